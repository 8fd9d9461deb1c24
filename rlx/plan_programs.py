"""The programs that `train` runs for a configuration, of values that are not there: shapes alone.

No weight is read, and no prompt: a prompt is as wide as `sampling.max_prompt_tokens` allows, and a
completion as long as `sampling.max_new_tokens`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from model.lora import beside
from model.parameters import parameter_axes
from model.sample import STRIDE, cache_widths
from rlx import assemble
from rlx.data import padded_width
from rlx.derived import needs_critic, offline, rows, unit
from rlx.frozen import frozen_dtype
from rlx.learner import Learner
from rlx.offline import offline_run
from rlx.plan_shapes import (
    Places,
    abstract_policy,
    device_bytes,
    frozen_params,
    model_shape,
    scorer_params,
)
from rlx.policy import Policy
from rlx.prepare import Frozen, make_signal, score_samples
from rlx.probe import choose_probed, rest, wide
from rlx.prompts import Prompts
from rlx.rollout import Sampling, Scores, sample_round, sample_rows
from rlx.rounds import begin
from rlx.settings import Config
from rlx.state import start_memory
from rlx.train import PROGRAMS
from rlx.types import Batch, Signal, TrainState
from rlx.verify import model_verifier

POOL = 8192
"""Training prompts, where the task doesn't say how many it has."""


class Part(NamedTuple):
    """A share of a program's work, for the time that it takes."""

    name: str
    trips: Mapping[str, float]
    """How often the loops turn whose number depends on data, at full length: by a part of their
    names, or by their places, `loop_0`, `loop_1` (`numbered` in rlx/plan.py)."""


class Planned(NamedTuple):
    """A program, ready to be lowered and compiled."""

    name: str
    lower: Callable
    """(*operands) -> what `compile` is called of."""
    operands: tuple[Any, ...]
    parts: tuple[Part, ...]
    """Each takes what it has beyond the one before."""
    held: int
    """Bytes of a device that the run keeps there meanwhile, the program's own arguments too."""
    lasting: int
    """Of them, those of the whole run that no data decides: parameters, moments, what is frozen."""
    runs: float = 1.0
    """A step."""

    def lowered(self) -> Any:
        return self.lower(*self.operands)


def programs(config: Config, places: Places) -> list[Planned]:
    """In the order that a step runs them. `config` is resolved for the devices."""
    policy = abstract_policy(config)
    critic = None
    if needs_critic(config) and config.critic.kind == "model":
        path = config.critic.path or config.model.path
        critic = dataclasses.replace(
            model_shape(path, "critic.path")[0], num_tokens=policy.config.num_tokens
        )
    learner = assemble.make_learner(config, policy, critic)
    trained = jax.eval_shape(
        lambda params: assemble.trained_params(config, policy._replace(params=params)),
        policy.params,
    )
    pair = (trained, scorer_params(critic) if critic else {})
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = TrainState(
        *pair, jax.eval_shape(learner.optimizer.init, pair), None, key, scalar, scalar, scalar
    )
    make = _offline if offline(config) else _online
    return make(config, places, policy, learner, state)


