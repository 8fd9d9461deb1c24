"""Reward model after Bradley and Terry. https://arxiv.org/abs/2203.02155 (eq. 1)

    L = - log sigmoid(r_w - r_l - margin) + centring (r_w + r_l)^2

over pairs of a preferred completion w and a rejected one l. The score r is the head's value after a
row's last real token. A margin, constant or the data's, asks for a wider gap
(https://arxiv.org/abs/2307.09288, eq. 2); the centring term holds scores around 0
(https://arxiv.org/abs/2312.09244, eq. 2). TRL has no constant margin, only the data's.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.algorithms.dpo import both_rows, pair_difference, right_pairs
from rlx.ops import mean
from rlx.types import Metrics


def reward_model(
    scores: Float[Array, "B 1"],
    margins: Float[Array, "B 1"],
    ref_logprobs: Float[Array, "B 1"],
    advantages: Float[Array, "B 1"],
    mask: Bool[Array, "B 1"],
    *,
    margin: float = 0.0,
    centring: float = 0.0,
) -> tuple[Float[Array, "B 1"], Metrics]:
    """-log sigmoid(r_w - r_l - margin) + centring (r_w + r_l)^2, on both rows of a pair."""
    difference = pair_difference(scores, advantages)
    total = both_rows(jnp.sum(scores.reshape(-1, 2), axis=1))
    # A pair's margin stands on both of its rows.
    loss = -jax.nn.log_sigmoid(difference - margins - margin) + centring * total**2
    return loss, {
        "accuracy": mean(right_pairs(difference), mask),
        "margin": mean(difference, mask),
        "score/chosen": mean(scores, mask & (advantages > 0)),
        "score/rejected": mean(scores, mask & (advantages < 0)),
    }
