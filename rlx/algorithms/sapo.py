"""SAPO: soft adaptive policy optimization. https://arxiv.org/abs/2511.20347

    L = - 1/B sum_i 1/|o_i| sum_t 4/tau sigmoid(tau (r - 1)) A,    r = pi / pi_old
    tau = tau_positive where A > 0, else tau_negative

A gate in place of the clip: the gradient fades as the ratio leaves 1 and never stops at an edge. At
r = 1 it is the policy gradient. Tokens of bad answers fade faster: pushing one token down lifts
thousands of others.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.ops import log_ratio, mean, ratio_metrics
from rlx.types import Metrics


def sapo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Float[Array, "B T"], Metrics]:
    """-(4 / tau) sigmoid(tau (r - 1)) A, per token."""
    ratio = jnp.exp(log_ratio(logprobs, old_logprobs))
    tau = jnp.where(advantages > 0, tau_positive, tau_negative)
    gate = jax.nn.sigmoid(tau * (ratio - 1.0))
    # The gradient's share of that at r = 1: 1 where nothing fades.
    share = mean(4.0 * gate * (1.0 - gate) * ratio, mask)
    return -4.0 / tau * gate * advantages, {"gate": share} | ratio_metrics(ratio, mask)
