"""A configuration in words: the table of all settings, and the formula that will run."""

import functools
import inspect
from collections.abc import Callable, Container, Sequence
from typing import Any

from rlx.algorithms.critic import value
from rlx.algorithms.record import hyper_parameters
from rlx.corrections import CORRECTIONS
from rlx.derived import offline, old_logprobs, rows, terms
from rlx.rewards import VERIFIERS
from rlx.settings import Config
from rlx.signatures import (
    FILLED,
    ChosenTerm,
    OneTerm,
    Section,
    TaskSettings,
    TermSettings,
    VerifierSettings,
    choices,
    model_of,
    short_names,
    term_names,
)
from rlx.tasks import TASKS
from rlx.yaml_text import shown

_NOUNS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "array": "a list",
    "object": "settings by name",
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
        return "one of " + ", ".join(str(choice) or "nothing" for choice in schema["enum"])
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
        if section == "algorithm":
            blocks += _algorithm_tables()
            continue
        names = list(TASKS) if section == "task" else []
        blocks.append(_table(section, section, field.annotation, names=names))
        blocks += [
            _table(
                section, f"{section}, where {section}.name is {name}", model_of(TaskSettings, name)
            )
            for name in names
        ]
        if section == "reward":
            blocks += _verifier_tables()
    return "\n\n".join(blocks) + "\n"


def _verifier_tables() -> list[str]:
    title = "an entry of reward.verifiers, and `run.py score --task {0}`, where its name is {0}"
    return [
        _table("", title.format(name), model_of(VerifierSettings, name), hyper_parameters(verifier))
        for name, verifier in VERIFIERS.items()
    ]


def _algorithm_tables() -> list[str]:
    path = "algorithm"
    blocks = [
        _table(path, "algorithm, of one term", OneTerm, names=short_names()),
        _table(
            f"{path}.terms[i]",
            "algorithm.terms, a list of these",
            TermSettings,
            names=term_names(),
        ),
    ]
    for name in short_names():
        kind = model_of(OneTerm, name)
        keys = kind.model_fields.keys() - choices(name)
        blocks.append(_table(path, f"algorithm, and a term, where its name is {name}", kind, keys))
    # What another advantage or reduction brings is the same beside every name.
    example = OneTerm.model_fields["name"].default
    title = "algorithm, and a term, of sampled text (kl_* and entropy: reduction only)"
    blocks.append(_table(path, title, model_of(OneTerm, example), choices(example)))
    for key, table in choices(example).items():
        for name, function in table.items():
            keys = hyper_parameters(function).keys() - FILLED
            if keys:
                title = f"algorithm, and a term, where its {key} is {name}"
                blocks.append(_table(path, title, model_of(OneTerm, example, **{key: name}), keys))
    return blocks


def _table(
    path: str,
    title: str,
    kind: type[Section],
    keys: Container[str] | None = None,
    names: Sequence[str] = (),
) -> str:
    """`path` stands before a key. `keys` are those shown, or all. `names` are what `name` may be;
    without them it is chosen and no setting of the table."""
    lines = [f"{title}:"]
    chosen = not names and issubclass(kind, OneTerm | TaskSettings | TermSettings)
    for key, schema in kind.model_json_schema().get("properties", {}).items():
        if (chosen and key == "name") or (keys is not None and key not in keys):
            continue
        if key == "name" and names:
            schema = {**schema, "enum": list(names)}
        default = kind.model_fields[key]
        came = "required" if default.is_required() else f"default {shown(default.default)}"
        lines.append(
            f"  {f'{path}.{key}' if path else key:<28} {expected(schema)}; {came}\n"
            f"  {'':<28}   {schema.get('description', '')}"
        )
    return "\n".join(lines) if len(lines) > 1 else f"{lines[0]} no settings of its own"


def formula(config: Config) -> str:
    """Return the formula that will run, from the docstrings of the functions that compute it."""
    chosen, batch, lines = terms(config), config.batch, []
    if len(chosen) > 1:
        lines.append(f"loss         {' + '.join(f'{t.weight:g} {t.name}' for t in chosen)}")
    for place, term in enumerate(chosen):
        lines += _term(term, config, place)
    if any(term.row.critic for term in chosen):
        lines += _critic(config)
    lines.append(
        f"update       {rows(config)} rows a step; epochs {batch.epochs}, mini-batches an epoch "
        f"{batch.minibatches}"
    )
    if not offline(config):
        lines += _rollout(config) + _reward(config)
    return "\n".join(lines) + "\n"


