"""GMPO: geometric-mean policy optimization. https://arxiv.org/abs/2507.20673

    L = - 1/B sum_i A_i exp( mean_t sgn(A) min(sgn(A) log r, sgn(A) clip(log r, -clip, clip)) )

The geometric mean over a row's tokens, where GRPO has the arithmetic one: one token with a wild
ratio moves it little. So the clip, in log space and per token, can be wide.       (eq. 4)
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.ops import clip_metrics, log_ratio, row_average
from rlx.types import Metrics


def gmpo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    clip: float = 0.4,
) -> tuple[Float[Array, "B 1"], Metrics]:
    """-A exp(mean_t of the log-ratio, clipped where that lowers the objective), per row (eq. 4)."""
    advantages = row_average(advantages, mask)
    log_r, sign = log_ratio(logprobs, old_logprobs), jnp.sign(advantages)
    clipped = sign * jnp.minimum(sign * log_r, sign * jnp.clip(log_r, -clip, clip))
    metrics = clip_metrics(
        jnp.exp(log_r), advantages, mask, 1.0 - math.exp(-clip), math.exp(clip) - 1.0
    )
    return -advantages * jnp.exp(row_average(clipped, mask)), metrics
