"""RLOO: REINFORCE leave one out. https://arxiv.org/abs/2402.14740

    L = - 1/B sum_i min(r_i A_i, clip(r_i, 1 - low, 1 + high) A_i),
    r_i = pi(o_i) / pi_old(o_i) = exp(sum_t log r_i,t),    A_i = R_i - mean of the group's others

The whole completion is one action, so its ratio is the product over its tokens. With one update a
batch the ratio is 1 and this is the paper's REINFORCE; the clip serves several. KL, if any, goes
into the reward (`reward.kl: k1`); TRL has it there by default, with beta .05.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.ops import LOG_RATIO_LIMIT, clip_metrics, clipped_surrogate, row_average, row_sum
from rlx.types import Metrics


def rloo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Float[Array, "B 1"], Metrics]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), per row, r of the whole completion."""
    total = row_sum(logprobs - old_logprobs, mask)
    ratio = jnp.exp(jnp.clip(total, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    advantages, rows = row_average(advantages, mask), jnp.any(mask, axis=1, keepdims=True)
    surrogate = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return surrogate, clip_metrics(ratio, advantages, rows, clip_low, clip_high)
