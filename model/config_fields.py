"""The fields of a Hugging Face `config.json`: each is used, or changes nothing here, or is refused
by name."""

from collections.abc import Mapping
from typing import Any

FAMILIES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
}
"""The `model_type`s that we read, and the architecture that a policy's configuration names."""

SCORERS = {
    family: name.replace("CausalLM", "SequenceClassification") for family, name in FAMILIES.items()
}
"""The architecture that a reward model's configuration names; its shape is read alike."""

USED = (
    *("model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "layer_types"),
    *("rope_theta", "rope_parameters", "rope_scaling"),
)

USED_OF_EXPERTS = (
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("norm_topk_prob", "router_aux_loss_coef", "decoder_sparse_step", "mlp_only_layers"),
    # Whether transformers returns them beside the logits.
    "output_router_logits",
)

ANY = object()

INERT = {
    # Other values would change the forward pass; these do not.
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "use_sliding_window": (False,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1,),
    "pretraining_tp": (1, None),
    "mlp_bias": (False,),
    "quantization_config": (None,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    # A window's size says nothing while `use_sliding_window` is false: the attention is full.
    **dict.fromkeys(("sliding_window", "max_window_layers"), ANY),
    # What the tensors are stored in; the files say it themselves.
    **dict.fromkeys(("dtype", "torch_dtype"), ANY),
    # The tokenizer's and the sampler's business (`model/tokenizer.py` reads the end-of-text id).
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"), ANY),
    **dict.fromkeys(("do_sample", "temperature", "top_k", "top_p", "repetition_penalty"), ANY),
    **dict.fromkeys(("max_length", "max_new_tokens"), ANY),
    # Where the file came from.
    **dict.fromkeys(
        ("_name_or_path", "_model_name_or_path", "transformers_version", "transformers.js_config"),
        ANY,
    ),
    **dict.fromkeys(("unsloth_fixed", "unsloth_version", "is_llama_config"), ANY),
    # How another library initialises, caches, returns and classifies.
    **dict.fromkeys(("initializer_range", "use_cache", "torchscript", "is_decoder"), ANY),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "return_dict"), ANY),
    # A classifier's labels are counted below; to a language model they are nothing.
    **dict.fromkeys(("num_labels", "id2label", "label2id", "problem_type"), ANY),
    "task_specific_params": ANY,
    **dict.fromkeys(("keys_to_ignore_at_inference", "_attn_implementation_autoset"), ANY),
}
"""Fields that change nothing here: at the values listed, or at any."""

INERT_OF_EXPERTS = {
    # Written by Qwen3-Coder; transformers reads none of them.
    "qkv_bias": (False,),
    "use_qk_norm": (True,),
    "shared_expert_intermediate_size": (0, None),
}


def refused(config: Mapping[str, Any], family: str) -> list[str]:
    """What the fields that shape nothing here, or that nobody knows, have against them."""
    # The field does not exist in Qwen2, whose biases are fixed.
    used = {*USED} if family == "qwen2" else {*USED, "attention_bias"}
    inert = INERT
    if family == "qwen3_moe":
        used |= {*USED_OF_EXPERTS}
        inert = INERT | INERT_OF_EXPERTS
    faults = []
    named = config.get("architectures")
    if named == [SCORERS[family]]:
        faults += _labels_refused(config)
    elif named is not None and named != [FAMILIES[family]]:
        faults.append(
            f"architectures must be [{FAMILIES[family]!r}], or [{SCORERS[family]!r}] for a reward "
            f"model, and is {named!r}"
        )
    for name, value in config.items():
        if name in used or inert.get(name) is ANY:
            continue
        if name in inert and value not in inert[name]:
            allowed = " or ".join(map(repr, inert[name]))
            faults.append(f"{name} is supported at {allowed} only, and is {value!r}")
    unknown = sorted(set(config) - used - set(inert))
    if unknown:
        faults.append(f"unknown fields, which may change the model: {', '.join(unknown)}")
    return faults


def _labels_refused(config: Mapping[str, Any]) -> list[str]:
    """A reward model gives one score; with more labels it is a classifier."""
    labels = config.get("id2label")
    stated = [config.get("num_labels"), len(labels) if isinstance(labels, Mapping) else labels]
    # Where the file says nothing, transformers takes two labels.
    counts = [count for count in stated if count is not None] or [2]
    return [
        f"num_labels (or the length of id2label) must be 1 where architectures is "
        f"{config['architectures']!r}, and is {count!r}: only a reward model's one score is read"
        for count in counts
        if count != 1
    ][:1]
