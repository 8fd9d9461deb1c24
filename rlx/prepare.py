"""From a collected rollout to a batch: scored by the training model, its critic and its reference,
rewards shaped, advantages set."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from model.sample import Samples
from model.sharding import split_rows, whole
from rlx import ops
from rlx.advantages import mixed, pair_order, reorder
from rlx.algorithms import Algorithm
from rlx.frozen import on_device
from rlx.learner import Learner
from rlx.prompts import Prompts
from rlx.replay import exchange
from rlx.rollout import Sampling, whole_rows
from rlx.rounds import Pending, finish_metrics
from rlx.scoring import score_completions
from rlx.shaping import Shaping, shape
from rlx.types import Batch, Largest, Mean, Memory, Metrics, Rollout, Signal, TrainState


class Frozen(NamedTuple):
    """Parameters that never change."""

    reference: PyTree | None = None
    reward_model: PyTree | None = None
    base: PyTree | None = None
    """What the policy's adapters are beside (model/lora.py); None where all of it is trained."""


class Plan(NamedTuple):
    """All that is static in a step."""

    sampling: Sampling
    learner: Learner
    shaping: Shaping
    overlong_filter: bool
    """Leave truncated rows out of the loss (after the group's statistics)."""
    replay_max_age: int
    """Steps for which a kept group may be used."""
    correction: Callable | None
    """One of `rlx.corrections`, for what sampler and trainer disagree on."""
    old_logprobs: str
    """`current` (one update a batch), `recompute` or `sampler`."""


class Preview(NamedTuple):
    """What a step shows of its text: its rollout and the advantages."""

    rollout: Rollout
    advantages: Float[Array, " B #T"]


class Scored(NamedTuple):
    """What the training model, its critic and its reference say of sampled text: those fields of a
    rollout. None where nothing reads it."""

    old_logprobs: Float[Array, "B T"] | None = None
    ref_logprobs: Float[Array, "B T"] | None = None
    values: Float[Array, "B T"] | None = None
    bootstrap: Float[Array, " B"] | None = None


def score_text(
    plan: Plan,
    state: TrainState,
    frozen: Frozen,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    mask: Bool[Array, "B T"],
    truncated: Bool[Array, " B"],
) -> Scored:
    """No reward is read: so this may run while the rows are being verified."""
    learner, scored = plan.learner, Scored()
    rows = (tokens, positions, mask)
    outputs = score_completions(learner, state.params, state.critic, *rows)
    if plan.old_logprobs == "recompute":
        scored = scored._replace(old_logprobs=outputs.logprobs)
    if learner.valued is not None:
        lengths = jnp.sum(mask, axis=1, keepdims=True)
        after = jnp.take_along_axis(outputs.values, lengths, axis=1)[:, 0]
        scored = scored._replace(
            values=ops.masked(outputs.values[:, :-1], mask),
            bootstrap=jnp.where(truncated, after, 0.0),
        )
    if frozen.reference is not None:
        policy = learner._replace(critic=None)
        ref = score_completions(policy, on_device(frozen.reference), {}, *rows).logprobs
        scored = scored._replace(ref_logprobs=ref)
    return scored


def score_samples(
    plan: Plan,
    state: TrainState,
    frozen: Frozen,
    pool: Prompts,
    rows: Int[Array, " N"],
    samples: Samples,
) -> Scored:
    """Of what was just sampled of these prompts."""
    text = whole_rows(pool, rows, samples)
    return score_text(plan, state, frozen, *text, samples.mask, samples.truncated)


def prepare(
    plan: Plan, state: TrainState, frozen: Frozen, pending: Pending
) -> tuple[Batch, Preview, Memory, Metrics]:
    """Scores the collected rows with the training model, its critic and its reference, and makes
    the batch."""
    rollout = pending.rollout
    text = (rollout.tokens, rollout.positions, rollout.mask, rollout.truncated)
    scored = score_text(plan, state, frozen, *text)
    return make_batch(plan, state, pending, scored)


