"""From prompts to a rollout: which prompts come next, their samples, scores, and groups kept."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from model.config import ModelConfig
from model.sample import Samples, sample
from rlx import ops
from rlx.advantages import mixed
from rlx.algorithms.dapo import informative, overlong_penalty
from rlx.types import Largest, Mean, Metrics, Rollout, Smallest


class Prompts(NamedTuple):
    """The task's tokenised pool, on device."""

    tokens: Int[Array, "M P"]
    """Padded on the left."""
    positions: Int[Array, "M P"]
    """-1 marks padding."""
    key: Key[Array, ""]
    """From it comes the order of every epoch."""


class Sampling(NamedTuple):
    """How a step samples; static."""

    model: ModelConfig
    dtype: jnp.dtype
    prompts: int
    samples: int
    max_new_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    pad_id: int
    components: tuple[str, ...]
    """Names of the reward's parts."""
    dynamic: bool
    """DAPO's dynamic sampling: keep informative groups only and draw until N are there."""
    max_rounds: int
    overlong_buffer: int
    """Tokens before the limit over which the length penalty grows; 0 for none."""


class Scores(NamedTuple):
    """What a verifier says; NaN where it could not."""

    rewards: Float[Array, "N G"]
    correct: Float[Array, "N G"]
    components: Float[Array, "N G C"]


class Pending(NamedTuple):
    """Groups collected so far."""

    rollout: Rollout
    kept: Bool[Array, " N"]
    cursor: Int[Array, ""]
    round: Int[Array, ""]
    informative: Int[Array, ""]
    """Groups worth keeping among all that were drawn."""
    metrics: Metrics
    """Of everything drawn, kept or not."""


def next_rows(
    pool: Prompts, cursor: Int[Array, ""], count: int
) -> tuple[Int[Array, " count"], Int[Array, " count"]]:
    """Ids of the next prompts and the epoch each belongs to: every epoch is a new order of the
    whole pool, `cursor` counts on through all of them. `count` is at most the pool's size."""
    size = pool.tokens.shape[0]
    index = cursor + jnp.arange(count)
    epoch, place = index // size, index % size
    first = cursor // size

    def order(e):
        return jax.random.permutation(jax.random.fold_in(pool.key, e), size)

    order_now = order(first)
    # Sorting a large pool takes a share of a step; the second order is seldom needed.
    order_next = jax.lax.cond(epoch[-1] > first, lambda: order(first + 1), lambda: order_now)
    return jnp.where(epoch == first, order_now[place], order_next[place]), epoch


def begin(sampling: Sampling, prompt_width: int, cursor: Int[Array, ""]) -> Pending:
    n, g, t = sampling.prompts, sampling.samples, sampling.max_new_tokens
    rows, width = n * g, prompt_width + t
    nothing = jnp.zeros((rows, t), jnp.float32)
    rollout = Rollout(
        tokens=jnp.full((rows, width), sampling.pad_id, jnp.int32),
        positions=jnp.full((rows, width), -1, jnp.int32),
        mask=jnp.zeros((rows, t), bool),
        sampler_logprobs=nothing,
        old_logprobs=nothing,
        ref_logprobs=nothing,
        rewards=jnp.zeros((n, g), jnp.float32),
        correct=jnp.zeros((n, g), jnp.float32),
        components=jnp.zeros((n, g, len(sampling.components)), jnp.float32),
        truncated=jnp.zeros(rows, bool),
        rows=jnp.zeros(n, jnp.int32),
    )
    shapes = jax.eval_shape(lambda r: measure(sampling, r, jnp.ones(rows, bool)), rollout)
    zero = jnp.int32(0)
    return Pending(rollout, jnp.zeros(n, bool), cursor, zero, zero, ops.nothing_measured(shapes))


def sample_round(
    sampling: Sampling,
    params: PyTree,
    pool: Prompts,
    cursor: Int[Array, ""],
    key: Key[Array, ""],
    round: Int[Array, ""],
) -> tuple[Samples, Int[Array, " N"]]:
    """Samples of the next N prompts, and which rows of the pool those are.

    A row's noise is of (step's key, round, prompt, epoch, sample): never used twice, never
    shared by siblings, and the same whatever else is in the batch.
    """
    rows, epochs = next_rows(pool, cursor, sampling.prompts)
    key = jax.random.fold_in(key, round)

    def group_keys(row, epoch):
        prompt_key = jax.random.fold_in(jax.random.fold_in(key, row), epoch)
        return jax.vmap(lambda g: jax.random.fold_in(prompt_key, g))(jnp.arange(sampling.samples))

    samples = sample(
        sampling.model,
        params,
        pool.tokens[rows],
        pool.positions[rows],
        jax.vmap(group_keys)(rows, epochs),
        max_new_tokens=sampling.max_new_tokens,
        stop_ids=jnp.asarray(sampling.stop_ids, jnp.int32),
        pad_id=sampling.pad_id,
        temperature=sampling.temperature,
        dtype=sampling.dtype,
    )
    return samples, rows


