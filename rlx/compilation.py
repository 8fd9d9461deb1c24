"""What JAX spends on making programs: seconds, by the name of a program's function."""

import ctypes
import sys
from collections import defaultdict
from typing import Any

import jax

EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
"""Tracing, lowering, compiling. The last comes once a program, one read from a cache included."""

SMALL_SECONDS = 0.5
"""Programs that take less are told together: each operation outside of a jit is one."""


class Compilation:
    """A context manager that counts the programs that the process makes while it is open."""

    def __init__(self):
        self.programs = 0
        self._seconds: dict[str, float] = defaultdict(float)

    def __enter__(self) -> "Compilation":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    @property
    def total_seconds(self) -> float:
        return sum(list(self._seconds.values()))  # another thread may add to them

    def seconds(self) -> dict[str, float]:
        """By the name of the program's function, the slowest first; the small ones, if there are
        any, together as `other`."""
        # A copy, since another thread may compile meanwhile.
        known = sorted(dict(self._seconds).items(), key=lambda item: -item[1])
        large = {name: round(seconds, 2) for name, seconds in known if seconds >= SMALL_SECONDS}
        other = sum(seconds for _, seconds in known if seconds < SMALL_SECONDS)
        return large | ({"other": round(other, 2)} if other else {})

    def _listen(self, event: str, seconds: float, **about: Any) -> None:
        if event in EVENTS:
            name = about.get("fun_name", "unnamed").removeprefix("jit(").removesuffix(")")
            self._seconds[name] += seconds
            self.programs += event == EVENTS[-1]


def give_back_memory() -> None:
    """Returns to the system what compiling took and the C library keeps: half of the process's
    memory where the model is small. Does nothing where the library is not GNU's."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
