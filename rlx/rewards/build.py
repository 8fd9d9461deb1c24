"""From a recipe's settings to its verifier. No JAX.

reward.combine: stages
reward.verifiers:
  - {name: task}
  - {name: judge, weight: 0.3, base_url: "http://localhost:8000/v1", judge_model: M}
"""

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model

from model.errors import BadInput
from rlx.rewards.compose import COMBINE, Composed, Part, Verifier
from rlx.rewards.own import OwnVerifier, is_own
from rlx.rewards.score import Score

OWN_KEYS = ("name", "weight", "threshold", "label")
"""Keys of an entry that are not its verifier's settings."""
EXAMPLE = "[{name: task}, {name: judge, weight: 0.3, base_url: U, judge_model: M}]"


def bind(function: Callable[..., Score], /, **settings: Any) -> Verifier:
    """The verifier with its settings, and with its `many` where it has one.

    `function.check(**settings)`, where there is one, raises BadInput for what can't work.
    """
    if check := getattr(function, "check", None):
        check(**settings)
    verifier = partial(function, **settings)
    if many := getattr(function, "many", None):
        verifier.many = partial(many, **settings)
    return verifier


def build(
    entries: Sequence[Any],
    combine: str,
    table: Mapping[str, Callable[..., Score]],
    default: Verifier | None,
) -> Composed:
    """The verifier that a recipe describes, each entry with `name`, `weight` and its own settings.

    A name is a row of `table`, `task` for the task's own (`default`, which has its settings), or a
    verifier of the user's. `label` is the name of its components, `threshold` what passes a stage.
    Raises BadInput where an entry is wrong, with its place and what is known.
    """
    if combine not in COMBINE:
        raise BadInput(f"combine: expected one of {', '.join(COMBINE)}; came {combine!r}.")
    parts = []
    for i, entry in enumerate(entries):
        try:
            parts.append(_part(entry, combine, table, default))
        except BadInput as error:
            raise BadInput(f"verifiers[{i}]: {error}") from error
    try:
        return COMBINE[combine](parts)
    except BadInput as error:
        raise BadInput(f"verifiers: {error}") from error


def _part(
    entry: Any,
    combine: str,
    table: Mapping[str, Callable[..., Score]],
    default: Verifier | None,
) -> Part:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise BadInput(f"expected settings with a `name`, as in {EXAMPLE}; came {entry!r}.")
    name = entry["name"]
    label = entry.get("label", name.rpartition(":")[2])
    if not isinstance(label, str) or not label or "/" in label or label == "reached":
        raise BadInput(f"label: expected a name without `/` and not `reached`; came {label!r}.")
    weight = _number(entry, "weight", 1.0)
    threshold = _number(entry, "threshold", 0.0) if entry.get("threshold") is not None else None
    if threshold is not None and combine != "stages":
        raise BadInput(
            "threshold: it would be ignored: there are stages with combine: stages only."
        )
    settings = {str(key): value for key, value in entry.items() if key not in OWN_KEYS}
    if name == "task":
        if default is None:
            raise BadInput("name: the task has no verifier of its own.")
        if settings:
            raise BadInput(
                f"{', '.join(settings)}: the task's own verifier is set in the section `task`."
            )
        return Part(label, weight, default, threshold)
    if name not in table and not is_own(name):
        raise BadInput(
            f"name: expected task, {', '.join(table)}, or one of your own as module:function or"
            f" file.py:function; came {name!r}."
        )
    function = table[name] if name in table else OwnVerifier(name)
    return Part(label, weight, bind(function, **typed_settings(function, settings)), threshold)


def typed_settings(function: Callable[..., Score], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, each of the type that the function's keyword of that name has.

    Raises BadInput for one that is unknown, missing or of another type.
    """
    known = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    if unknown := [name for name in settings if name not in known]:
        raise BadInput(
            f"{', '.join(unknown)}: there is no such setting; known are"
            f" {', '.join((*OWN_KEYS, *known))}."
        )
    empty = inspect.Parameter.empty
    fields: dict[str, Any] = {
        name: (
            Any if parameter.annotation is empty else parameter.annotation,
            ... if parameter.default is empty else parameter.default,
        )
        for name, parameter in known.items()
    }
    kind = create_model("Settings", __config__=ConfigDict(extra="forbid", strict=True), **fields)
    try:
        # as JSON: a list then fills a tuple, and a number a float, with nothing else converted
        given = kind.model_validate_json(json.dumps(dict(settings), default=str))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        came = f"; came {first['input']!r}" if first["type"] != "missing" else ""
        raise BadInput(f"{place}: {first['msg']}{came}.") from error
    # only those that were given: the others' defaults stay in the signature
    return {name: getattr(given, name) for name in settings}


def _number(entry: Mapping, key: str, default: float) -> float:
    value = entry.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadInput(f"{key}: expected a finite number; came {value!r}.")
    return float(value)
