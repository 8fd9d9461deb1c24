"""The sampler: prompts are prefilled once, their samples decoded side by side, in one program.

    slot      a place in the batch that is decoded; it holds one row after another, or one for good
    age       tokens that a slot's row has
    step      one more token in each slot, written at the same column of every slot's cache

As a row's columns are its last `age` ones, wherever in the cache they lie, a slot can begin a new
row at any step: the cache is a ring. Where each row has a slot of its own (training's case), all
rows are of one age, and the cache begins narrow and is widened as they grow.

A log-probability is that of the full softmax at the sampling temperature, whatever filters the
draw went through.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int8, Key, PyTree

from model.config import ModelConfig
from model.decode import (
    Cache,
    Prompt,
    Visible,
    decode,
    emptied,
    in_type,
    prefill,
    room,
    side_by_side,
    unstacked,
    widened,
)
from model.draw import Drawn, Filters, draw_token
from model.errors import BadInput
from model.heads import logits
from model.parameters import head_kernel, parameter_axes
from model.quantize import Stored, kernel_inputs, quantize, unhoisted
from model.sharding import (
    AXES,
    BATCH,
    RULES,
    TENSOR,
    batch_shards,
    constrain,
    mesh_sizes,
    part_of,
)

STRIDE = 4
"""Steps between two looks at what has finished: to stop, or to give a slot its next row."""

WIDTHS = 4
"""Widths that a cache goes through, each a loop to be compiled."""

NARROWEST = 32
"""Columns of the narrowest cache."""


class Samples(NamedTuple):
    tokens: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    """True on sampled tokens, the stop token included."""
    logprobs: Float[Array, "B T"]
    truncated: Bool[Array, " B"]
    """Ended by the length limit, not by a stop token."""
    finite: Bool[Array, " B"]
    """False where the logits held a NaN or an infinity: such a row is no sample."""
    slot_steps: Int[Array, ""]
    """Slots x steps: the tokens that could have been sampled at this cost."""


class Log(NamedTuple):
    """What was drawn, a line a step. Rows find theirs at the end: no step scatters."""

    drawn: Drawn
    row: Int[Array, "steps slots"]
    """Whose token it is; -1 if nobody's."""


class State(NamedTuple):
    step: Int[Array, ""]
    row: Int[Array, " slots"]
    age: Int[Array, " slots"]
    token: Int[Array, " slots"]
    """The last one, whose successor is drawn next."""
    live: Bool[Array, " slots"]
    """The row is not at its end."""
    clean: Bool[Array, " slots"]
    """The slot's cache holds finite numbers."""
    caches: list[Cache]
    log: Log
    taken: Int[Array, ""]
    """Rows that have got a slot."""
    begun: Int[Array, " B"]
    """At which step."""
    slot: Int[Array, " B"]
    """Which it was."""
    moved: Int[Array, ""]
    """The step at which the last rows were moved together."""
    slot_after: Int[Array, " B"]
    """Their slots from then on."""
    slot_steps: Int[Array, ""]


class Rows(NamedTuple):
    """What is known of each row before it is sampled."""

    prompt: Int[Array, " B"]
    token: Int[Array, " B"]
    """The prompt's last: left to the loop, so that there is one place that draws."""
    position: Int[Array, " B"]
    limit: Int[Array, " B"]
    uniforms: Float[Array, "B T"]


