"""Ways to advance a training state by some steps: on-line, fused or staged, and off-line."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
from jaxtyping import Key, PyTree

from model.errors import BadInput
from rlx import assemble
from rlx.config import Config
from rlx.data import encode_prompts, prompt_pool, worked_examples
from rlx.rewards.host import HostVerifier
from rlx.rollout import Prompts
from rlx.tasks import Task
from rlx.train import fused, offline_run, staged
from rlx.update import Learner


class Stopwatch:
    """Seconds of each phase since they were last taken."""

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[phase] += time.monotonic() - start

    def take(self) -> dict[str, float]:
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


class Stepper(NamedTuple):
    run: Callable
    """(state, length) -> (state, metrics stacked over steps, preview or None)."""
    learner: Learner
    stopwatch: Stopwatch
    verifier: HostVerifier | None
    notes: tuple[str, ...] = ()
    """What a person should know of the data before the run."""


def online_stepper(
    config: Config,
    policy: assemble.Policy,
    task: Task,
    key: Key[jax.Array, ""],
    reference: PyTree | None,
) -> Stepper:
    """Samples the task's training prompts. Raises BadInput where they are too few or too long."""
    tokenizer = policy.tokenizer
    encoded = encode_prompts(
        task.train, tokenizer, config.sampling.max_prompt_tokens, "training row"
    )
    _check_count(config, len(encoded), "training prompts")
    assemble.check_length(policy.config, encoded, config.sampling.max_new_tokens)
    pool = prompt_pool(encoded, tokenizer.pad_id, key)
    verifier = HostVerifier(task.score, task.train, tokenizer.decode, tokenizer.stop_ids)
    plan = assemble.make_plan(config, policy, verifier.components)
    stopwatch = Stopwatch()
    if config.loop.mode == "fused":
        step = fused(plan, verifier)
    else:
        step = staged(plan, verifier, stopwatch)

    def run(state, length):
        state, (metrics, preview) = step(state, reference, pool, length=length)
        return state, metrics, preview

    return Stepper(run, plan.learner, stopwatch, verifier)


def offline_stepper(
    config: Config, policy: assemble.Policy, task: Task, key: Key[jax.Array, ""]
) -> Stepper:
    """Reads the task's worked examples. Raises BadInput where it has none, or too few."""
    if task.demonstrate is None:
        raise BadInput(f"task.name: {task.name} has no worked examples to be fine-tuned on.")
    encoded = encode_prompts(
        task.train, policy.tokenizer, config.sampling.max_prompt_tokens, "training row"
    )
    assemble.check_length(policy.config, encoded, config.sampling.max_new_tokens)
    data = worked_examples(
        task, encoded, policy.tokenizer, config.run.seed, config.sampling.max_new_tokens
    )
    size, asked = len(data.mask), len(task.train) * task.demonstrations
    _check_count(config, size, "worked examples")
    learner = assemble.make_learner(config, policy)
    step = offline_run(learner, config.batch.prompts)
    pool = Prompts(data.tokens, data.positions, key)

    def run(state, length):
        state, metrics = step(state, pool, data, length=length)
        return state, metrics, None

    notes = (f"{size} worked examples",)
    if size < asked:
        notes = (
            f"{size} worked examples; {asked - size} were longer than sampling.max_new_tokens="
            f"{config.sampling.max_new_tokens} and are left out",
        )
    return Stepper(run, learner, Stopwatch(), None, notes)


def _check_count(config: Config, count: int, what: str) -> None:
    if count < config.batch.prompts:
        raise BadInput(
            f"batch.prompts: expected at most the task's {count} {what}, since a step draws each "
            f"at most once; came {config.batch.prompts}."
        )
