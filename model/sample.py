"""The sampler: prompts are prefilled once, their samples decoded side by side, in one program.

Rows are decoded in slots (model/slots.py). Where each row has a slot of its own (training's case),
all rows are of one age, and the cache begins narrow and is widened as they grow.

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
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from model.config import ModelConfig
from model.decode import Visible, decode, in_type, prefill, room, side_by_side, unstacked, widened
from model.draw import Filters, draw_token
from model.errors import BadInput
from model.heads import logits
from model.parameters import head_kernel
from model.quantize import Stored, quantize, unhoisted
from model.sample_inputs import Given, input_partition, row_uniforms
from model.sharding import AXES, BATCH, TENSOR, batch_shards, mesh_sizes, part_of
from model.slots import Log, Rows, State, begin, gathered, move_together, refill

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
        uniforms=row_uniforms(keys, max_new_tokens),
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
            in_specs=(input_partition(config, given),),
            out_specs=Samples(rows, rows, rows, rows, rows, PartitionSpec()),
            check_vma=False,
        )
    return part(given)


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
        state = begin(rows, slots, longest, [room(p, slots, 0) for p in prefilled])
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
        state = begin(rows, slots, steps, [room(prompt, slots, longest) for prompt in own])
        few = slots // 4
        state = jax.lax.while_loop(
            lambda state: anyone((state.taken < count) | (jnp.sum(state.live) > few)),
            lambda state: stride(refill(state, rows, prefilled), shared=False),
            state,
        )
        if few:
            state = jax.lax.while_loop(
                lambda state: anyone(jnp.any(state.live)),
                lambda state: stride(state, shared=False),
                move_together(state, few),
            )
    drawn, mask = gathered(state, max_new_tokens)
    tokens = jnp.where(mask, drawn.token, pad_id)
    samples = Samples(
        tokens=tokens,
        mask=mask,
        logprobs=jnp.where(mask, drawn.logprob, 0.0),
        truncated=~jnp.any(mask & jnp.isin(tokens, given.stop_ids), axis=1),
        finite=jnp.all(drawn.finite | ~mask, axis=1),
        slot_steps=state.slot_steps,
    )
    if jax.sharding.get_abstract_mesh().empty:
        return samples
    return samples._replace(slot_steps=jax.lax.psum(samples.slot_steps, BATCH))


def cache_widths(longest: int) -> list[int]:
    """The widths that the cache of `longest` columns goes through."""
    part = max(NARROWEST, STRIDE * math.ceil(longest / WIDTHS / STRIDE))
    return [*range(part, longest, part), longest]
