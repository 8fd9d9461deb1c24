"""The gym task: any data set of reasoning-gym by name, generated, with its own scorer.

https://github.com/open-thought/reasoning-gym, https://arxiv.org/abs/2505.24760. The package is the
extra `gym`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from model.errors import BadInput
from rlx.rewards import gym as verifier
from rlx.tasks.choice import thinking_prompt
from rlx.tasks.gym_rows import Wanted, draw
from rlx.tasks.task import Task

INSTRUCTION = (
    "Write your reasoning in <think> </think> tags, and then only the final answer, in the form"
    " that is asked for, in <answer> </answer> tags."
)


def load(
    *,
    seed: int,
    dataset: str,
    options: dict[str, Any] = {},  # noqa: B006  (never written to)
    train_size: int = 1024,
    heldout_size: int = 128,
    format_weight: float = 0.1,
    partial_weight: float = 0.0,
) -> Task:
    """Generated problems to train on and held-out ones, with one prompt each and the verifier.

    `dataset` is the name of one of reasoning-gym's data sets and `options` are its configuration's
    fields. No question is asked twice, and no held-out one is trained on; the held-out ones depend
    on neither the seed nor `train_size`. A problem whose own answer its scorer does not take for
    right is left out. `partial_weight` is the weight of the scorer's value where that is below 1.

    Raises BadInput where the package is not installed, for a name or an option that there is not,
    and where the data set has too few different problems.
    """
    for name, size in (("train_size", train_size), ("heldout_size", heldout_size)):
        if size < 1:
            raise BadInput(f"`{name}` must be at least 1, not {size}.")
    drawn = draw(Wanted(dataset, dict(options), seed, train_size, heldout_size))
    notes = ()
    if drawn.refused:
        count = len(drawn.train) + len(drawn.heldout) + len(drawn.refused)
        notes = (
            f"{len(drawn.refused)} of {count} problems of {dataset} left out, the first:"
            f" {drawn.refused[0]}",
        )
    weights = {"format_weight": format_weight, "partial_weight": partial_weight}
    return Task(
        name="gym",
        train=[make_row(dataset, options, item) for item in drawn.train],
        heldout=[make_row(dataset, options, item) for item in drawn.heldout],
        score=partial(verifier.score, **weights),
        notes=notes,
    )


def make_row(name: str, options: Mapping[str, Any], item: Mapping[str, Any]) -> dict:
    """The problem with its prompt and what the verifier needs."""
    row = thinking_prompt(f"{item['question']}\n\n{INSTRUCTION}")
    return row | {"dataset": name, "options": dict(options)} | item
