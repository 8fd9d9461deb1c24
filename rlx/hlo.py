"""Reads the text of a compiled program: computations, sizes of arrays, how often loops turn.

The text is what `compiled.as_text()` gives for a CPU, a GPU or a TPU. They differ: a TPU pads
arrays to tiles (`{1,0:T(8,128)}`), keeps some beside its main memory (`S(1)`), and does not say how
often a loop turns.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple


class Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str
    """The operands' parentheses and all that comes after."""
    root: bool


Computation = dict[str, Instruction]


class Module(NamedTuple):
    computations: dict[str, Computation]
    entry: str
    loops: dict[str, tuple[str, Instruction]]
    """By a loop's body: the computation that the loop is in, and the loop."""


BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2", "s4", "u4"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
    "c128": 16,
}
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
TILE = re.compile(r"^\{([\d,]*):T\(([\d,]+)\)")
HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
SAME = ("copy", "bitcast", "convert", "copy-done", "copy-start", "optimization-barrier")
"""Instructions that give what they take."""


def parse(text: str) -> Module:
    computations: dict[str, Computation] = {}
    entry, current, loops, name = "", {}, {}, ""
    for line in text.splitlines():
        if head := HEAD.match(line):
            name = head[1]
            current = computations[name] = {}
            entry = name if line.startswith("ENTRY") else entry
        elif found := LINE.match(line):
            read = _instruction(found, line[found.end() :])
            current[read.name] = read
            if read.opcode == "while":
                loops[attribute(read.text, "body")] = (name, read)
    return Module(computations, entry, loops)


def _instruction(found: re.Match, rest: str) -> Instruction:
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, (opcode, _, tail) = rest[:end], rest[end:].strip().partition("(")
    inner = tail[: _closing("(" + tail) - 1]
    operands = tuple(re.findall(r"%([\w.\-]+)", inner))
    return Instruction(found[2], shape, opcode, operands, "(" + tail, bool(found[1]))


PARENTHESIS = re.compile(r"[()]")


def _closing(text: str) -> int:
    """Where the parenthesis that `text` begins with is closed."""
    depth = 0
    for found in PARENTHESIS.finditer(text):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.start()
    raise ValueError(f"a parenthesis is never closed: {text[:80]}")


# ---- attributes ----------------------------------------------------------------------------


def attribute(text: str, name: str) -> str:
    return re.search(rf'{name}="?%?([\w.\-$]+)', text)[1]


def numbers(text: str, name: str) -> list[int]:
    found = re.search(rf"{name}=\{{([\d,]*)\}}", text)
    return [int(x) for x in found[1].split(",") if x] if found else []


def origin(line: Instruction) -> str:
    """The operation of the program as it was written that an instruction comes from."""
    found = re.search(r'op_name="([^"]*)"', line.text)
    return found[1] if found else line.name


def branches(line: Instruction) -> Iterator[str]:
    if listed := re.search(r"branch_computations=\{([^}]*)\}", line.text):
        yield from re.findall(r"%?([\w.\-]+)", listed[1])
    else:
        yield from (attribute(line.text, f"{which}_computation") for which in ("true", "false"))


# ---- sizes ---------------------------------------------------------------------------------


def dimensions(shape: str) -> list[int]:
    """Of the first array that a shape names."""
    return [int(x) for x in ARRAY.search(shape)[2].split(",") if x]


def size(shape: str) -> int:
    return math.prod(dimensions(shape))


@functools.lru_cache(100_000)
def array_bytes(shape: str, everywhere: bool = False) -> int:
    """Of all arrays that a shape, a tuple perhaps, names, padded to their tiles.

    What lies beside the main memory counts only with `everywhere`.
    """
    return sum(
        BYTES.get(kind, 0) * _padded(dims, layout)
        for kind, dims, layout in ARRAY.findall(shape)
        if everywhere or "S(" not in layout
    )


def largest_array(shape: str) -> int:
    """Bytes of the largest array that a shape names, unpadded and wherever it lies."""
    return max(
        (
            BYTES.get(kind, 0) * math.prod(int(x) for x in dims.split(",") if x)
            for kind, dims, _ in ARRAY.findall(shape)
        ),
        default=0,
    )


