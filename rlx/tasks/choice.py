"""The task of multiple choice: questions with lettered options, read from files.

A row has `question`, its options and `answer`:

- `options` is a list of texts, texts by letter, or such a list or object as JSON text; or the row
  has a field for each letter, `A`, `B` and so on;
- `answer` is a letter, the text of an option or an index from 0. What could be read as two
  different ones is refused, unless `answer_idx`, a letter or an index, decides between them.

MMLU's own files have no header: question, options, letter. Such a file is known by its first
record, which ends in a letter and holds neither `question` nor `answer`. A name with `*` stands for
all files that match, as `mmlu/*_test.csv`.
"""

import json
import random
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import Any, NamedTuple

from model.errors import BadInput
from rlx.rewards import choice as verifier
from rlx.rewards.labels import folded
from rlx.tasks.files import split_of
from rlx.tasks.formats import Found, read_csv_records, suffix_of
from rlx.tasks.rows import BadRows, parsed_rows, set_apart, used
from rlx.tasks.task import Task

SYSTEM = (
    "You are a helpful assistant. You think the problem through first"
    " and then give the user the answer."
)
PREFILL = "<think>"
# The example is no option's letter: who repeats the prompt has answered nothing.
INSTRUCTION = (
    "Write your reasoning in <think> </think> tags, and then only the letter of the right option"
    " in <answer> </answer> tags, as in <answer>X</answer>."
)
FIELDS = ("question", "options", "answer", "answer_idx", *ascii_uppercase)

# options that speak of others by letter or place
_POINTS_ELSEWHERE = re.compile(
    r"\b(?i:(?:all|none|both|neither|either|any|each|two|some) of (?:the )?(?:above|following|these"
    r"|those|them|options|choices|answers|preceding|others?)|(?:the|as) (?:above|foregoing)"
    r"|all answers)\b"
    r"|\b[A-Z] ?(?:,|&|(?i:and|or|nor)\b) ?[A-Z]\b"
    r"|\((?i:[a-z])\) ?(?:,|&|(?i:and|or|nor)\b) ?\((?i:[a-z])\)"
    r"|\b(?i:options?|choices?|answers?) \(?[A-Z]\b"
)


class Problem(NamedTuple):
    question: str
    options: dict[str, str]
    answer: str
    """A letter."""


def load(
    *,
    seed: int,
    file: str,
    heldout_file: str = "",
    train_size: int = 0,
    heldout_size: int = 256,
    shuffle: bool = False,
    columns: dict[str, str] = {},  # noqa: B006  (never written to)
    bad_rows: BadRows = "refuse",
    format_weight: float = 0.1,
) -> Task:
    """Questions to train on and held-out ones, with one prompt each and the verifier.

    `heldout_size` counts questions: the first of `heldout_file`, or the last of `file`. A question
    that is held out is not trained on, in whatever order its options stand.

    `shuffle` puts the options of each question into an order of its own: of training rows by the
    seed, of held-out ones always the same. Where an option speaks of others (`all of the above`)
    they keep their order.

    Raises BadInput for a row that cannot be used, with its place.
    """
    read = partial(read_problems, columns=columns, bad_rows=bad_rows)
    source, notes = read(file)
    other, more = read(heldout_file) if heldout_file else (None, ())
    train, heldout = set_apart(
        source, other, key=key, train_size=train_size, heldout_size=heldout_size, file=file
    )
    notes += more
    if shuffle:
        kept = sum(points_elsewhere(problem) for problem in train + heldout)
        if kept:
            notes += (
                f"{kept} of {len(train) + len(heldout)} questions kept the order of their options,"
                " which speak of one another.",
            )
        train = [shuffled(problem, seed) for problem in train]
        # the same for every run, so that all are measured on the same prompts
        heldout = [shuffled(problem, 0) for problem in heldout]
    return Task(
        name="choice",
        train=[make_row(problem) for problem in train],
        heldout=[make_row(problem) for problem in heldout],
        score=partial(verifier.score, format_weight=format_weight),
        answer=verifier.answer,
        notes=notes,
    )


def make_row(problem: Problem) -> dict:
    """The problem with its prompt."""
    options = "\n".join(f"{letter}. {text}" for letter, text in problem.options.items())
    row = thinking_prompt(f"{problem.question}\n\n{options}\n\n{INSTRUCTION}")
    # `answer_idx` says that the answer is meant as a letter, also where an option's text is one
    answer = {"answer": problem.answer, "answer_idx": problem.answer}
    return row | {"options": problem.options} | answer


