"""Entropy bonus: a term that keeps the policy from settling early. https://arxiv.org/abs/1602.01783

    L = - H(pi),    H = - sum_v pi(v) log pi(v)

of the softmax over the whole vocabulary at the sampling temperature, averaged over tokens. Its
weight is the term's.
"""

from jaxtyping import Array, Bool, Float

from rlx.ops import mean
from rlx.types import Metrics


def entropy(
    entropy: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T"], Metrics]:
    """-H of each token's distribution."""
    return -entropy, {"bonus": mean(entropy, mask)}
