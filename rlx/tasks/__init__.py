"""Tasks: each loads its rows and brings its verifier. No JAX.

`TASKS[name](seed=..., **settings)` returns a `Task`; the settings are the loader's keywords.
"""

from rlx.tasks import countdown
from rlx.tasks.task import Task

TASKS = {
    "countdown": countdown.load,
}

__all__ = ["TASKS", "Task"]
