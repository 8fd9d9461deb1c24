"""From prompts to a rollout: which prompts come next, their samples, scores, and groups kept."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from model.config import ModelConfig
from model.quantize import Stored
from model.sample import Samples, sample
from model.sharding import constrain
from rlx import mixture, ops
from rlx.advantages import mixed
from rlx.algorithms.dapo import informative, overlong_penalty
from rlx.mixture import Mix
from rlx.types import Cursor, Largest, Mean, Metrics, Rollout, Smallest

SPREAD = 1e-8
"""Rewards of a group that differ by more stand for a mixed verdict where there are no verdicts."""


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
    activations: jnp.dtype
    prompts: int
    samples: int
    slots: int
    """Rows decoded at a time; 0: all."""
    max_new_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    pad_id: int
    components: tuple[str, ...]
    """Names of the reward's parts."""
    verdicts: bool
    """The verifier says right or wrong, beside the reward."""
    retire_after: int
    """Successive visits that must find a prompt wholly solved to draw it no more; 0: never."""
    probe: int
    """Samples of a prompt before it is decided which prompts get the rest of a group; 0: off."""
    dynamic: bool
    """DAPO's dynamic sampling: keep informative groups only and draw until N are there."""
    max_rounds: int
    overlong_buffer: int
    """Tokens before the limit over which the length penalty grows; 0 for none."""
    weights: Stored = "auto"
    cache: Stored = "auto"
    mix: Mix | None = None
    """Where the pool holds the prompts of several tasks."""


class Scores(NamedTuple):
    """What a verifier says; NaN where it could not."""

    rewards: Float[Array, "N G"]
    correct: Float[Array, "N G"]
    components: Float[Array, "N G C"]
    token_scores: Float[Array, "N G T"]


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


class Draw(NamedTuple):
    """Which prompts come next."""

    rows: Int[Array, " N"]
    epochs: Int[Array, " N"]
    """The epoch that each is drawn in."""
    cursor: Cursor
    """Behind the last of them."""


