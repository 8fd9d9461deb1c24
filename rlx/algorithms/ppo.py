"""PPO: proximal policy optimization. https://arxiv.org/abs/1707.06347

    L = - sum_i,t min(r A, clip(r, 1 - low, 1 + high) A) / sum_i |o_i|,    r = pi / pi_old   (eq. 7)

The advantage is GAE over the critic's values, whitened over the batch; the critic learns beside
the policy (`critic.py`, eq. 9). A KL penalty belongs in the reward (`reward.kl`), as in
https://arxiv.org/abs/1909.08593 (eq. 2). The clip's dual bounds the loss of a bad token that has
become much likelier: https://arxiv.org/abs/1912.09729 (eq. 5); TRL's `delta` is that bound.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.ops import clip_metrics, clipped_surrogate, log_ratio, mean
from rlx.types import Metrics


def ppo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Float[Array, "B T"], Metrics]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), per token (eq. 7)."""
    ratio = jnp.exp(log_ratio(logprobs, old_logprobs))
    surrogate = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return surrogate, clip_metrics(ratio, advantages, mask, clip_low, clip_high)


def ppo_dual_clip(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> tuple[Float[Array, "B T"], Metrics]:
    """PPO's surrogate; where A < 0 no more than -dual_clip A (1912.09729, eq. 5)."""
    surrogate, metrics = ppo(
        logprobs,
        old_logprobs,
        ref_logprobs,
        advantages,
        mask,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    bound = -dual_clip * advantages
    cut = (advantages < 0) & (surrogate > bound)
    return jnp.where(cut, bound, surrogate), metrics | {"clip/dual": mean(cut, mask)}
