"""The verifier of reasoning-gym's tasks: each data set's own scorer judges the answer. No JAX.

    reward = format_weight * format + (correct, or else partial_weight * score)

`format` is `blocks.format_score`; `score` is what the data set's scorer gives, from 0 to 1, and
`correct` is 1 where that is 1. Many of the scorers give something to any answer at all, or a part
to a long text that holds the right one; so a score below 1 earns nothing by itself.

Some scorers run the answer as Python. What reaches these is arithmetic or a literal by a grammar of
ours (`rlx/rewards/gym_answers.py`), and any other answer is wrong; a data set that is not known
there and whose scorer would run the answer is refused.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from model.errors import BadInput
from rlx.rewards.blocks import completion_text, format_score, last_answer
from rlx.rewards.gym_answers import objection, runs_answers
from rlx.rewards.score import RowError, Score

MAX_CHARACTERS = 20_000
"""Of an answer: some are whole boards."""


def score(
    completion: str, row: Mapping, *, format_weight: float = 0.1, partial_weight: float = 0.0
) -> Score:
    """Judge a completion (without its prompt) of a row with `dataset`, `answer` and `metadata`, and
    where the data set has such, `question` and `options` (its configuration).

    Raises RowError, a ValueError, where the row's fields are missing or there is no such data set.
    """
    entry = entry_of(row)
    text = completion_text(completion, row)
    layout = format_score(text)
    value, reason = _judge(last_answer(text), entry, row)
    correct = value >= 1.0
    components = {"format": layout, "correct": float(correct), "score": value}
    weights = {
        "format": format_weight,
        "correct": 1.0 - partial_weight,
        "score": partial_weight,
    }
    earned = 1.0 if correct else partial_weight * value
    return Score(format_weight * layout + earned, correct, components, reason, weights=weights)


# loaded before the first row, so that no row's time goes into it
score.imports = ("reasoning_gym",)


def entry_of(row: Mapping) -> dict[str, Any]:
    """The row as reasoning-gym has it; RowError names the field that is not so."""
    name, metadata = row.get("dataset"), row.get("metadata", {})
    if not isinstance(name, str) or "answer" not in row:
        raise RowError(
            "A row of the gym needs `dataset`, the name of one of reasoning-gym's, and `answer`;"
            f" the row has {sorted(map(str, row))}."
        )
    if not isinstance(metadata, Mapping):
        raise RowError(f"`metadata` must be an object, not {metadata!r:.200}.")
    return {
        "question": row.get("question", ""),
        "answer": row["answer"],
        "metadata": dict(metadata),
    }


def _judge(answer: str | None, entry: dict[str, Any], row: Mapping) -> tuple[float, str]:
    if answer is None:
        return 0.0, "there is no answer block"
    answer = answer.strip()
    if not answer:
        return 0.0, "the answer is empty"
    if len(answer) > MAX_CHARACTERS:
        return 0.0, f"the answer is longer than {MAX_CHARACTERS} characters"
    name = row["dataset"]
    if why := objection(name, answer, entry):
        return 0.0, why
    source = dataset(name, row.get("options") or {})
    try:
        value = own_score(source, answer, entry)
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(entry["answer"], str):
            # a scorer that stumbles over the right answer too has failed by itself
            own_score(source, entry["answer"], entry)
        return 0.0, f"the answer cannot be read: {type(error).__name__}: {error!s:.200}"
    return value, "correct" if value >= 1.0 else f"the scorer of {name} gives {value:.3g}"


def own_score(source: Any, answer: str, entry: Mapping) -> float:
    """What the data set's scorer gives, from 0 to 1; ValueError where that is no number."""
    value = float(source.score_answer(answer, entry))
    if not value == value:
        raise ValueError("the data set's scorer gives NaN")
    return min(max(value, 0.0), 1.0)


def dataset(name: str, options: Mapping[str, Any]) -> Any:
    """The data set, made once for each configuration. Raises RowError where it can't be."""
    return _made(name, json.dumps(options, sort_keys=True))


@lru_cache(maxsize=64)
def _made(name: str, options: str) -> Any:
    try:
        return make_dataset(name, seed=0, size=1, options=json.loads(options))
    except BadInput as error:
        raise RowError(str(error)) from error


def make_dataset(name: str, *, seed: int, size: int, options: Mapping[str, Any]) -> Any:
    """One of reasoning-gym's data sets. Raises BadInput where the package, the name or an option is
    wrong."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset  # a second to import, an extra
    except ImportError as error:
        raise BadInput(
            "The gym's data sets come from the package reasoning-gym, which is not installed:"
            " pip install 'rlx[gym]'"
        ) from error
    if name not in DATASETS or name == "composite":
        known = ", ".join(sorted(DATASETS.keys() - {"composite"}))
        raise BadInput(f"dataset: expected one of reasoning-gym's ({known}); came {name!r}.")
    for setting in ("seed", "size"):
        if setting in options:
            raise BadInput(f"options.{setting}: expected unset, since the task gives it.")
    fields = list(DATASETS[name][1].__dataclass_fields__)
    if unknown := [str(option) for option in options if option not in fields]:
        raise BadInput(
            f"options: {name} has {', '.join(f for f in fields if f not in ('seed', 'size'))}; came"
            f" {', '.join(unknown)}."
        )
    try:
        made = create_dataset(name, seed=seed, size=size, **options)
    except Exception as error:
        # a configuration is checked by assertions, and by whatever a wrong type runs into
        raise BadInput(
            f"options: {name} can't be made with {dict(options)!r:.300}: {type(error).__name__}:"
            f" {error!s:.300}"
        ) from error
    if runs_answers(name, made):
        raise BadInput(
            f"dataset: the scorer of {name}, in the version of reasoning-gym that is installed,"
            " runs answers as code, which is not known to be safe."
        )
    return made
