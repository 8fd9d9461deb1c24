"""The update: a batch to a new state, by scans over epochs, mini-batches and micro-batches.

One mini-batch is one optimizer update. Its weights are computed on all its rows before they are
cut into micro-batches, so that the cut changes nothing but rounding.

Rows of samples are packed: a micro-batch is a stream that holds each prompt once and no padding
(model/stream.py). Given text keeps its rows as they are.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from model.heads import Outputs, completion_outputs, state_values, stream_outputs
from model.lora import beside
from model.qwen import Qwen, parameter_axes
from model.sharding import (
    ParameterAxes,
    apart,
    batch_shards,
    constrain,
    each_shard,
    in_row_order,
    micro_batches,
    split_parameters,
    split_rows,
    together,
    whole,
)
from model.stream import Places, Stream
from rlx import ops, router
from rlx.algorithms.record import Algorithm, clean, of_scores
from rlx.packing import Layout, Packed, for_each_stream, layout, pack
from rlx.types import Batch, Largest, Mean, Metrics, Signal, TrainState


class Term(NamedTuple):
    """One of the losses that share a forward pass and are added up."""

    name: str
    algorithm: Algorithm
    """With its hyper-parameters bound."""
    weight: float = 1.0


class Learner(NamedTuple):
    """What an update needs to know and never changes."""

    model: Qwen
    critic: Qwen | None
    """A critic of its own; None where there is none, or a head on the policy's trunk."""
    terms: tuple[Term, ...]
    """The first names the run's algorithm; at least one."""
    optimizer: optax.GradientTransformation
    """Of (params, critic)."""
    schedule: Callable[[Int[Array, ""]], Float[Array, ""]]
    """Optimizer updates made -> learning rate, for the log; the optimizer has its own."""
    temperature: float
    minibatches: int
    epochs: int
    micro: int
    """Rows of one forward and backward pass: whole units."""
    on_policy: bool
    """The batch gets exactly one update: the old log-probabilities are the current ones."""
    samples: int = 1
    """Successive rows that share their prompt."""
    packing: bool = False
    """Pack rows into streams, each prompt once; `micro` rows of full length fill one."""
    router_aux: float = 0.0
    """Weight of the load-balancing loss of the policy's routers."""

    @property
    def axes(self) -> ParameterAxes:
        """Of all that is trained."""
        of_critic = parameter_axes(self.critic.config) if self.critic else {}
        return of_critic | parameter_axes(self.model.config)

    @property
    def unit(self) -> int:
        """Rows that stay together when a batch is shuffled and cut."""
        return max(term.algorithm.unit for term in self.terms)

    @property
    def valued(self) -> int | None:
        """Which term's advantages read the critic's values."""
        places = [i for i, term in enumerate(self.terms) if term.algorithm.critic]
        return places[0] if places else None

    @property
    def online(self) -> bool:
        return self.terms[0].algorithm.source == "rollouts"


def forward(
    learner: Learner,
    params: PyTree,
    critic: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    width: int,
) -> Outputs:
    """Policy and critic on the last `width` columns: what the loss and all scoring read."""
    temperature = learner.temperature
    outputs = completion_outputs(learner.model, params, tokens, positions, width, temperature)
    if learner.critic is None:
        return outputs
    values = state_values(learner.critic, critic, tokens, positions, width)
    return outputs._replace(values=values)


def forward_stream(
    learner: Learner, params: PyTree, critic: PyTree, stream: Stream, places: Places, width: int
) -> Outputs:
    """`forward` of the rows of a stream; beyond a row's end stands garbage."""
    where = (stream, places, width)
    outputs = stream_outputs(learner.model, params, *where, learner.temperature)
    if learner.critic is None:
        return outputs
    values = stream_outputs(learner.critic, critic, *where).values
    return outputs._replace(values=values)


