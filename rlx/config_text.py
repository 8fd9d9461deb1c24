"""A configuration in words: the table of all settings, and the formula that will run."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from rlx.algorithms import ALGORITHMS
from rlx.algorithms.record import hyper_parameters
from rlx.settings import Config, Section, hyper, model_of, offline, old_logprobs, rows
from rlx.tasks import TASKS
from rlx.yaml_text import shown

_TABLES = {"algorithm": ALGORITHMS, "task": TASKS}
_NOUNS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "array": "a list",
    "null": "nothing (null)",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def expected(schema: dict[str, Any]) -> str:
    """Return in words what a field's JSON schema allows."""
    if "anyOf" in schema:
        return " or ".join(expected(choice) for choice in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    noun = _NOUNS[schema["type"]]
    if schema["type"] == "array" and "type" in schema.get("items", {}):
        noun = f"a list, each {expected(schema['items'])}"
    if "pattern" in schema:
        noun = f"text that matches {schema['pattern']}"
    if "minLength" in schema:
        noun += " that is not empty"
    bounds = [f"{words} {schema[key]}" for key, words in _BOUNDS.items() if key in schema]
    return ", ".join([noun, *bounds])


def describe() -> str:
    """Return every setting with its type, default and meaning, for `--help`."""
    blocks = []
    for section, field in Config.model_fields.items():
        blocks.append(_table(section, field.annotation))
        names = _TABLES.get(section, ())
        blocks += [_table(section, model_of(section, name), name) for name in names]
    return "\n\n".join(blocks) + "\n"


def _table(section: str, kind: type[Section], row: str = "") -> str:
    lines = [f"{section}, where {section}.name is {row}:" if row else f"{section}:"]
    for key, schema in kind.model_json_schema().get("properties", {}).items():
        if row and key == "name":
            continue
        if key == "name" and section in _TABLES:
            schema = {**schema, "enum": list(_TABLES[section])}
        default = kind.model_fields[key]
        value = "required" if default.is_required() else shown(default.default)
        lines.append(
            f"  {section + '.' + key:<28} {expected(schema)}; default {value}\n"
            f"  {'':<28}   {schema.get('description', '')}"
        )
    return "\n".join(lines) if len(lines) > 1 else f"{lines[0]} no settings of its own"


def formula(config: Config) -> str:
    """Return the formula that will run, from the docstrings of the functions that compute it."""
    name = config.algorithm.name
    row, values, batch = ALGORITHMS[name], hyper(config.algorithm), config.batch
    lines = [f"algorithm    {name}"]
    if offline(config):
        lines.append("advantage    none: it learns from data as it stands")
    else:
        lines += _statement("advantage", row.advantages, config)
    lines += _statement("loss", row.loss, config)
    if "clip_low" in values and "clip_high" in values:
        low, high = 1 - values["clip_low"], 1 + values["clip_high"]
        lines.append(f"clip         ratio within [{low:g}, {high:g}]")
    if "beta" not in values:
        lines.append("KL           none")
    elif values["beta"] == 0:
        lines.append("KL           none (beta is 0)")
    else:
        lines.append(f"KL           beta {values['beta']:g}, where the formula has it")
    lines += _statement("reduction", row.weights, config)
    lines.append(
        f"update       {rows(config)} rows a step; epochs {batch.epochs}, mini-batches an epoch "
        f"{batch.minibatches}"
    )
    if not offline(config):
        lines += _rollout(config)
    return "\n".join(lines) + "\n"


def _statement(label: str, function: Callable, config: Config) -> list[str]:
    values = hyper(config.algorithm, function)
    if "budget" in hyper_parameters(function):
        values["budget"] = config.sampling.max_new_tokens
    while isinstance(function, functools.partial):
        function = function.func
    arguments = ", ".join(f"{key} = {shown(value)}" for key, value in values.items())
    lines = [f"{label:<12} {function.__name__}({arguments})"]
    # An algorithm's maths stands at the head of its file, a helper's in its own docstring.
    docs = [inspect.getdoc(function)]
    if label == "loss":
        docs.insert(0, inspect.getmodule(function).__doc__)
    for doc in filter(None, docs):
        lines += [f"{'':<12} {line}" for line in _mathematics(doc)]
    return lines


def _mathematics(doc: str) -> list[str]:
    """Return a docstring's first paragraph and its indented lines, which hold the equations."""
    head, _, rest = doc.partition("\n\n")
    return head.splitlines() + [line for line in rest.splitlines() if line.startswith(" ")]


def _rollout(config: Config) -> list[str]:
    rollout, sampling, batch = config.rollout, config.sampling, config.batch
    old = {
        "current": "the update's own: one update a batch, so the ratio is 1",
        "recompute": "recomputed by the training model",
        "sampler": "the sampler's own",
    }[old_logprobs(config)]
    lines = [
        f"old logprobs {old}",
        f"sampling     {batch.prompts} prompts, {batch.samples} samples each, at temperature "
        f"{sampling.temperature:g}, at most {sampling.max_new_tokens} tokens",
    ]
    if rollout.dynamic_sampling:
        lines.append(
            "groups       those whose samples are all correct or all wrong are drawn again, in "
            f"{rollout.max_rounds} rounds at most"
        )
    if rollout.overlong_buffer:
        start = sampling.max_new_tokens - rollout.overlong_buffer
        lines.append(f"reward       + clip(({start} - length) / {rollout.overlong_buffer}, -1, 0)")
    if rollout.overlong_filter:
        lines.append("mask         truncated rows are left out of the loss")
    return lines
