"""The worked examples whose numbers were computed by hand: the arguments of every kind of loss.

Two prompts with two samples each; two preference pairs; the scores of three pairs; a critic's row.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from rlx.advantages import group_centred, group_normalised, leave_one_out


class Example(NamedTuple):
    """The five arguments of a loss, and how many of its rows belong together."""

    logprobs: Array
    old_logprobs: Array
    ref_logprobs: Array
    advantages: Array
    mask: Array
    unit: int = 1

    @property
    def arrays(self):
        return self[:5]


MASK = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]], bool)
OLD = jnp.array(
    [[-1.0, -0.5, -2.0, -0.1], [-0.7, -1.2, 0, 0], [-0.3, -0.9, -1.5, 0], [-2.2, 0, 0, 0]]
)
LOG_RATIO = jnp.array(
    [[0.30, -0.10, 0.05, 0], [-0.40, 0.20, 0, 0], [0.10, 0.25, -0.35, 0], [0.15, 0, 0, 0]]
)
NEW = OLD + LOG_RATIO
REF_SHIFT = jnp.array(
    [[-0.05, 0.10, 0.20, -0.30], [0, 0.15, 0, 0], [0.20, -0.10, 0.05, 0], [0.40, 0, 0, 0]]
)
REF = OLD + REF_SHIFT
REWARDS = jnp.array([[1.1, 0.1], [1.0, 0.0]])
ADVANTAGES = group_normalised(REWARDS, ddof=1).reshape(4, 1)
ZEROS = jnp.zeros((4, 4))

# Sums over tokens: chosen -12 (reference -13), rejected -15 (-14.5), so that Delta is 1.5. The
# second pair is the first with its rows exchanged and its tokens in another order.
PAIR_MASK = jnp.array([[1] * 6, [1] * 5 + [0], [1] * 5 + [0], [1] * 6], bool)
SIGNS = jnp.array([[1.0], [-1.0], [-1.0], [1.0]])
PAIRS = jnp.array(
    [
        [-1, -3, -2, -2, -1.5, -2.5],
        [-3, -2, -4, -3, -3, 0],
        [-4, -3, -3, -2, -3, 0],
        [-2, -2.5, -1, -3, -2, -1.5],
    ]
)
PAIRS_REF = jnp.array(
    [
        [-2, -2.5, -2, -2.5, -2, -2],
        [-2.5, -3, -3, -3, -3, 0],
        [-3, -3, -2.5, -3, -3, 0],
        [-2.5, -2, -2, -2.5, -2, -2],
    ]
)

# The last pair is masked, wholly.
SCORES = jnp.array([[0.7], [0.2], [0.2], [0.7], [9.0], [-9.0]])
SCORED = jnp.array([[True], [True], [True], [True], [False], [False]])
SCORE_SIGNS = jnp.concatenate([SIGNS, jnp.array([[1.0], [-1.0]])])

# The critic's row of four tokens, cut in two.
VALUES = jnp.array([[0.5, 0.1, 0], [0.9, 0.45, 0]])
OLD_VALUES = jnp.array([[0.2, 0.3, 0], [0.1, 0.5, 0]])
RETURNS = jnp.array([[0.8046875, 0.83125, 0], [0.975, 1.0, 0]])
VALUE_MASK = jnp.array([[True, True, False]] * 2)

EXAMPLES = {
    "z_score": Example(NEW, OLD, REF, ADVANTAGES, MASK),
    "centred": Example(NEW, OLD, REF, group_centred(REWARDS).reshape(4, 1), MASK),
    "left_out": Example(NEW, OLD, REF, leave_one_out(REWARDS).reshape(4, 1), MASK),
    "entropy": Example(-NEW, ZEROS, ZEROS, ADVANTAGES, MASK),
    "values": Example(VALUES, OLD_VALUES, jnp.zeros_like(VALUES), RETURNS, VALUE_MASK),
    "pairs": Example(PAIRS, jnp.zeros_like(PAIRS), PAIRS_REF, SIGNS, PAIR_MASK, unit=2),
    "scores": Example(
        SCORES, jnp.zeros_like(SCORES), jnp.zeros_like(SCORES), SCORE_SIGNS, SCORED, unit=2
    ),
}