def _online(
    config: Config, places: Places, policy: Policy, learner: Learner, state: TrainState
) -> list[Planned]:
    batch, sampling = config.batch, config.sampling
    plan = assemble.make_plan(config, policy, learner, {"score": 1.0}, True)
    width, count = padded_width(sampling.max_prompt_tokens), rows(config)
    pool = _pool(config, width)
    memory = jax.eval_shape(lambda pool: assemble.make_memory(config, plan, pool), pool)
    pool, memory = places.whole((pool, memory))
    state = places.parameters(learner.axes, state._replace(memory=None))._replace(memory=memory)
    reference, base = _frozen(config, places, policy)
    frozen, scorer = Frozen(reference, None, base), None
    acting = state._replace(params=beside(base, state.params))
    if config.reward.source == "model":
        shape, _ = model_shape(config.reward.model, "reward.model")
        weights = frozen_params(config, scorer_params(shape), policy.dtype)
        on_host = config.model.frozen_memory == "host"
        weights = places.parameters(parameter_axes(shape), weights, on_host)
        frozen = frozen._replace(reward_model=weights)
        scorer = assemble.network(config, shape, policy.dtype)
    key, zero = places.whole((state.key, jax.ShapeDtypeStruct((), jnp.int32)))
    solved = memory.solved
    # A probing round has as many rows, of more prompts.
    first = wide(plan.sampling) if plan.sampling.probe else plan.sampling
    operands = (first, acting.params, pool, state.cursor, solved, key, zero)
    samples, draw = _shapes(sample_round, *operands)
    samples, draw = places.rows(samples, count), places.whole(draw)
    resident = device_bytes((state, frozen, pool))
    lasting = device_bytes((state._replace(memory=None), frozen))
    sampled = device_bytes(samples)

    made = []

    def add(name, operands, parts, extra=0):
        lower = PROGRAMS[name].jitted().lower
        made.append(Planned(name, lower, operands, parts, resident + extra, lasting))

    def add_verifier(name, rows, samples, extra):
        verify = jax.jit(model_verifier(scorer, learner.micro))
        operands, parts = (frozen, pool, rows, samples), (Part(name, {}),)
        made.append(Planned(name, verify.lower, operands, parts, resident + extra, lasting))

    add("sample", operands, _sampler_parts(first, places.shards))
    if scorer is not None:
        add_verifier("verify", draw.rows, samples, sampled)
    if plan.sampling.probe:
        more, scores = rest(plan.sampling), places.whole(_scores(first))
        probed = _shapes(choose_probed, plan.sampling, pool, solved, draw, samples, scores)
        probed = places.rows(probed, batch.prompts * first.samples)
        chosen, kept = places.whole(probed.draw), device_bytes(probed)
        operands = (more, acting.params, pool, chosen.rows, chosen.epochs, key, zero)
        add("complete", operands, _sampler_parts(more, places.shards, "_rest"), sampled + kept)
        if scorer is not None:
            others = places.rows(_shapes(sample_rows, *operands), batch.prompts * more.samples)
            add_verifier("verify_rest", chosen.rows, others, kept + device_bytes(others))
    pending = jax.eval_shape(
        lambda cursor, solved: begin(plan.sampling, width, cursor, solved), zero, solved
    )
    pending = places.rows(pending, count)
    streams = {"while": math.ceil(count / learner.micro)}
    kept = device_bytes(pending)
    if config.rollout.dynamic_sampling or config.rollout.probe:
        operands = (plan, acting, frozen, pending)
        add("prepare", operands, (Part("score", streams),), kept + sampled)
        prepared = _shapes(PROGRAMS["prepare"].function, *operands)
    else:
        operands = (plan, acting, frozen, pool, draw.rows, samples)
        if _reads_scores(plan, learner, frozen):
            add("score", operands, (Part("score", streams),), sampled)
        scored = _shapes(score_samples, *operands)
        scored = places.rows(scored, count)
        operands = (plan, acting, pending, scored)
        prepared = _shapes(PROGRAMS["make_batch"].function, *operands)
    learnt = places.rows(prepared[0], count)
    preview = device_bytes(places.rows(prepared[1], count))
    each = {"while": math.ceil(count / batch.minibatches / learner.micro)}
    operands = (learner, state, learnt, key, base)
    add("update", operands, (Part("update", each),), device_bytes(learnt) + preview)
    return made


def _frozen(config: Config, places: Places, policy: Policy) -> tuple[PyTree | None, PyTree | None]:
    """What the policy is held to, and what its adapters are beside."""
    axes, base = parameter_axes(policy.config), None
    if policy.base is not None:
        base = places.parameters(axes, policy.base)
    if not assemble.uses_reference(config):
        return None, base
    if policy.lora and jnp.dtype(config.lora.base_dtype) == frozen_dtype(config, policy.dtype):
        # In the very arrays of the base.
        return beside(base, places.parameters(axes, policy.lora.adapters)), base
    reference = frozen_params(config, policy.whole, policy.dtype)
    return places.parameters(axes, reference, config.model.frozen_memory == "host"), base