def next_rows(
    pool: Prompts,
    cursor: Int[Array, ""],
    count: int,
    retired: Bool[Array, " M"] | None = None,
) -> Draw:
    """The next prompts: every epoch is a new order of the whole pool, `cursor` counts on through
    all of them. `count` is at most the pool's size.

    Retired prompts are passed over, unless fewer than `count` are left: then they fill up.
    """
    size = pool.tokens.shape[0]
    first, place = cursor // size, cursor % size

    def order(e):
        return jax.random.permutation(jax.random.fold_in(pool.key, e), size)

    order_now = order(first)
    ahead = jnp.arange(size) >= place
    if retired is None:
        beyond = place + count > size
    else:
        beyond = jnp.sum(ahead & ~retired[order_now]) < count
    # Sorting a large pool takes a share of a step; the second order is seldom needed.
    order_next = jax.lax.cond(beyond, lambda: order(first + 1), lambda: order_now)
    rows = jnp.concatenate([order_now, order_next])
    if retired is None:
        places = place + jnp.arange(count)
    else:
        # What this epoch still holds is not taken from the next one too: a draw then has no prompt
        # twice, and a visit counts once.
        waiting = jnp.zeros(size, bool).at[order_now].set(ahead)
        free = jnp.concatenate([ahead, ~waiting[order_next]])
        rank = jnp.where(free, retired[rows].astype(jnp.int32), 2)
        places = jnp.argsort(rank, stable=True)[:count]
    return Draw(rows[places], first + places // size, first * size + jnp.max(places) + 1)


def empty_rollout(sampling: Sampling, prompt_width: int) -> Rollout:
    """Its shapes, with nothing in them."""
    n, g, t = sampling.prompts, sampling.samples, sampling.max_new_tokens
    rows, width = n * g, prompt_width + t
    nothing = jnp.zeros((rows, t), jnp.float32)
    return Rollout(
        tokens=jnp.full((rows, width), sampling.pad_id, jnp.int32),
        positions=jnp.full((rows, width), -1, jnp.int32),
        mask=jnp.zeros((rows, t), bool),
        sampler_logprobs=nothing,
        old_logprobs=nothing,
        ref_logprobs=nothing,
        values=nothing,
        bootstrap=jnp.zeros(rows, jnp.float32),
        rewards=jnp.zeros((n, g), jnp.float32),
        token_rewards=nothing,
        correct=jnp.zeros((n, g), jnp.float32),
        components=jnp.zeros((n, g, len(sampling.components)), jnp.float32),
        token_scores=nothing,
        truncated=jnp.zeros(rows, bool),
        rows=jnp.zeros(n, jnp.int32),
    )


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


def sample_round(
    sampling: Sampling,
    params: PyTree,
    pool: Prompts,
    cursor: Cursor,
    solved: Int[Array, " M"] | None,
    key: Key[Array, ""],
    round: Int[Array, ""],
) -> tuple[Samples, Draw]:
    """Samples of the next N prompts, and which those are."""
    if sampling.mix is not None:
        draw = Draw(*mixture.next_rows(sampling.mix, pool.key, cursor, sampling.prompts))
    else:
        retired = None if solved is None else solved >= sampling.retire_after
        draw = next_rows(pool, cursor, sampling.prompts, retired)
    key = jax.random.fold_in(key, round)
    return sample_rows(sampling, params, pool, draw.rows, draw.epochs, key, 0), draw


def sample_rows(
    sampling: Sampling,
    params: PyTree,
    pool: Prompts,
    rows: Int[Array, " N"],
    epochs: Int[Array, " N"],
    key: Key[Array, ""],
    first: Int[Array, ""] | int,
) -> Samples:
    """G samples of each prompt, of which the first is number `first`.

    A row's noise is of (key of the step and round, prompt, epoch, sample): never used twice, never
    shared by siblings, and the same whatever else is in the batch.
    """

    def group_keys(row, epoch):
        prompt_key = jax.random.fold_in(jax.random.fold_in(key, row), epoch)
        numbers = first + jnp.arange(sampling.samples)
        return jax.vmap(lambda g: jax.random.fold_in(prompt_key, g))(numbers)

    return sample(
        sampling.model,
        params,
        pool.tokens[rows],
        pool.positions[rows],
        jax.vmap(group_keys)(rows, epochs),
        max_new_tokens=sampling.max_new_tokens,
        stop_ids=jnp.asarray(sampling.stop_ids, jnp.int32),
        pad_id=sampling.pad_id,
        temperature=sampling.temperature,
        slots=sampling.slots or None,
        dtype=sampling.dtype,
        activations=sampling.activations,
        weights=sampling.weights,
        cache=sampling.cache,
    )


def whole_rows(
    pool: Prompts, rows: Int[Array, " N"], samples: Samples
) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """Tokens and positions of each prompt with each of its completions."""
    group = samples.mask.shape[0] // rows.shape[0]
    prompt_positions = constrain(jnp.repeat(pool.positions[rows], group, axis=0), "batch")
    columns = jnp.arange(samples.mask.shape[1]) + 1
    positions = jnp.where(samples.mask, prompt_positions[:, -1:] + columns, -1)
    prompt_tokens = constrain(jnp.repeat(pool.tokens[rows], group, axis=0), "batch")
    tokens = [prompt_tokens, samples.tokens]
    return jnp.concatenate(tokens, axis=1), jnp.concatenate([prompt_positions, positions], axis=1)


def join(
    sampling: Sampling,
    pool: Prompts,
    rows: Int[Array, " N"],
    samples: Samples,
    scores: Scores,
) -> Rollout:
    """Puts prompts, samples and scores together, and shapes the reward by length."""
    tokens, positions = whole_rows(pool, rows, samples)
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
        tokens=tokens,
        positions=positions,
        mask=samples.mask,
        sampler_logprobs=samples.logprobs,
        old_logprobs=nothing,
        ref_logprobs=nothing,
        values=nothing,
        bootstrap=nothing[:, 0],
        rewards=rewards,
        token_rewards=nothing,
        correct=jnp.where(jnp.isfinite(rewards), scores.correct, jnp.nan),
        components=scores.components,
        token_scores=scores.token_scores.reshape(samples.mask.shape),
        truncated=samples.truncated,
        rows=rows,
    )


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


def count_solved(
    solved: Int[Array, " M"] | None, rows: Int[Array, " N"], correct: Float[Array, "N G"]
) -> Int[Array, " M"] | None:
    """One more visit to each of these prompts: another all right, or the end of a series."""
    if solved is None:
        return None
    return solved.at[rows].set(jnp.where(jnp.all(correct == 1, axis=1), solved[rows] + 1, 0))


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
        "groups/all_right": of_groups(jnp.all(right | ~scored, axis=1) & jnp.any(scored, axis=1)),
        "groups/all_wrong": of_groups(jnp.all(wrong | ~scored, axis=1) & jnp.any(scored, axis=1)),
    }
    by_task: Metrics = {}
    if sampling.mix is not None:
        shape = rewards.shape
        facts = (lengths.reshape(shape), rollout.truncated.reshape(shape))
        by_task = mixture.measure(sampling.mix, rollout.rows, rewards, correct, *facts)
    return (
        (verdicts if sampling.verdicts else {})
        | by_task
        | {
            "reward/mean": ops.mean(rewards, scored),
            "reward/std": ops.deviation(rewards, scored),
            "groups/all_equal": of_groups(~mixed(rewards)),
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
