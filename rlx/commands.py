"""What the command line does beside training: evaluate, generate, export."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from model.load import export as export_checkpoint
from model.sample import Filters
from model.tokenizer import Tokenizer, check_ids
from rlx import assemble
from rlx.checkpoint import Checkpoints
from rlx.config import Config, load
from rlx.data import pad_left, prompt_width
from rlx.evaluate import Draw, Heldout, Sampler
from rlx.loop import first_and_last
from rlx.report.metrics import write_atomically
from rlx.tasks.files import read_json_lines
from rlx.train import initial_state

GENERATION_ROWS = 256


def evaluate(config: Config) -> dict[str, Any]:
    """Held-out metrics of the checkpoint that `model.path` names."""
    policy = assemble.load_policy(config)
    heldout = Heldout(config, policy, assemble.load_task(config))
    metrics, _ = heldout.evaluate(
        policy.params, config.eval.final_problems, greedy=config.eval.greedy
    )
    return {"model": config.model.path, "task": config.task.name, **first_and_last(metrics)}


def generate(config: Config, source: Path, output: Path, count: int) -> dict[str, Any]:
    """Writes `count` completions of each prompt in `source`, in its order.

    A line in has `prompt` (text), `messages` (chat) or `prompt_ids`; a line out adds `completion`,
    `token_ids`, `logprobs` (at the sampling temperature) and `finish_reason`.
    """
    if count < 1:
        raise ValueError(f"--n: expected at least 1 completion a prompt; came {count}.")
    rows = read_json_lines(source)
    if not rows:
        raise ValueError(f"{source}: expected a prompt a line; the file has none.")
    policy = assemble.load_policy(config)
    tokenizer = policy.tokenizer
    encoded = [
        prompt_ids(row, tokenizer, policy, f"{source}, row {i + 1}") for i, row in enumerate(rows)
    ]
    assemble.check_length(policy.config, encoded, config.sampling.max_new_tokens)
    settings = config.sampling
    filtered = settings.top_k or settings.top_p < 1 or settings.min_p
    filters = Filters(settings.top_k, settings.top_p, settings.min_p) if filtered else None
    sampler = Sampler(
        policy.config,
        dtype=policy.dtype,
        stop_ids=tokenizer.stop_ids,
        pad_id=tokenizer.pad_id,
        max_new_tokens=settings.max_new_tokens,
        rows=min(GENERATION_ROWS, len(rows) * count),
    )
    tokens, positions = pad_left(encoded, prompt_width(encoded), tokenizer.pad_id)
    draw = Draw(count, settings.temperature, filters)
    samples = sampler(policy.params, tokens, positions, draw, config.run.seed)
    broken = int((~samples.finite).sum())
    if broken:
        raise RuntimeError(f"The logits of {broken} completions were not finite.")
    lines = []
    for row in range(len(samples.tokens)):
        ids = samples.tokens[row][samples.mask[row]].tolist()
        truncated = bool(samples.truncated[row])
        text = tokenizer.decode(ids if truncated else ids[:-1])
        lines.append(
            json.dumps(
                rows[row // count]
                | {
                    "completion": text,
                    "token_ids": ids,
                    "logprobs": samples.logprobs[row][samples.mask[row]].tolist(),
                    "finish_reason": "length" if truncated else "stop",
                }
            )
        )
    write_atomically(output, "\n".join(lines) + "\n")
    return {
        "prompts": len(rows),
        "completions": len(lines),
        "tokens": int(samples.mask.sum()),
        "truncated": float(np.mean(samples.truncated)),
        "output": str(output),
    }


def prompt_ids(
    row: Mapping[str, Any], tokenizer: Tokenizer, policy: assemble.Policy, place: str
) -> list[int]:
    """The ids of one line's prompt. Raises ValueError naming the place."""
    given = [name for name in ("prompt", "messages", "prompt_ids") if row.get(name) is not None]
    if len(given) != 1:
        raise ValueError(
            f"{place}: expected one of `prompt`, `messages` and `prompt_ids`; came "
            f"{' and '.join(given) or 'none'}."
        )
    value = row[given[0]]
    try:
        if given[0] != "prompt_ids":
            return tokenizer.encode_prompt(value)
        if not value or not all(type(id) is int for id in value):
            raise ValueError(f"prompt_ids: expected a list of token ids; came {value!r}")
        check_ids(value, policy.config)
        return value
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def export(run: Path, step: int | None, output: Path, dtype: str) -> dict[str, Any]:
    """Writes a run's checkpoint as a Hugging Face folder."""
    if not (run / "config.yaml").exists():
        raise ValueError(f"--run: expected a run folder; there is no config.yaml in {run}.")
    config = load(run / "config.yaml", [])
    policy = assemble.load_policy(config)
    learner = assemble.make_learner(config, policy)
    state = initial_state(policy.params, learner, jax.random.key(0))
    with Checkpoints(run / "checkpoints", keep=config.checkpoint.keep, keep_best=False) as kept:
        steps = kept.steps
        if not steps:
            raise ValueError(f"{run} holds no whole checkpoint.")
        if step is not None and step not in steps:
            raise ValueError(f"--step: expected one of {steps}; came {step}.")
        state = kept.restore(state, step)
    export_checkpoint(
        output, jax.device_get(state.params), policy.config, source=policy.folder, dtype=dtype
    )
    return {"step": int(state.step), "output": str(output), "dtype": dtype}
