"""The files of a checkpoint's tokenizer: which class reads them rightly, and what ends a text."""

import json
from pathlib import Path

import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from model.config import CheckpointError, read_json

PROBE = "Hello  world,\n\n\tit's 3.14 (a+b)*c = 1234567?\r\n  Größe, e\u0301, 中文。 def f(x): "
"""Runs of spaces, digits, contractions, accents: where one kind of tokenizer gives away another."""


def read_inner(folder: Path) -> PreTrainedTokenizerBase:
    """The first class that encodes as `tokenizer.json` does.

    `AutoTokenizer` takes the class that belongs to the model type, and that class may build its
    own pre-tokenizer in place of the file's: a word-level tokenizer beside a Qwen2 configuration
    then encodes every text to nothing.
    """
    file = folder / "tokenizer.json"
    found = []
    for cls in (AutoTokenizer, PreTrainedTokenizerFast):
        try:
            inner = cls.from_pretrained(folder, local_files_only=True)
        # The libraries raise whatever comes, bare `Exception` too, on a broken or a newer file.
        except Exception as error:
            found.append(f"{cls.__name__}: {error}")
            continue
        if not file.is_file():
            return inner
        fault = _disagreement(inner, _read_tokenizer(file))
        if fault is None:
            return inner
        found.append(f"{cls.__name__}: {fault}")
    raise CheckpointError(f"The tokenizer of {folder} cannot be used. " + " ".join(found))


def _read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    # The library raises bare `Exception` on a broken file.
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from None


def _disagreement(inner: PreTrainedTokenizerBase, file: tokenizers.Tokenizer) -> str | None:
    # The probe alone would be all unknown to a tokenizer with a vocabulary of its own.
    size = file.get_vocab_size()
    sample = [id for id in range(0, size, max(size // 64, 1)) if file.id_to_token(id) is not None]
    for text in (PROBE, file.decode(sample, skip_special_tokens=False)):
        try:
            wanted = file.encode(text, add_special_tokens=False).ids
        # The library raises bare `Exception` where a vocabulary without an unknown token ends.
        except Exception:
            continue
        got = list(inner.encode(text, add_special_tokens=False))
        if got != wanted:
            return f"it encodes {text!r} to {got}, and tokenizer.json to {wanted}."
    return None


def read_stop_ids(folder: Path) -> tuple[int, ...]:
    """The ids at which generation ends; without `generation_config.json`, those of the model."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            value = read_json(folder / name).get("eos_token_id")
            if value is None:
                continue
            ids = tuple(value) if isinstance(value, list) else (value,)
            if not all(type(id) is int for id in ids):
                raise CheckpointError(
                    f"eos_token_id in {folder / name} must be an id or a list of ids, "
                    f"and is {json.dumps(value)}."
                )
            return ids
    return ()
