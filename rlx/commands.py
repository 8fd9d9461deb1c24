"""What the command line does beside training: evaluate, generate, export."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from model.errors import BadInput
from model.load import export as export_checkpoint
from model.lora import beside, merged
from model.peft_format import save_adapters
from model.score_head import export_scorer
from model.tokenizer import check_ids
from rlx import assemble, hosts, scorers
from rlx.checkpoint import Checkpoints
from rlx.config import load
from rlx.config_rules import greedy_samples
from rlx.derived import trains_scorer, uses_lora
from rlx.evaluate import nest_greedy
from rlx.files import check_output, write_atomically
from rlx.generate import Draw, Generator
from rlx.heldout import Heldout
from rlx.mesh import on_mesh
from rlx.policy import Policy, check_length, load_policy
from rlx.resolve import mesh_sizes, resolve
from rlx.run_folder import check_same_rows
from rlx.settings import Config
from rlx.task_loading import load_task
from rlx.tasks.files import read_json_lines

GENERATION_ROWS = 256
"""Decoded at a time, where `sampling.slots` says nothing."""


def evaluate(config: Config) -> dict[str, Any]:
    """Held-out metrics of the checkpoint that `model.path` names, sampled as `sampling` says."""
    for problem in greedy_samples(config):
        raise BadInput(f"{problem}.")
    config = resolve(config)
    hosts.check_same_settings(config)
    sizes = hosts.from_first(lambda: mesh_sizes(config, training=False))
    with on_mesh(sizes):
        return _evaluate(config)


def _evaluate(config: Config) -> dict[str, Any]:
    keys = assemble.random_keys(config)
    task = load_task(config)
    check_same_rows(task)
    policy = load_policy(config, keys.weights)
    count = config.eval.final_problems
    counts = {"eval.final_problems": count}
    reward_model = scorers.load_reward_model(config, policy)
    heldout = Heldout(config, policy, task, keys.evaluation, counts, reward_model)
    metrics, _ = heldout.evaluate(policy.whole, count, greedy=config.eval.greedy)
    result = {"model": config.model.path, "task": config.task.name, **nest_greedy(metrics)}
    return result | ({"notes": list(heldout.notes)} if heldout.notes else {})


def generate(config: Config, source: Path, output: Path, count: int) -> dict[str, Any]:
    """Writes `count` completions of each prompt in `source`, in its order.

    A line in has `prompt` (text), `messages` (chat) or `prompt_ids`, and may have a
    `max_new_tokens` of its own, at most that of `sampling`; a line out adds `completion`,
    `token_ids`, `logprobs` (at the sampling temperature) and `finish_reason`. Where the logits were
    not finite, `finish_reason` says so and there is no completion.
    """
    if count < 1:
        raise BadInput(f"--n: expected at least 1 completion a prompt; came {count}.")
    located = read_json_lines(source)
    if not located:
        raise BadInput(f"--input: {source} holds no prompt.")
    sampling = config.sampling
    limits = [own_limit(row, place, sampling.max_new_tokens) for place, row in located]
    hosts.from_first(lambda: check_output(output))
    config = resolve(config)
    hosts.check_same_settings(config)
    sizes = hosts.from_first(lambda: mesh_sizes(config, training=False))
    with on_mesh(sizes):
        return _generate(config, located, limits, output, count)


def _generate(
    config: Config,
    located: Sequence[tuple[str, Mapping[str, Any]]],
    limits: Sequence[int],
    output: Path,
    count: int,
) -> dict[str, Any]:
    sampling = config.sampling
    keys = assemble.random_keys(config)
    policy = load_policy(config, keys.weights)
    hosts.check_same("lines of --input", located)
    tokenizer = policy.tokenizer
    encoded = [prompt_ids(row, policy, place, sampling.max_prompt_tokens) for place, row in located]
    check_length(policy.config, encoded, max(limits))
    generator = Generator(
        policy,
        max_new_tokens=max(limits),
        rows=sampling.slots or GENERATION_ROWS,
        prompts=len(located),
    )
    draw = Draw(count, sampling.temperature, assemble.filters(config))
    samples = generator(policy.whole, encoded, draw, keys.evaluation, limits)
    if not samples.finite.any():
        raise FloatingPointError("The logits of all completions were not finite.")
    lines = []
    for row in range(len(samples.tokens)):
        ids = samples.tokens[row][samples.mask[row]].tolist()
        made = {
            "completion": tokenizer.decode_completion(ids),
            "token_ids": ids,
            "logprobs": samples.logprobs[row][samples.mask[row]].tolist(),
            "finish_reason": "length" if samples.truncated[row] else "stop",
        }
        if not samples.finite[row]:
            nothing = {"completion": None, "token_ids": [], "logprobs": []}
            made = nothing | {"finish_reason": "not finite"}
        lines.append(json.dumps(located[row // count][1] | made) + "\n")
    if hosts.first():
        write_atomically(output, "".join(lines))
    return {
        "prompts": len(located),
        "completions": len(lines),
        "tokens": int(samples.mask.sum()),
        "truncated": float(np.mean(samples.truncated)),
        "not_finite": int(np.sum(~samples.finite)),
        "output": str(output),
    }


def prompt_ids(row: Mapping[str, Any], policy: Policy, place: str, limit: int) -> list[int]:
    """The ids of one line's prompt. Raises BadInput naming the place."""
    given = [name for name in ("prompt", "messages", "prompt_ids") if row.get(name) is not None]
    if len(given) != 1:
        raise BadInput(
            f"{place}: expected one of prompt, messages and prompt_ids; came "
            f"{' and '.join(given) or 'none'}."
        )
    name, value = given[0], row[given[0]]
    kind, wanted = {
        "prompt": (str, "a text"),
        "messages": (list, "a list of chat messages"),
        "prompt_ids": (list, "a list of token ids"),
    }[name]
    if not isinstance(value, kind) or not value:
        raise BadInput(f"{place}: {name}: expected {wanted}; came {value!r}.")
    try:
        if name == "prompt_ids":
            if not all(type(id) is int for id in value):
                raise BadInput(f"prompt_ids: expected {wanted}; came {value!r}.")
            check_ids(value, policy.config)
            ids = value
        else:
            ids = policy.tokenizer.encode_prompt(value)
    except BadInput as error:
        raise BadInput(f"{place}: {error}") from error
    if len(ids) > limit:
        raise BadInput(
            f"{place}: the prompt has {len(ids)} tokens, more than sampling.max_prompt_tokens, "
            f"{limit}."
        )
    return ids


