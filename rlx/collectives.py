"""What a compiled program sends to other devices, in bytes a device.

A ring of n devices sends (n - 1) / n of an array to gather or to scatter it, and twice that to add
it up everywhere. https://doi.org/10.1016/j.jpdc.2008.09.002 (Patarasuk and Yuan, sec. 3)
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from rlx.hlo import Computation, Instruction, largest_array

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\[[^)]*\)?)\))?\s*\{([^}]*)\}"
)
IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


class Message(NamedTuple):
    """One kind of exchange."""

    kind: str
    devices: int
    """That take part, each group of them for itself."""
    beside: int
    """Of them, on a device's own host; all of them where no host is crossed."""


def collective(opcode: str) -> str | None:
    """The kind that an instruction is of; None for others, and for the end of one that was begun
    before."""
    name = opcode.removesuffix("-start")
    return name if name in COLLECTIVES else None


def message(
    line: Instruction,
    computation: Computation,
    devices: int,
    hosts: Sequence[int] | None,
    within: str = "",
) -> tuple[Message, float]:
    """What a collective is, and how many bytes each of its devices sends. `hosts` says on which
    host each of the `devices` is, None where all are on one; `within`, the computation's name."""
    kind = collective(line.opcode)
    if kind == "all-reduce" and within.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # a TPU's: the sum, of which a device takes its part
    groups = replica_groups(line.text, devices)
    operand = sum(largest_array(computation[x].shape) for x in line.operands)
    n = len(groups[0]) if groups else 1
    beside = n
    if hosts and groups:
        beside = min(sum(hosts[x] == hosts[group[0]] for x in group) for group in groups)
    if kind == "collective-permute":
        pairs = [group for group in groups if group[0] != group[1]]
        crossing = hosts and any(hosts[a] != hosts[b] for a, b in pairs)
        return Message(kind, 2, 1 if crossing else 2), float(operand if pairs else 0)
    share = (n - 1) / n
    sent = {
        # By what a device brings; a gathered array is n times as large.
        "all-gather": n * share,
        "all-reduce": 2 * share,
        "reduce-scatter": share,
        "all-to-all": share,
        "ragged-all-to-all": share,
        "collective-broadcast": share,
    }[kind]
    return Message(kind, n, beside), operand * sent


def replica_groups(text: str, devices: int) -> list[list[int]]:
    """Of a collective: who exchanges with whom. In any of the three forms that XLA writes."""
    if found := re.search(r"source_target_pairs=\{(\{.*?\})\}", text):
        return _lists(found[1])
    if found := MESH.search(text):
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        order = IOTA.match(found[2]) if found[2] else None
        devices_of = _iota(order[1], order[2]) if order else None
        return _of_mesh(axes, found[3], devices_of)
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        order = IOTA.match(found[2])
        return _iota(order[1], order[2]).reshape([int(x) for x in found[1].split(",")]).tolist()
    if found := re.search(r"replica_groups=\{(\{.*?\})\}", text):
        return _lists(found[1])
    if "replica_groups={}" in text or "replica_groups" not in text:
        return [list(range(devices))]
    raise ValueError(f"unknown form of replica groups: {text[:200]}")


def _lists(text: str) -> list[list[int]]:
    return [[int(x) for x in group.split(",") if x] for group in re.findall(r"\{([\d,]*)\}", text)]


def _iota(shape: str, order: str | None) -> Int[np.ndarray, " n"]:
    """`[4,2]T(1,0)`: numbers that count up along the axes in another order."""
    sizes = [int(x) for x in shape.split(",")]
    ids = np.arange(np.prod(sizes)).reshape(sizes)
    return (ids.transpose([int(x) for x in order.split(",")]) if order else ids).reshape(-1)


def _of_mesh(
    axes: dict[str, int], chosen: str, devices: Int[np.ndarray, " n"] | None
) -> list[list[int]]:
    """Groups along some axes of a mesh, `'a'`, or along a part of one, `'a':(before)size`;
    `devices` are those of the mesh in order, None where they count up."""
    sizes, along = [], []
    parts = {
        name: (int(before or 1), int(size or 0))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", chosen)
    }
    for name, whole in axes.items():
        if name in parts and parts[name][1]:
            before, size = parts[name]
            sizes += [before, size, whole // (before * size)]
            along += [False, True, False]
        else:
            sizes.append(whole)
            along.append(name in parts)
    ids = (np.arange(np.prod(sizes)) if devices is None else devices).reshape(sizes)
    order = [i for i, x in enumerate(along) if not x] + [i for i, x in enumerate(along) if x]
    count = int(np.prod([size for size, x in zip(sizes, along, strict=True) if x]))
    return ids.transpose(order).reshape(-1, count).tolist()
