"""Dr.GRPO: GRPO done right. https://arxiv.org/abs/2503.20783

    L = - sum_i,t min(r A, clip(r, 1 - low, 1 + high) A) / (B T_max),   r = pi / pi_old   (sec. 3.2)

It takes two biases out of GRPO. The advantage is not divided by the group's deviation, which
weighed the easiest and the hardest prompts most; the loss is not divided by a row's length, which
made a wrong answer cheaper the longer it grew. T_max is `sampling.max_new_tokens`;
`algorithm.reduction: token_mean` divides by the number of tokens instead. No KL term. TRL's
`loss_type: dr_grpo` is the loss alone: advantages are divided by the deviation unless
`scale_rewards` is `none`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.ops import clip_metrics, clipped_surrogate, log_ratio
from rlx.types import Metrics


def dr_grpo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[Float[Array, "B T"], Metrics]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), per token."""
    ratio = jnp.exp(log_ratio(logprobs, old_logprobs))
    surrogate = clipped_surrogate(ratio, advantages, clip_low, clip_high)
    return surrogate, clip_metrics(ratio, advantages, mask, clip_low, clip_high)
