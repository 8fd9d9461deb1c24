"""What is done about the gap between sampler and trainer: weights of the advantages.

The sampler's log-probabilities differ from the training model's, by rounding, by a cast to bfloat16
or by quantised weights, so that text is drawn from another distribution than the one which is
trained. The ratio of the two,

    w = pi_old / pi_sampler,    per token, or the product over a completion,

corrects for it: truncated at a cap (https://fengyao.notion.site/off-policy-rl, TIS), or with what
lies outside a band left out. Every policy loss is proportional to its advantages, which are what
the weight multiplies; KL and other terms stay as they are.

Each function takes (old, sampler's log-probabilities, mask) and returns the raw ratio, of which
metrics are taken, the weights, and what is kept in the mask: what is left out leaves the loss's
denominator too, with a KL term that stands within the same loss (GRPO's).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.ops import LOG_RATIO_LIMIT, row_sum

Correction = tuple[Float[Array, " B #T"], Float[Array, " B #T"], Bool[Array, " B #T"]]


def token_ratio(old: Float[Array, "B T"], sampler: Float[Array, "B T"]) -> Float[Array, "B T"]:
    gap = jnp.clip(old - sampler, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.exp(gap)


def sequence_ratio(
    old: Float[Array, "B T"], sampler: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B 1"]:
    gap = jnp.clip(row_sum(old - sampler, mask), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.exp(gap)


def token_truncate(
    old: Float[Array, "B T"], sampler: Float[Array, "B T"], mask: Bool[Array, "B T"], *, cap: float
) -> Correction:
    """min(w, cap) for each token."""
    ratio = token_ratio(old, sampler)
    return ratio, jnp.minimum(ratio, cap), jnp.ones_like(ratio, bool)


def token_mask(
    old: Float[Array, "B T"],
    sampler: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    cap: float,
    floor: float,
) -> Correction:
    """w for each token; those outside [floor, cap] are masked out."""
    ratio = token_ratio(old, sampler)
    return ratio, ratio, (ratio >= floor) & (ratio <= cap)


def sequence_truncate(
    old: Float[Array, "B T"], sampler: Float[Array, "B T"], mask: Bool[Array, "B T"], *, cap: float
) -> Correction:
    """min(w, cap) for each completion."""
    ratio = sequence_ratio(old, sampler, mask)
    return ratio, jnp.minimum(ratio, cap), jnp.ones_like(ratio, bool)


def sequence_mask(
    old: Float[Array, "B T"],
    sampler: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    cap: float,
    floor: float,
) -> Correction:
    """w for each completion; those outside [floor, cap] are masked out."""
    ratio = sequence_ratio(old, sampler, mask)
    return ratio, ratio, (ratio >= floor) & (ratio <= cap)


CORRECTIONS = {
    "token_truncate": token_truncate,
    "token_mask": token_mask,
    "sequence_truncate": sequence_truncate,
    "sequence_mask": sequence_mask,
}