def join(
    sampling: Sampling,
    pool: Prompts,
    rows: Int[Array, " N"],
    samples: Samples,
    scores: Scores,
) -> Rollout:
    """Puts prompts, samples and scores together, and shapes the reward by length."""
    g = sampling.samples
    prompt_positions = jnp.repeat(pool.positions[rows], g, axis=0)
    columns = jnp.arange(samples.mask.shape[1]) + 1
    positions = jnp.where(samples.mask, prompt_positions[:, -1:] + columns, -1)
    rewards = scores.rewards
    if sampling.overlong_buffer:
        lengths = jnp.sum(samples.mask, axis=1).reshape(rewards.shape)
        rewards = rewards + overlong_penalty(
            lengths, limit=sampling.max_new_tokens, buffer=sampling.overlong_buffer
        )
    # A row whose logits were not finite is no sample of the policy: treated as unscored.
    rewards = jnp.where(samples.finite.reshape(rewards.shape), rewards, jnp.nan)
    nothing = jnp.zeros_like(samples.logprobs)
    return Rollout(
        tokens=jnp.concatenate([jnp.repeat(pool.tokens[rows], g, axis=0), samples.tokens], axis=1),
        positions=jnp.concatenate([prompt_positions, positions], axis=1),
        mask=samples.mask,
        sampler_logprobs=samples.logprobs,
        old_logprobs=nothing,
        ref_logprobs=nothing,
        rewards=rewards,
        correct=jnp.where(jnp.isfinite(rewards), scores.correct, jnp.nan),
        components=scores.components,
        truncated=samples.truncated,
        rows=rows,
    )


def absorb(
    sampling: Sampling,
    pool: Prompts,
    pending: Pending,
    rows: Int[Array, " N"],
    samples: Samples,
    scores: Scores,
) -> Pending:
    """Adds one round. With dynamic sampling, uninformative groups are dropped; groups beyond N
    are surplus. The order of drawing is kept."""
    fresh = join(sampling, pool, rows, samples, scores)
    n = sampling.prompts
    useful = informative(fresh.correct) if sampling.dynamic else jnp.ones(n, bool)
    kept = jnp.concatenate([pending.kept, useful])
    chosen = jnp.argsort(~kept, stable=True)[:n]

    def merge(old, new):
        groups = [x.reshape(n, x.shape[0] // n, *x.shape[1:]) for x in (old, new)]
        return jnp.concatenate(groups)[chosen].reshape(old.shape)

    return Pending(
        rollout=jax.tree.map(merge, pending.rollout, fresh),
        kept=kept[chosen],
        cursor=pending.cursor + n,
        round=pending.round + 1,
        informative=pending.informative + jnp.sum(useful, dtype=jnp.int32),
        metrics=ops.combine(pending.metrics, measure(sampling, fresh, samples.finite)),
    )


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

    return {
        "reward/mean": ops.mean(rewards, scored),
        "reward/std": ops.deviation(rewards, scored),
        # A row that could not be scored is not solved, and stays in the denominator.
        "solve_rate": ops.mean(right, jnp.ones_like(scored)),
        "groups/all_equal": of_groups(~mixed(rewards)),
        "groups/all_right": of_groups(jnp.all(right | ~scored, axis=1) & jnp.any(scored, axis=1)),
        "groups/all_wrong": of_groups(jnp.all(wrong | ~scored, axis=1) & jnp.any(scored, axis=1)),
        "length/mean": ops.mean(lengths, every),
        "length/min": Smallest(jnp.min(lengths)),
        "length/max": Largest(jnp.max(lengths)),
        "length/finished": ops.mean(lengths, ~rollout.truncated[:, None]),
        "truncated": ops.mean(rollout.truncated[:, None], every),
        "unscored": ops.mean(~scored, jnp.ones_like(scored)),
        "nonfinite_rows": ops.mean(~finite[:, None], every),
        "tokens": Mean(jnp.sum(lengths), jnp.float32(0)),
    } | {
        f"reward/{name}": ops.mean(rollout.components[..., i], scored)
        for i, name in enumerate(sampling.components)
    }


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
