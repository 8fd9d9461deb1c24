"""Bytes of a device's main memory that the instructions of a compiled program read and write."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from rlx.hlo import ARRAY, Computation, Instruction, Module, array_bytes, attribute

FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
        *("partition-id", "replica-id", "optimization-barrier", "opt-barrier"),
    )
)
"""Instructions that move nothing."""
SLICES = ("dynamic-slice", "slice", "gather")
"""They read as much as they give, however large their operand is."""
SEEN_THROUGH = ("bitcast", "reshape")
"""What a fusion slices behind one of them it reads no more of."""


def instruction_bytes(line: Instruction, computation: Computation) -> int:
    """Read and written by an instruction that stands alone."""
    operands = [computation[name] for name in line.operands]
    if line.opcode.endswith(("-done", "-update")):
        return 0
    if line.opcode in SLICES:
        return array_bytes(line.shape, True) + array_bytes(line.shape)
    if line.opcode == "dynamic-update-slice":
        return 2 * array_bytes(operands[1].shape, True)
    if line.opcode == "scatter":
        return 2 * _scattered(line, computation) + sum(array_bytes(x.shape) for x in operands[1:])
    if line.opcode.removesuffix("-start") in SLICES:
        # Its shape holds what it slices, whole, before the slice.
        slice_shape = [found[0] for found in ARRAY.finditer(line.shape)][1]
        return array_bytes(slice_shape, True) + array_bytes(slice_shape)
    if line.opcode.endswith("-start") and line.shape.startswith("("):
        # Its shape holds what it reads beside what it writes.
        return array_bytes(line.shape)
    if line.opcode == "custom-call" and not operands:
        return 0
    return array_bytes(line.shape) + sum(array_bytes(x.shape) for x in operands)


def fusion_bytes(module: Module, line: Instruction) -> int:
    """A fusion reads of an operand what it slices of it, and writes in place what it updates."""
    inner = module.computations[attribute(line.text, "calls")]
    total = sum(_read(module, inner, x) for x in inner.values() if x.opcode == "parameter")
    return total + max(0, array_bytes(line.shape) - sum(_kept(module, inner)))


def _kept(module: Module, inner: Computation) -> Iterator[int]:
    """Bytes of results that stay as they were."""
    for part in inner.values():
        if part.opcode == "dynamic-update-slice":
            given = array_bytes(inner[part.operands[1]].shape, True)
            yield max(0, array_bytes(part.shape) - given)
        elif part.opcode == "scatter":
            yield array_bytes(part.shape) - _scattered(part, inner)
        elif part.opcode == "fusion":
            yield from _kept(module, module.computations[attribute(part.text, "calls")])


def _read(
    module: Module,
    inner: Computation,
    part: Instruction,
    outside: tuple[Any, ...] = (),
) -> int:
    """Bytes that the users of `part`, a parameter or the same behind a bitcast, read of it.

    `outside` are the same arguments for the fusion that `inner` is of, where it lies in another:
    who reads its result reads `part`, if that is its result.
    """
    whole, read = array_bytes(part.shape), 0
    if part.root:
        return min(whole, _read(module, *outside)) if outside else whole
    for user, place in _users(inner)[part.name]:
        if user.opcode in SLICES and place == 0:
            read += array_bytes(user.shape, True)
        elif user.opcode in SEEN_THROUGH:
            # A bitcast may forget where its operand lies.
            read += min(whole, _read(module, inner, user, outside))
        elif user.opcode == "fusion":
            called = module.computations[attribute(user.text, "calls")]
            read += _read(module, called, _parameter(called, place), (inner, user, outside))
        elif user.opcode == "scatter" and place == 0:
            read += _scattered(user, inner) if _combines(module, user) else 0
        elif user.opcode != "dynamic-update-slice" or place:
            read = whole
        if read >= whole:
            return whole
    return min(read, whole)


def _scattered(line: Instruction, computation: Computation) -> int:
    """Bytes of the rows that a scatter changes, where they lie: it reads and writes no others."""
    updates = array_bytes(computation[line.operands[2]].shape, True)
    return min(updates, array_bytes(line.shape))


def _combines(module: Module, line: Instruction) -> bool:
    """Whether what a scatter changes is read: not where it is replaced."""
    combiner = module.computations[attribute(line.text, "to_apply")]
    return next(x for x in combiner.values() if x.root).opcode != "parameter"


def _parameter(called: Computation, place: int) -> Instruction:
    found = (x for x in called.values() if x.opcode == "parameter")
    return next(x for x in found if x.text.startswith(f"({place})"))


def _users(inner: Computation) -> dict[str, list[tuple[Instruction, int]]]:
    users = defaultdict(list)
    for user in inner.values():
        for place, name in enumerate(user.operands):
            users[name].append((user, place))
    return users
