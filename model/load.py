"""Reading and writing the policy's parameters as Hugging Face checkpoints.

Everything stays on the host: what is read are numpy arrays, which the caller moves to devices.
"""

import contextlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from model.config import CheckpointError, ModelConfig, from_hugging_face, read_json, to_hugging_face
from model.tensors import Tensor, tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
READABLE = ("F32", "F16", "BF16")
NUMPY_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
COMPUTED = "rotary_emb.inv_freq"
"""Ending of the tensors that old releases saved and that are computed anew from `rope_theta`."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json",),
)


def load_params(
    folder: str | Path, config: ModelConfig, dtype: DTypeLike = np.float32
) -> dict[str, Any]:
    """The parameters in a checkpoint folder, as nested dicts of numpy arrays of `dtype`.

    Tensors are read one by one into stacked arrays, so the peak is the parameters and one tensor.
    Raises `CheckpointError` that lists all missing, unexpected, misshapen and misfiled tensors.
    """
    folder = Path(folder)
    wanted = tensors(config)
    with contextlib.ExitStack() as stack:
        held, faults = _open(folder, stack)
        faults += _mismatches(held, wanted, config)
        if faults:
            raise CheckpointError(
                f"The tensors of {folder} do not fit its model: " + "; ".join(faults) + "."
            )
        leaves: dict[str, np.ndarray] = {}
        for name, tensor in wanted.items():
            value = tensor.to_leaf(held[name].get_tensor(name))
            if tensor.layer is None:
                leaves[tensor.path] = np.array(value, dtype=dtype, order="C")
                continue
            if tensor.path not in leaves:
                leaves[tensor.path] = np.empty((config.num_layers, *tensor.leaf), dtype)
            leaves[tensor.path][tensor.layer] = value
    return _nest(leaves)


def save_params(
    folder: str | Path,
    params: Mapping[str, Any],
    config: ModelConfig,
    *,
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes `config.json` and the weights, sharded with an index where they need two files.

    Weights that the folder already holds are removed, since a reader would prefer a stale single
    file to new shards. Raises `CheckpointError` that lists all missing, unexpected and misshapen
    leaves.
    """
    folder = Path(folder)
    described = to_hugging_face(config, dtype=dtype)
    wanted = tensors(config)
    leaves = _check_leaves(params, wanted, config)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in [*folder.glob("model*.safetensors"), folder / INDEX]:
        stale.unlink(missing_ok=True)

    _write_json(folder / "config.json", described)
    number = NUMPY_DTYPES[dtype]
    shards = _shards(wanted, number.itemsize, max_shard_bytes)
    weight_map = {}
    for k, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{k:05d}-of-{len(shards):05d}.safetensors"
        shard = {}
        for name in names:
            tensor = wanted[name]
            leaf = leaves[tensor.path]
            leaf = np.asarray(leaf if tensor.layer is None else leaf[tensor.layer])
            # safetensors writes a transposed view's memory as it lies: the copy must be in order.
            shard[name] = np.ascontiguousarray(tensor.to_stored(leaf), dtype=number)
            weight_map[name] = file
        save_file(shard, folder / file, metadata={"format": "pt"})
        # The library makes the file for its owner alone, unlike all others in the folder.
        shutil.copymode(folder / "config.json", folder / file)
    if len(shards) > 1:
        total = sum(math.prod(tensor.stored) for tensor in wanted.values()) * number.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / INDEX, index)


