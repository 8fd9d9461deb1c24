"""DAPO: decoupled clip and dynamic sampling policy optimization. https://arxiv.org/abs/2503.14476

    L = - sum_i,t min(r A, clip(r, 1 - low, 1 + high) A) / sum_i |o_i|,    r = pi / pi_old   (eq. 8)

Its four parts: the clip is wider above than below; every token weighs the same; prompts whose
samples are all right or all wrong are drawn again (`rollout.dynamic_sampling`, eq. 11); long
answers are punished softly (`rollout.overlong_buffer`) or left out (`rollout.overlong_filter`).
No KL term: the policy is meant to move far from where it began (sec. 2.3). TRL's
`loss_type: dapo` clips the same on both sides unless `epsilon_high` is set.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rlx.ops import clip_metrics, clipped_surrogate, log_ratio
from rlx.types import Metrics


def dapo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> tuple[Float[Array, "B T"], Metrics]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), per token (eq. 8)."""
    ratio = jnp.exp(log_ratio(logprobs, old_logprobs))
    surrogate = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return surrogate, clip_metrics(ratio, advantages, mask, clip_low, clip_high)


def overlong_penalty(
    lengths: Int[Array, "*rows"], *, limit: int, buffer: int
) -> Float[Array, "*rows"]:
    """0 up to `limit - buffer` tokens, then linear to -1 at `limit` and beyond (eq. 13).

    Lengths count completion tokens, the stop token included.
    """
    return jnp.clip((limit - buffer - lengths) / buffer, -1.0, 0.0)


def informative(correct: Float[Array, "N G"]) -> Bool[Array, " N"]:
    """0 < number correct < G (eq. 11), of the rows that could be scored."""
    right = jnp.sum(correct == 1, axis=1)
    return (right > 0) & (right < jnp.sum(jnp.isfinite(correct), axis=1))
