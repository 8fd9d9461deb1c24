"""What a model must compute and move, and what a compiled program does.

    needed = update_flops(forward_flops(config, rows=64, prompt=64, completion=128, samples=8))
    counted = cost(compiled.as_text(), trips={"sample/while": 128})
    counted.flops / needed, counted.bytes

FLOPs are those of matrix products, a multiply and an add being two. XLA's own `cost_analysis`
counts a loop's body once, whatever its number of turns.
"""

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from model.config import ModelConfig
from model.errors import BadInput


class Forward(NamedTuple):
    """FLOPs of one forward pass, by part."""

    projections: float
    """Query, key, value and output."""
    feed_forward: float
    """Of a model with experts: the router's, and of each token's own experts."""
    attention: float
    head: float

    @property
    def total(self) -> float:
        return sum(self)


def forward_flops(
    config: ModelConfig,
    *,
    rows: int,
    prompt: int,
    completion: int,
    samples: int = 1,
    causal: bool = True,
) -> Forward:
    """Of `rows` texts of `prompt` + `completion` tokens, with logits of the completion's tokens.

    `samples` rows share each prompt, which is computed once for them. Attention is counted for
    the pairs of tokens that see each other; with `causal` false also for those that come later,
    as a program that masks them computes it. A rollout needs as many FLOPs as this.
    """
    c, groups = config, rows / samples
    tokens = groups * prompt + rows * completion
    width = c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    if causal:
        pairs = groups * prompt * (prompt + 1) / 2
        pairs += rows * (completion * prompt + completion * (completion + 1) / 2)
    else:
        pairs = groups * prompt**2 + rows * completion * (prompt + completion)
        pairs += rows * prompt * completion if samples == 1 else 0
    return Forward(
        projections=2.0 * c.num_layers * tokens * c.hidden_size * width,
        feed_forward=2.0 * c.num_layers * tokens * _feed_forward_size(c, c.experts_per_token),
        attention=4.0 * c.num_layers * pairs * c.num_heads * c.head_dim,
        head=2.0 * rows * completion * c.hidden_size * c.vocab_size,
    )


def _feed_forward_size(config: ModelConfig, experts: int | float) -> int | float:
    """Numbers in a layer's feed-forward kernels; or in the router's and in so many experts'."""
    if not config.num_experts:
        return 3 * config.hidden_size * config.intermediate_size
    width = config.hidden_size
    return width * config.num_experts + experts * 3 * width * config.expert_size


def update_flops(forward: Forward, *, remat: bool = False, chunked: bool = True) -> float:
    """Of a forward and a backward pass: each product has two of its size on the way back.

    What is recomputed counts once more: the layers with `remat`, the head where it is `chunked`.
    """
    return forward.head * (4 if chunked else 3) + (forward.total - forward.head) * (
        4 if remat else 3
    )


def rollout_bytes(
    config: ModelConfig,
    *,
    rows: int,
    prompt: int,
    completion: int,
    samples: int = 1,
    itemsize: int = 4,
) -> float:
    """Least that decoding reads: at every step the weights, each prompt's keys and values once,
    and each row's own so far. `itemsize` is that of weights and cache, in bytes.

    Of a model with experts, as many of a layer's as `rows` tokens choose on average if all are
    chosen alike: E (1 - (1 - k/E)^rows).
    """
    c = config
    layer = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    chosen = 0.0
    if c.num_experts:
        chosen = c.num_experts * (1 - (1 - c.experts_per_token / c.num_experts) ** rows)
    layer += _feed_forward_size(c, chosen)
    weights = c.num_layers * layer + c.vocab_size * c.hidden_size
    columns = completion * (rows / samples * prompt) + rows * completion * (completion + 1) / 2
    cached = 2 * c.num_layers * c.num_kv_heads * c.head_dim * columns
    return float(itemsize * (completion * weights + cached))


class Cost(NamedTuple):
    """What one run of a program takes."""

    products: dict[str, int]
    """FLOPs of matrix products and convolutions by the operation that they come from."""
    bytes: int
    """Read and written by all instructions, as if no cache kept anything between two of them."""
    uncounted: dict[str, int]
    """Targets of the custom calls whose FLOPs are not known, with how often each runs."""

    @property
    def flops(self) -> int:
        return sum(self.products.values())


class Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    text: str
    """The operands' parentheses and all that comes after."""


Computation = dict[str, Instruction]

BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2", "s4", "u4"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
    "c128": 16,
}
FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id")
)
"""Instructions that move nothing."""
SLICES = ("dynamic-slice", "slice", "gather")
"""They read as much as they give, however large their operand is."""
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")


def cost(text: str, trips: Mapping[str, int] | None = None) -> Cost:
    """Of one run of the program that `compiled.as_text()` shows.

    A loop turns as often as XLA has proved (`known_trip_count`). For others `trips` gives the
    number: its keys are parts of the operation's name in the text (`jit(sample)/while`), and the
    longest that fits counts. Of a conditional the costliest branch counts. Raises BadInput that
    lists the loops without a number.
    """
    computations, entry = _parse(text)
    unknown = []

    @functools.cache
    def of(name: str, fused: bool) -> Cost:
        """Of one run of a computation. What is fused moves nothing by itself."""
        computation = computations[name]
        parts = []
        for line in computation.values():
            called = CALLED.search(line.text)
            flops = _flops(line, computation)
            if flops:
                parts.append(Cost({_origin(line): flops}, 0, {}))
            elif line.opcode == "custom-call":
                parts.append(Cost({}, 0, {_attribute(line.text, "custom_call_target"): 1}))
            if line.opcode == "while":
                turns = _turns(line, trips or {})
                if turns is None:
                    unknown.append(_origin(line))
                parts.append(_scaled(of(_attribute(line.text, "body"), fused), turns or 0))
            elif line.opcode == "conditional":
                branches = [of(branch, fused) for branch in _branches(line.text)]
                parts.append(max(branches, key=lambda branch: (branch.flops, branch.bytes)))
            elif line.opcode == "fusion":
                moved = 0 if fused else _fusion_bytes(line, computations[called[1]])
                parts += [of(called[1], True), Cost({}, moved, {})]
            elif line.opcode == "call" or (line.opcode.endswith("-start") and called):
                parts.append(of(called[1], fused))
            elif not fused and line.opcode not in FREE:
                parts.append(Cost({}, _bytes(line, computation), {}))
        return _sum(parts)

    total = of(entry, False)
    if unknown:
        raise BadInput(
            "How often these loops turn depends on data; expected a number for each in `trips`: "
            + ", ".join(dict.fromkeys(unknown))
            + "."
        )
    return total


def temporary_bytes(compiled: Any) -> int:
    """Peak of what the program holds beside its arguments and results, as XLA plans it."""
    return compiled.memory_analysis().temp_size_in_bytes


def _scaled(one: Cost, times: int) -> Cost:
    products, uncounted = ({k: times * v for k, v in x.items()} for x in (one[0], one[2]))
    return Cost(products, times * one.bytes, uncounted)


def _sum(parts: list[Cost]) -> Cost:
    products, uncounted = Counter(), Counter()
    for part in parts:
        products.update(part.products)
        uncounted.update(part.uncounted)
    return Cost(dict(products), sum(part.bytes for part in parts), dict(uncounted))


def _parse(text: str) -> tuple[dict[str, Computation], str]:
    """All computations by name, and the name of the entry."""
    computations: dict[str, Computation] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if head := HEAD.match(line):
            current = computations[head[1]] = {}
            entry = head[1] if line.startswith("ENTRY") else entry
        elif found := LINE.match(line):
            name, rest = found[1], line[found.end() :]
            end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
            shape, (opcode, _, tail) = rest[:end], rest[end:].strip().partition("(")
            inner = tail[: _closing("(" + tail) - 1]
            operands = tuple(re.findall(r"%([\w.\-]+)", inner))
            current[name] = Instruction(name, shape, opcode, operands, "(" + tail)
    return computations, entry


