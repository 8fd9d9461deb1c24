"""The sections `task` and `algorithm` and the settings of verifiers, whose keys are read off the
signatures of a row's functions.

The keys are the keyword-only parameters of the functions of the chosen row, which hold their
defaults; only their ranges are in a table below.
"""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, create_model
from pydantic.fields import FieldInfo

from rlx.algorithms import ADVANTAGES, ALGORITHMS, REDUCTIONS, TERMS, Algorithm
from rlx.algorithms.record import hyper_parameters
from rlx.rewards import VERIFIERS
from rlx.tasks import TASKS
from rlx.traced import reads_values


def _flag(value: Any) -> Any:
    # bool("False") is True, so that text is read by its letters and never by its truth.
    words = {"true": True, "false": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


Flag = Annotated[bool, BeforeValidator(_flag)]


class Section(BaseModel):
    """Refuses unknown keys and changes of type: no text for a number, no 1.5 for an integer."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TaskSettings(Section):
    """`name` only; the chosen task's own keys come from its signature."""

    name: str = Field("countdown", description="row of the table of tasks")


class VerifierSettings(Section):
    """`name` only; the verifier's own keys come from its signature."""

    name: str = Field(description="row of the table of verifiers")


class AlgorithmSettings(Section):
    """One term in the short form, or several: two sets of keys."""


class OneTerm(AlgorithmSettings):
    """`name` only; the chosen algorithm's own keys come from its functions' signatures."""

    weight: ClassVar[float] = 1.0
    name: str = Field("dapo", description="row of the table of algorithms, or reward_model")


class TermSettings(Section):
    """One of several terms; its other keys come from its functions' signatures."""

    name: str = Field(description="row of the table of algorithms, or of the terms beside one")
    weight: float = Field(1.0, gt=0, description="factor of the term's loss in the sum")


class SeveralTerms(AlgorithmSettings):
    terms: tuple[SerializeAsAny[TermSettings], ...] = Field(
        min_length=1, description="losses that are added up; the first is the run's algorithm"
    )


# What a hyper-parameter may be, by name: one word means one thing in every algorithm and task.
# A name that is not here has its type for a limit.
RANGES: dict[str, FieldInfo] = {
    "clip_low": Field(ge=0, lt=1, description="the ratio is clipped at 1 - clip_low"),
    "clip_high": Field(ge=0, le=10, description="the ratio is clipped at 1 + clip_high"),
    "dual_clip": Field(gt=1, description="where A < 0 the loss is at most -dual_clip A"),
    "beta": Field(ge=0, le=100, description="weight of the KL to the reference; 0: none is loaded"),
    "ddof": Field(ge=0, le=1, description="1: sample standard deviation, 0: population"),
    "epsilon": Field(ge=0, le=1, description="added to the standard deviation"),
    "gamma": Field(ge=0, le=1, description="discount a token"),
    "lam": Field(ge=0, le=1, description="decay of the advantage estimate a token"),
    "cap": Field(ge=1, description="largest importance weight; below 1 it would cut all text"),
    "clip": Field(ge=0, le=10, description="clip of the log-ratio"),
    "tau_positive": Field(gt=0, description="gate's temperature where the advantage is positive"),
    "tau_negative": Field(gt=0, description="gate's temperature where the advantage is negative"),
    "label_smoothing": Field(ge=0, lt=0.5, description="share of preferences taken as wrong"),
    "margin": Field(ge=0, description="by how much a preferred score is to win, beside the data's"),
    "centring": Field(ge=0, description="weight of the term that holds a pair's scores around 0"),
    "train_size": Field(ge=0, description="rows to train on; 0: all of a file's"),
    "heldout_size": Field(ge=1, description="problems to evaluate on"),
    "format_weight": Field(ge=0, le=1, description="reward for the form of the answer alone"),
    "line_weight": Field(ge=0, le=1, description="reward for true lines of reasoning; 0: off"),
    "language": Field(description="of the prompts"),
    "give_up": Field(ge=0, le=1, description="worked examples: chance to give up after a miss"),
    "demonstrations": Field(ge=1, description="worked completions a training problem, for sft"),
    "numbers": Field(description="counts of numbers a problem may have, in equal shares"),
    "lowest": Field(description="least number of a problem"),
    "highest": Field(description="largest number of a problem"),
    "target_lowest": Field(description="least target"),
    "target_highest": Field(description="largest target"),
    "file": Field(description="file of training rows; empty, where it may be: they are generated"),
    "heldout_file": Field(description="file of held-out rows; empty: they are set apart"),
    "tasks": Field(description="of a mixture: settings of each, with its name, weight and label"),
    "follow": Field(
        description="what a mixture's weights do: stay, go to each task's final_weight over the "
        "run, or favour tasks that are half solved"
    ),
    "floor": Field(ge=0, le=1, description="least factor that a solve rate puts on a weight"),
    "judge": Field(description="settings of the verifier judge; empty: reward.verifiers score"),
    "prefill": Field(description="how the assistant's answer begins; empty: nothing"),
    "columns": Field(description="a file's column for each field that has another name there"),
    "bad_rows": Field(description="what is done about rows that can't be read; skip: left out"),
    "shuffle": Field(description="put options into another order, by the seed in training"),
    "context_characters": Field(
        ge=0, description="contexts of a prompt are cut after so many; 0: whole"
    ),
    "dataset": Field(description="name of one of reasoning-gym's data sets"),
    "options": Field(description="configuration of the data set, field by field"),
    "partial_weight": Field(ge=0, le=1, description="weight of a scorer's value below 1"),
    "extraction": Field(description="which part of a completion is the answer: docs/tasks.md"),
    "databases": Field(description="folder of the sqlite files; empty: `database` beside the file"),
    "empty_results": Field(description="train also where the gold query gives an empty result"),
    "syntax_weight": Field(ge=0, le=1, description="reward for a query that parses"),
    "execution_weight": Field(ge=0, le=1, description="reward for a query that runs"),
    "column_order": Field(description="columns must stand in the gold query's order"),
    "tolerance": Field(ge=0, lt=1, description="relative error that a float may have"),
    "query_seconds": Field(gt=0, le=600, description="time limit of a query"),
    "result_rows": Field(ge=1, description="most rows of a result"),
    "system": Field(description="put first where a row has no system message; empty: nothing"),
}
# Of pairs, where beta is no weight: 1 / beta stands in a loss, and at 0 nothing would be learnt.
PAIR_RANGES = RANGES | {
    "beta": Field(gt=0, le=100, description="scale of log pi / pi_ref; larger: nearer to pi_ref"),
}

# Given by the caller: the run's seed to a task, what loads one to a mixture of them, and
# `sampling.max_new_tokens` to a reduction.
FILLED = frozenset({"seed", "budget", "load_task"})
# Keys of a section that say which functions there are, and are no function's own.
CHOOSING = frozenset({"name", "weight", "advantage", "reduction"})


def short_names() -> list[str]:
    """The rows that a run may have for its one term."""
    return [*ALGORITHMS, *(name for name, row in TERMS.items() if row.source != "rollouts")]


def term_names() -> list[str]:
    """The rows that may stand among several terms: all but the critic's own."""
    return [name for name in (*ALGORITHMS, *TERMS) if name != "value"]


def choices(name: str) -> dict[str, dict[str, Callable]]:
    """What of a row can be replaced, and by which functions."""
    row = (ALGORITHMS | TERMS)[name]
    if row.source != "rollouts":
        return {}
    advantage = {} if row.advantages is None else {"advantage": ADVANTAGES}
    return advantage | {"reduction": REDUCTIONS}


def chosen_row(name: str, advantage: str = "", reduction: str = "") -> Algorithm:
    """The row, with another advantage or reduction where one is named. Raises KeyError where a
    table has no such row."""
    row = (ALGORITHMS | TERMS)[name]
    if advantage:
        estimate = ADVANTAGES[advantage]
        row = row._replace(advantages=estimate, critic=reads_values(estimate))
    return row._replace(weights=REDUCTIONS[reduction]) if reduction else row


def model_of(
    base: type[Section], name: str, advantage: str = "", reduction: str = ""
) -> type[Section]:
    """Return the type of a section `OneTerm`, `TermSettings`, `TaskSettings` or `VerifierSettings`
    where row `name` is chosen, with these functions in the place of its own.

    Raises KeyError where a table has no such row.
    """
    if base is TaskSettings:
        return _built(base, name, (TASKS[name],), (), "task")
    if base is VerifierSettings:
        return _built(base, name, (VERIFIERS[name],), (), "verifier")
    row = chosen_row(name, advantage, reduction)
    return _built(base, name, row.functions(), tuple(choices(name)), row.source)


@functools.cache
def _built(
    base: type[Section],
    name: str,
    functions: tuple[Callable, ...],
    replaceable: tuple[str, ...],
    source: str,
) -> type[Section]:
    about = base.model_fields["name"].description
    fields: dict[str, Any] = {"name": (Literal[name], Field(name, description=about))}
    for key in replaceable:
        about = Field("", description="row of its table; empty: the algorithm's own")
        fields[key] = (Literal["", *choices(name)[key]], about)
    ranges = PAIR_RANGES if source == "pairs" else RANGES
    for function in functions:
        for key, parameter in hyper_parameters(function).items():
            default = parameter.default
            if key in FILLED and source != "verifier":
                continue
            if key in CHOOSING:
                raise TypeError(f"{name} calls a hyper-parameter `{key}`, which is a section's key")
            if default is inspect.Parameter.empty:
                default = ...
            if key in fields and fields[key][1] != default:
                raise TypeError(
                    f"two functions of {name} have different defaults for `{key}`: "
                    f"expected one, came {fields[key][1]!r} and {default!r}"
                )
            kind = Flag if parameter.annotation is bool else parameter.annotation
            about = ranges.get(key) or Field(description=_explained(function, key))
            fields[key] = (Annotated[kind, about], default)
    return create_model(f"{base.__name__}_{name}", __base__=base, **fields)


def _explained(function: Callable, key: str) -> str:
    """Return the first sentence of the docstring that speaks of the parameter, or its name."""
    text = " ".join((inspect.getdoc(function) or "").split())
    about = [s for s in re.split(r"(?<=[.:]) ", text) if f"`{key}`" in s]
    return about[0].rstrip(".:") if about else key.replace("_", " ")


def hyper(section: Section, function: Callable | None = None) -> dict[str, Any]:
    """Return the hyper-parameters of a term or of `task`, or those that `function` takes.

    What the caller fills (`seed`, `budget`) is not among them.
    """
    values = {key: value for key, value in section if key not in CHOOSING}
    if function is None:
        return values
    return {key: values[key] for key in hyper_parameters(function) if key in values}


class ChosenTerm(NamedTuple):
    """One of the losses that are added up."""

    name: str
    row: Algorithm
    """With the chosen advantage and reduction; hyper-parameters not bound."""
    hyper: dict[str, Any]
    weight: float


def chosen_term(section: OneTerm | TermSettings) -> ChosenTerm:
    """Return the section's term, with the functions that it chooses."""
    replaced = {key: value for key, value in section if key in choices(section.name)}
    row = chosen_row(section.name, **replaced)
    return ChosenTerm(section.name, row, hyper(section), section.weight)
