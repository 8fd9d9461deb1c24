"""Advantages: pure functions of rewards, and of a critic's values. No gradient flows through them.

Statistics are a group's (the G samples of one prompt) or the batch's. Rows that could not be
scored (NaN) are left out of them and get 0.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rlx.ops import last_token
from rlx.types import Rollout


def group_normalised(
    rewards: Float[Array, "N G"], *, ddof: int = 0, epsilon: float = 1e-4
) -> Float[Array, "N G"]:
    """A = (R - mean_g) / (std_g + epsilon), the std with `ddof`.

    DeepSeekMath, https://arxiv.org/abs/2402.03300 (sec. 4.1.2). A group of equal rewards gets
    exactly 0: its std is rounding noise, which an epsilon would not hide. Raises ValueError for
    groups of one.
    """
    return group_centred(rewards) / (group_deviation(rewards, ddof) + epsilon)


def group_centred(rewards: Float[Array, "N G"]) -> Float[Array, "N G"]:
    """A = R - mean_g. Dr.GRPO, https://arxiv.org/abs/2503.20783 (sec. 3.2). Exactly 0 in a group
    of equal rewards. Raises ValueError for groups of one."""
    _check_group(rewards)
    scored = jnp.isfinite(rewards)
    clean = jnp.where(scored, rewards, 0.0)
    count = jnp.sum(scored, axis=1, keepdims=True)
    centred = clean - jnp.sum(clean, axis=1, keepdims=True) / jnp.maximum(count, 1)
    return jnp.where(scored & mixed(rewards)[:, None], centred, 0.0)


def leave_one_out(rewards: Float[Array, "N G"]) -> Float[Array, "N G"]:
    """A_i = R_i - mean of the others = G / (G - 1) (R_i - mean_g). RLOO,
    https://arxiv.org/abs/2402.14740. Raises ValueError for groups of one."""
    count = jnp.sum(jnp.isfinite(rewards), axis=1, keepdims=True)
    return group_centred(rewards) * count / jnp.maximum(count - 1, 1)


def group_deviation(rewards: Float[Array, "N G"], ddof: int) -> Float[Array, "N 1"]:
    """The standard deviation of each group's scored rewards."""
    centred = group_centred(rewards)
    count = jnp.sum(jnp.isfinite(rewards), axis=1, keepdims=True)
    return jnp.sqrt(jnp.sum(centred**2, axis=1, keepdims=True) / jnp.maximum(count - ddof, 1))


def mixed(rewards: Float[Array, "N G"], tolerance: float = 0.0) -> Bool[Array, " N"]:
    """True where a group's scored rewards differ: max - min > tolerance, no threshold of a std."""
    scored = jnp.isfinite(rewards)
    highest = jnp.max(jnp.where(scored, rewards, -jnp.inf), axis=1)
    return highest - jnp.min(jnp.where(scored, rewards, jnp.inf), axis=1) > tolerance


