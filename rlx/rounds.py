"""Rounds of sampling: which groups a step keeps, and what is measured of all that it drew.

Without dynamic sampling there is one round, and all of it is kept.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from model.sample import Samples
from rlx import mixture, ops
from rlx.advantages import mixed
from rlx.algorithms.dapo import informative
from rlx.prompts import Draw, Prompts, count_solved
from rlx.rollout import Sampling, Scores, empty_rollout, join
from rlx.types import Cursor, Largest, Mean, Metrics, Rollout, Smallest

SPREAD = 1e-8
"""Rewards of a group that differ by more stand for a mixed verdict where there are no verdicts."""


class Pending(NamedTuple):
    """Groups collected so far."""

    rollout: Rollout
    kept: Bool[Array, " N"]
    cursor: Cursor
    solved: Int[Array, " M"] | None
    """As `Memory` has it, this step's groups counted in."""
    round: Int[Array, ""]
    informative: Int[Array, ""]
    """Groups worth keeping among all that were drawn."""
    metrics: Metrics
    """Of everything drawn, kept or not."""


def begin(
    sampling: Sampling,
    prompt_width: int,
    cursor: Cursor,
    solved: Int[Array, " M"] | None = None,
) -> Pending:
    rollout = empty_rollout(sampling, prompt_width)
    finite = jnp.ones_like(rollout.truncated)
    shapes = jax.eval_shape(lambda r: measure(sampling, r, finite), rollout)
    zero, nothing = jnp.int32(0), jnp.zeros(sampling.prompts, bool)
    return Pending(rollout, nothing, cursor, solved, zero, zero, ops.nothing_measured(shapes))


def absorb(
    sampling: Sampling,
    pool: Prompts,
    pending: Pending,
    draw: Draw,
    samples: Samples,
    scores: Scores,
) -> Pending:
    """Adds one round. With dynamic sampling, uninformative groups are dropped; groups beyond N
    are surplus. The order of drawing is kept."""
    fresh = join(sampling, pool, draw.rows, samples, scores)
    n = sampling.prompts
    useful = jnp.ones(n, bool)
    if sampling.dynamic:
        useful = worth(sampling, fresh, scores.rewards)
    kept = jnp.concatenate([pending.kept, useful])
    chosen = jnp.argsort(~kept, stable=True)[:n]

    def merge(old, new):
        groups = [x.reshape(n, x.shape[0] // n, *x.shape[1:]) for x in (old, new)]
        return jnp.concatenate(groups)[chosen].reshape(old.shape)

    return Pending(
        rollout=jax.tree.map(merge, pending.rollout, fresh),
        kept=kept[chosen],
        cursor=counted(sampling, draw.cursor, draw.rows, fresh.correct),
        solved=count_solved(pending.solved, draw.rows, fresh.correct),
        round=pending.round + 1,
        informative=pending.informative + jnp.sum(useful, dtype=jnp.int32),
        metrics=ops.combine(pending.metrics, measure(sampling, fresh, samples.finite)),
    )


def counted(
    sampling: Sampling, cursor: Cursor, rows: Int[Array, " N"], correct: Float[Array, "N G"]
) -> Cursor:
    """The cursor behind these groups, whose verdicts are known now."""
    if sampling.mix is None:
        return cursor
    return mixture.counted(sampling.mix, cursor, rows, correct)


def worth(sampling: Sampling, rollout: Rollout, rewards: Float[Array, "N G"]) -> Bool[Array, " N"]:
    """Which groups have something to teach: by the verdicts, or by the verifier's own `rewards`,
    never by a reward shaped by length."""
    if sampling.verdicts:
        return informative(rollout.correct)
    return mixed(jnp.where(jnp.isfinite(rollout.rewards), rewards, jnp.nan), SPREAD)


def measure(sampling: Sampling, rollout: Rollout, finite: Bool[Array, " B"]) -> Metrics:
    """Metrics of what one round sampled. Lengths are of the text, not of the loss mask."""
    rewards, correct = rollout.rewards, rollout.correct
    scored = jnp.isfinite(rewards)
    right, wrong = correct == 1, correct == 0
    lengths = jnp.sum(rollout.mask, axis=1).astype(jnp.float32)[:, None]
    every = jnp.ones_like(lengths, bool)
    groups = jnp.ones((sampling.prompts, 1), bool)

    def of_groups(x):
        return ops.mean(x[:, None], groups)

    verdicts = {
        # A row that could not be scored is not solved, and stays in the denominator.
        "solve_rate": ops.mean(right, jnp.ones_like(scored)),
    }
    alike: Metrics = {}
    if rewards.shape[1] > 1:
        alike = {"groups/all_equal": of_groups(~mixed(rewards))}
        seen = jnp.any(scored, axis=1)
        verdicts |= {
            "groups/all_right": of_groups(jnp.all(right | ~scored, axis=1) & seen),
            "groups/all_wrong": of_groups(jnp.all(wrong | ~scored, axis=1) & seen),
        }
    by_task: Metrics = {}
    if sampling.mix is not None:
        shape = rewards.shape
        facts = (lengths.reshape(shape), rollout.truncated.reshape(shape))
        by_task = mixture.measure(sampling.mix, rollout.rows, rewards, correct, *facts)
    return (
        (verdicts if sampling.verdicts else {})
        | by_task
        | alike
        | {
            "reward/mean": ops.mean(rewards, scored),
            "reward/std": ops.deviation(rewards, scored),
            "length/mean": ops.mean(lengths, every),
            "length/min": Smallest(jnp.min(lengths)),
            "length/max": Largest(jnp.max(lengths)),
            "length/finished": ops.mean(lengths, ~rollout.truncated[:, None]),
            "truncated": ops.mean(rollout.truncated[:, None], every),
            "unscored": ops.mean(~scored, jnp.ones_like(scored)),
            "nonfinite_rows": ops.mean(~finite[:, None], every),
            "tokens": Mean(jnp.sum(lengths), jnp.float32(0)),
        }
        | {
            f"reward/{name}": ops.mean(rollout.components[..., i], scored)
            for i, name in enumerate(sampling.components)
        }
    )


def finish_metrics(sampling: Sampling, pending: Pending) -> Metrics:
    """Closes the metrics of all rounds."""
    metrics = dict(pending.metrics)
    tokens = metrics.pop("tokens").total
    kept = jnp.sum(pending.kept)
    return metrics | {
        "tokens": ops.scalar_metric(tokens),
        "rollout/rounds": ops.scalar_metric(pending.round),
        "rollout/surplus": ops.scalar_metric(pending.informative - kept),
        "rollout/shortfall": ops.scalar_metric(1.0 - kept / sampling.prompts),
    }
