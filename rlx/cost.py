"""What a model must compute and move, and what a compiled program does.

    needed = update_flops(forward_flops(config, rows=64, prompt=64, completion=128, samples=8))
    counted = cost(compiled.as_text(), trips={"sample/while": 128})
    counted.flops / needed, counted.bytes

FLOPs are those of matrix products, a multiply and an add being two; bytes are those of the device's
main memory. XLA's own `cost_analysis` counts a loop's body once, whatever its number of turns, and
gives nothing for a GPU that is not there.
"""

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from model.config import ModelConfig
from model.errors import BadInput
from rlx.collectives import Message, collective, message
from rlx.hlo import attribute, branches, origin, parse, turns
from rlx.moved import FREE, fusion_bytes, instruction_bytes
from rlx.products import product_flops


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


Number = int | float


class Cost(NamedTuple):
    """What one run of a program takes, of each device."""

    products: dict[str, Number] = {}  # noqa: RUF012
    """FLOPs of matrix products and convolutions by the operation that they come from."""
    bytes: Number = 0
    """Read and written by all instructions, as if no cache kept anything between two of them."""
    uncounted: dict[str, Number] = {}  # noqa: RUF012
    """Targets of the custom calls whose FLOPs are not known, with how often each runs."""
    channels: dict[tuple[Message, str], Number] = {}  # noqa: RUF012
    """Bytes sent to other devices, by the exchange and the name of its channel."""

    @property
    def flops(self) -> Number:
        return sum(self.products.values())

    @property
    def messages(self) -> dict[Message, Number]:
        """Bytes sent to other devices, by the exchange."""
        total: Counter = Counter()
        for (kind, _), sent in self.channels.items():
            total[kind] += sent
        return dict(total)

    @property
    def sent(self) -> Number:
        return sum(self.channels.values())


NO_WORK = (
    "AllocateBuffer",
    "AssumeGatherIndicesInBound",
    "AsyncCollectiveDone",
    "AsyncCollectiveStart",
    "ConcatBitcast",
    "GatherScatterIndicesBitpacked",
    "LayoutConstraint",
    "PrepareAsyncCallDone",
    "PrepareAsyncCallStart",
    "Sharding",
    "ShapeAssertion",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "ZeroCrop",
    "annotate_device_placement",
)
"""Targets of custom calls that compute nothing."""
USUAL = re.compile(r"usual_turns_(\d+)\)*/while$")
"""Of the loop's own scope, not of one around the loop that it is in."""
CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")


def cost(
    text: str,
    trips: Mapping[str, Number] | None = None,
    *,
    hosts: Sequence[int] | None = None,
) -> Cost:
    """Of one run of the program that `compiled.as_text()` shows, on each device.

    A loop turns as often as its own scope says is usual (`usual_turns` in
    model/expert_products.py), else as its text proves. For others `trips` gives the number: its
    keys are parts of the operation's name in the text (`jit(sample)/while`), and the longest that
    fits counts. Of a conditional the costliest branch counts. `hosts`: on which host each device
    is.
    Raises BadInput that lists the loops without a number.
    """
    module, unknown = parse(text), []
    partitions = re.search(r"^HloModule .*num_partitions=(\d+)", text)
    devices = len(hosts) if hosts else int(partitions[1]) if partitions else 1

    @functools.cache
    def of(name: str, fused: bool) -> Cost:
        """Of one run of a computation. What is fused moves nothing by itself."""
        computation = module.computations[name]
        parts = []
        for line in computation.values():
            called = CALLED.search(line.text)
            flops = product_flops(line, computation)
            if flops:
                parts.append(Cost({origin(line): flops}))
            elif line.opcode == "custom-call":
                target = attribute(line.text, "custom_call_target")
                parts.append(Cost(uncounted={} if target in NO_WORK else {target: 1}))
            elif collective(line.opcode):
                kind, sent = message(line, computation, devices, hosts, name)
                # What is begun, waited for and computed beside is one exchange, on one channel.
                channel = re.search(r"channel_id=(\d+)", line.text)
                parts.append(Cost(channels={(kind, channel[1] if channel else line.name): sent}))
            if line.opcode == "while":
                usual = USUAL.search(origin(line))
                count = int(usual[1]) if usual else turns(module, line)
                if count is None:
                    fitting = [key for key in trips or {} if key in origin(line)]
                    count = trips[max(fitting, key=len)] if fitting else None
                if count is None:
                    unknown.append(origin(line))
                parts.append(_scaled(of(attribute(line.text, "body"), fused), count or 0))
            elif line.opcode == "conditional":
                each = [of(branch, fused) for branch in branches(line)]
                parts.append(max(each, key=lambda branch: (branch.flops, branch.bytes)))
            elif line.opcode == "fusion":
                moved = 0 if fused else fusion_bytes(module, line)
                parts += [of(called[1], True), Cost(bytes=moved)]
            elif line.opcode in ("call", "async-start"):
                parts.append(of(called[1], fused))
            elif not fused and line.opcode not in FREE:
                parts.append(Cost(bytes=instruction_bytes(line, computation)))
        return _sum(parts)

    total = of(module.entry, False)
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


def _scaled(one: Cost, times: Number) -> Cost:
    products, uncounted, channels = (
        {k: times * v for k, v in x.items()} for x in (one.products, one.uncounted, one.channels)
    )
    return Cost(products, times * one.bytes, uncounted, channels)


def _sum(parts: list[Cost]) -> Cost:
    products, uncounted = Counter(), Counter()
    channels: dict[tuple[Message, str], Number] = {}
    for part in parts:
        products.update(part.products)
        uncounted.update(part.uncounted)
        for key, sent in part.channels.items():
            channels[key] = max(channels.get(key, 0), sent)
    return Cost(dict(products), sum(part.bytes for part in parts), dict(uncounted), channels)