def gae(
    rewards: Float[Array, "B T"],
    values: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    bootstrap: Float[Array, " B"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Advantages and returns (A + V) by generalised advantage estimation.

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1}

    https://arxiv.org/abs/1506.02438 (eq. 16). After a row's last token V is `bootstrap`: the
    critic's value where the length limit cut the row, 0 where it finished. Masked tokens are no
    steps: they are passed over without a decay. lam = 1 is Monte Carlo, lam = 0 is TD.
    """

    def back(carry, column):
        following, later = carry
        reward, value, real = column
        advantage = reward + gamma * following - value + gamma * lam * later
        advantage = jnp.where(real, advantage, later)
        return (jnp.where(real, value, following), advantage), jnp.where(real, advantage, 0.0)

    columns = jax.tree.map(jnp.transpose, (rewards, values, mask))
    _, advantages = jax.lax.scan(
        back, (bootstrap, jnp.zeros_like(bootstrap)), columns, reverse=True
    )
    advantages = advantages.T
    return advantages, jnp.where(mask, advantages + values, 0.0)


def discounted(
    rewards: Float[Array, "B T"], mask: Bool[Array, "B T"], gamma: float
) -> Float[Array, "B T"]:
    """Each token's return: its own reward and, discounted, those after it."""
    zeros = jnp.zeros_like(rewards)
    return gae(rewards, zeros, mask, zeros[:, 0], gamma=gamma, lam=1.0)[0]


def whiten(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """(x - mean) / sqrt(variance + 1e-8) over all unmasked tokens, the variance with ddof 1."""
    count = jnp.sum(mask)
    mean = jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(count, 1)
    centred = jnp.where(mask, x - mean, 0.0)
    variance = jnp.sum(centred**2) / jnp.maximum(count - 1, 1)
    return centred * jax.lax.rsqrt(variance + 1e-8)


# From a rollout: advantages and returns, each [B 1] or [B T].

Estimate = tuple[Float[Array, " B #T"], Float[Array, " B #T"]]


def per_row(estimate: Callable[..., Float[Array, "N G"]]) -> Callable[..., Estimate]:
    """Lifts an estimate over groups to a function of the rollout."""

    @functools.wraps(estimate)
    def advantages(rollout: Rollout, **hyper):
        rewards = rollout.rewards
        return estimate(rewards, **hyper).reshape(-1, 1), _known(rewards).reshape(-1, 1)

    return advantages


def gae_whitened(rollout: Rollout, *, gamma: float = 1.0, lam: float = 0.95) -> Estimate:
    """A = whiten(GAE(token rewards, V)), returns = GAE + V before whitening.

    https://arxiv.org/abs/1506.02438 (eq. 16); masked tokens are no steps, truncated rows are
    bootstrapped with the critic's value.
    """
    advantages, returns = gae_plain(rollout, gamma=gamma, lam=lam)
    return whiten(advantages, rollout.mask), returns


def gae_plain(rollout: Rollout, *, gamma: float = 1.0, lam: float = 0.95) -> Estimate:
    """A = GAE(token rewards, V), returns = A + V. https://arxiv.org/abs/1506.02438 (eq. 16)"""
    rewards = jnp.where(rollout.mask, rollout.token_rewards, 0.0)
    return gae(rewards, rollout.values, rollout.mask, rollout.bootstrap, gamma=gamma, lam=lam)


def whitened_returns(rollout: Rollout, *, gamma: float = 1.0) -> Estimate:
    """A = whiten over the batch of each token's discounted return. REINFORCE++,
    https://arxiv.org/abs/2501.03262"""
    returns = discounted(rollout.token_rewards, rollout.mask, gamma)
    return whiten(returns, rollout.mask), returns


def whitened_group_returns(rollout: Rollout, *, gamma: float = 1.0) -> Estimate:
    """A = whiten over the batch of each token's discounted return, the group's mean reward taken
    off first. REINFORCE++ with baseline, https://arxiv.org/abs/2501.03262"""
    centred = group_centred(rollout.rewards)
    shift = (centred - _known(rollout.rewards)).reshape(-1, 1)
    returns = discounted(rollout.token_rewards, rollout.mask, gamma)
    shifted = discounted(
        rollout.token_rewards + jnp.where(last_token(rollout.mask), shift, 0.0), rollout.mask, gamma
    )
    return whiten(shifted, rollout.mask), returns


def group_reward_to_go(rollout: Rollout, *, ddof: int = 0, epsilon: float = 1e-4) -> Estimate:
    """A_t = (sum of the rewards from token t on - mean_g R) / (std_g R + epsilon).

    A token answers for what comes after it: credit that a verifier gave to an earlier place of
    the text is not its own. Without such places it is the group's z-score on every token.
    """
    deviation = group_deviation(rollout.rewards, ddof)
    scale = 1.0 / (deviation + epsilon)
    group = rollout.rewards.shape[1]
    total = group_centred(rollout.rewards).reshape(-1, 1)
    earned = jnp.cumsum(rollout.token_rewards, axis=1) - rollout.token_rewards
    # The final reward, and any rounding of the sum, is never taken off: nothing follows it.
    earned = jnp.where(rollout.mask, earned, 0.0)
    scale = jnp.repeat(scale, group, axis=0)
    live = jnp.repeat(mixed(rollout.rewards), group)[:, None]
    scored = jnp.isfinite(rollout.rewards).reshape(-1, 1)
    advantages = jnp.where(live & scored, (total - earned) * scale, 0.0)
    return advantages, discounted(rollout.token_rewards, rollout.mask, 1.0)


def components_normalised(rollout: Rollout, *, ddof: int = 0, epsilon: float = 1e-4) -> Estimate:
    """A = whiten(sum over the reward's parts c of (R_c - mean_g R_c) / (std_g R_c + epsilon)).

    Each part counts the same, however large its numbers; over the batch the sum is brought back to
    mean 0 and deviation 1 (ddof 1). GDPO, https://arxiv.org/abs/2601.05242
    """
    scored = jnp.isfinite(rollout.rewards)
    normalise = functools.partial(group_normalised, ddof=ddof, epsilon=epsilon)
    parts = jnp.where(scored[..., None], rollout.parts, jnp.nan)
    total = jnp.sum(jax.vmap(normalise, in_axes=2, out_axes=2)(parts), axis=2)
    count = jnp.sum(scored)
    centred = jnp.where(scored, total - jnp.sum(total) / jnp.maximum(count, 1), 0.0)
    deviation = jnp.sqrt(jnp.sum(centred**2) / jnp.maximum(count - 1, 1))
    advantages = centred / (deviation + epsilon)
    return advantages.reshape(-1, 1), _known(rollout.rewards).reshape(-1, 1)


def best_and_worst(rollout: Rollout) -> Estimate:
    """+1 on a group's best row, -1 on its worst, 0 elsewhere: a preference pair out of every group
    whose rewards differ, of its first two rows in the `pair_order`."""
    rewards = rollout.rewards
    place = jnp.arange(rewards.shape[1])
    best, worst = _extremes(rewards)
    signs = (place == best).astype(jnp.float32) - (place == worst)
    signs = jnp.where(mixed(rewards)[:, None], signs, 0.0).reshape(-1, 1)
    return signs, signs


def solved(rollout: Rollout) -> Estimate:
    """1 on the rows that the verifier calls right, or, in a group of which it calls none right or
    wrong, on the best where the rewards differ; 0 elsewhere."""
    right = jnp.where(jnp.isnan(rollout.correct), 0.0, rollout.correct)
    # The places of groups that were never found have neither verdict nor reward.
    judged = jnp.isfinite(rollout.correct) & jnp.isfinite(rollout.rewards)
    best = jnp.maximum(best_and_worst(rollout)[0], 0.0).reshape(right.shape)
    chosen = jnp.where(jnp.any(judged, axis=1, keepdims=True), right, best).reshape(-1, 1)
    return chosen, chosen


def pair_order(rewards: Float[Array, "N G"]) -> Int[Array, "N G"]:
    """An order of each group with its best row first and its worst second, so that they are a
    pair; the others keep theirs."""
    place = jnp.arange(rewards.shape[1])
    best, worst = _extremes(rewards)
    rank = jnp.where(place == best, 0, jnp.where(place == worst, 1, 2))
    return jnp.argsort(rank, axis=1, stable=True)


def reorder(rollout: Rollout, order: Int[Array, "N G"]) -> Rollout:
    """The same rows, each group's in the given order."""
    n, g = order.shape

    def leaf(x):
        grouped = x.reshape(n, g, -1)
        return jnp.take_along_axis(grouped, order[..., None], axis=1).reshape(x.shape)

    return jax.tree.map(leaf, rollout._replace(rows=None))._replace(rows=rollout.rows)


ADVANTAGES = {
    "group_normalised": per_row(group_normalised),
    "group_centred": per_row(group_centred),
    "leave_one_out": per_row(leave_one_out),
    "components_normalised": components_normalised,
    "group_reward_to_go": group_reward_to_go,
    "gae_whitened": gae_whitened,
    "gae": gae_plain,
    "whitened_returns": whitened_returns,
    "whitened_group_returns": whitened_group_returns,
}


def _check_group(rewards: Float[Array, "N G"]) -> None:
    if rewards.shape[1] < 2:
        raise ValueError(
            f"group advantages need at least 2 samples a prompt, not {rewards.shape[1]}"
        )


def _known(rewards: Float[Array, "N G"]) -> Float[Array, "N G"]:
    return jnp.where(jnp.isfinite(rewards), rewards, 0.0)


def _extremes(rewards: Float[Array, "N G"]) -> tuple[Int[Array, "N 1"], Int[Array, "N 1"]]:
    scored = jnp.isfinite(rewards)
    best = jnp.argmax(jnp.where(scored, rewards, -jnp.inf), axis=1, keepdims=True)
    worst = jnp.argmin(jnp.where(scored, rewards, jnp.inf), axis=1, keepdims=True)
    return best, worst
