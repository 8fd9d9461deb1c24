"""More samples where they teach something: a few of many prompts first, then the rest of a group
for those prompts whose first samples differ.

A step samples `probe` of each of N G / probe prompts, in as many rows as ever. The N most promising
get the other G - probe samples; the others none. So a group of G is spent on a prompt that is
neither solved nor, as far as the first samples tell, out of reach.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from model.sample import Samples
from rlx import ops
from rlx.prompts import Draw, Prompts, count_solved
from rlx.rollout import Sampling, Scores, join
from rlx.rounds import Pending, counted, measure, worth
from rlx.types import Metrics, Rollout


class Probed(NamedTuple):
    """The first samples of many prompts, and the prompts that get the rest of a group."""

    rollout: Rollout
    """Of N prompts with `probe` samples each."""
    scores: Float[Array, "N probe"]
    """Their rewards before any shaping."""
    draw: Draw
    solved: Int[Array, " M"] | None
    metrics: Metrics


def wide(sampling: Sampling) -> Sampling:
    """The probing round: as many rows as ever, of more prompts with fewer samples each."""
    prompts = sampling.prompts * (sampling.samples // sampling.probe)
    return sampling._replace(prompts=prompts, samples=sampling.probe)


def rest(sampling: Sampling) -> Sampling:
    """The completing round."""
    return sampling._replace(samples=sampling.samples - sampling.probe)


def choose_probed(
    sampling: Sampling,
    pool: Prompts,
    solved: Int[Array, " M"] | None,
    draw: Draw,
    samples: Samples,
    scores: Scores,
) -> Probed:
    """The N prompts whose first samples differ; then those that may yet, with no sample right;
    last those with all right. Each in the order of drawing."""
    many, n = wide(sampling), sampling.prompts
    fresh = join(many, pool, draw.rows, samples, scores)
    useful = worth(sampling, fresh, scores.rewards)
    rank = jnp.where(useful, 0, jnp.where(jnp.all(fresh.correct == 1, axis=1), 2, 1))
    chosen = jnp.argsort(rank, stable=True)[:n]

    def pick(x):
        groups = x.reshape(many.prompts, x.shape[0] // many.prompts, *x.shape[1:])
        return groups[chosen].reshape(-1, *x.shape[1:])

    every = jnp.ones((many.prompts, 1), bool)
    return Probed(
        rollout=jax.tree.map(pick, fresh),
        scores=scores.rewards[chosen],
        draw=Draw(
            draw.rows[chosen],
            draw.epochs[chosen],
            counted(sampling, draw.cursor, draw.rows, fresh.correct),
        ),
        solved=count_solved(solved, draw.rows, fresh.correct),
        metrics=measure(many, fresh, samples.finite)
        | {"probe/informative": ops.mean(useful[:, None], every)},
    )


def complete_probed(
    sampling: Sampling, pool: Prompts, probed: Probed, samples: Samples, scores: Scores
) -> Pending:
    """Groups of the first samples and the others."""
    n, more = sampling.prompts, rest(sampling)
    fresh = join(more, pool, probed.draw.rows, samples, scores)

    def together(first, second):
        if first.shape[0] == n:  # [N G ...]; all others are [B ...]
            return jnp.concatenate([first, second], axis=1)
        groups = [x.reshape(n, x.shape[0] // n, *x.shape[1:]) for x in (first, second)]
        return jnp.concatenate(groups, axis=1).reshape(-1, *first.shape[1:])

    rollout = jax.tree.map(
        together, probed.rollout._replace(rows=None), fresh._replace(rows=None)
    )._replace(rows=probed.draw.rows)
    # Rates are of the probing round: those of chosen prompts would not be the pool's. What was
    # spent and what failed is counted in both.
    measured, metrics = measure(more, fresh, samples.finite), dict(probed.metrics)
    for name in ("tokens", "unscored", "nonfinite_rows"):
        metrics |= ops.combine({name: metrics[name]}, {name: measured[name]})
    useful = worth(sampling, rollout, jnp.concatenate([probed.scores, scores.rewards], axis=1))
    metrics["probe/chosen_informative"] = ops.mean(useful[:, None], jnp.ones((n, 1), bool))
    return Pending(
        rollout=rollout,
        kept=jnp.ones(n, bool),
        cursor=probed.draw.cursor,
        solved=unless_wrong(probed.solved, probed.draw.rows, fresh.correct),
        round=jnp.int32(2),
        informative=jnp.int32(n),
        metrics=metrics,
    )


def unless_wrong(
    solved: Int[Array, " M"] | None, rows: Int[Array, " N"], correct: Float[Array, "N G"]
) -> Int[Array, " M"] | None:
    """The counts of the probing round, begun anew where one of the other samples is not right."""
    if solved is None:
        return None
    return solved.at[rows].set(jnp.where(jnp.all(correct == 1, axis=1), solved[rows], 0))
