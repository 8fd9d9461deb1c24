"""The update: a batch to a new state, by scans over epochs, mini-batches and micro-batches.

One mini-batch is one optimizer update. Its weights are computed on all its rows before they are
cut into micro-batches, so that the cut changes nothing but rounding.

Rows of samples are packed: a micro-batch is a stream that holds each prompt once and no padding
(model/stream.py). Given text keeps its rows as they are.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key, PyTree

from model.lora import beside
from model.sharding import (
    batch_shards,
    constrain,
    micro_batches,
    split_parameters,
    split_rows,
    whole,
)
from model.stream import Places, Stream
from rlx import ops, router
from rlx.algorithms.record import clean, of_scores
from rlx.learner import Learner, forward, forward_stream
from rlx.packing import for_each_stream, pack_rows
from rlx.types import Batch, Largest, Mean, Metrics, TrainState


def loss(
    learner: Learner,
    trained: tuple[PyTree, PyTree],
    batch: Batch,
    weights: tuple[Float[Array, " B #T"], ...],
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
        # Of text that the old policy wrote.
        "kl/old": ops.mean(ops.k3(old, current), mask),
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
