"""GSPO: group sequence policy optimization. https://arxiv.org/abs/2507.18071

    L = - 1/B sum_i min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i),
    s_i = (pi(o_i) / pi_old(o_i))^(1 / |o_i|) = exp(mean_t log r_i,t)              (eq. 5, 7)

The reward is a sequence's, and so is the ratio: single tokens, whose ratios are noise, are not
clipped one by one. The mean makes s a matter of a ten-thousandth, and the clip with it.

GSPO-token has the sequence's ratio in value and each token's gradient (eq. 13, 14),

    s_i,t = sg[s_i] pi_i,t / sg[pi_i,t],

so that advantages may differ within a row. With one advantage a row its gradient is GSPO's. In TRL
GSPO is `importance_sampling_level: sequence`, under which the clip stays at .2 unless it is set.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.ops import clip_metrics, clipped_surrogate, log_ratio, row_average
from rlx.types import Metrics


def gspo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Float[Array, "B 1"], Metrics]:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), per row (eq. 5)."""
    ratio = jnp.exp(row_average(log_ratio(logprobs, old_logprobs), mask))
    advantages, rows = row_average(advantages, mask), jnp.any(mask, axis=1, keepdims=True)
    surrogate = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return surrogate, clip_metrics(ratio, advantages, rows, clip_low, clip_high)


def gspo_token(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Float[Array, "B T"], Metrics]:
    """-min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t), per token (eq. 13)."""
    sequence = row_average(log_ratio(logprobs, old_logprobs), mask)
    ratio = jnp.exp(jax.lax.stop_gradient(sequence) + logprobs - jax.lax.stop_gradient(logprobs))
    surrogate = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return surrogate, clip_metrics(ratio, advantages, mask, clip_low, clip_high)
