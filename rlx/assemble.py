"""From a configuration to the parts of a run: network, losses, learner, plan."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Key, PyTree

from model.config import ModelConfig
from model.device import this_device
from model.draw import Filters
from model.errors import BadInput
from model.heads import with_value_head
from model.kernels import fitting, obstacle
from model.product import activations
from model.qwen import Qwen
from rlx import ops
from rlx.algorithms import TERMS
from rlx.algorithms.record import hyper_parameters
from rlx.corrections import CORRECTIONS
from rlx.derived import in_streams, needs_critic, offline, rows, terms, trains_scorer, updates
from rlx.learner import Learner, Term
from rlx.mixture import Mix
from rlx.optimizer import apart, make_optimizer, schedule
from rlx.policy import Policy
from rlx.prepare import Plan
from rlx.prompts import Prompts
from rlx.replay import empty_replay
from rlx.rollout import Sampling, empty_rollout
from rlx.settings import Config
from rlx.shaping import Shaping
from rlx.state import start_memory
from rlx.tasks import Task
from rlx.types import Memory

UNROLLED_LAYERS = 32


class Keys(NamedTuple):
    """The root of all randomness, split once."""

    order: Key[jax.Array, ""]
    steps: Key[jax.Array, ""]
    evaluation: Key[jax.Array, ""]
    weights: Key[jax.Array, ""]


def random_keys(config: Config) -> Keys:
    return Keys(*jax.random.split(jax.random.key(config.run.seed), len(Keys._fields)))


def bound_terms(config: Config) -> tuple[Term, ...]:
    """The losses of the run with their hyper-parameters, the critic's last where there is one."""
    chosen = []
    for term in terms(config):
        fixed = dict(term.hyper)
        if "budget" in term.row.hyper_parameters():
            fixed["budget"] = config.sampling.max_new_tokens
        chosen.append(Term(term.name, term.row.bind(**fixed), term.weight))
    for term in chosen:
        if term.algorithm.critic:
            value = TERMS["value"]._replace(advantages=term.algorithm.advantages)
            value = value._replace(
                loss=functools.partial(value.loss, value_clip=config.critic.value_clip)
            )
            joint = config.critic.kind == "head"
            weight = config.critic.coefficient if joint else 1.0
            return *chosen, Term("value", value, weight)
    return tuple(chosen)


def uses_reference(config: Config) -> bool:
    """Whether a loss or the reward reads the log-probabilities of the policy at its start."""
    penalised = not offline(config) and config.reward.kl != "none"
    return penalised or any(term.algorithm.uses_reference() for term in bound_terms(config))


def trained_params(config: Config, policy: Policy) -> PyTree:
    """What a run trains of the policy: its parameters or its adapters, with a head for scores or
    values where one is trained on them."""
    params = policy.params if policy.lora is None else policy.lora.adapters
    headed = needs_critic(config) and config.critic.kind == "head"
    if trains_scorer(config) or headed:
        return with_value_head(policy.config, params)
    return params


def check_verifier(config: Config, task: Task) -> None:
    """Raises BadInput where the task's verifier can't give what the run asks of it."""
    if task.score is None:
        raise BadInput(
            f"reward.source: the task {task.name} has no verifier; expected reward.source=model, "
            "with a reward model in reward.model."
        )
    if config.rollout.retire_after and not task.verdicts:
        raise BadInput(
            f"rollout.retire_after: expected 0, since the verifier of {task.name} calls nothing "
            f"right or wrong; came {config.rollout.retire_after}."
        )


def make_mix(config: Config, task: Task, rows: Sequence[Mapping[str, Any]]) -> Mix | None:
    """How a mixture's prompts are drawn from `rows`, those of the pool; None for a single task.

    Raises BadInput where a task has no row left, or a setting means nothing for a mixture.
    """
    if task.mixture is None:
        return None
    if config.rollout.retire_after:
        raise BadInput(
            "rollout.retire_after: expected 0 with task.name=mixture, whose weights can follow the "
            f"solve rates (task.follow=solve_rates); came {config.rollout.retire_after}."
        )
    if task.mixture.follow == "solve_rates" and not (
        config.reward.source == "verifier" and task.verdicts
    ):
        raise BadInput(
            "task.follow: expected weights or schedule, since nothing here calls an answer right "
            "or wrong; came solve_rates."
        )
    counts = Counter(row["task"] for row in rows)
    names = tuple(task.mixture.tasks)
    for name in names:
        if not counts[name]:
            raise BadInput(f"task.tasks: no training prompt of {name} is left.")
    return Mix(
        names,
        tuple(counts[name] for name in names),
        task.mixture.weights,
        task.mixture.final_weights,
        task.mixture.follow,
        task.mixture.floor,
        steps=config.loop.steps,
    )


