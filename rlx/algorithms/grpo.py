"""GRPO: group relative policy optimization. DeepSeekMath, https://arxiv.org/abs/2402.03300

    L = 1/B sum_i 1/|o_i| sum_t [ -min(r A, clip(r, 1 - low, 1 + high) A) + beta k3 ],
    r = pi / pi_old,    k3 = pi_ref / pi - log(pi_ref / pi) - 1                    (eq. 3, 4)

The advantage is the group's z-score; there is no critic. With beta = 0 no reference is loaded. TRL
has n - 1 in the deviation (here `ddof: 1`) and by default multiplies k3 by the ratio.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.ops import clamped_share, clip_metrics, clipped_surrogate, k3, log_ratio, mean
from rlx.types import Metrics


def grpo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.04,
) -> tuple[Float[Array, "B T"], Metrics]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta k3, per token (eq. 3)."""
    ratio = jnp.exp(log_ratio(logprobs, old_logprobs))
    surrogate = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    metrics = clip_metrics(ratio, advantages, mask, clip_low, clip_high)
    divergence = k3(logprobs, ref_logprobs)
    return surrogate + beta * divergence, metrics | {
        "kl": mean(divergence, mask),
        "kl/clamped": clamped_share(ref_logprobs, logprobs, mask),
    }