def own_limit(row: Mapping[str, Any], place: str, limit: int) -> int:
    """The new tokens that one line may get: its own `max_new_tokens`, or `limit`. Raises BadInput
    naming the place."""
    value = row.get("max_new_tokens")
    if value is None:
        return limit
    if type(value) is not int or not 1 <= value <= limit:
        raise BadInput(
            f"{place}: max_new_tokens: expected a whole number from 1 to "
            f"sampling.max_new_tokens, {limit}; came {value!r}."
        )
    return value


def _on_the_host():
    """No device need have room for a whole model. If JAX knows no CPU: on the first device."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        host = None
    return jax.default_device(host)


def export(run: Path, step: int | None, output: Path, dtype: str, adapter: bool) -> dict[str, Any]:
    """Writes a run's checkpoint as a Hugging Face folder, or its adapters alone in PEFT's format.

    Where a run trained adapters, the folder holds the model that they make with their base.
    """
    if not (run / "config.yaml").exists():
        raise BadInput(f"--run: expected a run folder; there is no config.yaml in {run}.")
    config = resolve(load(run / "config.yaml", []))
    if adapter and not uses_lora(config):
        raise BadInput(
            f"--adapter: expected a run with lora.rank above 0; {run} trained no adapter."
        )
    if adapter and dtype != "float32":
        raise BadInput(f"--dtype: expected unset, since adapters are float32; came {dtype}.")
    keys = assemble.random_keys(config)
    with _on_the_host():
        policy = load_policy(config, keys.weights)
    shapes = jax.eval_shape(lambda: assemble.trained_params(config, policy))
    with Checkpoints(run / "checkpoints", keep=config.checkpoint.keep, keep_best=False) as kept:
        if not kept.steps:
            raise BadInput(f"--run: {run} holds no whole checkpoint.")
        if step is not None and step not in kept.steps:
            raise BadInput(f"--step: expected one of {kept.steps}; came {step}.")
        step = kept.latest if step is None else step
        weights = kept.restore_params(shapes, step)
    scorer = trains_scorer(config)
    if adapter:
        alpha, base = policy.lora.alpha, policy.folder
        save_adapters(output, weights, policy.config, alpha=alpha, base=base, scorer=scorer)
    else:
        weights = merged(beside(jax.device_get(policy.base), weights))
        write = export_scorer if scorer else export_checkpoint
        write(output, weights, policy.config, source=policy.folder, dtype=dtype)
    return {"step": step, "output": str(output), "dtype": dtype}
