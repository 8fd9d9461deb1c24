"""REINFORCE++: critic-free, normalised over the batch. https://arxiv.org/abs/2501.03262

    L = - sum_i,t min(r A, clip(r, 1 - low, 1 + high) A) / sum_i |o_i|,    r = pi / pi_old

The advantage is each token's discounted return, whitened over all tokens of the batch instead of
over a group: one prompt's few samples don't set the scale. `reinforce_pp_baseline` takes the
group's mean reward off first. The KL penalty stands in the reward (`reward.kl: k1`).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.ops import clip_metrics, clipped_surrogate, log_ratio
from rlx.types import Metrics


def reinforce_pp(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Float[Array, "B T"], Metrics]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), per token."""
    ratio = jnp.exp(log_ratio(logprobs, old_logprobs))
    surrogate = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return surrogate, clip_metrics(ratio, advantages, mask, clip_low, clip_high)
