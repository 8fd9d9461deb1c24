"""What the processes of a run on many hosts tell each other.

Every process runs the same program on the same settings. Whatever decides its course (a signal, a
time limit, a score) is told to all of them, or they would wait for each other for ever.
"""

import contextlib
import os
import pickle
import time
import zlib
from collections.abc import Callable
from io import TextIOBase
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from model.errors import BadInput
from rlx.settings import Config

PIECE_BYTES = 2**28
"""Of an array that goes to the first process, on each device at a time."""
STORAGE_SECONDS = 20
"""Until what one host has written shows on the others."""

T = TypeVar("T")


# ---- who is who -------------------------------------------------------------------------------


def several() -> bool:
    return jax.process_count() > 1


def first() -> bool:
    """Whether this is the process that writes files and is heard; the only one is."""
    return jax.process_index() == 0


def silence() -> TextIOBase:
    return Path(os.devnull).open("w", encoding="utf-8")


def heard(stream: TextIOBase) -> TextIOBase:
    """Where this process's words go."""
    return stream if first() else silence()


# ---- telling each other -----------------------------------------------------------------------


def gathered(value: T) -> list[T]:
    """What each process gives, in their order, on all of them. All must call it."""
    if not several():
        return [value]
    own = zlib.compress(pickle.dumps(value), 1)
    sizes = multihost_utils.process_allgather(np.array(len(own), np.int32))
    # Few sizes, so few programs.
    padded = np.zeros(max(256, 1 << int(sizes.max() - 1).bit_length()), np.uint8)
    padded[: len(own)] = np.frombuffer(own, np.uint8)
    every = multihost_utils.process_allgather(padded)
    return [
        pickle.loads(zlib.decompress(row[:size].tobytes()))
        for row, size in zip(every, sizes.tolist(), strict=True)
    ]


def anywhere(flag: bool) -> bool:
    """Whether it holds on any process."""
    return any(gathered(flag))


def from_first(make: Callable[[], T]) -> T:
    """What `make` gives on the first process, or the BadInput that it raises, on all of them."""
    if not several():
        return make()
    value, fault = None, ""
    if first():
        try:
            value = make()
        except BadInput as error:
            fault = str(error)
    value, fault = gathered((value, fault))[0]
    if fault:
        raise BadInput(fault)
    return value


def check_same(what: str, value: Any) -> None:
    """Raises BadInput where another process has another value than the first."""
    if not several():
        return
    every = gathered(value)
    other = next((i for i, there in enumerate(every) if there != every[0]), None)
    if other is not None:
        raise BadInput(
            f"hosts: expected the same {what} on every host; process {other} has other ones than "
            "process 0."
        )


def check_same_data(tree: PyTree) -> None:
    """Raises BadInput where arrays that are to be the same on every host are not."""
    if several():
        # The settings make the random keys.
        keys = jax.dtypes.prng_key
        leaves = [x for x in jax.tree.leaves(tree) if not jax.dtypes.issubdtype(x.dtype, keys)]
        leaves = map(np.asarray, leaves)
        found = [(x.shape, str(x.dtype), zlib.crc32(np.ascontiguousarray(x))) for x in leaves]
        check_same("data (files of task.name, tokenizer, versions of libraries)", found)


def check_same_weights(tree: PyTree) -> None:
    """Raises BadInput where arrays of the hosts differ in some of their numbers: each process gives
    the devices its own, and nothing would compare them again."""
    if several():
        found = [zlib.crc32(_some(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]
        check_same("weights (files of model.path, critic.path, reward.model, lora.adapter)", found)


def _some(x: np.ndarray | jax.Array) -> np.ndarray:
    """At most 63 places of each axis, evenly apart; all of a large array is not read from disk."""
    return np.asarray(x[tuple(slice(None, None, max(1, size // 32)) for size in x.shape)])


def check_same_settings(config: Config) -> None:
    """Raises BadInput where the processes were not started with the same settings."""
    if not several():
        return
    every = [
        {
            f"{section}.{key}": value
            for section, settings in dumped.items()
            for key, value in settings.items()
            if section != "hosts"
        }
        for dumped in gathered(config.model_dump())
    ]
    for i, there in enumerate(every):
        if faults := [
            f"{path}={there.get(path)!r} on process {i}, {every[0].get(path)!r} on process 0"
            for path in sorted({*there, *every[0]})
            if there.get(path) != every[0].get(path)
        ]:
            raise BadInput(
                f"hosts: expected the same settings on every host; came {'; '.join(faults)}."
            )


def check_shared(folder: Path) -> None:
    """Raises BadInput where the hosts don't see the same folder: each writes its own part of a
    checkpoint there."""
    if not several():
        return
    probe = folder / ".shared"

    def put() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text(str(time.time_ns()))
        return probe.read_text()

    written = from_first(put)
    end = time.monotonic() + STORAGE_SECONDS

    def seen() -> bool:
        with contextlib.suppress(OSError):
            return probe.read_text() == written
        return False

    while not (here := seen()) and time.monotonic() < end:
        time.sleep(0.5)
    every = gathered(here)
    if first():
        probe.unlink(missing_ok=True)
    if not all(every):
        raise BadInput(
            f"run.dir: expected a folder on storage that all hosts share, since each writes its "
            f"own part of a checkpoint; process {every.index(False)} does not see what process 0 "
            f"wrote to {folder.absolute()}."
        )


# ---- arrays -----------------------------------------------------------------------------------


def own_pieces(x: jax.Array) -> list[tuple[int, np.ndarray]]:
    """Of an array that is split over its first axis, the pieces that this process is to look after,
    each with the row where it begins. Where several devices hold a piece, it belongs to the process
    of the first: each to one process."""
    owners: dict[int, int] = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        owners.setdefault(index[0].start or 0, device.process_index)
    found = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    mine = sorted(start for start, owner in owners.items() if owner == jax.process_index())
    return [(start, np.asarray(found[start])) for start in mine]


def fetched(x: jax.Array) -> np.ndarray:
    """The whole array, on every process."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


def to_first(tree: PyTree) -> PyTree:
    """Arrays in the first process's memory, piece by piece, so that no device holds a large one
    whole. None on the others."""
    if not several():
        return jax.device_get(tree)
    leaves, structure = jax.tree.flatten(tree)
    taken = [_leaf_to_first(leaf) for leaf in leaves]
    return jax.tree.unflatten(structure, taken) if first() else None


def _leaf_to_first(x: jax.Array) -> np.ndarray | None:
    if x.is_fully_replicated:
        return np.asarray(x) if first() else None
    size = max(1, x.shape[0] * PIECE_BYTES // max(x.nbytes, 1))
    out = np.empty(x.shape, x.dtype) if first() else None
    whole = NamedSharding(x.sharding.mesh, PartitionSpec())
    take = jax.jit(
        lambda x, at, size: jax.lax.dynamic_slice_in_dim(x, at, size),
        static_argnames="size",
        out_shardings=whole,
    )
    for start in range(0, x.shape[0], size):
        count = min(size, x.shape[0] - start)
        piece = take(x, jnp.int32(start), size=count)
        if out is not None:
            out[start : start + count] = np.asarray(piece)
    return out
