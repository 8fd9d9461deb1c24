"""DPO: direct preference optimization, and its family. https://arxiv.org/abs/2305.18290

    L = mean over pairs of f(Delta),    Delta = (l_w - l_ref,w) - (l_l - l_ref,l)       (eq. 7)

l is a completion's log-probability, the sum over its tokens; w is preferred to l. The rows of a
pair are 2i and 2i + 1, and the sign of the advantage says which is preferred.

    dpo          -log sigmoid(beta Delta)
    dpo_hinge    max(0, 1 - beta Delta)                   SLiC, https://arxiv.org/abs/2305.10425
    ipo          (Delta' - 1 / (2 beta))^2                https://arxiv.org/abs/2310.12036 (eq. 17)
    cdpo         -(1 - e) log sigmoid(beta Delta) - e log sigmoid(-beta Delta)    a share e of the
                 preferences is wrong, https://ericmitchell.ai/cdpo.pdf (eq. 3)
    robust_dpo   [-(1 - e) log sigmoid(beta Delta) + e log sigmoid(-beta Delta)] / (1 - 2 e)
                 unbiased under such noise, https://arxiv.org/abs/2403.00409 (eq. 12)

IPO's Delta' is of means over tokens, as its authors compute it; `ipo_sum` takes sums.
`dpo_reference_free` leaves the reference out (as a uniform one would). TRL has neither of these
two, and its `sigmoid` ignores `label_smoothing`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.ops import mean, row_average, row_sum
from rlx.types import Metrics


def pair_difference(
    rows: Float[Array, "B 1"], advantages: Float[Array, " B #T"]
) -> Float[Array, "B 1"]:
    """The preferred row less the other, on both rows of each pair.

    Raises ValueError for an odd number of rows.
    """
    if len(rows) % 2:
        raise ValueError(
            f"preference pairs are rows 2i and 2i + 1; expected an even number of "
            f"rows, came {len(rows)}"
        )
    signed = rows * jnp.sign(advantages[:, :1])
    return both_rows(jnp.sum(signed.reshape(-1, 2), axis=1))


def right_pairs(difference: Float[Array, "B 1"]) -> Float[Array, "B 1"]:
    """1 where the preferred row is ahead, 0 where it is behind, half where they tie, as of held-out
    pairs."""
    return 0.5 * (jnp.sign(difference) + 1.0)


def both_rows(pairs: Float[Array, " pairs"]) -> Float[Array, "B 1"]:
    return jnp.repeat(pairs, 2)[:, None]


def preference_metrics(
    implicit: Float[Array, "B 1"],
    beta: float,
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
) -> Metrics:
    """Of the implicit rewards, beta log pi / pi_ref."""
    difference = pair_difference(implicit, advantages)
    rows, sign = jnp.any(mask, axis=1, keepdims=True), advantages[:, :1]
    return {
        "accuracy": mean(right_pairs(difference), rows),
        "margin": mean(beta * difference, rows),
        "rewards/chosen": mean(beta * implicit, rows & (sign > 0)),
        "rewards/rejected": mean(beta * implicit, rows & (sign < 0)),
    }


def dpo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    beta: float = 0.1,
) -> tuple[Float[Array, "B 1"], Metrics]:
    """-log sigmoid(beta Delta), on both rows of a pair."""
    implicit = row_sum(logprobs - ref_logprobs, mask)
    delta = pair_difference(implicit, advantages)
    return -jax.nn.log_sigmoid(beta * delta), preference_metrics(implicit, beta, advantages, mask)


def dpo_hinge(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    beta: float = 0.1,
) -> tuple[Float[Array, "B 1"], Metrics]:
    """max(0, 1 - beta Delta), on both rows of a pair."""
    implicit = row_sum(logprobs - ref_logprobs, mask)
    delta = pair_difference(implicit, advantages)
    return jnp.maximum(0.0, 1.0 - beta * delta), preference_metrics(
        implicit, beta, advantages, mask
    )


def dpo_reference_free(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    beta: float = 0.1,
) -> tuple[Float[Array, "B 1"], Metrics]:
    """-log sigmoid(beta (l_w - l_l)), on both rows of a pair."""
    implicit = row_sum(logprobs, mask)
    delta = pair_difference(implicit, advantages)
    return -jax.nn.log_sigmoid(beta * delta), preference_metrics(implicit, beta, advantages, mask)


def ipo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    beta: float = 0.1,
) -> tuple[Float[Array, "B 1"], Metrics]:
    """(Delta' - 1 / (2 beta))^2 of means over tokens, on both rows of a pair."""
    implicit = row_average(logprobs - ref_logprobs, mask)
    delta = pair_difference(implicit, advantages)
    return (delta - 1.0 / (2.0 * beta)) ** 2, preference_metrics(implicit, beta, advantages, mask)


def ipo_sum(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    beta: float = 0.1,
) -> tuple[Float[Array, "B 1"], Metrics]:
    """(Delta - 1 / (2 beta))^2 of sums, on both rows of a pair."""
    implicit = row_sum(logprobs - ref_logprobs, mask)
    delta = pair_difference(implicit, advantages)
    return (delta - 1.0 / (2.0 * beta)) ** 2, preference_metrics(implicit, beta, advantages, mask)


def cdpo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> tuple[Float[Array, "B 1"], Metrics]:
    """-(1 - e) log sigmoid(beta Delta) - e log sigmoid(-beta Delta), on both rows of a pair."""
    implicit = row_sum(logprobs - ref_logprobs, mask)
    delta = pair_difference(implicit, advantages)
    right, wrong = jax.nn.log_sigmoid(beta * delta), jax.nn.log_sigmoid(-beta * delta)
    loss = -(1.0 - label_smoothing) * right - label_smoothing * wrong
    return loss, preference_metrics(implicit, beta, advantages, mask)


def robust_dpo(
    logprobs: Float[Array, "B T"],
    old_logprobs: Float[Array, "B T"],
    ref_logprobs: Float[Array, "B T"],
    advantages: Float[Array, " B #T"],
    mask: Bool[Array, "B T"],
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> tuple[Float[Array, "B 1"], Metrics]:
    """[-(1 - e) log sigmoid(beta Delta) + e log sigmoid(-beta Delta)] / (1 - 2 e), on both rows."""
    implicit = row_sum(logprobs - ref_logprobs, mask)
    delta = pair_difference(implicit, advantages)
    right, wrong = jax.nn.log_sigmoid(beta * delta), jax.nn.log_sigmoid(-beta * delta)
    noisy = -(1.0 - label_smoothing) * right + label_smoothing * wrong
    loss = noisy / (1.0 - 2.0 * label_smoothing)
    return loss, preference_metrics(implicit, beta, advantages, mask)
