"""Advantages: pure functions of rewards. Statistics are a group's, the G samples of one prompt."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.types import Rollout


def group_normalised(
    rewards: Float[Array, "N G"], *, ddof: int = 0, epsilon: float = 1e-4
) -> Float[Array, "N G"]:
    """A = (R - mean_g) / (std_g + epsilon), the std with `ddof`.

    DeepSeekMath, https://arxiv.org/abs/2402.03300 (sec. 4.1.2). A group of equal rewards gets
    exactly 0: its std is rounding noise, which an epsilon would not hide. Rows that could not
    be scored (NaN) are left out of the statistics and get 0.
    """
    if rewards.shape[1] < 2:
        raise ValueError(
            f"group advantages need at least 2 samples a prompt, not {rewards.shape[1]}"
        )
    scored = jnp.isfinite(rewards)
    clean = jnp.where(scored, rewards, 0.0)
    count = jnp.sum(scored, axis=1, keepdims=True)
    centred = jnp.where(
        scored, clean - jnp.sum(clean, axis=1, keepdims=True) / jnp.maximum(count, 1), 0.0
    )
    variance = jnp.sum(centred**2, axis=1, keepdims=True) / jnp.maximum(count - ddof, 1)
    normalised = centred / (jnp.sqrt(variance) + epsilon)
    return jnp.where(mixed(rewards)[:, None], normalised, 0.0)


def mixed(rewards: Float[Array, "N G"]) -> Bool[Array, " N"]:
    """True where a group's scored rewards differ: max > min, no tolerance of a std."""
    scored = jnp.isfinite(rewards)
    highest = jnp.max(jnp.where(scored, rewards, -jnp.inf), axis=1)
    return highest > jnp.min(jnp.where(scored, rewards, jnp.inf), axis=1)


def per_row(
    estimate: Callable[..., Float[Array, "N G"]],
) -> Callable[..., tuple[Float[Array, "B 1"], Float[Array, "B 1"]]]:
    """Lifts an estimate over groups to a function of the rollout: advantages and returns, a row."""

    @functools.wraps(estimate)
    def advantages(rollout: Rollout, **hyper):
        rewards = rollout.rewards
        return estimate(rewards, **hyper).reshape(-1, 1), rewards.reshape(-1, 1)

    return advantages
