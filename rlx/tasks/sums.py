"""Sums of one step, such as 8 + 5 or 17 - 9: the easiest task for a small language model.

    What is 8 + 5?        ->  8 + 5 =        (the model goes on from here)

A completion is right where its last number is the result, so that rambling on is wrong too.
"""

import random
from functools import partial
from itertools import product

from model.errors import BadInput
from rlx.rewards import maths as verifier
from rlx.tasks.task import Task


def load(
    *,
    seed: int,
    train_size: int = 512,
    heldout_size: int = 64,
    lowest: int = 1,
    highest: int = 20,
) -> Task:
    """Distinct problems of two whole numbers from `lowest` to `highest`, no result below 0.

    Held-out problems do not depend on the seed, and none of them is trained on; a - b and a + b are
    two problems. Raises BadInput where there are not as many.
    """
    if not 0 <= lowest <= highest:
        raise BadInput(f"`highest`: expected at least `lowest`, {lowest}, not {highest}.")
    values = range(lowest, highest + 1)
    problems = [(a, "+", b) for a, b in product(values, values)]
    problems += [(a, "-", b) for a, b in product(values, values) if a >= b]
    if len(problems) < train_size + heldout_size:
        raise BadInput(
            f"There are {len(problems)} sums of numbers from {lowest} to {highest}; expected at "
            f"least `train_size` + `heldout_size` = {train_size + heldout_size}: raise `highest`."
        )
    # Text seeds are hashed by SHA-512, which is the same in every process.
    random.Random("sums heldout").shuffle(problems)
    heldout, rest = problems[:heldout_size], problems[heldout_size:]
    random.Random(f"sums train {seed}").shuffle(rest)
    score = partial(verifier.score, extraction="last_number", format_weight=0.0)
    score.bounded = True  # numbers alone are compared at once
    return Task(
        name="sums",
        train=[make_row(*problem) for problem in rest[: train_size or None]],
        heldout=[make_row(*problem) for problem in heldout],
        score=score,
        answer=partial(verifier.given_answer, extraction="last_number"),
    )


def make_row(a: int, sign: str, b: int) -> dict:
    prefill = f"{a} {sign} {b} ="
    messages = [
        {"role": "user", "content": f"What is {a} {sign} {b}?"},
        {"role": "assistant", "content": prefill},
    ]
    return {"prompt": messages, "answer": str(a + b if sign == "+" else a - b), "prefill": prefill}