def _term(term: ChosenTerm, config: Config, place: int) -> list[str]:
    row, values = term.row, term.hyper
    label = "term" if place else "algorithm"
    weight = f", with the weight {term.weight:g}" if place or term.weight != 1 else ""
    lines = [f"{label:<12} {term.name}{weight}"]
    if offline(config):
        lines.append("advantage    none: it learns from data as it stands")
    elif row.advantages is None:
        lines.append("advantage    none: its loss reads none")
    else:
        lines += _statement("advantage", row.advantages, values, config)
    lines += _statement("loss", row.loss, values, config)
    if "clip_low" in values and "clip_high" in values:
        low, high = 1 - values["clip_low"], 1 + values["clip_high"]
        lines.append(f"clip         ratio within [{low:g}, {high:g}]")
    lines.append(f"KL           {_divergence(term, config)}")
    return lines + _statement("reduction", row.weights, values, config)


def _divergence(term: ChosenTerm, config: Config) -> str:
    """Where the term holds the policy to the reference."""
    row, beta = term.row, term.hyper.get("beta")
    if not row.reference:
        return "none in the loss" if config.reward.kl != "none" else "none"
    if not row.bind(**term.hyper).uses_reference():
        return "none (beta is 0)"
    if beta is None:
        return f"to the reference: the term itself, with the weight {term.weight:g}"
    if row.source == "pairs":
        # Of a pair it is no term of its own.
        curve = "sigmoid" if "sigmoid" in (inspect.getdoc(row.loss) or "") else "pair's loss"
        return f"to the reference, inside the {curve}: beta {beta:g}"
    return f"to the reference: beta {beta:g}, where the formula has it"


def _critic(config: Config) -> list[str]:
    critic = config.critic
    kind = "a head on the policy's trunk"
    if critic.kind == "model":
        rate = critic.learning_rate or config.optimizer.learning_rate
        kind = f"a model of its own, from {critic.path or 'the policy'}, learning rate {rate:g}"
    return [
        f"critic       {kind}; weight {critic.coefficient:g}",
        *_statement("critic loss", value, {"value_clip": critic.value_clip}, config),
    ]


def _statement(label: str, function: Callable, hyper: dict[str, Any], config: Config) -> list[str]:
    values = {key: hyper[key] for key in hyper_parameters(function) if key in hyper}
    if "budget" in hyper_parameters(function):
        values["budget"] = config.sampling.max_new_tokens
    while isinstance(function, functools.partial):
        function = function.func
    arguments = ", ".join(f"{key} = {shown(value)}" for key, value in values.items())
    lines = [f"{label:<12} {function.__name__}({arguments})"]
    # An algorithm's maths stands at the head of its file, a helper's in its own docstring.
    docs = [inspect.getdoc(function)]
    if label.endswith("loss"):
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
    if rollout.probe:
        lines.append(
            f"probe        {rollout.probe} samples of a prompt first, which decide whether its "
            "group is completed"
        )
    if rollout.retire_after:
        lines.append(
            f"retire       a prompt whose samples were all right {rollout.retire_after} visits in "
            "a row is drawn no more"
        )
    if rollout.replay:
        lines.append(
            f"replay       up to {rollout.replay} groups of the last {rollout.replay_max_age} "
            "steps take the place of those that teach nothing"
        )
    if rollout.correction != "none":
        bounds = {"cap": rollout.correction_cap, "floor": rollout.correction_floor}
        lines += _statement("correction", CORRECTIONS[rollout.correction], bounds, config)
        lines.append(f"{'':<12} on the advantages, w = pi_old / pi_sampler")
    if rollout.overlong_filter:
        lines.append("mask         truncated rows are left out of the loss")
    return lines


def _reward(config: Config) -> list[str]:
    """What the reward is made of, in the order in which it is made."""
    rollout, reward = config.rollout, config.reward
    lines = []
    if reward.source == "model":
        lines.append(f"reward       the score of the reward model {reward.model}")
    if rollout.overlong_buffer:
        start = config.sampling.max_new_tokens - rollout.overlong_buffer
        lines.append(f"reward       + clip(({start} - length) / {rollout.overlong_buffer}, -1, 0)")
    if reward.running:
        lines.append("reward       less the mean of all so far, over their deviation")
    if reward.clip:
        lines.append(f"reward       within [{-reward.clip:g}, {reward.clip:g}]")
    if reward.missing_stop_penalty:
        lines.append(f"reward       - {reward.missing_stop_penalty:g} for a truncated row")
    if reward.kl != "none":
        lines.append(
            f"KL           in the reward: - beta {reward.kl} to the reference at each token, "
            f"beta {reward.kl_beta:g}"
        )
        if reward.kl_target:
            lines.append(
                f"{'':<12} at first, then steered to {reward.kl_target:g} nats a completion over "
                f"{reward.kl_horizon:g} completions"
            )
    return lines