def _closing(text: str) -> int:
    """Where the parenthesis that `text` begins with is closed."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return place
    raise ValueError(f"a parenthesis is never closed: {text[:80]}")


def _flops(line: Instruction, computation: Computation) -> int:
    """Of a matrix product or a convolution, whatever it was lowered to; else 0."""
    if line.opcode == "dot":
        left = _dimensions(computation[line.operands[0]].shape)
        contracted = _numbers(line.text, "lhs_contracting_dims")
        return 2 * _size(line.shape) * math.prod(left[i] for i in contracted)
    if line.opcode == "convolution":
        kernel = _dimensions(computation[line.operands[1]].shape)
        labels = re.search(r"dim_labels=\w+_(\w+)->", line.text)[1]
        return 2 * _size(line.shape) * math.prod(kernel) // kernel[labels.index("o")]
    if line.opcode == "custom-call":
        target = _attribute(line.text, "custom_call_target")
        if "matmul" in target or "gemm" in target:
            # oneDNN's and cuBLAS's: [.., M, K] x [.., K, N] in whatever order of axes.
            out = next(ARRAY.finditer(line.shape))[0]
            sides = [math.prod(_dimensions(computation[x].shape)) for x in line.operands[:2]]
            batch = math.prod(_dimensions(out)[:-2]) if _batched(line, computation) else 1
            return 2 * math.isqrt(sides[0] * sides[1] * _size(out) // batch)
    return 0


def _batched(line: Instruction, computation: Computation) -> bool:
    return all(len(_dimensions(computation[x].shape)) > 2 for x in line.operands[:2])


def _turns(line: Instruction, trips: Mapping[str, int]) -> int | None:
    """How often a loop's body runs; None where nothing says it."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line.text):
        return int(known[1])
    fitting = [key for key in trips if key in _origin(line)]
    return trips[max(fitting, key=len)] if fitting else None


def _bytes(line: Instruction, computation: Computation) -> int:
    """Read and written by an instruction that stands alone."""
    operands = [computation[name] for name in line.operands]
    if line.opcode in SLICES:
        return 2 * _array_bytes(line.shape)
    if line.opcode == "dynamic-update-slice":
        return 2 * _array_bytes(operands[1].shape)
    return _array_bytes(line.shape) + sum(_array_bytes(x.shape) for x in operands)


def _fusion_bytes(line: Instruction, inner: Computation) -> int:
    """A fusion reads of an operand what it slices of it, and writes in place what it updates."""
    users = defaultdict(list)
    for user in inner.values():
        for place, name in enumerate(user.operands):
            users[name].append((user, place))
    total, updated = 0, 0
    for part in inner.values():
        if part.opcode == "dynamic-update-slice":
            updated += _array_bytes(part.shape) - _array_bytes(inner[part.operands[1]].shape)
        if part.opcode != "parameter":
            continue
        whole = _array_bytes(part.shape)
        read = 0
        for user, place in users[part.name]:
            if user.opcode in SLICES and place == 0:
                read += _array_bytes(user.shape)
            elif user.opcode != "dynamic-update-slice" or place:
                read = whole
        total += min(read, whole)
    return total + max(0, _array_bytes(line.shape) - updated)


def _branches(text: str) -> Iterator[str]:
    if listed := re.search(r"branch_computations=\{([^}]*)\}", text):
        yield from re.findall(r"%?([\w.\-]+)", listed[1])
    else:
        yield from (_attribute(text, f"{which}_computation") for which in ("true", "false"))


def _origin(line: Instruction) -> str:
    found = re.search(r'op_name="([^"]*)"', line.text)
    return found[1] if found else line.name


def _attribute(text: str, name: str) -> str:
    return re.search(rf'{name}="?%?([\w.\-$]+)', text)[1]


def _numbers(text: str, name: str) -> list[int]:
    found = re.search(rf"{name}=\{{([\d,]*)\}}", text)
    return [int(x) for x in found[1].split(",") if x] if found else []


def _dimensions(shape: str) -> list[int]:
    """Of the first array that a shape names."""
    return [int(x) for x in ARRAY.search(shape)[2].split(",") if x]


def _size(shape: str) -> int:
    return math.prod(_dimensions(shape))


def _array_bytes(shape: str) -> int:
    """Of all arrays that a shape, a tuple perhaps, names."""
    return sum(
        BYTES.get(kind, 0) * math.prod(int(x) for x in dims.split(",") if x)
        for kind, dims in ARRAY.findall(shape)
    )