def make_batch(
    plan: Plan, state: TrainState, pending: Pending, scored: Scored
) -> tuple[Batch, Preview, Memory, Metrics]:
    """Shapes the rewards of the collected rows and sets advantages.

    Statistics of a group are taken before truncated rows are masked out of the loss. Masked
    wholly: rows that could not be scored, and the places of groups that were never found.
    """
    learner, rollout = plan.learner, pending.rollout
    known = {name: x for name, x in scored._asdict().items() if x is not None}
    rollout = rollout._replace(**known)
    if plan.old_logprobs == "sampler":
        rollout = rollout._replace(old_logprobs=rollout.sampler_logprobs)
    kept = jnp.repeat(pending.kept, plan.sampling.samples)
    shaped, memory, metrics = shape(plan.shaping, state.memory, rollout, kept)
    memory = memory._replace(solved=pending.solved)
    if memory.replay is not None:
        # Without the KL penalty, which differs within every group.
        plain = plan.shaping._replace(divergence=None)
        useful = mixed(shape(plain, state.memory, rollout, kept)[0].rewards) & pending.kept
        age = plan.replay_max_age
        shaped, replay, measured = exchange(memory.replay, shaped, useful, state.step, age)
        memory, metrics = memory._replace(replay=replay), metrics | measured
    if learner.unit > 1:
        shaped = reorder(shaped, pair_order(shaped.rewards))
    text = shaped
    # A row without a reward is no step of any return.
    use = jnp.isfinite(shaped.rewards).reshape(-1)
    shaped = shaped._replace(mask=shaped.mask & use[:, None])
    if plan.overlong_filter:
        use &= ~shaped.truncated
    mask = shaped.mask & use[:, None]
    signals = tuple(learn_from(term.algorithm, shaped, mask) for term in learner.terms)
    advantages = signals[0].advantages
    if plan.correction is not None:
        signals, measured = corrected(plan, shaped, signals)
        metrics |= measured
    counted = mask if advantages.shape == mask.shape else use[:, None]
    metrics |= finish_metrics(plan.sampling, pending) | {
        "advantage/mean": ops.mean(advantages, counted),
        "advantage/std": ops.deviation(advantages, counted),
        "trained_rows": ops.scalar_metric(jnp.sum(use)),
        "trained_tokens": ops.scalar_metric(jnp.sum(mask)),
    }
    if learner.valued is not None:
        returns = signals[learner.valued].returns
        metrics |= critic_metrics(shaped.values, returns, mask)
    batch = Batch(
        tokens=shaped.tokens,
        positions=shaped.positions,
        mask=mask,
        sampler_logprobs=shaped.sampler_logprobs,
        old_logprobs=shaped.old_logprobs,
        ref_logprobs=shaped.ref_logprobs,
        values=shaped.values,
        margins=jnp.zeros((mask.shape[0], 1), jnp.float32),
        signals=signals,
    )
    return split_rows(batch), *whole((Preview(text, advantages), memory, metrics))


def learn_from(algorithm: Algorithm, rollout: Rollout, mask: Bool[Array, "B T"]) -> Signal:
    """What a term learns from a rollout, within `mask`."""
    if algorithm.advantages is None:
        zeros = jnp.zeros((mask.shape[0], 1), jnp.float32)
        return Signal(zeros, zeros, mask)
    if algorithm.unit > 1:
        # A pair of which one row is left out is none.
        rows = jnp.any(mask, axis=1).reshape(-1, algorithm.unit)
        whole = jnp.repeat(jnp.all(rows, axis=1), algorithm.unit)
        mask = mask & whole[:, None]
    return make_signal(algorithm, *algorithm.advantages(rollout), mask)


def make_signal(
    algorithm: Algorithm,
    advantages: Float[Array, " B #T"],
    returns: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
) -> Signal:
    """What a term learns from: rows that have no part in its loss are masked out."""
    if algorithm.selects is not None:
        mask = mask & algorithm.selects(advantages)
    return Signal(advantages, returns, mask)


def corrected(
    plan: Plan, rollout: Rollout, signals: tuple[Signal, ...]
) -> tuple[tuple[Signal, ...], Metrics]:
    """The signals of policy losses, whose advantages are weighed and masked by the ratio between
    trainer and sampler."""
    mask = rollout.mask
    old, sampler = (ops.masked(x, mask) for x in (rollout.old_logprobs, rollout.sampler_logprobs))
    ratio, weights, keep = plan.correction(old, sampler, mask)
    used = mask if ratio.shape == mask.shape else jnp.any(mask, axis=1, keepdims=True)

    def one(term, signal):
        if not term.algorithm.is_policy_loss:
            return signal
        advantages = signal.advantages * jnp.where(keep, weights, 0.0)
        return signal._replace(advantages=advantages, mask=signal.mask & keep)

    return tuple(map(one, plan.learner.terms, signals)), {
        "correction/ratio": ops.mean(ratio, used),
        "correction/ratio_max": Largest(jnp.max(jnp.where(used, ratio, -jnp.inf))),
        "correction/truncated": ops.mean(weights != ratio, used),
        "correction/masked": ops.mean(~keep, used),
    }


def critic_metrics(
    values: Float[Array, "B T"], returns: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Metrics:
    """How much of the returns the critic foresaw: 1 all, 0 no more than their mean would."""
    error = ops.deviation(returns - values, mask)
    spread = ops.deviation(returns, mask)
    varied = spread.total > 1e-6 * spread.count
    foreseen = 1.0 - (error.total / jnp.where(varied, spread.total, 1.0)) ** 2
    return {
        "value/mean": ops.mean(values, mask),
        "return/mean": ops.mean(returns, mask),
        # Of equal returns there is no variance to explain.
        "explained_variance": Mean(jnp.where(varied, foreseen, 0.0), varied.astype(jnp.float32)),
    }
