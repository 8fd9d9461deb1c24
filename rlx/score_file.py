"""Scoring a file of completions: what `score` on the command line runs."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from model.errors import BadInput
from rlx.files import check_output, write_atomically
from rlx.rewards import VERIFIERS, Score
from rlx.rewards.batch import batch_scorer
from rlx.rewards.build import bind, typed_settings
from rlx.rewards.compose import Verifier
from rlx.rewards.pool import MEMORY_BYTES, ROW_SECONDS
from rlx.rewards.score import RowError
from rlx.rewards.worker import Failure, mark
from rlx.tasks.files import read_json_lines
from rlx.yaml_text import read_overrides


def score_file(
    task_name: str,
    input: Path,
    output: Path,
    overrides: Sequence[str] = (),
    *,
    workers: int | None = None,
    seconds: float = ROW_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> dict:
    """Score each line's `completion` and write the line with its verdict added.

    A line out has the fields of its line in, and `reward`, `correct`, each component, `reason` and,
    where the verifier names any, `spans`: places of the completion and what each earned.
    Where the verifier fails, or `completion` is null as where `generate` had no text, `reward` and
    `correct` are null and `reason` tells why. Nothing is written unless every line in has what the
    verifier needs (ValueError names file and line).
    `overrides` are the verifier's settings, `task.key=value` each;
    `workers` and the limits of time a row and memory a worker are `batch_scorer`'s.

    Returns `rows`, `failures`, `solve_rate` (failed rows stay in its denominator; null where
    nothing is called right or wrong) and `mean_reward` (of the rows that could be scored; null
    where none could).
    """
    if task_name not in VERIFIERS:
        raise BadInput(f"There is no task {task_name!r}; known are {', '.join(VERIFIERS)}.")
    verifier = _bound(task_name, overrides)
    located = read_json_lines(input)
    if not located:
        raise BadInput(f"{input} holds no rows.")
    for place, row in located:
        completion = row.get("completion", "")
        if "completion" not in row or not isinstance(completion, str | None):
            raise BadInput(f"{place}: expected a text `completion`, got {row.get('completion')!r}.")
    check_output(output)
    if check_row := mark(verifier, "check_row"):
        for place, row in located:
            try:
                check_row(row)
            except RowError as error:
                raise BadInput(f"{place}: {error}") from error
    rows = [row for _, row in located]
    scorer = batch_scorer(
        verifier, rows, workers=workers, seconds=seconds, memory_bytes=memory_bytes
    )
    with contextlib.closing(scorer):
        items = [(row["completion"], i) for i, row in enumerate(rows)]
        found = iter(scorer.score_all([item for item in items if item[0] is not None]))
    nothing = Failure("verifier", "there is no completion")
    results = [nothing if text is None else next(found) for text, _ in items]
    verdicts = [
        _verdict(result, place) for (place, _), result in zip(located, results, strict=True)
    ]
    lines = [row | verdict for (_, row), verdict in zip(located, verdicts, strict=True)]
    # json escapes to ASCII: a reader that cuts lines at U+2028 then finds none
    write_atomically(output, "".join(json.dumps(line) + "\n" for line in lines))

    rewards = [verdict["reward"] for verdict in verdicts if verdict["reward"] is not None]
    right = [verdict["correct"] for verdict in verdicts]
    judged = not rewards or set(right) != {None}
    return {
        "task": task_name,
        "rows": len(verdicts),
        "failures": len(verdicts) - len(rewards),
        "solve_rate": sum(map(bool, right)) / len(right) if judged else None,
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "output": str(output),
    }


def _bound(task_name: str, overrides: Sequence[str]) -> Verifier:
    """The verifier with its settings. Raises BadInput for one that is wrong or missing."""
    entries, problems = read_overrides(overrides)
    problems += [
        f"{entry.path}: expected a setting of the verifier, as in task.format_weight=0"
        for entry in entries
        if entry.section != "task" or not entry.key
    ]
    if problems:
        raise BadInput("\n".join(problems))
    function = VERIFIERS[task_name]
    try:
        settings = typed_settings(function, {entry.key: entry.value for entry in entries})
        return bind(function, **settings)
    except BadInput as error:
        raise BadInput(f"task.{error}") from error


def _verdict(result: Score | Failure, place: str) -> dict:
    if isinstance(result, Failure):
        if result.kind == "row":
            raise BadInput(f"{place}: {result.reason}")
        reason = f"could not be scored: {result.reason}"
        return {"reward": None, "correct": None, "reason": reason}
    # the component `correct`, where there is one, says the same as the verdict
    verdict = result.components | {
        "reward": result.reward,
        "correct": result.correct,
        "reason": result.reason,
    }
    if result.spans:
        verdict["spans"] = [span._asdict() for span in result.spans]
    return verdict