def _padded(dims: str, layout: str) -> int:
    lengths = [int(x) for x in dims.split(",") if x]
    if tile := TILE.match(layout):
        order = [int(x) for x in tile[1].split(",") if x]
        sides = [int(x) for x in tile[2].split(",")]
        for axis, side in zip(order, reversed(sides), strict=False):
            lengths[axis] = -(-lengths[axis] // side) * side
    return math.prod(lengths)


# ---- loops ---------------------------------------------------------------------------------


def turns(module: Module, line: Instruction) -> int | None:
    """How often a loop's body runs; None where it depends on data."""
    if known := TURNS.search(line.text):
        return int(known[1])
    condition = module.computations[attribute(line.text, "condition")]
    compared = _comparison(module, condition, _root(condition))
    if compared is None:
        return None
    direction, sides = compared
    counter, bound = sides if direction in ("LT", "LE") else reversed(sides)
    if direction not in ("LT", "LE", "GT", "GE") or counter[0] != "element":
        return None
    body = module.computations[attribute(line.text, "body")]
    step = _step(module, body, counter[1])
    outer = module.computations[module.loops[attribute(line.text, "body")][0]]
    begun = _value(module, outer, outer[line.operands[0]], counter[1])
    if bound[0] == "element":
        if _step(module, body, bound[1]) != 0:
            return None
        end = _value(module, outer, outer[line.operands[0]], bound[1])
    else:
        end = bound[1]
    if step is None or step <= 0 or begun is None or end is None:
        return None
    return max(0, math.ceil((end + (direction in ("LE", "GE")) - begun) / step))


def _root(computation: Computation) -> Instruction:
    return next(line for line in computation.values() if line.root)


Side = tuple[str, int]
"""`element` and its number in the loop's state, or `constant` and its value."""


def _comparison(
    module: Module, computation: Computation, line: Instruction, given: tuple[Side, ...] = ()
) -> tuple[str, list[Side]] | None:
    """What a condition compares, and how. `given` are the operands of a fusion."""
    if line.opcode == "fusion":
        inner = module.computations[attribute(line.text, "calls")]
        operands = tuple(_side(computation, computation[x], given) for x in line.operands)
        return None if None in operands else _comparison(module, inner, _root(inner), operands)
    if line.opcode in SAME:
        return _comparison(module, computation, computation[line.operands[0]], given)
    if line.opcode != "compare":
        return None
    sides = [_side(computation, computation[x], given) for x in line.operands]
    return None if None in sides else (attribute(line.text, "direction"), sides)


def _side(computation: Computation, line: Instruction, given: tuple[Side, ...] = ()) -> Side | None:
    while line.opcode in SAME:
        line = computation[line.operands[0]]
    if line.opcode == "constant":
        found = re.match(r"\((-?\d+)\)", line.text)
        return ("constant", int(found[1])) if found else None
    if line.opcode == "parameter" and given:
        return given[int(re.match(r"\((\d+)\)", line.text)[1])]
    if line.opcode == "get-tuple-element":
        return ("element", int(attribute(line.text, "index")))
    return None


def _step(module: Module, body: Computation, element: int) -> int | None:
    """By how much a turn moves an element of the loop's state; None where that is not plain."""
    line = body[_root(body).operands[element]]
    return _distance(module, body, line, element)


def _distance(module, computation, line, element, given=()) -> int | None:
    while line.opcode in SAME:
        line = computation[line.operands[0]]
    if line.opcode == "fusion":
        inner = module.computations[attribute(line.text, "calls")]
        operands = tuple(_side(computation, computation[x], given) for x in line.operands)
        return _distance(module, inner, _root(inner), element, operands)
    side = _side(computation, line, given)
    if side == ("element", element):
        return 0
    if line.opcode != "add":
        return None
    sides = [_side(computation, computation[x], given) for x in line.operands]
    constants = [x[1] for x in sides if x and x[0] == "constant"]
    return constants[0] if ("element", element) in sides and constants else None


def _value(module: Module, computation: Computation, line: Instruction, element: int = -1):
    """The number that an instruction, or an element of the tuple that it makes, surely is."""
    while line.opcode in SAME:
        line = computation[line.operands[0]]
    if line.opcode == "tuple" and element >= 0:
        return _value(module, computation, computation[line.operands[element]])
    if line.opcode == "constant":
        found = re.match(r"\((-?\d+)\)", line.text)
        return int(found[1]) if found else None
    if line.opcode == "get-tuple-element":
        index = int(attribute(line.text, "index"))
        return _value(module, computation, computation[line.operands[0]], index)
    if line.opcode == "parameter" and element >= 0:
        # The state of an outer loop: known where no turn changes it.
        name = next(n for n, c in module.computations.items() if c is computation)
        if name in module.loops:
            outer, loop = module.loops[name]
            body = computation
            if _step(module, body, element) == 0:
                around = module.computations[outer]
                return _value(module, around, around[loop.operands[0]], element)
    return None
