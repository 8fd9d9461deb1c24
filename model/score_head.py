"""Reward models as Hugging Face checkpoints: the policy's trunk under a head of one score.

They are `Qwen2ForSequenceClassification` and its kin with one label: `score.weight` stands where a
policy has `lm_head.weight`. In the parameters that head is `value_head`, as a critic's is.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from model.config import CheckpointError, ModelConfig, read_json, to_hugging_face
from model.config_fields import SCORERS
from model.load import MAX_SHARD_BYTES, read_params, write_params, write_whole
from model.tensors import scorer_tensors
from model.tokenizer import load_tokenizer

LABEL = "LABEL_0"


class Padding(NamedTuple):
    """The token that a reward model's texts are padded with."""

    id: int
    token: str | None
    """What the tokenizer's files must be made to say; None where they need no change."""


def load_scorer(folder: str | Path, config: ModelConfig) -> dict[str, Any]:
    """A reward model's parameters, with `value_head` and without `lm_head`, in float32.

    Raises `CheckpointError` that lists all missing, unexpected, misshapen and misfiled tensors,
    and for a language model.
    """
    return read_params(folder, config, scorer_tensors(config), np.float32)


def is_scorer(folder: str | Path) -> bool:
    """Whether the folder says that it holds a reward model."""
    architectures = read_json(Path(folder) / "config.json").get("architectures") or []
    return any(name in SCORERS.values() for name in architectures)


def export_scorer(
    folder: str | Path,
    params: Mapping[str, Any],
    config: ModelConfig,
    *,
    source: str | Path,
    dtype: str = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a whole reward model, with the tokenizer and settings of `source`.

    An `lm_head` among the parameters is left out: it has no part in the score. The padding token
    is that of `padding`, in `config.json` and in the tokenizer's files. Otherwise as `write_whole`
    does. Raises `CheckpointError` for parameters without `value_head`.
    """
    scorer = {name: leaf for name, leaf in params.items() if name != "lm_head"}
    pad = padding(source)
    described = to_hugging_face(config, dtype=dtype) | {
        "architectures": [SCORERS[config.family]],
        "id2label": {"0": LABEL},
        "label2id": {LABEL: 0},
        "pad_token_id": pad.id,
    }

    def write(partial: Path) -> None:
        wanted = scorer_tensors(config)
        write_params(partial, scorer, config, wanted, described, max_shard_bytes)

    changes = {}
    if pad.token is not None:
        changes["tokenizer_config.json"] = {"pad_token": pad.token}
        # Older releases of transformers read the token from this file, where there is one.
        if (Path(source) / "special_tokens_map.json").is_file():
            changes["special_tokens_map.json"] = {"pad_token": pad.token}
    write_whole(folder, config, write, source=source, changes=changes)


def padding(source: str | Path) -> Padding:
    """The token to pad with: the tokenizer's own, unless a text may end in it.

    transformers scores a text at its last token that is not padding, by id. Where the padding
    token also ends texts, as in most of Qwen's checkpoints, it would score one token too early;
    then another special token is taken, one that is named for padding if there is one. Raises
    `CheckpointError` where there is none: a run that ends in an export asks before it begins.
    """
    source = Path(source)
    if not any((source / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        return _stated_padding(source)
    tokenizer = load_tokenizer(source)
    inner, ends = tokenizer.inner, tokenizer.stop_ids
    if inner.pad_token_id is not None and inner.pad_token_id not in ends:
        return Padding(inner.pad_token_id, None)
    taken = {*ends, inner.bos_token_id, inner.unk_token_id}
    free = {
        id: token.content
        for id, token in sorted(inner.added_tokens_decoder.items())
        if token.special and id not in taken
    }
    if not free:
        raise CheckpointError(
            f"The tokenizer of {source} has no token to pad a reward model's texts with: expected "
            f"a special token that ends no text; came {inner.pad_token!r}, and texts end in "
            f"{', '.join(repr(inner.convert_ids_to_tokens(id)) for id in ends)}."
        )
    id = next((id for id, text in free.items() if "pad" in text), max(free))
    return Padding(id, free[id])


def _stated_padding(source: Path) -> Padding:
    """What `config.json` says, in a folder that holds no tokenizer."""
    described = read_json(source / "config.json")
    id, ends = described.get("pad_token_id"), described.get("eos_token_id")
    if type(id) is not int or id in (ends if isinstance(ends, list) else [ends]):
        raise CheckpointError(
            f"{source} holds no tokenizer, so its config.json must say what a reward model's texts "
            f"are padded with: expected a pad_token_id other than eos_token_id, {ends!r}; came "
            f"{id!r}."
        )
    return Padding(id, None)