def thinking_prompt(request: str) -> dict:
    """A row's `prompt`, chat messages that end in an opened think block, and its `prefill`."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": request},
        {"role": "assistant", "content": PREFILL},
    ]
    return {"prompt": messages, "prefill": PREFILL}


def key(problem: Problem) -> tuple:
    """What two statements of the same problem have in common."""
    return folded(problem.question), tuple(sorted(map(folded, problem.options.values())))


def shuffled(problem: Problem, seed: int) -> Problem:
    """The options in an order drawn for this question, at the same letters."""
    if points_elsewhere(problem):
        return problem
    letters = list(problem.options)
    # text seeds are hashed by SHA-512, which is the same in every process
    order = random.Random(f"choice {seed} {problem.question}").sample(letters, len(letters))
    options = {new: problem.options[old] for new, old in zip(letters, order, strict=True)}
    return problem._replace(options=options, answer=letters[order.index(problem.answer)])


def points_elsewhere(problem: Problem) -> bool:
    """Whether an option would mean something else in another order."""
    return any(
        _POINTS_ELSEWHERE.search(text) or (len(text) == 1 and text.isalpha())
        for text in problem.options.values()
    )


# ---- reading ----------------------------------------------------------------------------------


def read_problems(
    path: str, *, columns: Mapping[str, str], bad_rows: BadRows
) -> tuple[list[Problem], tuple[str, ...]]:
    """The questions of a file, a folder or all files that a pattern matches, and what was left
    out."""
    problems, notes = [], ()
    for source in _matching(path):
        if found := _without_header(source, columns):
            more, told = used(found, source, parse, bad_rows)
        else:
            more, told = parsed_rows(
                source, parse, columns=columns, bad_rows=bad_rows, fields=FIELDS
            )
        problems += more
        notes += told
    return problems, notes


def parse(row: Mapping) -> Problem:
    """A row in any of the forms; BadInput where it is none."""
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise BadInput(f"`question` must be a text that is not empty, not {question!r:.200}.")
    if row.get("answer") is None and row.get("answer_idx") is None:
        raise BadInput(f"expected `answer`; the row has {', '.join(map(str, row))}.")
    options = verifier.options_of(_options(row))
    answer, index = row.get("answer"), row.get("answer_idx")
    letter = verifier.right_letter(options, index if answer is None else answer, index)
    return Problem(question.strip(), options, letter)


def _options(row: Mapping) -> Any:
    given = row.get("options")
    if given is None:
        return {
            letter: row[letter] for letter in ascii_uppercase if row.get(letter) not in (None, "")
        } or _refuse_options(row)
    if isinstance(given, str):
        try:
            return json.loads(given)
        except ValueError as error:
            raise BadInput(
                f"`options` as a text must be a JSON list or object, not {given!r:.200}."
            ) from error
    return given


def _refuse_options(row: Mapping) -> None:
    raise BadInput(
        "expected `options`, or a field for each letter (`A`, `B` and so on); the row has"
        f" {', '.join(map(str, row))}."
    )


def _matching(path: str) -> list[str]:
    if not path:
        raise BadInput("`file` must name the rows to read; it is empty.")
    if "*" not in path:
        return [path]
    pattern = Path(path).expanduser()
    root = Path(pattern.anchor)
    files = sorted(map(str, root.glob(str(pattern.relative_to(root)))))
    if not files:
        raise BadInput(f"No file matches {path}.")
    return files


def _without_header(path: str, columns: Mapping[str, str]) -> list[Found]:
    """The rows of a CSV file in MMLU's form, or of a folder of those; none of another form."""
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if suffix_of(file))
        # a folder of several splits is refused where files are read
        if len({split_of(file.relative_to(place)) for file in files}) > 1:
            return []
    else:
        files = [place] if place.is_file() else []
    if not files or any(suffix_of(file) != ".csv" for file in files):
        return []
    records = [record for file in files for record in read_csv_records(file)]
    if not records or not _is_record(records[0][1], {"question", "answer", *columns.values()}):
        return []
    if columns:
        raise BadInput(f"columns: {path} has no header, so that its columns have no names.")
    width = len(records[0][1])
    wanted = BadInput(f"expected {width} fields: question, {width - 2} options and a letter.")
    return [
        (
            where,
            {"question": record[0], "options": record[1:-1], "answer": record[-1]}
            if len(record) == width
            else wanted,
        )
        for where, record in records
    ]


def _is_record(cells: list[str], names: set[str]) -> bool:
    letters = ascii_uppercase[: len(cells) - 2]
    header = names & {cell.strip().lower() for cell in cells}
    return len(cells) >= 4 and not header and cells[-1].strip() in tuple(letters)