def export(
    folder: str | Path,
    params: Mapping[str, Any],
    config: ModelConfig,
    *,
    source: str | Path,
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a whole checkpoint: the parameters, with the tokenizer and settings of `source`.

    Fields of the source's `config.json` that the parameters don't determine, such as token ids,
    stay. All is written beside `folder` and renamed at the end, so that a partial export never
    looks whole. An earlier checkpoint at `folder` is replaced; another folder is refused.
    """
    folder, source = Path(folder).absolute(), Path(source).absolute()
    if not source.is_dir():
        raise CheckpointError(f"There is no checkpoint folder {source} to take the tokenizer from.")
    if source.resolve().is_relative_to(folder.resolve()):
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
    save_params(partial, params, config, dtype=dtype, max_shard_bytes=max_shard_bytes)
    _write_json(partial / "config.json", extra | read_json(partial / "config.json"))
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, partial / name)
    if folder.exists():
        folder.rename(previous)
    partial.rename(folder)
    if previous.exists():
        shutil.rmtree(previous)


def _open(folder: Path, stack: contextlib.ExitStack) -> tuple[dict[str, Any], list[str]]:
    """The open file of each tensor in the folder, and what is wrong with the index."""
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint folder {folder}.")
    weight_map = None
    if (folder / SINGLE).is_file():
        files = [SINGLE]
    elif (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        named = isinstance(weight_map, dict) and weight_map
        if not named or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX} has no weight_map from tensors to files.")
        files = sorted(set(weight_map.values()))
    elif any(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} holds its weights in .bin files only; convert them to {SINGLE} "
            "(load them with transformers, then save_pretrained)."
        )
    else:
        raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}.")

    held: dict[str, Any] = {}
    where: dict[str, str] = {}
    faults = []
    for file in files:
        if not (folder / file).is_file():
            faults.append(f"{INDEX} names the file {file}, which is not there")
            continue
        try:
            opened = stack.enter_context(safe_open(folder / file, framework="numpy"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{folder / file} is not a whole safetensors file: {error}."
            ) from None
        names = opened.keys()
        held |= dict.fromkeys(names, opened)
        where |= dict.fromkeys(names, file)
    if weight_map is not None:
        lies = [n for n, file in weight_map.items() if where.get(n, file) != file or n not in held]
        if lies:
            faults.append(f"{INDEX} names tensors that their files do not hold: {_list(lies)}")
        unnamed = sorted(set(held) - set(weight_map))
        if unnamed:
            faults.append(f"{INDEX} does not name tensors that the files hold: {_list(unnamed)}")
    return held, faults


def _mismatches(
    held: Mapping[str, Any], wanted: Mapping[str, Tensor], config: ModelConfig
) -> list[str]:
    """Every way in which the tensors held are not the tensors wanted."""
    faults = []
    missing = [name for name in wanted if name not in held]
    if missing:
        faults.append(f"missing {_list(missing)}")
    if "lm_head.weight" in missing:
        faults.append("tie_word_embeddings is false, so lm_head.weight must be there")
    expected = {**wanted}
    if config.tie_embeddings:
        expected["lm_head.weight"] = wanted["model.embed_tokens.weight"]
    unexpected = [name for name in held if name not in expected and not name.endswith(COMPUTED)]
    if unexpected:
        faults.append(f"unexpected {_list(unexpected)}")
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
        faults.append(f"misshapen {_list(misfits)}")
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
    shapes = {
        tensor.path: tensor.leaf if tensor.layer is None else (config.num_layers, *tensor.leaf)
        for tensor in wanted.values()
    }
    faults = []
    if missing := sorted(set(shapes) - set(leaves)):
        faults.append(f"missing {_list(missing)}")
    if unexpected := sorted(set(leaves) - set(shapes)):
        faults.append(f"unexpected {_list(unexpected)}")
    misfits = [
        f"{path} is {list(np.shape(leaves[path]))} for {list(shape)}"
        for path, shape in shapes.items()
        if path in leaves and np.shape(leaves[path]) != shape
    ]
    if misfits:
        faults.append(f"misshapen {_list(misfits)}")
    if faults:
        raise CheckpointError("The parameters do not fit their model: " + "; ".join(faults) + ".")
    return leaves


def _shards(wanted: Mapping[str, Tensor], itemsize: int, max_shard_bytes: int) -> list[list[str]]:
    """Names of each file; a tensor that is larger than a shard has a file of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in wanted.items():
        nbytes = math.prod(tensor.stored) * itemsize
        if shards[-1] and filled + nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    return shards


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


def _list(names: list[str]) -> str:
    return f"({len(names)}) " + ", ".join(names)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
