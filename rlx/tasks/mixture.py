"""Several tasks in one run, each with its share of the prompts.

    tasks:
      - {name: pubmedqa, weight: 3, file: ori_pqal.json}
      - {name: maths, weight: 1, file: gsm8k.jsonl, label: gsm8k}

A row goes to the verifier of its own task. Where verifiers name different parts of their rewards, a
part that a task does not have is 0 there.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, Literal, NamedTuple

import numpy as np

from model.errors import BadInput
from rlx.rewards.compose import Results, Rows, Verifier, here
from rlx.rewards.score import RowError, Score
from rlx.rewards.worker import many_of, mark
from rlx.tasks.task import Mixing, Task

EXAMPLE = "[{name: pubmedqa, weight: 3, file: F}, {name: maths, file: G}]"

OWN = ("name", "weight", "final_weight", "label")
"""Keys of an entry that are not its task's settings."""


class Part(NamedTuple):
    verifier: Verifier


class ByTask:
    """Scores a row by the verifier of the task that its `task` names."""

    def __init__(self, scores: Mapping[str, Verifier], components: Mapping[str, float]):
        """`components` are those of all tasks, with what each counts in the reward."""
        self.scores, self.components = dict(scores), dict(components)
        # What rlx/rewards/batch.py asks of a verifier.
        self.parts = tuple(map(Part, self.scores.values()))
        self.bounded = all(mark(score, "bounded", False) for score in self.scores.values())
        self.imports = tuple(
            dict.fromkeys(name for s in self.scores.values() for name in mark(s, "imports", ()))
        )
        if any(many_of(score) for score in self.scores.values()):
            self.many = self._many

    def __call__(self, completion: str, row: Mapping) -> Score:
        return self._filled(self.scores[self._task(row)](completion, row))

    def _many(self, rows: Rows, *, each: Callable[[Verifier, Rows], Results] = here) -> Results:
        """Scores of many rows; `each` scores those of one task."""
        results: Results = [ValueError("no task")] * len(rows)
        places: dict[str, list[int]] = {}
        for i, (_, row) in enumerate(rows):
            try:
                places.setdefault(self._task(row), []).append(i)
            except RowError as error:
                results[i] = error
        for name, own in places.items():
            score, asked = self.scores[name], [rows[i] for i in own]
            found = each(score, asked)
            for i, result in zip(own, found, strict=True):
                results[i] = result if isinstance(result, Exception) else self._filled(result)
        return results

    def _task(self, row: Mapping) -> str:
        name = row.get("task")
        if name not in self.scores:
            raise RowError(f"`task` must be one of {', '.join(self.scores)}, not {name!r}.")
        return name

    def _filled(self, score: Score) -> Score:
        parts = {part: score.components.get(part, 0.0) for part in self.components}
        weights = score.weights if any(self.components.values()) else {}
        return score._replace(components=parts, weights=weights)


def load(
    *,
    seed: int,
    tasks: tuple[dict[str, Any], ...],
    load_task: Callable[[str, dict[str, Any], str], Task],
    follow: Literal["weights", "schedule", "solve_rates"] = "weights",
    floor: float = 0.1,
) -> Task:
    """The prompts of all `tasks`, task by task. `load_task(name, settings, where)` loads one.

    With `follow` schedule, weights go in a line to each entry's `final_weight` over the run; with
    solve_rates a weight is multiplied by 4 p (1 - p), but by no less than `floor`, p being its
    task's recent solve rate. Raises BadInput where an entry is wrong, or its task cannot be sampled
    and scored.
    """
    if len(tasks) < 2:
        raise BadInput(f"tasks: expected at least two, as in {EXAMPLE}; came {len(tasks)}.")
    entries = [_entry(entry, f"tasks[{i}]", follow) for i, entry in enumerate(tasks)]
    labels = [entry.label for entry in entries]
    for i, label in enumerate(labels):
        if label in labels[:i]:
            raise BadInput(f"tasks[{i}].label: expected a name of its own; came {label} again.")
    loaded = [load_task(e.name, e.settings, f"tasks[{i}]") for i, e in enumerate(entries)]
    for i, task in enumerate(loaded):
        if task.score is None or not task.train:
            raise BadInput(
                f"tasks[{i}].name: expected a task whose prompts are sampled and scored by a "
                f"verifier; came {task.name}."
            )
    components = _components([task.score("", task.train[0]) for task in loaded])

    def rows(of: str) -> list[list[dict]]:
        return [
            [row | {"task": label} for row in getattr(task, of)]
            for label, task in zip(labels, loaded, strict=True)
        ]

    return Task(
        name="mixture",
        train=list(chain.from_iterable(rows("train"))),
        heldout=_in_turn(rows("heldout")),
        score=ByTask(
            {label: task.score for label, task in zip(labels, loaded, strict=True)}, components
        ),
        verdicts=all(task.verdicts for task in loaded),
        notes=tuple(
            f"{label}: {note}"
            for label, task in zip(labels, loaded, strict=True)
            for note in task.notes
        ),
        mixture=Mixing(
            dict(zip(labels, loaded, strict=True)),
            tuple(entry.weight for entry in entries),
            tuple(entry.final_weight for entry in entries),
            follow,
            floor,
        ),
    )


def _components(scores: Sequence[Score]) -> dict[str, float]:
    """Those of all tasks, with their weights; with none at all, so that the reward is one thing,
    where it is that for one of the tasks, or a component counts for one and not, or the other way,
    for another."""
    weights: dict[str, float] = {}
    alike = all(score.weights for score in scores)
    for score in scores:
        for name in score.components:
            weight = score.weights.get(name, 0.0)
            alike = alike and np.sign(weight) == np.sign(weights.setdefault(name, weight))
    return weights if alike else dict.fromkeys(weights, 0.0)


class Entry(NamedTuple):
    name: str
    label: str
    """In metrics and in the rows' `task`."""
    weight: float
    final_weight: float
    settings: dict[str, Any]


def _entry(given: Mapping[str, Any], where: str, follow: str) -> Entry:
    name = given.get("name")
    if not isinstance(name, str) or name == "mixture":
        raise BadInput(f"{where}.name: expected a task, as in {EXAMPLE}; came {name!r}.")
    weight = _positive(given.get("weight", 1.0), f"{where}.weight")
    if "final_weight" in given and follow != "schedule":
        raise BadInput(f"{where}.final_weight: expected with follow=schedule only.")
    final = _positive(given.get("final_weight", weight), f"{where}.final_weight")
    label = given.get("label", name)
    if not isinstance(label, str) or not re.fullmatch(r"[\w.-]+", label):
        raise BadInput(
            f"{where}.label: expected letters, digits, dots, hyphens and underscores; "
            f"came {label!r}."
        )
    return Entry(name, label, weight, final, {k: v for k, v in given.items() if k not in OWN})


def _positive(value: Any, where: str) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise BadInput(f"{where}: expected a number above 0; came {value!r}.")
    return float(value)


def _in_turn(tasks: list[list[dict]]) -> list[dict]:
    """One row of each in turn, so that the first ones of the list are of all tasks."""
    return [row for rows in zip_longest(*tasks) for row in rows if row is not None]