def sample(
    config: ModelConfig,
    params: PyTree,
    tokens: Int[Array, "N P"],
    positions: Int[Array, "N P"],
    keys: Key[Array, "N G"],
    *,
    max_new_tokens: int,
    stop_ids: Int[Array, " stops"],
    pad_id: int,
    temperature: float | Float[Array, ""] = 1.0,
    filters: Filters | None = None,
    slots: int | None = None,
    limits: Int[Array, "N G"] | None = None,
    dtype: DTypeLike = jnp.float32,
    activations: DTypeLike | None = None,
    weights: Stored = "auto",
    cache: Stored = "auto",
) -> Samples:
    """G completions of each prompt, padded on its left to P >= 2; row b is of prompt b // G.

    `slots` rows are decoded at a time (None: all). A row has its own limit where `limits` are
    given, of which `max_new_tokens` is the most. A row depends on its own prompt, key and limit
    alone. Temperature 0 is greedy; its log-probabilities are those at temperature 1. Factors of
    matrix products are of `dtype`, what lies between products of `activations` (None: of `dtype`);
    kernels and cache may lie in int8, and log-probabilities are then those of the rounded model.
    Raises BadInput for P < 2 and for less than one slot.
    """
    prompts, width = tokens.shape
    if width < 2:
        raise BadInput(
            f"Prompts must be padded to at least 2 columns, and tokens is {list(tokens.shape)}."
        )
    if slots is not None and slots < 1:
        raise BadInput(f"slots must be at least 1, and is {slots}.")
    group = keys.shape[1]
    if limits is None:
        limits = jnp.full((prompts, group), max_new_tokens)
    kernel = head_kernel(config, params)
    kernel, scale = quantize(kernel, 0) if weights == "int8" else (kernel.astype(dtype), None)
    given = Given(
        # Layer by layer, so that on a mesh one at a time is gathered.
        params=unstacked(in_type(params, dtype, activations, weights)),
        kernel=kernel,
        kernel_scale=scale,
        tokens=tokens,
        positions=positions,
        uniforms=_uniforms(keys, max_new_tokens),
        limits=jnp.minimum(limits, max_new_tokens),
        stop_ids=stop_ids,
        temperature=temperature,
        filters=filters,
    )
    sizes = mesh_sizes()
    part = functools.partial(_sample_part, config, slots, pad_id, dtype, cache, None)
    if sizes:
        axis = TENSOR if sizes[TENSOR] > 1 else None
        each = slots and -(-slots // batch_shards())
        shape = part_of(config, sizes[TENSOR])
        part = functools.partial(_sample_part, shape, each, pad_id, dtype, cache, axis)
        rows = PartitionSpec(BATCH)
        part = jax.shard_map(
            part,
            in_specs=(_partition(config, given),),
            out_specs=Samples(rows, rows, rows, rows, rows, PartitionSpec()),
            check_vma=False,
        )
    return part(given)


class Given(NamedTuple):
    """All that sampling needs, on whatever devices."""

    params: PyTree
    """Of their types, with layers in a list."""
    kernel: Float[Array, "D V"] | Int8[Array, "D V"]
    """The head's."""
    kernel_scale: Float[Array, " V"] | None
    tokens: Int[Array, "N P"]
    positions: Int[Array, "N P"]
    uniforms: Float[Array, "N G T"]
    limits: Int[Array, "N G"]
    stop_ids: Int[Array, " stops"]
    temperature: float | Float[Array, ""]
    filters: Filters | None


def _partition(config: ModelConfig, given: Given) -> Given:
    """How it is split. A step reads all parameters: so each device keeps those of its part of the
    tensor axis, gathered over fsdp once a rollout."""
    axes = parameter_axes(config)

    def of_leaf(path, leaf):
        *outer, kind = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        names = axes[*outer, "kernel" if kind == "kernel_scale" else kind]
        if kind == "kernel_scale":
            inputs = kernel_inputs(*outer)
            names = tuple(name for i, name in enumerate(names) if i not in inputs)
        if outer[0] == "layers":
            names = names[1:]
        return PartitionSpec(*(of_tensor(name) for name in names))

    def of_tensor(name):
        return TENSOR if RULES.get(name) == TENSOR else None

    rows, whole = PartitionSpec(BATCH), PartitionSpec()
    return Given(
        params=jax.tree_util.tree_map_with_path(of_leaf, given.params),
        kernel=PartitionSpec(None, TENSOR),
        kernel_scale=PartitionSpec(TENSOR),
        tokens=rows,
        positions=rows,
        uniforms=rows,
        limits=rows,
        stop_ids=whole,
        temperature=whole,
        filters=whole,
    )


def _sample_part(
    config: ModelConfig,
    slots: int | None,
    pad_id: int,
    dtype: DTypeLike,
    cache: Stored,
    axis: str | None,
    given: Given,
) -> Samples:
    """`sample` of one device's prompts. Where `axis` of the mesh splits heads, vocabulary and the
    rest, devices of it work on the same rows, and `config` is that of a part."""
    tokens, positions = given.tokens, given.positions
    kernel, scale = given.kernel, given.kernel_scale
    group, max_new_tokens = given.uniforms.shape[1:]
    prompts = tokens.shape[0]
    count = prompts * group
    rounded = scale is not None or cache == "int8"
    params = side_by_side(given.params)
    prompt_mask = positions[:, :-1] >= 0
    prefilled = prefill(config, params, tokens[:, :-1], positions[:, :-1], dtype, cache, axis)
    rows = Rows(
        prompt=jnp.repeat(jnp.arange(prompts), group),
        token=jnp.repeat(tokens[:, -1], group),
        position=jnp.repeat(positions[:, -1], group),
        limit=given.limits.reshape(count),
        uniforms=given.uniforms.reshape(count, max_new_tokens),
    )

    def anyone(condition):
        """Whether it holds on any device: those that add up their parts must turn as often."""
        if axis is None:
            return condition
        return jax.lax.pmax(condition.astype(jnp.int32), AXES) > 0

    def step(state: State, shared: bool) -> State:
        lasting = (params, kernel, [cache.prompt for cache in state.caches])
        now = state.step
        if rounded:
            lasting, now = unhoisted(lasting, now)
        read, head, shown = lasting
        columns = jnp.arange(state.caches[0].keys.shape[-1])
        column = now % len(columns)
        visible = Visible(
            prompt=prompt_mask if shared else prompt_mask[rows.prompt[state.row]],
            own=(column - columns) % len(columns) <= state.age[:, None],
            column=column,
        )
        position = (rows.position[state.row] + state.age)[:, None]
        caches = [c._replace(prompt=prompt) for c, prompt in zip(state.caches, shown, strict=True)]
        hidden, caches = decode(
            config, read, state.token[:, None], position, caches, visible, dtype, axis
        )
        # What no step changes goes on as it came, or the loop would copy it.
        caches = [c._replace(prompt=o.prompt) for c, o in zip(caches, state.caches, strict=True)]
        first_id = 0 if axis is None else jax.lax.axis_index(axis) * config.vocab_size
        raw = logits(config, head.astype(dtype), hidden[:, 0].astype(dtype), first_id=first_id)
        if scale is not None:
            raw = raw * scale
        uniform = rows.uniforms[state.row, state.age]
        drawn = draw_token(raw, uniform, given.temperature, given.filters, axis)
        stopped = jnp.isin(drawn.token, given.stop_ids)
        line = Log(drawn, jnp.where(state.live, state.row, -1))
        age = state.age + state.live
        return state._replace(
            step=now + 1,
            age=age,
            token=drawn.token,
            live=state.live & ~stopped & (age < rows.limit[state.row]),
            clean=state.clean & drawn.finite,
            caches=caches,
            log=jax.tree.map(
                lambda log, new: jax.lax.dynamic_update_slice(log, new[None], (state.step, 0)),
                state.log,
                line,
            ),
            slot_steps=state.slot_steps + len(state.row),
        )

    def stride(state: State, shared: bool) -> State:
        return jax.lax.fori_loop(0, STRIDE, lambda _, state: step(state, shared), state)

    longest = STRIDE * math.ceil(max_new_tokens / STRIDE)
    if slots is None or slots >= count:
        slots = count
        state = _begin(rows, slots, longest, [room(p, slots, 0) for p in prefilled])
        for columns in cache_widths(longest):
            caches = [widened(cache, columns) for cache in state.caches]
            state = jax.lax.while_loop(
                lambda state, columns=columns: (state.step < columns) & anyone(jnp.any(state.live)),
                lambda state: stride(state, shared=True),
                state._replace(caches=caches),
            )
    else:
        own = [jax.tree.map(lambda x: x[rows.prompt[:slots]], prompt) for prompt in prefilled]
        # No slot is free while rows wait: the last to begin does so within the first term.
        steps = (count - 1) * longest // slots + longest
        state = _begin(rows, slots, steps, [room(prompt, slots, longest) for prompt in own])
        few = slots // 4
        state = jax.lax.while_loop(
            lambda state: anyone((state.taken < count) | (jnp.sum(state.live) > few)),
            lambda state: stride(_refill(state, rows, prefilled), shared=False),
            state,
        )
        if few:
            state = jax.lax.while_loop(
                lambda state: anyone(jnp.any(state.live)),
                lambda state: stride(state, shared=False),
                _together(state, few),
            )
    samples = _collect(state, max_new_tokens, given.stop_ids, pad_id)
    if jax.sharding.get_abstract_mesh().empty:
        return samples
    return samples._replace(slot_steps=jax.lax.psum(samples.slot_steps, BATCH))


def _uniforms(keys: Key[Array, "N G"], width: int) -> Float[Array, "N G {width}"]:
    """The number that draws each of a row's tokens, of its key and the token's place alone."""

    def of_row(key):
        return jax.vmap(lambda t: jax.random.uniform(jax.random.fold_in(key, t)))(jnp.arange(width))

    return constrain(jax.vmap(jax.vmap(of_row))(keys), "batch")


def cache_widths(longest: int) -> list[int]:
    """The widths that the cache of `longest` columns goes through."""
    part = max(NARROWEST, STRIDE * math.ceil(longest / WIDTHS / STRIDE))
    return [*range(part, longest, part), longest]


def _begin(rows: Rows, slots: int, steps: int, caches: list[Cache]) -> State:
    """The first rows in the slots."""
    count = rows.limit.shape[0]
    lines = (steps, slots)
    drawn = Drawn(jnp.zeros(lines, jnp.int32), jnp.zeros(lines), jnp.ones(lines, bool))
    return State(
        step=jnp.int32(0),
        row=jnp.arange(slots),
        age=jnp.zeros(slots, jnp.int32),
        token=rows.token[:slots],
        live=rows.limit[:slots] > 0,
        clean=jnp.ones(slots, bool),
        caches=caches,
        log=Log(drawn, jnp.full(lines, -1)),
        taken=jnp.int32(slots),
        begun=jnp.zeros(count, jnp.int32),
        slot=jnp.arange(count),
        moved=jnp.int32(steps),
        slot_after=jnp.zeros(count, jnp.int32),
        slot_steps=jnp.int32(0),
    )


def _refill(state: State, rows: Rows, prefilled: list[Prompt]) -> State:
    """The next rows in the slots whose row is at its end."""
    count = rows.limit.shape[0]
    following = state.taken + jnp.cumsum(~state.live) - 1
    fresh = ~state.live & (following < count)
    row = jnp.where(fresh, following, state.row)

    def choose(new, old):
        return jnp.where(fresh.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    def new_prompt(cache, prompt):
        own = jax.tree.map(
            lambda new, old: choose(new[rows.prompt[row]], old), prompt, cache.prompt
        )
        return cache._replace(prompt=own)

    caches = jax.lax.cond(
        jnp.any(fresh & ~state.clean),
        lambda caches: [emptied(cache, fresh) for cache in caches],
        lambda caches: caches,
        state.caches,
    )
    at = jnp.where(fresh, row, count)
    return state._replace(
        row=row,
        age=jnp.where(fresh, 0, state.age),
        token=jnp.where(fresh, rows.token[row], state.token),
        live=state.live | fresh & (rows.limit[row] > 0),
        clean=state.clean | fresh,
        caches=[new_prompt(*pair) for pair in zip(caches, prefilled, strict=True)],
        taken=state.taken + jnp.sum(fresh, dtype=jnp.int32),
        begun=state.begun.at[at].set(state.step, mode="drop"),
        slot=state.slot.at[at].set(jnp.arange(len(at)), mode="drop"),
    )


def _together(state: State, few: int) -> State:
    """The last rows, `few` at most, in as few slots: with none to follow, the others are idle."""
    chosen = jnp.argsort(~state.live, stable=True)[:few]
    of_slots = ("row", "age", "token", "live", "clean", "caches")
    moved = {name: jax.tree.map(lambda x: x[chosen], getattr(state, name)) for name in of_slots}
    at = state.row[chosen]
    return state._replace(
        **moved, moved=state.step, slot_after=state.slot_after.at[at].set(jnp.arange(few))
    )


def _collect(state: State, width: int, stop_ids: Int[Array, " stops"], pad_id: int) -> Samples:
    """Each row's tokens, from the lines in which it had its slot."""
    steps = state.begun[:, None] + jnp.arange(width)
    slots = jnp.where(steps < state.moved, state.slot[:, None], state.slot_after[:, None])
    drawn, row = jax.tree.map(lambda log: log[steps, slots], state.log)
    mask = row == jnp.arange(len(steps))[:, None]
    tokens = jnp.where(mask, drawn.token, pad_id)
    return Samples(
        tokens=tokens,
        mask=mask,
        logprobs=jnp.where(mask, drawn.logprob, 0.0),
        truncated=~jnp.any(mask & jnp.isin(tokens, stop_ids), axis=1),
        finite=jnp.all(drawn.finite | ~mask, axis=1),
        slot_steps=state.slot_steps,
    )
