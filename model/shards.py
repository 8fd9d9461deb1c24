"""Named tensors in a folder of safetensors files: one file, or shards with an index.

What a tensor means is `model/tensors.py`'s business; here are names, files and shapes.
"""

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from model.config import CheckpointError, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def open_shards(folder: Path, stack: contextlib.ExitStack) -> tuple[dict[str, Any], list[str]]:
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
            faults.append(f"{INDEX} names tensors that their files do not hold: {listed(lies)}")
        unnamed = sorted(set(held) - set(weight_map))
        if unnamed:
            faults.append(f"{INDEX} does not name tensors that the files hold: {listed(unnamed)}")
    return held, faults


def write_shards(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    value: Callable[[str], np.ndarray],
    number: np.dtype,
    *,
    max_shard_bytes: int,
    like: Path,
) -> None:
    """Writes the tensors of these names, and an index where they need two files.

    `value` is asked for one tensor at a time, so that one shard is in memory. Weights that the
    folder already holds are removed, since a reader would prefer a stale single file to new
    shards. The files get the permissions of `like`: safetensors makes them for their owner alone,
    unlike all others in the folder.
    """
    for stale in [*folder.glob("model*.safetensors"), folder / INDEX]:
        stale.unlink(missing_ok=True)
    nbytes = {name: math.prod(shape) * number.itemsize for name, shape in shapes.items()}
    shards = _cut(nbytes, max_shard_bytes)
    weight_map = {}
    for k, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{k:05d}-of-{len(shards):05d}.safetensors"
        # safetensors writes a transposed view's memory as it lies: the copy must be in order.
        shard = {name: np.ascontiguousarray(value(name), dtype=number) for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
        shutil.copymode(like, folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": weight_map}
        write_json(folder / INDEX, index)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def listed(names: Sequence[str]) -> str:
    """Names as an error message lists them, their number first."""
    return f"({len(names)}) " + ", ".join(names)


def _cut(nbytes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Names of each file; a tensor that is larger than a shard has a file of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in nbytes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
