"""Verifiers: each scores one completion against one row of its task. No JAX.

`VERIFIERS[name](completion, row)` returns a `Score`; `completion` never holds the prompt.
"""

from rlx.rewards import choice, countdown, gym, judge, maths, pubmedqa, sql
from rlx.rewards.score import RowError, Score

VERIFIERS = {
    "countdown": countdown.score,
    "maths": maths.score,
    "choice": choice.score,
    "pubmedqa": pubmedqa.score,
    "sql": sql.score,
    "gym": gym.score,
    "judge": judge.score,
}

__all__ = ["VERIFIERS", "RowError", "Score"]