def attention(config: Config, shape: ModelConfig, dtype: jnp.dtype) -> str:
    """How a model of this shape attends over whole rows here.

    Raises BadInput where the kernel that is asked for can't do it.
    """
    chosen, device = config.model.attention, this_device()
    packed = offline(config) and bool(config.batch.packing)
    if chosen == "auto":
        return fitting(shape, dtype, packed, device)
    why = "" if chosen == "plain" else obstacle(chosen, shape, dtype, packed, device)
    if why:
        raise BadInput(f"model.attention: expected auto or plain, since {why}; came {chosen}.")
    return chosen


def network(config: Config, shape: ModelConfig, dtype: jnp.dtype) -> Qwen:
    """Raises BadInput where `model.attention` is not possible here."""
    layers = shape.num_layers
    return Qwen(
        shape,
        dtype,
        activations=activations(dtype),
        remat=config.model.remat,
        attention=attention(config, shape, dtype),
        unroll=layers if this_device().platform == "cpu" and layers <= UNROLLED_LAYERS else 1,
    )


def make_learner(config: Config, policy: Policy, critic: ModelConfig | None = None) -> Learner:
    """`critic` is the shape of a critic of its own."""
    rate = schedule(config.optimizer, updates(config))
    minibatch = rows(config) // config.batch.minibatches
    optimizer = make_optimizer(config.optimizer, rate)
    if critic is not None:
        peak = config.critic.learning_rate or config.optimizer.learning_rate
        settings = config.optimizer.model_copy(update={"learning_rate": peak})
        own = make_optimizer(settings, schedule(settings, updates(config)))
        optimizer = apart(optimizer, own)
    return Learner(
        model=network(config, policy.config, policy.dtype),
        critic=critic and network(config, critic, policy.dtype),
        terms=bound_terms(config),
        optimizer=optimizer,
        schedule=rate,
        # Given text was not sampled: there `sampling` is for evaluation only.
        temperature=1.0 if offline(config) else config.sampling.temperature,
        minibatches=config.batch.minibatches,
        epochs=config.batch.epochs,
        micro=config.batch.micro or minibatch,
        on_policy=config.rollout.old_logprobs == "current" and not offline(config),
        samples=1 if offline(config) else config.batch.samples,
        packing=in_streams(config),
        router_aux=config.model.router_aux,
    )


def make_plan(
    config: Config,
    policy: Policy,
    learner: Learner,
    components: Mapping[str, float],
    verdicts: bool,
    mix: Mix | None = None,
) -> Plan:
    """`components` are what the verifier tells of a row, and what each counts in the reward."""
    rollout, reward = config.rollout, config.reward
    correction = None
    if rollout.correction != "none":
        function = CORRECTIONS[rollout.correction]
        bounds = {"cap": rollout.correction_cap, "floor": rollout.correction_floor}
        known = hyper_parameters(function)
        correction = functools.partial(function, **{n: bounds[n] for n in known})
    return Plan(
        sampling=Sampling(
            model=policy.config,
            dtype=policy.dtype,
            activations=activations(policy.dtype),
            prompts=config.batch.prompts,
            samples=config.batch.samples,
            slots=config.sampling.slots,
            max_new_tokens=config.sampling.max_new_tokens,
            temperature=config.sampling.temperature,
            stop_ids=policy.tokenizer.stop_ids,
            pad_id=policy.tokenizer.pad_id,
            components=tuple(components),
            component_weights=tuple(components.values()),
            verdicts=verdicts,
            retire_after=rollout.retire_after,
            probe=rollout.probe,
            dynamic=rollout.dynamic_sampling,
            max_rounds=rollout.max_rounds if rollout.dynamic_sampling else 1,
            overlong_buffer=rollout.overlong_buffer,
            weights=config.sampling.weights,
            cache=config.sampling.cache,
            mix=mix,
        ),
        learner=learner,
        shaping=Shaping(
            divergence={"none": None, "k1": ops.k1, "k3": ops.k3}[reward.kl],
            kl_target=reward.kl_target,
            kl_horizon=reward.kl_horizon,
            missing_stop_penalty=reward.missing_stop_penalty,
            running=reward.running,
            clip=reward.clip,
        ),
        overlong_filter=rollout.overlong_filter,
        replay_max_age=rollout.replay_max_age,
        correction=correction,
        old_logprobs=rollout.old_logprobs,
    )


def make_memory(config: Config, plan: Plan, pool: Prompts) -> Memory:
    """What the run remembers at its start."""
    size, width = pool.tokens.shape
    replay = None
    if config.rollout.replay:
        replay = empty_replay(empty_rollout(plan.sampling, width), config.rollout.replay)
    return start_memory(config.reward.kl_beta, size if config.rollout.retire_after else 0, replay)


def filters(config: Config) -> Filters | None:
    """What `sampling` forbids to be drawn, in evaluation and generation."""
    sampling = config.sampling
    if not sampling.top_k and sampling.top_p == 1 and not sampling.min_p:
        return None
    return Filters(sampling.top_k, sampling.top_p, sampling.min_p)
