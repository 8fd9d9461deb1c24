"""Tasks: each loads its data and brings its verifier, where it has one. No JAX.

`TASKS[name](seed=..., **settings)` returns a `Task`; the settings are the loader's keywords.
"""

from rlx.tasks import (
    chat,
    choice,
    countdown,
    gym,
    maths,
    mixture,
    open_answers,
    preference,
    pubmedqa,
    sql,
    sums,
)
from rlx.tasks.task import Pair, Task

TASKS = {
    "countdown": countdown.load,
    "sums": sums.load,
    "maths": maths.load,
    "choice": choice.load,
    "pubmedqa": pubmedqa.load,
    "sql": sql.load,
    "gym": gym.load,
    "open": open_answers.load,
    "mixture": mixture.load,
    "preference": preference.load,
    "chat": chat.load,
}

__all__ = ["TASKS", "Pair", "Task"]
