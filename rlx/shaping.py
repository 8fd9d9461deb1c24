"""What becomes of a reward before advantages: its scale, penalties, and its place among tokens."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx import ops
from rlx.types import Memory, Metrics, Moments, Rollout


class Shaping(NamedTuple):
    """Static; each part is off at its default."""

    divergence: Callable | None = None
    """`ops.k1` or `ops.k3`: the estimator of the KL penalty in the reward."""
    kl_beta: float = 0.0
    """Its weight; where it adapts, at the first step."""
    kl_target: float = 0.0
    """KL a completion that the weight is steered to; 0: the weight is fixed."""
    kl_horizon: float = 10_000.0
    """Completions over which it is steered."""
    missing_stop_penalty: float = 0.0
    """Taken off the reward of a truncated row."""
    running: bool = False
    """Normalise rewards by the mean and deviation of all so far."""
    clip: float = 0.0
    """Largest absolute reward, after normalisation; 0: any."""


def shape(
    shaping: Shaping, memory: Memory, rollout: Rollout, use: Bool[Array, " B"]
) -> tuple[Rollout, Memory, Metrics]:
    """Sets `rewards` and `token_rewards`, and what the next step shall remember.

        r_t = score_t - beta kl_t,    and the rest of the reward at the last sampled token

    `use` are the rows that have a reward. Ziegler et al., https://arxiv.org/abs/1909.08593
    (eq. 2; sec. 2.2 for the adaptive weight)
    """
    rewards = rollout.rewards.reshape(-1, 1)
    known = use[:, None] & jnp.isfinite(rewards)
    scores = jnp.where(known, rollout.token_scores, 0.0)
    clean = jnp.where(known, rewards, 0.0)
    moments, metrics = memory.rewards, {}
    if shaping.running:
        moments = add_moments(moments, clean, known)
        spread = jnp.sqrt(moments.squares / jnp.maximum(moments.count - 1, 1))
        # Equal rewards have the deviation of their rounding, which must not become the unit.
        equal = spread <= 1e-5 * jnp.abs(moments.mean)
        scale = jnp.where(equal, 1.0, 1.0 / (spread + 1e-8))
        clean, scores = (clean - moments.mean) * scale, scores * scale
        metrics["reward/scale"] = ops.scalar_metric(scale)
    if shaping.clip:
        clean = jnp.clip(clean, -shaping.clip, shaping.clip)
    if shaping.missing_stop_penalty:
        clean = clean - shaping.missing_stop_penalty * rollout.truncated[:, None]
    clean = jnp.where(known, clean, 0.0)
    rest = clean - ops.row_sum(scores, rollout.mask)
    token_rewards = ops.masked(scores, rollout.mask) + jnp.where(
        ops.last_token(rollout.mask), rest, 0.0
    )
    beta = memory.kl_beta
    if shaping.divergence is not None:
        divergence = ops.masked(
            shaping.divergence(rollout.old_logprobs, rollout.ref_logprobs), rollout.mask & known
        )
        token_rewards = token_rewards - beta * divergence
        spent = jnp.sum(divergence, axis=1, keepdims=True)
        clean = clean - beta * spent
        measured = ops.mean(spent, known)
        metrics |= {
            "kl/reward": ops.mean(divergence, rollout.mask & known),
            "kl/completion": measured,
            "kl/beta": ops.scalar_metric(beta),
        }
        if shaping.kl_target:
            kl = measured.total / jnp.maximum(measured.count, 1.0)
            beta = adapted(beta, kl, measured.count, shaping.kl_target, shaping.kl_horizon)
    shaped = jnp.where(known, clean, jnp.nan).reshape(rollout.rewards.shape)
    token_rewards = jnp.where(known, token_rewards, 0.0)
    rollout = rollout._replace(rewards=shaped, token_rewards=token_rewards)
    return rollout, memory._replace(kl_beta=beta, rewards=moments), metrics


def adapted(
    beta: Float[Array, ""] | float,
    kl: Float[Array, ""] | float,
    completions: Float[Array, ""] | float,
    target: float,
    horizon: float,
) -> Float[Array, ""]:
    """beta (1 + clip(kl / target - 1, -.2, .2) completions / horizon). 1909.08593 (sec. 2.2)"""
    return beta * (1.0 + jnp.clip(kl / target - 1.0, -0.2, 0.2) * completions / horizon)


def add_moments(moments: Moments, x: Float[Array, "B 1"], mask: Bool[Array, "B 1"]) -> Moments:
    """Those of all that was seen and of the unmasked x: exact, in any order (Chan et al.)."""
    count = jnp.sum(mask, dtype=jnp.float32)
    mean = jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(count, 1.0)
    squares = jnp.sum(jnp.where(mask, x - mean, 0.0) ** 2)
    total = moments.count + count
    share = count / jnp.maximum(total, 1.0)
    gap = mean - moments.mean
    return Moments(
        total,
        moments.mean + gap * share,
        moments.squares + squares + gap**2 * moments.count * share,
    )
