"""Ways to advance a training state by some steps: on-line, fused or staged, and off-line."""

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from model.errors import BadInput
from model.lora import beside
from model.tokenizer import Tokenizer
from rlx import assemble
from rlx.data import chat_rows, encode_prompts, preference_pairs, prompt_pool, worked_examples
from rlx.derived import source
from rlx.frozen import freeze_reference
from rlx.learner import Learner
from rlx.mesh import everywhere
from rlx.mixture import begin
from rlx.offline import offline_run
from rlx.policy import Policy, check_length
from rlx.prepare import Frozen, make_signal
from rlx.prompts import Prompts
from rlx.rewards.host import HostVerifier
from rlx.room import guard
from rlx.scorers import Critic, RewardModel, load_critic
from rlx.settings import Config
from rlx.state import initial_state
from rlx.task_loading import make_verifier
from rlx.tasks import Task
from rlx.train import fused, staged
from rlx.types import Batch, TrainState
from rlx.verify import callback_verifier, host_verifier, model_verifier


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
    """A run's training, ready to begin."""

    run: Callable
    """(state, length) -> (state, metrics stacked over steps, preview or None)."""
    learner: Learner
    state: TrainState
    """The first."""
    stopwatch: Stopwatch
    verifier: HostVerifier | None
    rows: Sequence[Mapping[str, Any]]
    """Of the pool that prompts are drawn from."""
    components: tuple[str, ...]
    """What the verifier tells of a row."""
    critic: Critic | None = None
    """A critic of its own, as it began, without parameters."""
    notes: tuple[str, ...] = ()
    """What a person should know of the data before the run."""
    base: PyTree | None = None
    """What the state's params are beside, where they are adapters."""

    def whole(self, state: TrainState) -> PyTree:
        """The policy's parameters as the model reads them."""
        return beside(self.base, state.params)


