"""Several verifiers as one: a weighted sum, or stages of which each must be passed. No JAX.

    sum:     reward = sum_i weight_i * reward_i
    stages:  the same over the stages that are reached; one is reached where all before it passed

A part's components are named `name/component`, and its own reward before its weight `name/reward`.
Of stages, `reached/name` is 1 or 0, and the components of a stage that is not reached are 0. A
part that fails fails the whole row: a sum without it would be a silent zero.

A verifier is `verifier(completion, row) -> Score`. It may have an attribute `many`, a function of a
list of (completion, row) that gives a list of scores and exceptions, which is then called with all
rows at once: a judge asks for many verdicts at a time. What is composed of such a part has it too;
it is `bounded` where all its parts are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from model.errors import BadInput
from rlx.rewards.score import RowError, Score
from rlx.rewards.worker import many_of, mark

Verifier = Callable[[str, Mapping], Score]
Rows = Sequence[tuple[str, Mapping]]
Results = list[Score | Exception]


class Part(NamedTuple):
    name: str
    weight: float
    verifier: Verifier
    threshold: float | None = None
    """Of stages: the reward, before its weight, that passes. None: its verdict must be right."""


def here(verifier: Verifier, rows: Rows) -> Results:
    """The score of each row, or its exception, in this process and without a time limit."""
    if many := many_of(verifier):
        return list(many(rows))
    results: Results = []
    for completion, row in rows:
        try:
            results.append(verifier(completion, row))
        except Exception as error:
            results.append(error)
    return results


class Composed:
    """Parts with names of their own; `weighted` and `staged` say how they make one score."""

    def __init__(self, parts: Sequence[Part]):
        if not parts:
            raise BadInput("expected at least one verifier; came none.")
        for i, part in enumerate(parts):
            if part.name in [other.name for other in parts[:i]]:
                raise BadInput(
                    f"two verifiers are called {part.name}; give one of them a `label` of its own."
                )
            if not math.isfinite(part.weight):
                raise BadInput(f"{part.name}: expected a finite weight; came {part.weight}.")
        self.parts = tuple(parts)
        verifiers = [part.verifier for part in parts]
        if any(many_of(verifier) for verifier in verifiers):
            self.many = self._many
        self.bounded = all(mark(verifier, "bounded", False) for verifier in verifiers)
        self.imports = tuple(
            dict.fromkeys(module for v in verifiers for module in mark(v, "imports", ()))
        )

    def __call__(self, completion: str, row: Mapping) -> Score:
        result = self._many([(completion, row)])[0]
        if isinstance(result, Exception):
            raise result
        return result

    def _many(self, rows: Rows, *, each: Callable[[Verifier, Rows], Results] = here) -> Results:
        """Scores of many rows. `each` scores those of a part: by a pool's workers, with time
        limits, where there is one."""
        found: list[dict[str, Score]] = [{} for _ in rows]
        failed: dict[int, Exception] = {}
        reached = list(range(len(rows)))
        for part in self.parts:
            asked = [rows[i] for i in reached]
            results = each(part.verifier, asked)
            for i, result in zip(reached, results, strict=True):
                if isinstance(result, Exception):
                    failed[i] = result
                else:
                    found[i][part.name] = result
            reached = [i for i in reached if i not in failed and self._goes_on(part, found[i])]
        return [
            failed[i] if i in failed else self._joined_or_error(found[i], row)
            for i, (_, row) in enumerate(rows)
        ]

    def _goes_on(self, part: Part, scores: dict[str, Score]) -> bool:
        raise NotImplementedError

    def _joined_or_error(self, scores: dict[str, Score], row: Mapping) -> Score | Exception:
        try:
            return self._joined(scores, row)
        except Exception as error:
            return error

    def _joined(self, scores: dict[str, Score], row: Mapping) -> Score:
        raise NotImplementedError

    def _sum(self, scores: dict[str, Score]) -> Score:
        """The weighted sum of the parts that there are."""
        weights = {part.name: part.weight for part in self.parts}
        verdicts = [score.correct for score in scores.values() if score.correct is not None]
        return Score(
            reward=sum(weights[name] * score.reward for name, score in scores.items()),
            correct=all(verdicts) if verdicts else None,
            components={
                f"{name}/{key}": value
                for name, score in scores.items()
                for key, value in ({"reward": score.reward} | score.components).items()
            },
            reason="; ".join(f"{name}: {score.reason}" for name, score in scores.items()),
            spans=tuple(
                span._replace(score=weights[name] * span.score)
                for name, score in scores.items()
                for span in score.spans
            ),
            weights={f"{part.name}/reward": part.weight for part in self.parts},
        )


class Weighted(Composed):
    def _goes_on(self, part: Part, scores: dict[str, Score]) -> bool:
        return True

    def _joined(self, scores: dict[str, Score], row: Mapping) -> Score:
        return self._sum(scores)


class Staged(Composed):
    def __init__(self, parts: Sequence[Part]):
        super().__init__(parts)
        self._empty: dict[str | None, dict[str, Score]] = {}
        """By the row's task, where there are several."""

    def _goes_on(self, part: Part, scores: dict[str, Score]) -> bool:
        return passes(part, scores[part.name])

    def _joined(self, scores: dict[str, Score], row: Mapping) -> Score:
        empty = self._of_nothing(row)
        joined = self._sum(scores)
        left_out = [part.name for part in self.parts if part.name not in scores]
        zeros = {
            f"{name}/{key}": 0.0 for name in left_out for key in ("reward", *empty[name].components)
        }
        reached = {f"reached/{part.name}": float(part.name in scores) for part in self.parts}
        # What is not reached is not right, where it calls anything right at all.
        missed = any(empty[name].correct is not None for name in left_out)
        return joined._replace(
            components=joined.components | zeros | reached,
            correct=False if missed else joined.correct,
            reason=joined.reason + "".join(f"; {name}: not reached" for name in left_out),
        )

    def _of_nothing(self, row: Mapping) -> dict[str, Score]:
        """Each stage's score of an empty completion: which components it has, and whether a
        verdict. Raises RowError where a stage could never be passed."""
        task = row.get("task")
        if task not in self._empty:
            empty = {part.name: part.verifier("", row) for part in self.parts}
            for part in self.parts[:-1]:
                if part.threshold is None and empty[part.name].correct is None:
                    of = f" of {task}" if task else ""
                    raise RowError(
                        f"The stage {part.name} calls nothing{of} right or wrong, so that no "
                        "completion would pass it: give it a `threshold`, the reward that passes."
                    )
            self._empty[task] = empty
        return self._empty[task]


def passes(part: Part, score: Score) -> bool:
    if part.threshold is None:
        return score.correct is True
    return score.reward >= part.threshold


def weighted(parts: Sequence[Part]) -> Weighted:
    """The weighted sum of the parts' rewards; right where every verdict that exists is."""
    return Weighted(parts)


def staged(parts: Sequence[Part]) -> Staged:
    """Stages in order; right where every verdict of every stage is, so that all are reached."""
    return Staged(parts)


COMBINE: dict[str, Callable[[Sequence[Part]], Composed]] = {"sum": weighted, "stages": staged}
