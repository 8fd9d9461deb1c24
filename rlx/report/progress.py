"""What a person sees while a run goes: a live bar on a terminal, plain lines in a log, warnings."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from io import TextIOBase
from typing import SupportsFloat

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

SHOWN = {
    "reward": "reward/mean",
    "solved": "solve_rate",
    "accuracy": "accuracy",
    "margin": "margin",
    "nll": "nll",
    "length": "length/mean",
    "entropy": "entropy",
    "loss": "loss",
}
"""Label on the bar -> name of the metric. The first SHOWN_AT_ONCE that a run has are shown."""

SHOWN_AT_ONCE = 4

RECENT = 20
"""Chunks that the time left is reckoned from."""


class Progress:
    """A context manager that shows how far a run is.

    `start` is the step that a resumed run goes on from; `chunk` the steps of one scan, whose
    metrics come all at once; `deadline` the time on `clock` at which the run ends whatever its
    step; `seconds_between_lines` applies where `stream` is no terminal.
    """

    def __init__(
        self,
        total: int,
        *,
        stream: TextIOBase,
        start: int = 0,
        chunk: int = 1,
        deadline: int | float = math.inf,
        seconds_between_lines: int | float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.total, self.stream, self.chunk, self.clock = total, stream, chunk, clock
        self.deadline = deadline
        self.seconds_between_lines = seconds_between_lines
        self._step = start
        self._shown: dict[str, str] = {}
        self._begun = clock()
        self._last_line = -math.inf
        self._unprinted = False
        # (clock, step) at the ends of chunks. The first one is the origin, so that the compile
        # before it counts nowhere.
        self._marks: deque[tuple[float, int]] = deque(maxlen=RECENT + 1)
        self._bar = None
        console = Console(file=stream)
        # rich also calls a stream a terminal when FORCE_COLOR is set, as in many a CI log.
        if stream.isatty() and console.is_terminal and not console.is_dumb_terminal:
            # An 80-column terminal has room for the values and the start of each name.
            self._letters = 3 if console.width < 100 else 8
            self._bar = Bar(
                BarColumn(bar_width=max(4, min(40, console.width - 76))),
                MofNCompleteColumn(),
                TextColumn("{task.fields[shown]}"),
                TimeElapsedColumn(),
                TextColumn("left [cyan]{task.fields[left]}"),
                console=console,
            )
            self._task = self._bar.add_task(
                "train", total=total, completed=start, left="-", shown=""
            )

    def __enter__(self) -> "Progress":
        self._begun = self.clock()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._unprinted:
            self._print_line()

    @property
    def seconds_left(self) -> float | None:
        """From the mean of recent steps; None until two chunks have ended."""
        if len(self._marks) < 2:
            return None
        (begin, first), (end, last) = self._marks[0], self._marks[-1]
        by_steps = (end - begin) / (last - first) * max(self.total - self._step, 0)
        return min(by_steps, max(self.deadline - self.clock(), 0.0))

    def update(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Shows `step` steps as taken, with the metrics of the last."""
        self._step = step
        found = [(label, name) for label, name in SHOWN.items() if name in metrics]
        self._shown = {label: _brief(metrics[name]) for label, name in found[:SHOWN_AT_ONCE]}
        last = step >= self.total
        chunk_ended = step % self.chunk == 0 or last
        if chunk_ended and (not self._marks or step > self._marks[-1][1]):
            self._marks.append((self.clock(), step))
        if self._bar is not None:
            left = clock_time(self.seconds_left)
            shown = "  ".join(f"{k[: self._letters]} [bold]{v}[/]" for k, v in self._shown.items())
            self._bar.update(self._task, completed=step, left=left, shown=shown)
            return
        self._unprinted = True
        due = self.clock() - self._last_line >= self.seconds_between_lines
        if last or (chunk_ended and due):
            self._print_line()

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(escape(text), highlight=False, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)

    def _print_line(self) -> None:
        self._last_line, self._unprinted = self.clock(), False
        values = "  ".join(f"{label} {value}" for label, value in self._shown.items())
        print(
            f"step {self._step}/{self.total}  {values}  "
            f"elapsed {clock_time(self._last_line - self._begun)}  "
            f"left {clock_time(self.seconds_left)}",
            file=self.stream,
            flush=True,
        )


class Watch:
    """Says aloud, once each, what lets a run succeed without having learnt.

    Groups with equal rewards (where `groups`: what is learnt lies in differences within them), and
    completions that are all cut, are told after `steps` successive steps; rows that could not be
    scored, and skipped updates, at once.
    """

    def __init__(self, note: Callable[[str], None], *, groups: bool = True, steps: int = 5):
        self.note, self.groups, self.steps = note, groups, steps
        self._run_of = {"equal": 0, "cut": 0}
        self._told: set[str] = set()

    def update(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        if self._lasts("cut", values.get("truncated", 0.0) >= 1.0):
            self._tell(
                "cut",
                step,
                f"every completion of the last {self.steps} steps was cut by the length limit "
                "before it stopped. Raise sampling.max_new_tokens.",
            )
        all_equal = self.groups and values.get("groups/all_equal", 0.0) >= 1.0
        if self._lasts("equal", all_equal):
            if values.get("groups/all_right", 0.0) >= 1.0:
                reason = "All were right: the task is too easy for this model, or is learnt."
            elif values.get("groups/all_wrong", 0.0) >= 1.0:
                reason = (
                    "All were wrong: look at samples.jsonl whether the answers keep the task's "
                    "format and fit into sampling.max_new_tokens."
                )
            else:
                reason = "Look at samples.jsonl; more batch.samples may help."
            self._tell(
                "equal",
                step,
                f"in the last {self.steps} steps the rewards within every group were equal, so "
                f"that no advantage was left to learn from. {reason}",
            )
        if values.get("unscored", 0.0) > 0:
            self._tell(
                "unscored",
                step,
                f"rows could not be scored (unscored {_brief(values['unscored'])}). They are "
                "masked and counted. Either the verifier failed on them, which it then tells, or "
                f"their logits were not finite (share {_brief(values.get('nonfinite_rows', 0))}).",
            )
        if values.get("skipped/nonfinite", 0.0) > 0:
            self._tell(
                "nonfinite",
                step,
                "updates were skipped because their gradient was not finite "
                f"(share {_brief(values['skipped/nonfinite'])}); the parameters did not change.",
            )
        elif values.get("skipped", 0.0) > 0:
            self._tell(
                "skipped",
                step,
                f"updates were skipped (skipped {_brief(values['skipped'])}): no token was left "
                "to learn from, and the parameters did not change.",
            )

    def _lasts(self, name: str, holds: bool) -> bool:
        self._run_of[name] = self._run_of[name] + 1 if holds else 0
        return self._run_of[name] >= self.steps

    def _tell(self, name: str, step: int, text: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self.note(f"WARNING (step {step}): {text}")


def clock_time(seconds: int | float | None) -> str:
    """h:mm:ss, or a dash where it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def compilation_told(seconds: Mapping[str, int | float]) -> str:
    """What the programs took to make, together and each."""
    programs = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
    return f"{sum(seconds.values()):.1f} s" + (f" ({programs})" if programs else "")


def _brief(value: SupportsFloat) -> str:
    number = float(value)
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"