def online_stepper(
    config: Config,
    policy: Policy,
    task: Task,
    keys: assemble.Keys,
    reward_model: RewardModel | None,
) -> Stepper:
    """Samples the task's training prompts. Raises BadInput where they are too few or too long."""
    tokenizer = policy.tokenizer
    task, encoded, left_out = _encoded(config, tokenizer, task)
    _check_count(config, len(encoded), "training prompts")
    if config.rollout.probe:
        drawn = config.batch.prompts * (config.batch.samples // config.rollout.probe)
        if drawn > len(encoded):
            raise BadInput(
                f"rollout.probe: a step draws batch.prompts * batch.samples / rollout.probe = "
                f"{drawn} prompts, each at most once; the task has {len(encoded)}."
            )
    check_length(policy.config, encoded, config.sampling.max_new_tokens)
    pool = everywhere(prompt_pool(encoded, tokenizer.pad_id, keys.order))
    reference = _reference(config, policy)
    critic = load_critic(config, policy)
    learner = assemble.make_learner(config, policy, critic and critic.config)
    for setting, scorer in (
        ("reward.model", reward_model and reward_model.model.config),
        ("critic.path", critic and critic.config),
    ):
        if scorer is not None:
            check_length(scorer, encoded, config.sampling.max_new_tokens, setting)
    verifier, components, verdicts = None, {"score": 1.0}, False
    if reward_model is None:
        assemble.check_verifier(config, task)
        verifier = make_verifier(config, task, task.train, tokenizer)
        components, verdicts = verifier.components, task.verdicts
    mix = assemble.make_mix(config, task, task.train)
    plan = assemble.make_plan(config, policy, learner, components, verdicts, mix)
    frozen = Frozen(reference, reward_model and reward_model.params, policy.base)
    stopwatch = Stopwatch()
    micro = learner.micro
    if config.loop.mode == "fused":
        verify = (
            callback_verifier(plan.sampling, verifier)
            if reward_model is None
            else model_verifier(reward_model.model, micro)
        )
        step = guard(config, "update", fused(plan, verify))
    else:
        verify = (
            host_verifier(verifier)
            if reward_model is None
            else guard(config, "verify", jax.jit(model_verifier(reward_model.model, micro)))
        )
        step = staged(plan, verify, stopwatch, functools.partial(guard, config))

    def run(state, length):
        state, (metrics, preview) = step(state, frozen, pool, length=length)
        return state, metrics, preview

    state = initial_state(
        assemble.trained_params(config, policy),
        learner,
        keys.steps,
        critic=critic and critic.params,
        memory=assemble.make_memory(config, plan, pool),
        cursor=0 if mix is None else begin(mix),
    )
    return Stepper(
        run,
        learner,
        state,
        stopwatch,
        verifier,
        task.train,
        tuple(components),
        critic and critic._replace(params=None),
        (*task.notes, *left_out),
        policy.base,
    )


def offline_stepper(config: Config, policy: Policy, task: Task, keys: assemble.Keys) -> Stepper:
    """Reads the task's pairs, conversations or worked examples. Raises BadInput where it has none,
    or too few."""
    data, notes = given_text(config, policy, task)
    learner = assemble.make_learner(config, policy)
    data = with_signals(data, learner)
    unit = learner.unit
    count = len(data.mask) // unit
    _check_count(config, count, "preference pairs" if unit == 2 else "texts")
    step = guard(config, "update", offline_run(learner, config.batch.prompts))
    data, order = everywhere((data, keys.order))
    pool = Prompts(data.tokens[::unit], data.positions[::unit], order)
    reference, base = _reference(config, policy), policy.base

    def run(state, length):
        state, metrics = step(state, reference, pool, data, length=length, base=base)
        return state, metrics, None

    state = initial_state(assemble.trained_params(config, policy), learner, keys.steps)
    notes = (*task.notes, *notes)
    return Stepper(run, learner, state, Stopwatch(), None, (), (), None, notes, base)


def given_text(
    config: Config, policy: Policy, task: Task, *, heldout: bool = False
) -> tuple[Batch, tuple[str, ...]]:
    """The text that an off-line run learns from, or is measured on, and what was left out of it.

    Raises BadInput where the task has none of the kind.
    """
    tokenizer, sampling = policy.tokenizer, config.sampling
    width = sampling.max_prompt_tokens + sampling.max_new_tokens
    if source(config) == "pairs":
        pairs = task.heldout_pairs if heldout else task.pairs
        if not pairs:
            raise BadInput(f"task.name: {task.name} has no preference pairs to learn from.")
        data, notes = preference_pairs(
            pairs,
            tokenizer,
            max_prompt_tokens=sampling.max_prompt_tokens,
            max_new_tokens=sampling.max_new_tokens,
        )
    elif conversations := task.heldout_conversations if heldout else task.conversations:
        packing = bool(config.batch.packing) and not heldout
        data, notes = chat_rows(conversations, tokenizer, width=width, packing=packing)
    elif task.demonstrate is not None:
        if config.batch.packing:
            raise BadInput(
                f"batch.packing: expected false, since it packs whole chats and {task.name} has "
                "worked examples; came true."
            )
        data, notes = _worked(config, policy, task)
    else:
        raise BadInput(f"task.name: {task.name} has no worked examples to be fine-tuned on.")
    longest = int(jnp.max(data.positions)) + 1
    if longest > policy.config.max_positions:
        raise BadInput(
            f"sampling.max_prompt_tokens, sampling.max_new_tokens: a text has {longest} tokens, "
            f"more than the model's {policy.config.max_positions} positions."
        )
    return data, notes


def _worked(config: Config, policy: Policy, task: Task) -> tuple[Batch, tuple[str, ...]]:
    task, encoded, left_out = _encoded(config, policy.tokenizer, task)
    data = worked_examples(
        task, encoded, policy.tokenizer, config.run.seed, config.sampling.max_new_tokens
    )
    size, asked = len(data.mask), len(task.train) * task.demonstrations
    if size == asked:
        return data, (*left_out, f"{size} worked examples")
    return data, (
        *left_out,
        f"{size} worked examples; {asked - size} were longer than sampling.max_new_tokens="
        f"{config.sampling.max_new_tokens} and are left out",
    )


def _encoded(
    config: Config, tokenizer: Tokenizer, task: Task
) -> tuple[Task, list[list[int]], tuple[str, ...]]:
    """The task with the training rows whose prompts fit, those prompts, and what was left out."""
    sampling = config.sampling
    rows, ids, notes = encode_prompts(
        task.train,
        tokenizer,
        sampling.max_prompt_tokens,
        "training row",
        long_prompts=sampling.long_prompts,
    )
    return task._replace(train=rows), ids, notes


def with_signals(data: Batch, learner: Learner) -> Batch:
    """A signal for each term of the learner, from the one that the data bring."""
    (signal,) = data.signals
    signals = (
        make_signal(term.algorithm, signal.advantages, signal.returns, signal.mask)
        for term in learner.terms
    )
    return data._replace(signals=tuple(signals))


def _reference(config: Config, policy: Policy) -> PyTree | None:
    """The policy where it began; None where nothing reads it. Beside adapters that are trained it
    is their very base."""
    if not assemble.uses_reference(config):
        return None
    return freeze_reference(config, policy.whole, policy.dtype)


def _check_count(config: Config, count: int, what: str) -> None:
    if count < config.batch.prompts:
        raise BadInput(
            f"batch.prompts: expected at most the task's {count} {what}, since a step draws each "
            f"at most once; came {config.batch.prompts}."
        )
