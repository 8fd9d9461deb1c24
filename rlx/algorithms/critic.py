"""The critic's loss: squared error, clipped around the values at sampling time.

    L = 1/2 mean max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

https://arxiv.org/abs/1707.06347 (eq. 9, with the clip of its authors' code). It stands beside PPO
with the weight `critic.coefficient` (.1) where the critic is a head on the policy's trunk.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.ops import mean
from rlx.types import Metrics


def value(
    values: Float[Array, "B T"],
    old_values: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    returns: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    value_clip: float = 0.2,
) -> tuple[Float[Array, "B T"], Metrics]:
    """1/2 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2), per token."""
    clipped = jnp.clip(values, old_values - value_clip, old_values + value_clip)
    error, clipped_error = (values - returns) ** 2, (clipped - returns) ** 2
    loss = jnp.maximum(error, clipped_error) / 2
    return loss, {"loss": mean(loss, mask), "clip": mean(clipped_error > error, mask)}
