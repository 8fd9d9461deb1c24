"""CISPO: clipped importance sampling policy optimization. https://arxiv.org/abs/2506.13585

    L = - sum_i,t sg[min(r, cap)] A log pi / sum_i |o_i|,    r = pi / pi_old          (eq. 4, 5)

The weight is clipped, not the update: every token keeps its gradient, also the rare ones at which
a reasoning turns, whose ratios a clip of the surrogate would cut. `cap` bounds the ratio itself,
as `epsilon_high` does in TRL.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.ops import log_ratio, mean, ratio_metrics
from rlx.types import Metrics


def cispo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    cap: float = 5.0,
) -> tuple[Float[Array, "B T"], Metrics]:
    """-sg[min(r, cap)] A log pi, per token (eq. 4)."""
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(logprobs, old_logprobs)))
    # The cap cuts a weight, whatever the advantage's sign.
    metrics = {"clip/high": mean(ratio > cap, mask)} | ratio_metrics(ratio, mask)
    return -jnp.minimum(ratio, cap) * advantages * logprobs, metrics
