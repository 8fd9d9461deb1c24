"""Makes the start of the bundled nano checkpoint: a small byte-level tokenizer and a config.

    python tools/nano_start.py FOLDER

The tokenizer is Qwen's kind (byte-level BPE that splits off every digit, Qwen's special tokens and
the ChatML template), with merges learnt from Countdown's prompts and worked examples. Weights come
from `configs/nano_sft.yaml`.
"""

import json
import random
import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2TokenizerFast

from rlx.tasks.countdown import load

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 512
# Qwen2's own pattern: every digit is a token.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}


def corpus(count: int = 2000) -> list[str]:
    """Rendered prompts and worked examples, in every language that the task has."""
    texts = []
    for language, share in (("brief", 1.0), ("en", 0.1), ("zh", 0.1)):
        task = load(seed=1, train_size=int(count * share), language=language)
        rng = random.Random(1)
        for row in task.train:
            for message in row["prompt"]:
                texts += [message["role"], message["content"]]
            texts.append(task.demonstrate(row, rng))
    return texts


def make(folder: Path) -> None:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator(corpus(), trainer)
    tokenizer = Qwen2TokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        model_max_length=CONFIG["max_position_embeddings"],
    )
    tokenizer.save_pretrained(folder)
    generation = {"do_sample": True, "temperature": 1.0, "eos_token_id": [2, 0], "pad_token_id": 0}
    for name, content in (("config.json", CONFIG), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