def loss(
    learner: Learner,
    trained: tuple[PyTree, PyTree],
    batch: Batch,
    weights: tuple[Float[Array, "B #T"], ...],
    placed: tuple[Stream, Places] | None = None,
    base: PyTree | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The weighted sum over these rows, additive over any cut of an update's rows.

    `trained` is (params, critic); `weights` are those of each term, and with `router_aux` each
    row's share of the update; `placed` is the stream that the rows lie in, where they are packed;
    `base` is what the params are beside, where they are adapters.
    """
    mask = batch.mask
    trained = (beside(base, trained[0]), trained[1])
    if placed is None:
        outputs = forward(learner, *trained, batch.tokens, batch.positions, mask.shape[1])
        padding = batch.positions < 0
    else:
        outputs = forward_stream(learner, *trained, *placed, mask.shape[1])
        padding = placed[0].positions < 0
    current = jax.lax.stop_gradient(outputs.logprobs)
    if learner.on_policy:
        batch = batch._replace(old_logprobs=current)
    metrics = {"padding": ops.mean(padding, jnp.ones_like(padding))}
    if learner.terms[0].algorithm.inputs is not of_scores:
        metrics["entropy"] = ops.mean(jax.lax.stop_gradient(outputs.entropy), mask)
    if learner.online:
        metrics |= _gaps(current, batch)
    total = jnp.float32(0)
    if outputs.load is not None:
        balance, measured = router.balance(outputs.load)
        metrics |= measured
        if learner.router_aux:
            # Each micro-batch has a loss of its own, which is not additive: so their mean counts.
            *weights, shares = weights
            total += learner.router_aux * jnp.sum(shares) * balance
    for place, (term, signal, share) in enumerate(
        zip(learner.terms, batch.signals, weights, strict=True)
    ):
        inputs = clean(term.algorithm.inputs(outputs, batch, signal))
        values, measured = term.algorithm.loss(*inputs)
        value = jnp.sum(share * values)
        total += term.weight * value
        if term.algorithm.reference and not term.algorithm.uses_reference():
            # It would be the divergence from a reference that was never loaded.
            measured = {n: m for n, m in measured.items() if n not in ("kl", "kl/clamped")}
        prefix = f"{term.name}/" if place else ""
        metrics |= {prefix + name: metric for name, metric in measured.items()}
        if len(learner.terms) > 1:
            # A sum over the micro-batches, closed in `gradients`.
            metrics[f"loss/{term.name}"] = Mean(jax.lax.stop_gradient(value), jnp.float32(0))
    return total, metrics


def _gaps(current: Float[Array, "B T"], batch: Batch) -> Metrics:
    """How far the policy is from the sampler and from where it was when the text was sampled."""
    mask = batch.mask
    current, old, sampler = (
        ops.masked(x, mask) for x in (current, batch.old_logprobs, batch.sampler_logprobs)
    )
    # Where the old ones are the sampler's own, the gap shows in the current ones.
    gap = jnp.abs(jnp.where(jnp.all(old == sampler), current, old) - sampler)
    importance = jnp.exp(ops.log_ratio(current, sampler))
    return {
        "sampler_gap/mean": ops.mean(gap, mask),
        "sampler_gap/max": Largest(jnp.max(gap)),
        "kl/old": ops.mean(ops.k3(current, old), mask),
        "importance/mean": ops.mean(importance, mask),
        "importance/square": ops.mean(importance**2, mask),
    }


def gradients(
    learner: Learner,
    trained: tuple[PyTree, PyTree],
    batch: Batch,
    prompts: Int[Array, " B"] | None = None,
    base: PyTree | None = None,
) -> tuple[tuple[PyTree, PyTree], Float[Array, ""], Metrics]:
    """Of one update's rows: summed over micro-batches in float32. `prompts` says which rows share
    theirs (None: as `learner.samples` says). A frozen `base` has none."""
    pairs = zip(learner.terms, batch.signals, strict=True)
    weights = tuple(term.algorithm.weights(signal.mask) for term, signal in pairs)
    if learner.router_aux:
        weights = (*weights, ops.row_mean(batch.mask))
    value_and_grad = jax.value_and_grad(loss, argnums=1, has_aux=True)
    # Without a sum that one micro-batch does not need there is one set of gradients in memory.
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trained)
    zeros = split_parameters(learner.axes, zeros)
    nothing = (zeros, jnp.float32(0))

    def of_rows(batch, weights, placed=None):
        (value, metrics), grads = value_and_grad(learner, trained, batch, weights, placed, base)
        return (grads, value), metrics

    def of_stream(stream, places, piece, inside):
        batch, weights = piece
        batch = batch._replace(
            mask=batch.mask & inside[:, None],
            signals=tuple(s._replace(mask=s.mask & inside[:, None]) for s in batch.signals),
        )
        weights = jax.tree.map(lambda x: jnp.where(inside[:, None], x, 0.0), weights)
        return of_rows(batch, weights, (stream, places))

    def add(total, result, first, inside):
        (sums, measured), (more, metrics) = total, result
        return jax.tree.map(jnp.add, sums, more), ops.combine(measured, metrics)

    def micro(total, piece):
        more, metrics = of_rows(*piece)
        return jax.tree.map(jnp.add, total, more), metrics

    if learner.packing:
        batch, weights, packed, how = pack_rows(learner, batch, weights, prompts)
        held = batch_shards() * how.rows
        rows = jax.tree.map(lambda x: x[:held], (batch, weights))
        shapes = jax.eval_shape(lambda t: loss(learner, t, *rows, base=base)[1], trained)
        start = (nothing, ops.nothing_measured(shapes))
        (grads, value), metrics = for_each_stream(
            how, packed, (batch, weights), of_stream, start, add
        )
    elif len(batch.mask) == learner.micro:
        (grads, value), metrics = of_rows(batch, weights)
    else:
        pieces = jax.tree.map(lambda x: micro_batches(x, learner.micro), (batch, weights))
        (grads, value), metrics = jax.lax.scan(micro, nothing, pieces)
        metrics = ops.pool(metrics)
    sums = {router.SENT, *(f"loss/{term.name}" for term in learner.terms)}
    # A term's loss is a sum over micro-batches, not a mean.
    closed = {
        name: Mean(m.total, jnp.ones_like(m.total)) if name in sums else m
        for name, m in metrics.items()
    }
    return grads, value, closed


def pack_rows(
    learner: Learner, batch: Batch, weights: PyTree, prompts: Int[Array, " B"] | None
) -> tuple[Batch, PyTree, Packed, Layout]:
    """The rows of an update, those of a prompt side by side, and where each lies."""
    rows, width = batch.mask.shape
    if prompts is None:
        prompts = jnp.arange(rows) // learner.samples
    unit = learner.unit
    order = jnp.argsort(prompts[::unit], stable=True)
    order = (order[:, None] * unit + jnp.arange(unit)).reshape(-1)
    ordered = jax.tree.map(lambda x: x[order], (batch, weights, prompts))
    batch, weights, prompts = split_rows(ordered)
    packed, how = pack_text(learner, batch.tokens, batch.positions, batch.mask, prompts, width)
    return batch, weights, packed, how


def pack_text(
    learner: Learner,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    mask: Bool[Array, "B T"],
    prompts: Int[Array, " B"],
    columns: int,
) -> tuple[Packed, Layout]:
    """Each part of the batch in streams of its own. `columns`: T, or T + 1 where the state after
    the last token is asked for too."""
    shards = batch_shards()
    rows, micro, width = mask.shape[0] // shards, learner.micro // shards, mask.shape[1]
    prompt = tokens.shape[1] - width
    # Rows of one prompt are one group, or, after a shuffle, as many as came into this mini-batch.
    groups = min(rows, -(-learner.minibatches * mask.shape[0] // learner.samples))
    if learner.minibatches == 1:
        groups = min(rows, -(-rows // learner.samples) + (rows % learner.samples > 0))
    if micro < rows:
        groups = -(-micro // learner.samples)
    how = layout(rows, micro, groups, learner.unit, prompt, columns)
    lengths = jnp.max(jnp.where(mask, jnp.arange(1, width + 1), 0), axis=1)
    lengths = jnp.where(lengths > 0, lengths + columns - width, 0)
    prompt_lengths = jnp.sum(positions[:, :prompt] >= 0, axis=1)
    parts = (apart(x, shards) for x in (tokens, lengths, prompt_lengths, prompts))
    return each_shard(functools.partial(pack, how), *parts), how


def optimise(
    learner: Learner,
    state: TrainState,
    batch: Batch,
    prompts: Int[Array, " B"] | None = None,
    base: PyTree | None = None,
) -> tuple[TrainState, Metrics]:
    """One optimizer update.

    Without a token that a term learns from, or with a gradient that is not finite, nothing changes,
    neither parameters nor moments nor schedule, and the update counts as skipped.
    """
    trained = (state.params, state.critic)
    grads, value, metrics = gradients(learner, trained, batch, prompts, base)
    grads = split_parameters(learner.axes, grads)
    norm = optax.global_norm(grads)
    taught = jnp.stack([jnp.any(signal.mask & batch.mask) for signal in batch.signals])
    live = jnp.any(taught) & jnp.isfinite(norm)

    def apply():
        updates, opt_state = learner.optimizer.update(grads, state.opt_state, trained)
        return *optax.apply_updates(trained, updates), opt_state, optax.global_norm(updates)

    def skip():
        return *trained, state.opt_state, jnp.float32(0)

    *new, update_norm = jax.lax.cond(live, apply, skip)
    params, critic, opt_state = split_parameters(learner.axes, tuple(new))
    metrics = ops.close(metrics) | {
        "loss": ops.scalar_metric(value),
        "gradient_norm": ops.scalar_metric(norm),
        "update_norm": ops.scalar_metric(update_norm),
        "parameter_norm": ops.scalar_metric(optax.global_norm(params)),
        "learning_rate": ops.scalar_metric(learner.schedule(state.updates)),
        "skipped": ops.scalar_metric(~live),
        "skipped/nonfinite": ops.scalar_metric(~jnp.isfinite(norm)),
    }
    new = state._replace(
        params=params, critic=critic, opt_state=opt_state, updates=state.updates + live
    )
    return new, metrics


def update(
    learner: Learner,
    state: TrainState,
    batch: Batch,
    key: Key[Array, ""],
    base: PyTree | None = None,
) -> tuple[TrainState, Metrics]:
    """All updates of one batch: every epoch shuffles the units and cuts them anew. `base` is what
    the state's params are beside, where they are adapters."""
    rows, unit = batch.mask.shape[0], learner.unit

    batch = split_rows(batch)

    def shuffle(x, order):
        return x.reshape(rows // unit, unit, *x.shape[1:])[order].reshape(x.shape)

    def epoch(state, key):
        def cut(x):
            cut = x.reshape(learner.minibatches, rows // learner.minibatches, *x.shape[1:])
            return constrain(cut, None, "batch")

        rows_now = (batch, jnp.arange(rows) // learner.samples)
        if learner.minibatches > 1:
            order = jax.random.permutation(key, rows // unit)
            rows_now = jax.tree.map(lambda x: shuffle(x, order), rows_now)
        state, metrics = jax.lax.scan(
            lambda state, minibatch: optimise(learner, state, *minibatch, base),
            state,
            jax.tree.map(cut, rows_now),
        )
        return state, ops.pool(metrics)

    state, metrics = jax.lax.scan(epoch, state, jax.random.split(key, learner.epochs))
    metrics = ops.pool(metrics)
    if "importance/mean" in metrics:
        # (sum w)^2 / (n sum w^2): the share of tokens that the importance weights leave.
        first, second = metrics.pop("importance/mean"), metrics.pop("importance/square")
        share = first.total**2 / jnp.maximum(first.count * second.total, 1e-30)
        metrics["effective_sample_size"] = ops.scalar_metric(share)
    if router.SENT in metrics:
        metrics |= router.load_metrics(metrics.pop(router.SENT).total)
    return state, whole(metrics)


def make_signal(
    algorithm: Algorithm,
    advantages: Float[Array, "B #T"],
    returns: Float[Array, "B #T"],
    mask: Bool[Array, "B T"],
) -> Signal:
    """What a term learns from: rows that have no part in its loss are masked out."""
    if algorithm.selects is not None:
        mask = mask & algorithm.selects(advantages)
    return Signal(advantages, returns, mask)


def score_rows(
    learner: Learner,
    params: PyTree,
    critic: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    width: int,
) -> Outputs:
    """`forward` on any number of rows, by micro-batches. What is not read costs nothing in jit."""
    pieces = jax.tree.map(lambda x: micro_batches(x, learner.micro), (tokens, positions))

    def of_piece(piece):
        return forward(learner, params, critic, *piece, width)._replace(load=None)

    return jax.tree.map(in_row_order, jax.lax.map(of_piece, pieces))


def score_completions(
    learner: Learner,
    params: PyTree,
    critic: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    mask: Bool[Array, "B T"],
) -> Outputs:
    """`forward` on sampled rows, packed where the learner packs. Outside the mask stands garbage;
    the values reach one column further than the row does."""
    rows, width = mask.shape
    if not learner.packing:
        return score_rows(learner, params, critic, tokens, positions, width)
    columns = width + (learner.valued is not None)
    prompts = jnp.arange(rows) // learner.samples
    packed, how = pack_text(learner, tokens, positions, mask, prompts, columns)

    def of_stream(stream, places, piece, inside):
        outputs = forward_stream(learner, params, critic, stream, places, width)
        return outputs._replace(load=None)

    shards = batch_shards()
    each = rows // shards

    def put(total, new, first, inside):
        old = jax.lax.dynamic_slice_in_dim(total, first, how.rows)
        new = jnp.where(inside[:, None], new, old)
        return jax.lax.dynamic_update_slice_in_dim(total, new, first, 0)

    def add(total, outputs, first, inside):
        inside = apart(inside, shards)
        return jax.tree.map(
            lambda x, y: each_shard(put, x, apart(y, shards), first, inside), total, outputs
        )

    def zeros(columns):
        empty = jnp.zeros((shards, each + how.rows, columns), jnp.float32)
        return constrain(empty, "batch")

    start = Outputs(zeros(width), zeros(width), zeros(width + 1))
    outputs = for_each_stream(how, packed, (), of_stream, start, add)
    if how.single:
        return outputs
    return jax.tree.map(lambda x: together(x[:, :each]), outputs)
