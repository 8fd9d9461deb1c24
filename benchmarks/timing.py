"""Wall time, processor time and memory of a call, taken when the machine has little else to do.

A repetition is clean when all other processes together used less than `CLEAN` cores during it. The
accounts are Linux's; elsewhere they are None, and every repetition counts.
"""

import contextlib
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

CLEAN = 0.15
PROC = Path("/proc")
QUIET_SECONDS = float(os.environ.get("PEER_QUIET_BUDGET_S", "240"))
"""How long one process may wait in all for the machine to become quiet."""


class Meter:
    """Wall time, own processor time and everybody else's over a block."""

    def __enter__(self):
        self._start = time.perf_counter(), time.process_time(), _busy_seconds()
        return self

    def __exit__(self, *error):
        wall, own, (busy, stolen) = self._start
        self.wall = time.perf_counter() - wall
        self.own = time.process_time() - own
        busy_now, stolen_now = _busy_seconds()
        self.others = max(0.0, busy_now - busy - self.own) + stolen_now - stolen

    @property
    def row(self) -> tuple[float, float, float]:
        """Seconds, own cores, others' cores."""
        return self.wall, self.own / self.wall, self.others / self.wall


class Phases:
    """Seconds of each phase since they were last taken; `with phases("update"):`."""

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


class Quiet:
    """Waits for others to leave the machine alone, within one allowance a process."""

    def __init__(self, seconds: float = QUIET_SECONDS):
        self.left = seconds if (PROC / "stat").exists() else 0.0

    def wait(self, window: float = 1.0) -> None:
        while self.left > 0:
            with Meter() as meter:
                time.sleep(window)
            self.left -= meter.wall
            if meter.others / meter.wall < CLEAN:
                return


def measure(call: Callable[[], None], *, reps: int, warmup: int) -> dict:
    """Calls `warmup` times at least once, then until `reps` calls were clean, twice `reps` at most.

    Returns what `summary` does, the first call's seconds (compilation included) with it.
    """
    from rlx.compilation import give_back_memory

    seconds = []
    for _ in range(max(1, warmup)):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    give_back_memory()  # as a run does after its first steps
    reset_peak()
    quiet, rows = Quiet(), []
    while sum(row[2] < CLEAN for row in rows) < reps and len(rows) < 2 * reps:
        quiet.wait()
        with Meter() as meter:
            call()
        rows.append(meter.row)
    return summary(rows, seconds[0])


def summary(rows: list[tuple[float, float, float]], first: float) -> dict:
    """Of `Meter.row`s: the median of the clean ones if there are three, or as many as there are
    calls; else of all."""
    clean = [row for row in rows if row[2] < CLEAN]
    used = clean if clean and len(clean) >= min(3, len(rows)) else rows
    seconds = [row[0] for row in used]
    return {
        "median_s": round(statistics.median(seconds), 5),
        "min_s": round(min(seconds), 5),
        "max_s": round(max(seconds), 5),
        "reps": len(seconds),
        "reps_all": len(rows),
        "clean": used is clean,
        "all_s": [round(row[0], 4) for row in rows],
        "first_call_s": round(first, 3),
        "own_cores_used": round(statistics.median(row[1] for row in used), 2),
        "other_cores_used": round(max(row[2] for row in used), 2),
        "peak_rss_timed_mb": peak_megabytes(),
    }


def reset_peak() -> None:
    """Lets the peak of resident memory begin anew."""
    with contextlib.suppress(OSError):
        (PROC / "self" / "clear_refs").write_text("5")


def process_megabytes() -> float:
    """Peak of resident memory over the whole life of the process."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def peak_megabytes() -> float | None:
    try:
        lines = (PROC / "self" / "status").read_text().splitlines()
    except OSError:
        return None
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return round(int(kilobytes) / 1024, 1)


def _busy_seconds() -> tuple[float, float]:
    """Of all processors since boot: in use, and taken by other guests of the same host."""
    try:
        fields = [int(x) for x in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return 0.0, 0.0
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = fields[:8]
    return (user + nice + system + interrupts + soft_interrupts) / ticks, stolen / ticks
