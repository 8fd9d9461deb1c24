"""The tokenizer: prompts encode as the checkpoint's own files say, or not at all."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Raw
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from model.config import CheckpointError, from_hugging_face
from model.errors import BadInput
from model.tokenizer import check_ids, check_vocabulary, load_tokenizer

QWEN3 = Path(__file__).parents[2] / "shared" / "data" / "qwen3_tokenizer"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Qwen2.5's template, less its tools: a system turn is added where none is given.
QWEN25_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
USER = [{"role": "user", "content": "what is it?"}]


def byte_level():
    """A small tokenizer of Qwen's kind."""
    raw = Raw(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(["what is it? it is what it is"] * 4, trainer)
    return raw


def word_level():
    raw = Raw(models.WordLevel({f"w{i}": i for i in range(10)} | {"<end>": 10}))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return raw


@pytest.fixture
def folder(tmp_path):
    """Writes a tokenizer and the files beside it, as a checkpoint has them."""

    def write(raw=None, *, config=None, generation=None, template=QWEN25_TEMPLATE, **special):
        special = special or {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
        wrapped = PreTrainedTokenizerFast(tokenizer_object=raw or byte_level(), **special)
        wrapped.chat_template = template
        wrapped.save_pretrained(tmp_path)
        for name, content in (("config", config), ("generation_config", generation)):
            if content is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write


@pytest.fixture(scope="module")
def qwen3():
    if not QWEN3.is_dir():
        pytest.skip("Qwen3's tokenizer is not beside the repository")
    return load_tokenizer(QWEN3)


def test_a_word_level_tokenizer_beside_a_qwen2_config_keeps_its_ids(folder):
    """The class of the model type encodes every text of it to [], without a word."""
    path = folder(
        word_level(),
        config={"model_type": "qwen2", "vocab_size": 16},
        template=None,
        eos_token="<end>",
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode_prompt("w5 w7 w9") == [5, 7, 9]
    assert tokenizer.decode([5, 7, 9]) == "w5 w7 w9"
    assert tokenizer.stop_ids == (10,) and len(tokenizer) == 11


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_every_family_encodes_as_tokenizer_json_says(folder, model_type):
    raw = byte_level()
    tokenizer = load_tokenizer(folder(raw, config={"model_type": model_type, "vocab_size": 400}))
    text = "what  is\n\nit? 3.14 中文 <|im_end|>é"
    assert tokenizer.encode(text) == raw.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_prompt_is_empty(folder):
    tokenizer = load_tokenizer(folder())
    with pytest.raises(ValueError, match="comes to no tokens"):
        tokenizer.encode_prompt("")
    with pytest.raises(ValueError, match="list of chat messages is empty"):
        tokenizer.encode_prompt([])


def test_text_gets_no_special_tokens_of_its_own(folder):
    tokenizer = load_tokenizer(folder())
    assert tokenizer.encode_prompt("it") == tokenizer.encode("it")
    assert tokenizer.decode(tokenizer.encode_prompt("it is , it 's")) == "it is , it 's"


def test_chat_prompts_have_the_templates_system_turn_and_the_assistants_header(folder):
    path = folder()
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode_prompt(USER)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are Qwen.<|im_end|>\n"
        "<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    reference = AutoTokenizer.from_pretrained(path)
    assert ids == reference.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("content", ["it is", "it is ", "it is\n", " ", ""])
@pytest.mark.parametrize("trims", [False, True])
def test_a_prefill_ends_exactly_where_its_text_ends(folder, content, trims):
    """No end token, no newline of the template's; no space is lost, though the template trims."""
    template = QWEN25_TEMPLATE
    if trims:
        template = template.replace("message.content +", "message.content | trim +")
    tokenizer = load_tokenizer(folder(template=template))
    messages = [*USER, {"role": "assistant", "content": content}]
    text = tokenizer.decode(tokenizer.encode_prompt(messages))
    assert text.endswith(f"what is it?<|im_end|>\n<|im_start|>assistant\n{content}")
    assert messages[-1]["content"] == content


def test_messages_without_a_template_are_refused(folder):
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(folder(template=None)).encode_prompt(USER)


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([{"role": "user"}], "message 0: .*content"),
        ([*USER, {"content": "a"}], "message 1: .*role"),
    ],
)
def test_a_broken_message_is_shown(folder, messages, match):
    with pytest.raises(ValueError, match=match):
        load_tokenizer(folder()).encode_prompt(messages)


def test_what_the_template_refuses_is_bad_input(folder):
    tokenizer = load_tokenizer(folder(template="{{ raise_exception('no system turns') }}"))
    with pytest.raises(ValueError, match="refuses the messages: no system turns"):
        tokenizer.encode_prompt(USER)


def test_stop_ids_are_those_of_generation_tokenizer_and_template(folder):
    end, start, close = 0, 1, 2
    path = folder(generation={"eos_token_id": [7, 8]})
    assert load_tokenizer(path).stop_ids == (end, close, 7, 8)
    path = folder(generation={"eos_token_id": 7}, template="{{ messages[0].content }}")
    assert load_tokenizer(path).stop_ids == (end, 7)  # <|im_end|> is a token that nobody writes
    path = folder(generation={}, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer = load_tokenizer(path)
    assert tokenizer.stop_ids == (close,)  # padding is no stop merely because it pads
    assert tokenizer.pad_id == end
    assert start not in tokenizer.stop_ids


def test_a_pad_that_is_also_the_end_still_stops(folder):
    tokenizer = load_tokenizer(folder(eos_token="<|im_end|>", pad_token="<|im_end|>"))
    assert tokenizer.pad_id == 2 and tokenizer.stop_ids == (2,)


def test_without_generation_config_the_models_end_counts(folder):
    path = folder(config={"model_type": "qwen2", "vocab_size": 400, "eos_token_id": 9})
    assert 9 in load_tokenizer(path).stop_ids


def test_a_tokenizer_without_a_pad_has_one_all_the_same(folder):
    tokenizer = load_tokenizer(folder(eos_token="<|im_end|>"))
    assert tokenizer.pad_id == 2


def test_stop_ids_that_are_no_ids_are_refused(folder):
    with pytest.raises(CheckpointError, match="must be an id or a list of ids"):
        load_tokenizer(folder(generation={"eos_token_id": "<|im_end|>"}))
    with pytest.raises(CheckpointError, match=r"\[5000\] are none of the tokenizer's 2\d\d ids"):
        load_tokenizer(folder(generation={"eos_token_id": 5000}))


def test_a_verifier_reads_no_text_after_the_stop(folder):
    tokenizer = load_tokenizer(folder())
    ids = tokenizer.encode("<answer>5</answer><|im_end|><answer>7</answer>")
    assert tokenizer.decode_completion(ids) == "<answer>5</answer>"
    assert tokenizer.decode(ids).endswith("<|im_end|><answer>7</answer>")
    assert tokenizer.decode_completion(ids[:4]) == tokenizer.decode(ids[:4])


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder):
    path = folder(config={"model_type": "qwen2", "vocab_size": 100})
    with pytest.raises(CheckpointError, match="100 embedding rows"):
        load_tokenizer(path)
    (path / "config.json").unlink()
    tokenizer = load_tokenizer(path)
    check_vocabulary(tokenizer, small(len(tokenizer)))
    with pytest.raises(CheckpointError, match="not of one checkpoint"):
        check_vocabulary(tokenizer, small(len(tokenizer) - 1))


def test_ids_outside_the_embedding_are_refused_on_the_host():
    """On the device, id 4 of 3 would silently read the last row, and -1 wrap to it."""
    check_ids([0, 2, 1], small(3))
    for ids, place in (([1, 4], 1), ([3], 0), ([0, 0, -1], 2)):
        with pytest.raises(ValueError, match=f"id {ids[place]} at place {place} .* of 3 "):
            check_ids(ids, small(3))


def small(vocab_size):
    return from_hugging_face(
        {"model_type": "llama", "vocab_size": vocab_size, "hidden_size": 8, "intermediate_size": 8}
        | {"num_hidden_layers": 1, "num_attention_heads": 2}
    )


def test_missing_and_broken_files_are_said_so(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json|cannot be used"):
        load_tokenizer(tmp_path)


def test_qwen3_encodes_as_its_file(qwen3):
    raw = Raw.from_file(str(QWEN3 / "tokenizer.json"))
    for text in ("Größe  e\u0301 中文", "x = 3.14\n\n\treturn  y", "<|im_start|>a<think>\n"):
        assert qwen3.encode(text) == raw.encode(text, add_special_tokens=False).ids
    assert len(qwen3) == 151669
    assert qwen3.stop_ids == (151645,)  # 151643 only pads
    assert qwen3.pad_id == 151643


def test_qwen3_generation_prompt_follows_its_template(qwen3):
    text = "<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\n"
    assert qwen3.render(USER) == text
    brief = load_tokenizer(QWEN3, {"enable_thinking": False})
    assert brief.render(USER) == text + "<think>\n\n</think>\n\n"
    reference = AutoTokenizer.from_pretrained(QWEN3)
    assert brief.encode_prompt(USER) == reference.apply_chat_template(
        USER, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )


def test_qwen3_prefill_stands_behind_the_generation_prompt(qwen3):
    """Rendered as a message, an open think block would get an empty one in front of it."""
    prefill = "Let me solve this.\n<think>"
    messages = [*USER, {"role": "assistant", "content": prefill}]
    reference = AutoTokenizer.from_pretrained(QWEN3)
    prompt = reference.apply_chat_template(USER, add_generation_prompt=True, tokenize=False)
    text = qwen3.decode(qwen3.encode_prompt(messages))
    assert text == prompt + prefill
    assert text.count("<think>") == 1


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TALK = [turn("user", "what is it?"), turn("assistant", "it is"), turn("user", "what?")]


def written(tokenizer, text) -> list[str]:
    """What the mask marks, each run of it as a text."""
    runs = [[]]
    for id, marked in zip(text.ids, text.assistant, strict=True):
        if marked:
            runs[-1].append(id)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def test_a_chat_is_one_text_whose_answers_and_their_ends_are_marked(folder):
    path = folder()
    tokenizer = load_tokenizer(path)
    messages = [*TALK, turn("assistant", "中文 é"), turn("user", "it?")]
    (text,) = tokenizer.encode_chat(messages)
    reference = AutoTokenizer.from_pretrained(path)
    # up to the end of the last answer: without the newline behind it and the turn after
    whole = reference.apply_chat_template(messages[:4], return_dict=False)[:-1]
    assert text.ids == whole and tokenizer.decode(whole).endswith("é<|im_end|>")
    # neither the header nor the newline behind the end
    assert written(tokenizer, text) == ["it is<|im_end|>", "中文 é<|im_end|>"]


def test_an_answer_is_encoded_by_itself_as_when_it_is_sampled(folder):
    """Encoded in one go, a newline of the header and one of the answer would be one token."""
    raw = byte_level()
    merged = json.loads(raw.to_str())
    double = len(merged["model"]["vocab"])
    merged["model"]["vocab"]["ĊĊ"] = double
    merged["model"]["merges"].insert(0, ["Ċ", "Ċ"])
    tokenizer = load_tokenizer(folder(Raw.from_str(json.dumps(merged))))
    messages = [*USER, turn("assistant", "\nit")]
    (text,) = tokenizer.encode_chat(messages)
    assert double in tokenizer.encode("\n\n") and double not in text.ids
    prompt = tokenizer.encode_prompt(USER)
    assert text.ids == prompt + tokenizer.encode_answer(USER, "\nit")
    assert text.assistant == [i >= len(prompt) for i in range(len(text.ids))]


def test_an_answer_has_one_stop_token_the_templates_or_the_tokenizers(folder):
    tokenizer = load_tokenizer(folder())  # its end of text is another than the template's
    end, close = tokenizer.encode("<|endoftext|><|im_end|>")
    assert tokenizer.end_id == end
    assert tokenizer.encode_answer(USER, "it") == [*tokenizer.encode("it"), close]
    assert tokenizer.encode_answer(USER, "it<|im_end|>") == [*tokenizer.encode("it"), close]
    prefilled = [*USER, turn("assistant", "it ")]
    # Behind a prefill an answer ends as any other of the template's.
    for prompt, stop in (("what is", end), (prefilled, close)):
        assert tokenizer.encode_answer(prompt, "it is") == [*tokenizer.encode("it is"), stop]
        assert tokenizer.encode_answer(prompt, "it<|im_end|>is") == [*tokenizer.encode("it"), stop]


def test_without_an_end_of_text_the_last_stop_token_ends_an_answer(folder):
    tokenizer = load_tokenizer(folder(eos_token=None, generation={"eos_token_id": [7, 8]}))
    assert tokenizer.end_id == tokenizer.stop_ids[-1]


def test_a_template_that_rewrites_history_gives_a_text_for_each_answer(qwen3):
    thought = turn("assistant", "<think>\na\n</think>\n\nb")
    first, second = qwen3.encode_chat([*USER, thought, *USER, turn("assistant", "c")])
    header = "<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\n"
    assert qwen3.decode(first.ids) == header + "<think>\na\n</think>\n\nb<|im_end|>"
    assert written(qwen3, first) == ["<think>\na\n</think>\n\nb<|im_end|>"]
    # what a model sees there: the earlier thought is gone; it is not trained on once more
    assert qwen3.decode(second.ids) == (
        header + "b<|im_end|>\n" + header + "<think>\n\n</think>\n\nc<|im_end|>"
    )
    assert written(qwen3, second) == ["<think>\n\n</think>\n\nc<|im_end|>"]
    for text, prompt in ((first, USER), (second, [*USER, thought, *USER])):
        assert text.ids[: text.assistant.index(True)] == qwen3.encode_prompt(prompt)


def test_an_answer_that_the_template_puts_elsewhere_is_taken_as_it_stands(folder):
    """R1's generation prompt opens a think block that a finished turn does not have."""
    opened = QWEN25_TEMPLATE.replace(
        "<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n*' }}"
    )
    endless = QWEN25_TEMPLATE.replace("<|im_end|>", "")
    for template in (opened, endless):
        tokenizer = load_tokenizer(folder(template=template))
        first, second = tokenizer.encode_chat([*TALK, turn("assistant", "what")])
        for text, prompt, answer in ((first, TALK[:1], "it is"), (second, TALK, "what")):
            prompt_ids = tokenizer.encode_prompt(prompt)
            assert text.ids == [*prompt_ids, *tokenizer.encode(answer), tokenizer.end_id]
            assert text.assistant.count(True) == len(text.ids) - len(prompt_ids)


THINKING = QWEN25_TEMPLATE.replace(
    "<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\n<think>\\n' }}"
)


@pytest.mark.parametrize("prefill", ["<think>", "Step by step.\n<think>"])
def test_a_think_block_is_opened_once(folder, prefill):
    """R1's generation prompt opens one, and so do the prefills of tasks and the answers of data."""
    tokenizer = load_tokenizer(folder(template=THINKING))
    text = tokenizer.decode(tokenizer.encode_prompt([*USER, turn("assistant", prefill)]))
    assert text.endswith("<|im_start|>assistant\n" + prefill)
    assert tokenizer.render(USER).endswith("<|im_start|>assistant\n<think>\n")
    (close,) = tokenizer.encode("<|im_end|>")
    # As the template writes it; and where that does not begin as its own generation prompt.
    for written, stop in (("<think>\nit</think>what", close), ("<think>it</think>what", None)):
        answer = tokenizer.encode_answer(USER, written)
        assert answer == [*tokenizer.encode("it</think>what"), stop or tokenizer.end_id]
        (chat,) = tokenizer.encode_chat([*USER, turn("assistant", written)])
        assert chat.ids == tokenizer.encode_prompt(USER) + answer


def test_a_text_prompt_begins_as_the_tokenizer_begins_texts(folder):
    """Llama's begin with a token of their own; an answer, and what a template wrote, do not."""
    raw = byte_level()
    begin = raw.token_to_id("<|im_start|>")
    raw.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", begin)]
    )
    special = {"bos_token": "<|im_start|>", "eos_token": "<|endoftext|>"}
    tokenizer = load_tokenizer(folder(raw, **special))
    assert tokenizer.encode_prompt("it is") == [begin, *tokenizer.encode("it is")]
    assert tokenizer.encode_prompt("<|im_start|>it") == tokenizer.encode("<|im_start|>it")
    assert tokenizer.encode_prompt(USER).count(begin) == 3  # of three turns
    assert begin not in tokenizer.encode_answer("it is", "what")


def test_no_prompt_is_of_today(folder):
    """Llama 3.2's template writes the date, so that a resumed run would have other prompts."""
    dated = (
        "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}"
        "{%- endif %}{{ date_string + '\n' }}" + QWEN25_TEMPLATE
    )
    path = folder(template=dated)
    assert load_tokenizer(path).render(USER).startswith("26 Jul 2024\n")
    assert load_tokenizer(path, {"date_string": "it"}).render(USER).startswith("it\n")


@pytest.mark.parametrize("name", ["enable_thinkng", "tokenize", "messages"])
def test_what_a_template_does_not_read_is_refused(folder, name):
    with pytest.raises(BadInput, match=f"chat template reads; came {name}"):
        load_tokenizer(folder(), {name: True})


def test_given_text_needs_a_tokenizer_that_encodes_answers_by_themselves(folder):
    """Llama 2's puts a space before each piece that it encodes."""
    raw = Raw(models.BPE(vocab={"\u2581": 0, "a": 1, "<unk>": 2}, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    tokenizer = load_tokenizer(folder(raw, eos_token="<unk>", pad_token="<unk>"))
    assert tokenizer.encode_prompt("a") == [0, 1]
    with pytest.raises(BadInput, match="not on given text"):
        tokenizer.encode_answer("a", "a")
    with pytest.raises(BadInput, match="not on given text"):
        tokenizer.encode_chat(TALK)


@pytest.mark.parametrize("content", ["{", '{"version": "1.0"}', '{"model": {"type": "Newer"}}'])
def test_a_tokenizer_file_that_nobody_can_read_is_said_so(folder, content):
    """Cut short, or of a newer release: the libraries raise bare exceptions."""
    path = folder()
    (path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        (USER, "no message of the assistant's"),
        ([turn("assistant", "it")], "message 0, .* must follow"),
        ([*TALK[:2], turn("assistant", "it")], "message 2, .* must follow"),
        ([*USER, {"role": "assistant"}], "message 1: .*content"),
        ([], "is empty"),
    ],
)
def test_a_chat_without_answers_to_learn_from_is_refused(folder, messages, match):
    with pytest.raises(ValueError, match=match):
        load_tokenizer(folder()).encode_chat(messages)
