"""The files a run leaves as it goes: metrics.jsonl, samples.jsonl, summary.json, TensorBoard.

Every line is valid JSON and is flushed as it is written, so that a killed run loses at most the
line it was writing. A resumed run first takes away what the interrupted one wrote past its
checkpoint; each step then stands there once. Errors of the disk are not caught.
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat, SupportsInt, TextIO

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from model.errors import BadInput
from rlx.files import write_atomically

KINDS = ("train", "eval")
RESERVED = ("step", "kind", "nonfinite")
SAMPLE_FIELDS = (
    "prompt",
    "completion",
    "reward",
    "components",
    "correct",
    "advantage",
    "truncated",
    "length",
)


class Unwritten:
    """In a MetricsWriter's place where another process writes the files."""

    def write(
        self, step: SupportsInt, values: Mapping[str, SupportsFloat], kind: str = "train"
    ) -> None:
        pass

    def write_samples(self, step: SupportsInt, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        pass


class MetricsWriter:
    """Writes a run's metrics, samples and summary into `folder`; closes its files on exit.

    `resume_step` is the step of the checkpoint that the run goes on from; None is a fresh run, and
    then a `folder` that already holds metrics or samples is refused (ValueError).
    `evaluated_again`: the evaluation at that step will be written anew.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool,
        resume_step: int | None,
        evaluated_again: bool = False,
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._last_step = dict.fromkeys(KINDS, -1)
        self._open_files: dict[str, TextIO] = {}
        for name in ("metrics.jsonl", "samples.jsonl"):
            kept = self._keep_up_to(name, resume_step, evaluated_again)
            if name == "metrics.jsonl":
                for line in kept:
                    self._last_step[line["kind"]] = line["step"]
        self._events = None
        if tensorboard:
            # Not by a SummaryWriter: a full disk ends its thread, and then it waits for ever. The
            # suffix keeps a resume within the same second from opening the very same file.
            (folder / "tensorboard").mkdir(exist_ok=True)
            self._events = EventsWriter(
                str(folder / "tensorboard" / "events"), filename_suffix=f".{resume_step or 0}"
            )
            if resume_step is not None:
                # TensorBoard hides what earlier files hold from this step on.
                begun = SessionLog(status=SessionLog.START)
                self._events.write_event(Event(step=resume_step + 1, session_log=begun))

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(
        self, step: SupportsInt, values: Mapping[str, SupportsFloat], kind: str = "train"
    ) -> None:
        """Appends one line; a value that is no finite number becomes null and is named in
        `nonfinite`.

        Raises BadInput for an unknown kind, a reserved name, a value that is no number, and a
        step that goes backwards; a train step may not come twice either.
        """
        step = int(step)
        if kind not in KINDS:
            raise BadInput(f"Expected kind to be one of {', '.join(KINDS)}; got {kind!r}.")
        last = self._last_step[kind]
        if step < last or (kind == "train" and step == last):
            raise BadInput(
                f"Expected {kind} metrics of a step after {last}; got step {step} "
                f"({self.folder / 'metrics.jsonl'} holds each step once, in order)."
            )
        numbers = {name: _number(name, value) for name, value in values.items()}
        nonfinite = [name for name, number in numbers.items() if not math.isfinite(number)]
        line: dict[str, Any] = {"step": step, "kind": kind}
        line |= {
            name: number if math.isfinite(number) else None for name, number in numbers.items()
        }
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._append("metrics.jsonl", [line])
        self._last_step[kind] = step
        if self._events is not None:
            now = time.time()
            for name, number in numbers.items():
                if math.isfinite(number):
                    summary = scalar(f"{kind}/{name}", number)
                    self._events.write_event(Event(wall_time=now, step=step, summary=summary))
            self._events.flush()

    def write_samples(self, step: SupportsInt, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends one line a row. A row has at least SAMPLE_FIELDS; `components` maps the name of
        each part of the reward to its value. Further fields are kept as they are.

        Raises BadInput for a row that lacks a field.
        """
        lines = []
        for row in rows:
            missing = [name for name in SAMPLE_FIELDS if name not in row]
            if missing:
                raise BadInput(
                    f"Expected a sample to have {', '.join(SAMPLE_FIELDS)}; one of step {step} "
                    f"lacks {', '.join(missing)}."
                )
            lines.append({"step": int(step), **json_safe(row)})
        self._append("samples.jsonl", lines)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replaces summary.json as a whole."""
        text = json.dumps(json_safe(summary), indent=2, allow_nan=False)
        write_atomically(self.folder / "summary.json", text + "\n")

    def close(self) -> None:
        for file in self._open_files.values():
            file.close()
        self._open_files.clear()
        if self._events is not None:
            self._events.close()
            self._events = None

    def _append(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        if name not in self._open_files:
            self._open_files[name] = (self.folder / name).open("a", encoding="utf-8")
        for line in lines:
            # ASCII escapes keep lone surrogates and odd line separators of a completion from
            # breaking the file.
            self._open_files[name].write(json.dumps(line, allow_nan=False) + "\n")
        self._open_files[name].flush()

    def _keep_up_to(
        self, name: str, resume_step: int | None, evaluated_again: bool
    ) -> list[dict[str, Any]]:
        path = self.folder / name
        if not path.exists() or path.stat().st_size == 0:
            return []
        if resume_step is None:
            raise BadInput(
                f"Expected an empty run folder for a fresh run; {path} already holds an earlier "
                "run. Resume that run, or choose another run.dir."
            )
        kept = [
            line
            for line in read_lines(path)
            if line["step"] < resume_step + (not evaluated_again)
            or (line["step"] == resume_step and "train" in (line.get("kind"), line.get("split")))
        ]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        return kept


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSON-lines file of a run; none where the file is missing.

    A last line without its line break was being written when the run died, and is dropped. Raises
    ValueError, with the line's number, for any other line that is no JSON object with a step.
    """
    if not path.exists():
        return []
    *whole, _torn = path.read_bytes().split(b"\n")
    lines = []
    for number, text in enumerate(whole, start=1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise BadInput(f"{path}, line {number}: expected JSON; {error}.") from error
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise BadInput(
                f"{path}, line {number}: expected an object with a whole number `step`; "
                f"got {text[:80].decode(errors='replace')}."
            )
        if path.name == "metrics.jsonl" and line.get("kind") not in KINDS:
            raise BadInput(
                f"{path}, line {number}: expected kind to be one of {', '.join(KINDS)}; "
                f"got {line.get('kind')!r}."
            )
        lines.append(line)
    return lines


def json_safe(value: Any) -> Any:
    """The value in JSON's own types: arrays and their scalars as numbers, NaN and inf as null."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    array = np.asarray(value)
    if array.dtype.kind == "V":
        array = array.astype(np.float64)  # bfloat16 and its like have no scalar of Python's own
    if array.dtype.kind not in "biufU":
        raise BadInput(f"Expected a value that JSON can hold; got {type(value).__name__}.")
    return json_safe(array.tolist())


def _number(name: str, value: SupportsFloat) -> float:
    if name in RESERVED:
        raise BadInput(f"{name!r} is a field of every metrics line and no name for a metric.")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"Expected metric {name!r} to be one number; got {type(value).__name__}: {value!r:.80}."
        ) from error
