"""The PubMedQA task: does an abstract, without its conclusion, answer a question yes, no or maybe?

https://arxiv.org/abs/1909.06146. Rows come from the authors' own file (an object of records by
PMID), or from any file with one row an object. The fields, and other names that they may have:

- `question` (`QUESTION`);
- `contexts` (`CONTEXTS`), a list of texts or one text; or `context` with `contexts` in it;
- `answer` (`final_decision`): yes, no or maybe;
- `id` (`pubid`, `pmid`), only where a file of ids says which rows are held out.

`heldout_file` has rows, or is the authors' `test_ground_truth.json`, an object of answers by PMID:
those rows of `file` are then held out.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from model.errors import BadInput
from rlx.rewards import pubmedqa as verifier
from rlx.rewards.labels import folded
from rlx.tasks.choice import thinking_prompt
from rlx.tasks.formats import read_json, suffix_of
from rlx.tasks.rows import BadRows, parsed_rows, renamed, set_apart, used
from rlx.tasks.task import Task

# Repeated by a completion, it names all three and so answers nothing.
INSTRUCTION = (
    "Write your reasoning in <think> </think> tags, and then in <answer> </answer> tags only one"
    " word: yes, no or maybe."
)
NAMES = {
    "question": ("question", "QUESTION"),
    "contexts": ("contexts", "CONTEXTS", "context"),
    "answer": ("answer", "final_decision"),
    "id": ("id", "pubid", "pmid"),
}


class Problem(NamedTuple):
    question: str
    contexts: list[str]
    answer: str
    id: str
    """The PMID; "" where it is not known."""


def load(
    *,
    seed: int,
    file: str,
    heldout_file: str = "",
    train_size: int = 0,
    heldout_size: int = 500,
    context_characters: int = 0,
    columns: dict[str, str] = {},  # noqa: B006  (never written to)
    bad_rows: BadRows = "refuse",
    format_weight: float = 0.1,
) -> Task:
    """Questions with their abstracts to train on and held-out ones, and the verifier.

    `heldout_size` counts questions: the first that `heldout_file` names, or the last of `file`.
    `context_characters` cuts the contexts of a prompt after so many; 0: they stay whole.
    Nothing depends on the seed. Evaluation tells the recall of each of the three answers.

    Raises BadInput for a row that cannot be used, with its place.
    """
    if context_characters < 0:
        raise BadInput(f"`context_characters` must be at least 0, not {context_characters}.")
    source, notes = read_problems(file, columns, bad_rows)
    other = None
    if heldout_file:
        if answers := named_answers(heldout_file):
            other = by_id(source, answers, file, heldout_file)
        else:
            other, more = read_problems(heldout_file, columns, bad_rows)
            notes += more
    train, heldout = set_apart(
        source, other, key=key, train_size=train_size, heldout_size=heldout_size, file=file
    )
    return Task(
        name="pubmedqa",
        train=[make_row(problem, context_characters) for problem in train],
        heldout=[make_row(problem, context_characters) for problem in heldout],
        score=partial(verifier.score, format_weight=format_weight),
        answer=verifier.answer,
        label=verifier.label,
        notes=notes,
    )


def make_row(problem: Problem, context_characters: int) -> dict:
    """The problem with its prompt."""
    contexts = "\n\n".join(problem.contexts)
    if 0 < context_characters < len(contexts):
        cut = contexts[:context_characters]
        if not (contexts[context_characters].isspace() or cut[-1].isspace()):
            cut = cut.rsplit(None, 1)[0]  # not within a word
        contexts = cut.rstrip() + " ..."
    return thinking_prompt(f"{contexts}\n\nQuestion: {problem.question}\n\n{INSTRUCTION}") | {
        "answer": problem.answer
    }


def key(problem: Problem) -> str:
    """What two statements of the same problem have in common."""
    return folded(problem.question)


# ---- reading ----------------------------------------------------------------------------------


def read_problems(
    path: str, columns: Mapping[str, str], bad_rows: BadRows
) -> tuple[list[Problem], tuple[str, ...]]:
    """The questions of a file or folder, and what was left out."""
    records = keyed(path)
    if records is None:
        return parsed_rows(path, parse, columns=columns, bad_rows=bad_rows, fields=list(NAMES))
    found = [
        (
            f"{path}, record {id}",
            renamed(record, columns) | {"id": id}
            if isinstance(record, dict)
            else BadInput("expected an object."),
        )
        for id, record in records.items()
    ]
    return used(found, path, parse, bad_rows)


def keyed(path: str) -> dict[str, Any] | None:
    """The content of a JSON file that is an object with a key a record; None of any other."""
    place = Path(path).expanduser()
    if not place.is_file() or suffix_of(place) != ".json":
        return None
    content = read_json(place)
    return content if isinstance(content, dict) and "data" not in content else None


def named_answers(path: str) -> dict[str, str] | None:
    """Answers by id, where a file holds just these."""
    content = keyed(path)
    if not content or not all(isinstance(answer, str) for answer in content.values()):
        return None
    return content


def by_id(
    problems: list[Problem], answers: Mapping[str, str], file: str, heldout_file: str
) -> list[Problem]:
    """The problems with these ids; BadInput where one is missing or has another answer."""
    known = {problem.id: problem for problem in problems}
    if missing := [id for id in answers if id not in known]:
        raise BadInput(
            f"{heldout_file} names {len(missing)} of {len(answers)} ids that no row of {file} has,"
            f" such as {missing[0]}."
        )
    for id, answer in answers.items():
        if known[id].answer != answer.strip().lower():
            raise BadInput(
                f"{heldout_file}: the answer to {id} is {answer!r:.40}, and in {file} it is"
                f" {known[id].answer!r}."
            )
    return [known[id] for id in answers]


def parse(row: Mapping) -> Problem:
    """A row by any of its fields' names; BadInput where one is missing or of another kind."""
    question, contexts, answer, id = (_field(row, field) for field in NAMES)
    if isinstance(contexts, Mapping):
        contexts = contexts.get("contexts")
    if isinstance(contexts, str):
        contexts = [contexts]
    if not isinstance(question, str) or not question.strip():
        raise BadInput(f"`question` must be a text that is not empty, not {question!r:.200}.")
    if not isinstance(contexts, list) or not all(isinstance(text, str) for text in contexts):
        raise BadInput(f"`contexts` must be a text or a list of texts, not {contexts!r:.200}.")
    texts = [text.strip() for text in contexts if text.strip()]
    if not texts:
        raise BadInput("`contexts` must hold a text that is not empty.")
    gold = verifier.label({"answer": answer})
    return Problem(question.strip(), texts, gold, "" if id is None else str(id))


def _field(row: Mapping, field: str) -> Any:
    return next((row[name] for name in NAMES[field] if row.get(name) is not None), None)
