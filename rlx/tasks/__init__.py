"""Tasks: each loads its data and brings its verifier, where it has one. No JAX.

`TASKS[name](seed=..., **settings)` returns a `Task`; the settings are the loader's keywords.
"""

from rlx.tasks import chat, countdown, preference
from rlx.tasks.task import Pair, Task

TASKS = {
    "countdown": countdown.load,
    "preference": preference.load,
    "chat": chat.load,
}

__all__ = ["TASKS", "Pair", "Task"]
