r"""The maths task: questions with one answer, read from files (GSM8K, MATH, AIME and their like).

A row has its question in `question` or `problem` and its gold answer in `answer` or, where that is
missing, `solution`; of a worked answer counts what follows its last `####` or its last `\boxed{}`
holds. The prompt asks for the form that the verifier reads, and holds no answer that would score if
repeated.
"""

import re
from functools import partial
from typing import NamedTuple

from model.errors import BadInput
from rlx.rewards import maths as verifier
from rlx.tasks.messages import check_sizes, shown
from rlx.tasks.rows import BadRows, parsed_rows, set_apart
from rlx.tasks.task import Task

FIELDS = ("question", "answer")
_UNBRACED_BOX = re.compile(r"\\boxed\s+([^\s${}]+)")


class Form(NamedTuple):
    """How the prompt asks for an answer."""

    instruction: str
    prefill: str = ""


_BOXED = Form(r"Reason step by step, and put your final answer within \boxed{}.")
FORMS: dict[str, Form] = {
    "hashes": Form(
        "Reason step by step, and end with a line that holds four hash signs (####)"
        " and then only the final answer."
    ),
    "boxed": _BOXED,
    "block": Form(
        "Write your reasoning in <think> </think> tags, and then only the final answer in"
        " <answer> </answer> tags.",
        prefill="<think>",
    ),
    "last_number": Form("Reason step by step, and end with the final answer, which is one number."),
    "any": _BOXED,
}


def load(
    *,
    seed: int,
    file: str,
    heldout_file: str = "",
    train_size: int = 0,
    heldout_size: int = 256,
    columns: dict[str, str] = {},  # noqa: B006  (never written to)
    bad_rows: BadRows = "refuse",
    extraction: verifier.Extraction = "boxed",
    format_weight: float = 0.1,
    system: str = "",
) -> Task:
    """Questions to train on and held-out ones: the first of `heldout_file`, or the last of `file`.

    `extraction` is the verifier's rule, which the prompt states. `columns` names the file's columns
    of `question` and `answer` where they are called otherwise. `system` is the system message; no
    text, no message. Nothing depends on the seed. Raises BadInput for settings or rows that cannot
    be used, with the place.
    """
    check_sizes(file, train_size, heldout_size)
    if not 0 <= format_weight < float("inf"):
        raise BadInput(f"`format_weight` must be a number of at least 0, not {format_weight}.")
    parse = partial(make_row, form=FORMS[extraction], system=system)

    def rows_of(path: str) -> tuple[list[dict], tuple[str, ...]]:
        return parsed_rows(path, parse, columns=columns, bad_rows=bad_rows, fields=FIELDS)

    rows, notes = rows_of(file)
    other, more_notes = rows_of(heldout_file) if heldout_file else (None, ())
    train, heldout = set_apart(
        rows, other, key=key, train_size=train_size, heldout_size=heldout_size, file=file
    )
    return Task(
        name="maths",
        train=train,
        heldout=heldout,
        score=partial(verifier.score, extraction=extraction, format_weight=format_weight),
        answer=partial(verifier.given_answer, extraction=extraction),
        notes=notes + more_notes,
    )


def make_row(fields: dict, *, form: Form, system: str) -> dict:
    """The row with its prompt; BadInput where the question or the gold answer cannot be used."""
    question = _first(fields, "question", "problem")
    if not isinstance(question, str) or not question.strip():
        raise BadInput(f"the question must be a text that is not empty, not {shown(question)}.")
    answer = gold_answer(fields)
    messages = [{"role": "user", "content": f"{question.strip()}\n\n{form.instruction}"}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    if form.prefill:
        messages.append({"role": "assistant", "content": form.prefill})
    return {
        "prompt": messages,
        "question": question,
        "answer": answer,
        "prefill": form.prefill,
    }


def gold_answer(fields: dict) -> str | int | float:
    """The gold answer alone, without its derivation."""
    answer = _first(fields, "answer", "solution")
    if isinstance(answer, str):
        # MATH has boxes without braces, `\boxed 5`
        answer = verifier.final_answer(_UNBRACED_BOX.sub(r"\\boxed{\1}", answer)).strip()
    elif "answer" not in fields:
        raise BadInput(f"the solution must be a text, not {shown(answer)}.")
    verifier.gold_answer({"answer": answer})
    return answer


def key(row: dict) -> str:
    """The same for two questions that differ in white space and case only."""
    return " ".join(row["question"].casefold().split())


def _first(fields: dict, *names: str) -> object:
    for name in names:
        if fields.get(name) is not None:
            return fields[name]
    expected = " or ".join(f"`{name}`" for name in names)
    raise BadInput(f"expected {expected}; the row has {', '.join(sorted(fields))}.")