def _reads_scores(plan: Any, learner: Learner, frozen: Frozen) -> bool:
    """Whether anything is scored before the update."""
    needed = plan.old_logprobs == "recompute" or learner.valued is not None
    return needed or frozen.reference is not None


def _scores(sampling: Sampling) -> Scores:
    n, g = sampling.prompts, sampling.samples
    shapes = ((n, g), (n, g), (n, g, 1), (n, g, sampling.max_new_tokens))
    return Scores(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def _sampler_parts(sampling: Sampling, shards: int, which: str = "") -> tuple[Part, Part]:
    turns = decode_turns(sampling, shards)
    trips = {f"loop_{place}": float(count) for place, count in enumerate(turns)}
    return Part(f"prefill{which}", {"while": 0}), Part(f"decode{which}", trips)


def decode_turns(sampling: Sampling, shards: int) -> list[int]:
    """How often each loop of the sampler (model/sample.py) turns, in their order, where every row
    is of full length and rows lie in so many `shards`, each with its share of the slots.

    There is a loop for each width of the cache; or, with slots, one for rows that have others to
    follow them and one for the last rows, where they are so few that they move together. Rows
    that begin together end together: only those of the last term can be few, and the first turn
    of a term, which gives them their slots, is of the first loop.
    """
    count = sampling.prompts * sampling.samples // shards
    slots = math.ceil(sampling.slots / shards)
    each = math.ceil(sampling.max_new_tokens / STRIDE)
    if not slots or slots >= count:
        widths = [0, *cache_widths(STRIDE * each)]
        return [(after - before) // STRIDE for before, after in itertools.pairwise(widths)]
    few, terms = slots // 4, math.ceil(count / slots)
    last = count - (terms - 1) * slots
    together = each - 1 if last <= few else 0
    return [terms * each - together, *([together] if few else [])]


def _offline(
    config: Config, places: Places, policy: Policy, learner: Learner, state: TrainState
) -> list[Planned]:
    sampling, size = config.sampling, unit(config)
    width, columns = padded_width(sampling.max_prompt_tokens), padded_width(sampling.max_new_tokens)
    pool = _pool(config, width + columns)
    count = pool.tokens.shape[0] * size
    text = jax.ShapeDtypeStruct((count, width + columns), jnp.int32)
    one = jax.ShapeDtypeStruct((count, 1), jnp.float32)
    per_token = jax.ShapeDtypeStruct((count, columns), jnp.float32)
    mask = jax.ShapeDtypeStruct((count, columns), jnp.bool_)

    def signals(one, mask):
        return tuple(make_signal(term.algorithm, one, one, mask) for term in learner.terms)

    given = jax.eval_shape(signals, one, mask)
    given = tuple(Signal(*signal) for signal in given)
    data = Batch(text, text, mask, per_token, per_token, per_token, per_token, one, given)
    data, pool = places.whole((data, pool))
    memory = places.whole(jax.eval_shape(start_memory))
    state = places.parameters(learner.axes, state._replace(memory=None))._replace(memory=memory)
    reference, base = _frozen(config, places, policy)
    step = offline_run(learner, config.batch.prompts)
    held = device_bytes((state, reference, base, pool, data))
    lasting = device_bytes((state._replace(memory=None), reference, base))
    return [
        Planned(
            "update",
            lambda *operands: step.lower(*operands, length=1, base=base),
            (state, reference, pool, data),
            (Part("update", {}),),
            held,
            lasting,
        )
    ]


def _pool(config: Config, width: int) -> Prompts:
    size = config.task.model_dump().get("train_size") or POOL
    text = jax.ShapeDtypeStruct((max(size, config.batch.prompts), width), jnp.int32)
    return Prompts(text, text, jax.eval_shape(lambda: jax.random.key(0)))


def _shapes(function: Callable, static: Any, *operands: PyTree) -> PyTree:
    return jax.eval_shape(lambda *given: function(static, *given), *operands)
