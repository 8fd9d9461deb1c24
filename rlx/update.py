"""The update: a batch to a new state, by scans over epochs, mini-batches and micro-batches.

One mini-batch is one optimizer update. Its weights are computed on all its rows before they are
cut into micro-batches, so that the cut changes nothing but rounding.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key, PyTree

from model.heads import completion_outputs
from model.qwen import Qwen
from rlx import ops
from rlx.algorithms.record import Algorithm, clean_advantages
from rlx.types import Batch, Largest, Metrics, TrainState


class Learner(NamedTuple):
    """What an update needs to know and never changes."""

    model: Qwen
    algorithm: Algorithm
    """With its hyper-parameters bound."""
    optimizer: optax.GradientTransformation
    schedule: Callable[[Int[Array, ""]], Float[Array, ""]]
    """Optimizer updates made -> learning rate, for the log; the optimizer has its own."""
    temperature: float
    minibatches: int
    epochs: int
    micro: int
    """Rows of one forward and backward pass."""
    on_policy: bool
    """The batch gets exactly one update: the old log-probabilities are the current ones."""


def loss(
    learner: Learner, params: PyTree, batch: Batch, weights: Float[Array, "B #T"]
) -> tuple[Float[Array, ""], Metrics]:
    """The weighted sum over these rows, additive over any cut of an update's rows."""
    mask = batch.mask
    outputs = completion_outputs(
        learner.model, params, batch.tokens, batch.positions, mask.shape[1], learner.temperature
    )
    logprobs = ops.masked(outputs.logprobs, mask)
    current = jax.lax.stop_gradient(logprobs)
    old = current if learner.on_policy else ops.masked(batch.old_logprobs, mask)
    reference = ops.masked(batch.ref_logprobs, mask)
    advantages = clean_advantages(batch.advantages, mask)
    value, metrics = learner.algorithm.loss(logprobs, old, reference, advantages, mask)
    if not learner.algorithm.uses_reference():
        # It would be the divergence from a reference that was never loaded.
        metrics = {name: m for name, m in metrics.items() if name not in ("kl", "kl/clamped")}
    metrics["entropy"] = ops.mean(jax.lax.stop_gradient(outputs.entropy), mask)
    if learner.algorithm.advantages is not None:
        sampler = ops.masked(batch.sampler_logprobs, mask)
        # Where the old ones are the sampler's own, the gap shows in the current ones.
        gap = jnp.abs(jnp.where(jnp.all(old == sampler), current, old) - sampler)
        importance = jnp.exp(ops.log_ratio(current, sampler))
        metrics |= {
            "sampler_gap/mean": ops.mean(gap, mask),
            "sampler_gap/max": Largest(jnp.max(gap)),
            "kl/old": ops.mean(ops.k3(current, old), mask),
            "importance/mean": ops.mean(importance, mask),
            "importance/square": ops.mean(importance**2, mask),
        }
    return jnp.sum(weights * value), metrics


def gradients(
    learner: Learner, params: PyTree, batch: Batch
) -> tuple[PyTree, Float[Array, ""], Metrics]:
    """Of one update's rows: summed over micro-batches in float32."""
    weights = learner.algorithm.weights(batch.mask)
    pieces = jax.tree.map(lambda x: x.reshape(-1, learner.micro, *x.shape[1:]), (batch, weights))

    def micro(total, piece):
        value_and_grad = jax.value_and_grad(loss, argnums=1, has_aux=True)
        (value, metrics), grads = value_and_grad(learner, params, *piece)
        return jax.tree.map(jnp.add, total, (grads, value)), metrics

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    (grads, value), metrics = jax.lax.scan(micro, (zeros, jnp.float32(0)), pieces)
    return grads, value, ops.pool(metrics)


def optimise(learner: Learner, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One optimizer update.

    Without an unmasked token, or with a gradient that is not finite, nothing changes, neither
    parameters nor moments nor schedule, and the update counts as skipped.
    """
    grads, value, metrics = gradients(learner, state.params, batch)
    norm = optax.global_norm(grads)
    live = jnp.any(batch.mask) & jnp.isfinite(norm)

    def apply():
        updates, opt_state = learner.optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return params, opt_state, optax.global_norm(updates)

    def skip():
        return state.params, state.opt_state, jnp.float32(0)

    params, opt_state, update_norm = jax.lax.cond(live, apply, skip)
    metrics = ops.close(metrics) | {
        "loss": ops.scalar_metric(value),
        "gradient_norm": ops.scalar_metric(norm),
        "update_norm": ops.scalar_metric(update_norm),
        "parameter_norm": ops.scalar_metric(optax.global_norm(params)),
        "learning_rate": ops.scalar_metric(learner.schedule(state.updates)),
        "skipped": ops.scalar_metric(~live),
        "skipped/nonfinite": ops.scalar_metric(~jnp.isfinite(norm)),
    }
    new = state._replace(params=params, opt_state=opt_state, updates=state.updates + live)
    return new, metrics


def update(
    learner: Learner, state: TrainState, batch: Batch, key: Key[Array, ""]
) -> tuple[TrainState, Metrics]:
    """All updates of one batch: every epoch shuffles the rows and cuts them anew."""
    rows = batch.mask.shape[0]

    def epoch(state, key):
        def cut(x):
            return x.reshape(learner.minibatches, rows // learner.minibatches, *x.shape[1:])

        if learner.minibatches > 1:
            order = jax.random.permutation(key, rows)
            batch_now = jax.tree.map(lambda x: x[order], batch)
        else:
            batch_now = batch
        state, metrics = jax.lax.scan(
            lambda state, minibatch: optimise(learner, state, minibatch),
            state,
            jax.tree.map(cut, batch_now),
        )
        return state, ops.pool(metrics)

    state, metrics = jax.lax.scan(epoch, state, jax.random.split(key, learner.epochs))
    metrics = ops.pool(metrics)
    if "importance/mean" in metrics:
        # (sum w)^2 / (n sum w^2): the share of tokens that the importance weights leave.
        first, second = metrics.pop("importance/mean"), metrics.pop("importance/square")
        share = first.total**2 / jnp.maximum(first.count * second.total, 1e-30)
        metrics["effective_sample_size"] = ops.scalar_metric(share)
    return state, metrics


def recompute_logprobs(
    learner: Learner,
    params: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    width: int,
) -> Float[Array, "B T"]:
    """Log-probabilities of the last `width` columns, by the same function that the loss uses."""
    pieces = jax.tree.map(lambda x: x.reshape(-1, learner.micro, x.shape[1]), (tokens, positions))
    logprobs = jax.lax.map(
        lambda piece: (
            completion_outputs(learner.model, params, *piece, width, learner.temperature).logprobs
        ),
        pieces,
    )
    return logprobs.reshape(tokens.shape[0], width)
