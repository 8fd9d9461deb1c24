"""KL to the reference as a term of the loss. http://joschu.net/blog/kl-approx.html

    k2 = d^2 / 2,    k3 = exp(d) - d - 1,    r k3 = pi / pi_old k3,    d = log pi_ref - log pi

k2 has the right gradient on policy; k3 is never negative and its gradient is that of the reverse
KL; r k3 weighs it by the ratio, as off-policy text asks (DeepSeek-V3.2,
https://arxiv.org/abs/2512.02556, eq. 7). k1 = -d is not here: averaged over samples its gradient is
zero, so that a loss of it would do nothing. It stands in the reward (`reward.kl: k1`).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.ops import clamped_share, k2, k3, log_ratio, mean
from rlx.types import Metrics


def kl_k2(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T"], Metrics]:
    """d^2 / 2, per token."""
    divergence = k2(logprobs, ref_logprobs)
    return divergence, _metrics(divergence, logprobs, ref_logprobs, mask)


def kl_k3(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T"], Metrics]:
    """exp(d) - d - 1, per token."""
    divergence = k3(logprobs, ref_logprobs)
    return divergence, _metrics(divergence, logprobs, ref_logprobs, mask)


def kl_r_k3(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T"], Metrics]:
    """r (exp(d) - d - 1), per token."""
    ratio = jnp.exp(log_ratio(logprobs, old_logprobs))
    divergence = ratio * k3(logprobs, ref_logprobs)
    return divergence, _metrics(divergence, logprobs, ref_logprobs, mask)


def _metrics(divergence, logprobs, ref_logprobs, mask) -> Metrics:
    return {
        "kl": mean(divergence, mask),
        "kl/clamped": clamped_share(ref_logprobs, logprobs, mask),
    }
