"""Reading and writing parameters as Hugging Face checkpoints of language models.

Everything stays on the host: what is read are numpy arrays, which the caller moves to devices.
Reward models have a head of another kind: `model/score_head.py`.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from model.config import CheckpointError, ModelConfig, from_hugging_face, read_json, to_hugging_face
from model.fused_experts import split_experts
from model.shards import listed, open_shards, write_json, write_shards
from model.tensors import SCORE, Tensor, tensors

READABLE = ("F32", "F16", "BF16")
NUMPY_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
COMPUTED = "rotary_emb.inv_freq"
"""Ending of the tensors that old releases saved and that are computed anew from `rope_theta`."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json",),
)
MAX_SHARD_BYTES = 5 * 10**9


def load_params(
    folder: str | Path, config: ModelConfig, dtype: DTypeLike = np.float32
) -> dict[str, Any]:
    """The policy's parameters in a checkpoint folder, as nested dicts of numpy arrays of `dtype`.

    Raises `CheckpointError` that lists all missing, unexpected, misshapen and misfiled tensors,
    and for a reward model.
    """
    return read_params(folder, config, tensors(config), dtype)


def read_params(
    folder: str | Path, config: ModelConfig, wanted: Mapping[str, Tensor], dtype: DTypeLike
) -> dict[str, Any]:
    """The parameters that these tensors make up.

    Tensors are read one by one into stacked arrays, so the peak is the parameters and one tensor.
    """
    folder = Path(folder)
    with contextlib.ExitStack() as stack:
        held, faults = open_shards(folder, stack)
        held = split_experts(held) if config.num_experts else held
        if not faults:
            _check_kind(folder, held, wanted)
        faults += _mismatches(held, wanted, config)
        if faults:
            raise CheckpointError(
                f"The tensors of {folder} do not fit its model: " + "; ".join(faults) + "."
            )
        leaves: dict[str, np.ndarray] = {}
        for name, tensor in wanted.items():
            value = tensor.to_leaf(held[name].get_tensor(name))
            if not tensor.place:
                leaves[tensor.path] = np.array(value, dtype=dtype, order="C")
                continue
            if tensor.path not in leaves:
                leaves[tensor.path] = np.empty(tensor.stacked(config), dtype)
            leaves[tensor.path][tensor.place] = value
    return _nest(leaves)


