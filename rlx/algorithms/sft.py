"""Supervised fine-tuning: the likelihood of given completions.

    L = - sum_i,t log pi(o_i,t) / sum_i |o_i|

Every token of every completion weighs the same. TRL's `sft` beside a DPO loss averages within each
micro-batch instead.
"""

from jaxtyping import Array, Bool, Float

from rlx.ops import mean
from rlx.types import Metrics


def sft(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T"], Metrics]:
    """-log pi of each token."""
    return -logprobs, {"nll": mean(-logprobs, mask)}
