"""Verifiers: each scores one completion against one row of its task. No JAX.

`VERIFIERS[name](completion, row)` returns a `Score`; `completion` never holds the prompt.
"""

from rlx.rewards import countdown
from rlx.rewards.score import RowError, Score

VERIFIERS = {
    "countdown": countdown.score,
}

__all__ = ["VERIFIERS", "RowError", "Score"]
