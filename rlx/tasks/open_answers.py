"""The task of open answers: questions of which no rule decides whether they are well answered.

A row has `question` (text), and may have `reference` (an answer that is known to be good) and
`rubric` (what counts in this answer); only a judge is shown those two.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from model.errors import BadInput
from rlx.rewards import judge as verifier
from rlx.rewards.build import bind, typed_settings
from rlx.tasks.messages import shown
from rlx.tasks.rows import BadRows, parsed_rows, set_apart
from rlx.tasks.task import Task

FIELDS = ("question", "reference", "rubric")


def load(
    *,
    seed: int,
    file: str,
    heldout_file: str = "",
    train_size: int = 0,
    heldout_size: int = 64,
    columns: dict[str, str] = {},  # noqa: B006
    bad_rows: BadRows = "refuse",
    system: str = "",
    prefill: str = "",
    judge: dict[str, Any] = {},  # noqa: B006
) -> Task:
    """Questions to train on and held-out ones; two rows with one question are the same problem.

    `judge` has the settings of the verifier `judge`; empty: the task has no verifier of its own,
    and the recipe's reward says what scores. `prefill` begins the assistant's answer. Nothing
    depends on the seed. Raises BadInput, with file and line for a row that cannot be used.
    """
    score = None
    if judge:
        try:
            score = bind(verifier.score, **typed_settings(verifier.score, judge))
        except BadInput as error:
            raise BadInput(f"judge: {error}") from error
    parse = partial(make_row, system=system, prefill=prefill)

    def rows_of(path: str) -> tuple[list[dict], tuple[str, ...]]:
        return parsed_rows(path, parse, columns=columns, bad_rows=bad_rows, fields=FIELDS)

    if not file:
        raise BadInput("`file` must name the rows to read; it is empty.")
    rows, notes = rows_of(file)
    others, more_notes = rows_of(heldout_file) if heldout_file else (None, ())
    train, heldout = set_apart(
        rows,
        others,
        key=lambda row: " ".join(row["question"].split()),
        train_size=train_size,
        heldout_size=heldout_size,
        file=file,
    )
    return Task(
        name="open",
        train=train,
        heldout=heldout,
        score=score,
        verdicts=False,
        notes=notes + more_notes,
    )


def make_row(row: Mapping, system: str, prefill: str) -> dict:
    """The prompt, and what a judge is shown. Raises BadInput for a field that is not as it should
    be."""
    for field in FIELDS:
        value = row.get(field)
        if value is None and field != "question":
            continue
        if not isinstance(value, str) or not value.strip():
            raise BadInput(f"expected a text `{field}`; came {shown(value)}.")
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": prefill},
    ]
    return {
        "prompt": [message for message in messages if message["content"]],
        "prefill": prefill,
        **{field: row[field] for field in FIELDS if row.get(field) is not None},
    }
