"""From prompts to a rollout: their samples, the scores of these, and both put together."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from model.config import ModelConfig
from model.quantize import Stored
from model.sample import Samples, sample
from model.sharding import constrain
from rlx import mixture
from rlx.algorithms.dapo import overlong_penalty
from rlx.mixture import Mix
from rlx.prompts import Draw, Prompts, next_rows
from rlx.types import Cursor, Rollout


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
    """What a verifier tells of a row."""
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
    component_weights: tuple[float, ...] = ()
    """What each counts in the reward; none: the reward is one thing."""
    mix: Mix | None = None
    """Where the pool holds the prompts of several tasks."""


class Scores(NamedTuple):
    """What a verifier says; NaN where it could not."""

    rewards: Float[Array, "N G"]
    correct: Float[Array, "N G"]
    components: Float[Array, "N G C"]
    token_scores: Float[Array, "N G T"]


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
        parts=jnp.zeros((n, g, max(len(_counted(sampling)), 1)), jnp.float32),
        token_scores=nothing,
        truncated=jnp.zeros(rows, bool),
        rows=jnp.zeros(n, jnp.int32),
    )


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
        cursor = mixture.step_begun(sampling.mix, cursor, round == 0)
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


def weighed(sampling: Sampling, scores: Scores) -> Float[Array, "N G K"]:
    """What adds up to the verifier's reward: `Rollout.parts`."""
    weights = _counted(sampling)
    if not weights:
        return scores.rewards[..., None]
    counted = scores.components[..., jnp.array(list(weights))]
    return counted * jnp.array(list(weights.values()), jnp.float32)


def _counted(sampling: Sampling) -> dict[int, float]:
    """Weights of the components that have one, by their place."""
    return {i: weight for i, weight in enumerate(sampling.component_weights) if weight}


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
        parts=weighed(sampling, scores),
        token_scores=scores.token_scores.reshape(samples.mask.shape),
        truncated=samples.truncated,
        rows=rows,
    )