def save_params(
    folder: str | Path,
    params: Mapping[str, Any],
    config: ModelConfig,
    *,
    dtype: str = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes `config.json` and the policy's weights, sharded with an index where they need two
    files.

    A `value_head` among the parameters is left out: a critic's head is no part of the policy.
    Raises `CheckpointError` that lists all missing, unexpected and misshapen leaves.
    """
    policy = {name: leaf for name, leaf in params.items() if name != "value_head"}
    described = to_hugging_face(config, dtype=dtype)
    write_params(folder, policy, config, tensors(config), described, max_shard_bytes)


def write_params(
    folder: str | Path,
    params: Mapping[str, Any],
    config: ModelConfig,
    wanted: Mapping[str, Tensor],
    described: Mapping[str, Any],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes these tensors of the parameters, and `described` as their `config.json`."""
    folder = Path(folder)
    leaves = _check_leaves(params, wanted, config)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", described)

    def stored(name: str) -> np.ndarray:
        tensor = wanted[name]
        leaf = leaves[tensor.path]
        return tensor.to_stored(np.asarray(leaf[tensor.place] if tensor.place else leaf))

    write_shards(
        folder,
        {name: tensor.stored for name, tensor in wanted.items()},
        stored,
        NUMPY_DTYPES[described["dtype"]],
        max_shard_bytes=max_shard_bytes,
        like=folder / "config.json",
    )


def export(
    folder: str | Path,
    params: Mapping[str, Any],
    config: ModelConfig,
    *,
    source: str | Path,
    dtype: str = "float32",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a whole checkpoint: the policy, with the tokenizer and settings of `source`.

    A `value_head` is left out, as by `save_params`; otherwise as `write_whole` does.
    """

    def write(partial: Path) -> None:
        save_params(partial, params, config, dtype=dtype, max_shard_bytes=max_shard_bytes)

    write_whole(folder, config, write, source=source)


def write_whole(
    folder: str | Path,
    config: ModelConfig,
    write: Callable[[Path], None],
    *,
    source: str | Path,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """What `write` puts into a folder, with the tokenizer and settings of `source`.

    Fields of the source's `config.json` that the parameters don't determine, such as token ids,
    stay. `changes` are fields of tokenizer files, by the file's name. All is written beside
    `folder` and renamed at the end, so that a partial export never looks whole. An earlier
    checkpoint at `folder` is replaced; another folder is refused.
    """
    # Renamed is the folder, and not a link to it.
    folder, source = Path(folder).resolve(), Path(source).absolute()
    if not source.is_dir():
        raise CheckpointError(f"There is no checkpoint folder {source} to take the tokenizer from.")
    if source.resolve().is_relative_to(folder):
        raise CheckpointError(f"The export to {folder} would replace its own source {source}.")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"The export's folder {folder} is a file.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"The export's folder {folder} holds something that is no checkpoint; it would be lost."
        )
    extra = {}
    if (source / "config.json").is_file():
        extra = read_json(source / "config.json")
        if to_hugging_face(from_hugging_face(extra)) != to_hugging_face(config):
            raise CheckpointError(f"The source {source} holds a model of another shape.")

    partial = folder.with_name(f".{folder.name}.partial")
    previous = folder.with_name(f".{folder.name}.previous")
    for leftover in (partial, previous):
        if leftover.exists():
            shutil.rmtree(leftover)
    write(partial)
    write_json(partial / "config.json", extra | read_json(partial / "config.json"))
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, partial / name)
    for name, fields in (changes or {}).items():
        before = read_json(partial / name) if (partial / name).is_file() else {}
        write_json(partial / name, before | fields)
    if folder.exists():
        folder.rename(previous)
    partial.rename(folder)
    if previous.exists():
        shutil.rmtree(previous)


def _check_kind(folder: Path, held: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> None:
    """Policy and reward model differ in their head; without this a wrong folder would be told of
    as a list of tensors."""
    if SCORE in held and SCORE not in wanted:
        raise CheckpointError(
            f"{folder}: this is a reward model (its head, {SCORE}, gives a text one score), and a "
            f"language model was expected."
        )
    if SCORE in wanted and SCORE not in held:
        raise CheckpointError(
            f"{folder}: this is no reward model (it holds no {SCORE}), and one was expected."
        )


def _mismatches(
    held: Mapping[str, Any], wanted: Mapping[str, Tensor], config: ModelConfig
) -> list[str]:
    """Every way in which the tensors held are not the tensors wanted."""
    faults = []
    missing = [name for name in wanted if name not in held]
    if missing:
        faults.append(f"missing {listed(missing)}")
    if "lm_head.weight" in missing:
        faults.append("tie_word_embeddings is false, so lm_head.weight must be there")
    expected = {**wanted}
    if config.tie_embeddings:
        expected["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    unexpected = [name for name in held if name not in expected and not name.endswith(COMPUTED)]
    if unexpected:
        faults.append(f"unexpected {listed(unexpected)}")
    misfits = []
    for name, tensor in expected.items():
        if name not in held:
            continue
        found = held[name].get_slice(name)
        if tuple(found.get_shape()) != tensor.stored:
            misfits.append(f"{name} is {list(found.get_shape())} for {list(tensor.stored)}")
        elif found.get_dtype() not in READABLE:
            misfits.append(f"{name} is {found.get_dtype()} for one of {', '.join(READABLE)}")
    if misfits:
        faults.append(f"misshapen {listed(misfits)}")
    elif config.tie_embeddings and "lm_head.weight" in held and not missing:
        head, embedding = (
            held[name].get_tensor(name) for name in ("lm_head.weight", "model.embed_tokens.weight")
        )
        if not np.array_equal(head, embedding):
            faults.append(
                "tie_word_embeddings is true, and yet lm_head.weight differs from "
                "model.embed_tokens.weight"
            )
    return faults


def _check_leaves(
    params: Mapping[str, Any], wanted: Mapping[str, Tensor], config: ModelConfig
) -> dict[str, Any]:
    leaves = dict(_walk(params))
    shapes = {tensor.path: tensor.stacked(config) for tensor in wanted.values()}
    faults = []
    if missing := sorted(set(shapes) - set(leaves)):
        faults.append(f"missing {listed(missing)}")
    if unexpected := sorted(set(leaves) - set(shapes)):
        faults.append(f"unexpected {listed(unexpected)}")
    misfits = [
        f"{path} is {list(np.shape(leaves[path]))} for {list(shape)}"
        for path, shape in shapes.items()
        if path in leaves and np.shape(leaves[path]) != shape
    ]
    if misfits:
        faults.append(f"misshapen {listed(misfits)}")
    if faults:
        raise CheckpointError("The parameters do not fit their model: " + "; ".join(faults) + ".")
    return leaves


def _walk(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _nest(leaves: Mapping[str, np.ndarray]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = result
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return result
