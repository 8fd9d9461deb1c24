"""The rows of a reasoning-gym data set, generated in a process of their own.

Some of its generators go through sets of texts, whose order is another in each Python process. A
resumed run needs the same rows, so that they are made where that order is fixed.
"""

import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from model.errors import BadInput
from rlx.rewards.gym import make_dataset, own_score
from rlx.rewards.gym_answers import EXPRESSIONS, objection

DRAWS = 20
"""So many items are drawn for each row that is wanted, before the search is given up."""

CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
CHILD += "from rlx.tasks.gym_rows import main; main()"


class Wanted(NamedTuple):
    dataset: str
    options: dict[str, Any]
    seed: int
    train_size: int
    heldout_size: int


class Drawn(NamedTuple):
    """Items as reasoning-gym has them: `question`, `answer` and `metadata`."""

    train: list[dict]
    heldout: list[dict]
    refused: list[str]
    """Why an item could not be used, one each."""


def draw(wanted: Wanted) -> Drawn:
    """Draw them in a fresh process. Raises BadInput for what can't be drawn."""
    path = [str(Path(entry).absolute()) for entry in sys.path]
    process = subprocess.run(
        [sys.executable, "-P", "-c", CHILD, json.dumps(path)],
        input=pickle.dumps(wanted),
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONHASHSEED": "0"},
        check=True,
    )
    drawn = pickle.loads(process.stdout)
    if isinstance(drawn, BadInput):
        raise drawn
    return drawn


def main() -> None:
    """The child's life: what is wanted comes on standard input, and what was drawn goes out."""
    out = os.dup(1)
    os.dup2(2, 1)  # generators print
    try:
        drawn = draw_here(pickle.load(sys.stdin.buffer))
    except BadInput as error:
        drawn = error
    with os.fdopen(out, "wb") as file:
        pickle.dump(drawn, file)


def draw_here(wanted: Wanted) -> Drawn:
    """Draw them in this process."""
    taken: set[str] = set()
    refused: list[str] = []
    # the held-out ones first: they depend on neither the seed nor the size of the others
    heldout = _draw(wanted, "heldout", wanted.heldout_size, taken, refused)
    train = _draw(wanted, f"train {wanted.seed}", wanted.train_size, taken, refused)
    return Drawn(train, heldout, refused)


def _draw(
    wanted: Wanted, purpose: str, size: int, taken: set[str], refused: list[str]
) -> list[dict]:
    """`size` items whose questions are not in `taken`, which they are added to."""
    name = wanted.dataset
    # An item's own seed is the data set's plus its number: with seeds next to each other, two runs
    # would share items. Text seeds are hashed by SHA-512, the same in every process.
    seed = random.Random(f"gym {name} {purpose}").getrandbits(31)
    random.seed(seed)
    source = make_dataset(name, seed=seed, size=DRAWS * size, options=wanted.options)
    items: list[dict] = []
    for item in _items(source, DRAWS * size, refused):
        if item["question"] in taken:
            continue
        if why := unusable(name, source, item):
            refused.append(why)
            continue
        taken.add(item["question"])
        items.append({field: item[field] for field in ("question", "answer", "metadata")})
        if len(items) == size:
            return items
    told = f" {len(refused)} could not be used, the first: {refused[0]}" if refused else ""
    raise BadInput(
        f"{name} gave {len(items)} of {size} new problems in {DRAWS * size} draws; ask for fewer,"
        f" or for other `options`.{told}"
    )


def _items(source: Any, count: int, refused: list[str]) -> Iterator[Mapping[str, Any]]:
    for number in range(count):
        try:
            yield source[number]
        except Exception as error:
            # some generators give up on an unlucky draw
            refused.append(f"problem {number}: {type(error).__name__}: {error!s:.200}")


def unusable(name: str, source: Any, item: Mapping[str, Any]) -> str:
    """Why a problem's own answer would earn nothing; "" where it earns 1."""
    answer = item["answer"]
    if answer is None:
        return ""  # boxnet and others: there are many, and the scorer tries the one that is given
    if not isinstance(answer, str) or not answer.strip():
        return f"its answer is no text but {answer!r:.100}"
    if why := objection(name, answer.strip(), item):
        return f"{why}: {answer!r:.100}"
    if name in EXPRESSIONS:
        return ""  # sympy would take minutes for all of them
    try:
        value = own_score(source, answer.strip(), item)
    except Exception as error:
        return f"its scorer fails on {answer!r:.100}: {type(error).__name__}: {error!s:.100}"
    return (
        "" if value >= 1.0 else f"its scorer gives {value:.3g} for its own answer {answer!r:.100}"
    )
