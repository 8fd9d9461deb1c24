"""The programs that `train` runs for a configuration, of values that are not there: shapes alone.

No weight is read, and no prompt: a prompt is as wide as `sampling.max_prompt_tokens` allows, and a
completion as long as `sampling.max_new_tokens`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import PyTree

from model.config import ModelConfig, read_config, read_json
from model.errors import BadInput
from model.heads import with_value_head
from model.qwen import cast, initialise, parameter_axes
from model.sample import STRIDE, _widths
from model.shapes import names, published
from model.sharding import BATCH, shardings, without_mesh
from model.tokenizer import load_tokenizer
from rlx import assemble
from rlx.data import round_up
from rlx.prepare import Frozen, score_samples
from rlx.rollout import Prompts, begin, sample_round
from rlx.settings import Config, offline, rows, unit
from rlx.train import PROGRAMS, offline_run, start_memory
from rlx.types import Batch, Signal, TrainState
from rlx.update import Learner, make_signal
from rlx.verify import model_verifier

POOL = 8192
"""Training prompts, where the task doesn't say how many it has."""


class Part(NamedTuple):
    """A share of a program's work, for the time that it takes."""

    name: str
    trips: Mapping[str, float]
    """How often the loops turn whose number depends on data, at full length."""


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
    runs: float = 1.0
    """A step."""

    def lowered(self) -> Any:
        return self.lower(*self.operands)


class Tokens(NamedTuple):
    """What a program needs of a tokenizer."""

    stop_ids: tuple[int, ...]
    pad_id: int


def model_shape(path: str, setting: str = "model.path") -> tuple[ModelConfig, Path | None]:
    """Of a checkpoint's folder, in which `config.json` suffices, or of a published model."""
    folder = assemble.BUNDLED.get(path, Path(path))
    if (folder / "config.json").is_file():
        return read_config(folder), folder
    known = published(path) if path else None
    if known is None:
        raise BadInput(
            f"{setting}: expected a folder with a config.json, or the name of a model whose shape "
            f"is known ({', '.join(names())}); came {path or 'nothing'}."
        )
    return known, None


def abstract_policy(config: Config) -> assemble.Policy:
    """`load_policy` without a weight."""
    shape, folder = model_shape(config.model.path)
    tokens = Tokens((shape.vocab_size - 1,), 0)
    if folder is not None and (folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(folder)
        shape = dataclasses.replace(shape, num_tokens=len(tokenizer))
        tokens = Tokens(tokenizer.stop_ids, tokenizer.pad_id)
    elif folder is not None:
        ended = read_json(folder / "config.json").get("eos_token_id")
        tokens = Tokens(tuple(ended) if isinstance(ended, list) else (ended or 0,), 0)
    with without_mesh():
        params = jax.eval_shape(lambda: initialise(shape, jax.random.key(0)))
    dtype = jnp.dtype(config.model.dtype)
    return assemble.Policy(folder, shape, tokens, params, dtype)


def scorer_params(shape: ModelConfig) -> PyTree:
    """Of a critic or a reward model of this shape."""

    def made():
        params = initialise(shape, jax.random.key(0))
        return with_value_head(shape, {k: x for k, x in params.items() if k != "lm_head"})

    with without_mesh():
        return jax.eval_shape(made)


class Places:
    """Puts shapes on the devices of a mesh, or on a single one."""

    def __init__(self, mesh: Mesh | None, devices: list[Any]):
        self.mesh, self.devices = mesh, devices

    def _put(self, tree: PyTree, place: Callable) -> PyTree:
        def of_leaf(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x))

        return jax.tree.map(of_leaf, tree)

    def whole(self, tree: PyTree) -> PyTree:
        if self.mesh is None:
            return self._put(tree, lambda x: SingleDeviceSharding(self.devices[0]))
        return self._put(tree, lambda x: NamedSharding(self.mesh, PartitionSpec()))

    def rows(self, tree: PyTree, *counts: int) -> PyTree:
        """Arrays whose first axis is one of `counts` lie split over the batch's axes."""
        if self.mesh is None:
            return self.whole(tree)
        split = math.prod(self.mesh.shape[axis] for axis in BATCH)

        def place(x):
            along = x.ndim > 0 and x.shape[0] in counts and x.shape[0] % split == 0
            return NamedSharding(self.mesh, PartitionSpec(BATCH) if along else PartitionSpec())

        return self._put(tree, place)

    def parameters(self, axes: Any, tree: PyTree) -> PyTree:
        """Parameters, and what belongs to them."""
        if self.mesh is None:
            return self.whole(tree)
        where = shardings(self.mesh, axes, tree)
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, where
        )


def device_bytes(tree: PyTree) -> int:
    """Of placed shapes, on each device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def programs(config: Config, places: Places) -> list[Planned]:
    """In the order that a step runs them. `config` is resolved for the devices."""
    policy = abstract_policy(config)
    critic = None
    if assemble.needs_critic(config) and config.critic.kind == "model":
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
    config: Config, places: Places, policy: assemble.Policy, learner: Learner, state: TrainState
) -> list[Planned]:
    batch, sampling = config.batch, config.sampling
    plan = assemble.make_plan(config, policy, learner, ("score",), True)
    width, count = round_up(sampling.max_prompt_tokens), rows(config)
    pool = _pool(config, width)
    memory = jax.eval_shape(lambda pool: assemble.make_memory(config, plan, pool), pool)
    pool, memory = places.whole((pool, memory))
    state = places.parameters(learner.axes, state._replace(memory=None))._replace(memory=memory)
    reference = policy.params if assemble.uses_reference(config) else None
    reference = reference and places.parameters(parameter_axes(policy.config), reference)
    frozen, scorer = Frozen(reference), None
    if config.reward.source == "model":
        shape, _ = model_shape(config.reward.model, "reward.model")
        weights = jax.eval_shape(lambda x: cast(x, policy.dtype), scorer_params(shape))
        frozen = frozen._replace(reward_model=places.parameters(parameter_axes(shape), weights))
        scorer = assemble.network(config, shape, policy.dtype)
    key, zero = places.whole((state.key, jax.ShapeDtypeStruct((), jnp.int32)))
    solved = memory.solved
    operands = (state.params, pool, state.cursor, solved, key, zero)
    samples, draw = _shapes(sample_round, plan.sampling, *operands)
    samples, draw = places.rows(samples, count), places.whole(draw)
    resident = device_bytes((state, frozen, pool))
    sampled = device_bytes(samples)

    made = []

    def add(name, operands, parts, extra=0, runs=1.0):
        made.append(
            Planned(name, PROGRAMS[name].jitted().lower, operands, parts, resident + extra, runs)
        )

    drawn = 1.0
    loops = _decode_trips(config, count, sampling.slots)
    add(
        "sample",
        (plan.sampling, *operands),
        (Part("prefill", {"while": 0}), Part("decode", {"while": loops})),
        runs=drawn,
    )
    if scorer is not None:
        verify = jax.jit(model_verifier(scorer, learner.micro))
        operands = (frozen, pool, draw.rows, samples)
        parts = (Part("verify", {}),)
        made.append(Planned("verify", verify.lower, operands, parts, resident + sampled, drawn))
    scores = _scores(plan, count)
    pending = jax.eval_shape(
        lambda cursor, solved: begin(plan.sampling, width, cursor, solved), zero, solved
    )
    pending = places.rows(pending, count)
    scores = places.whole(scores)
    streams = {"while": math.ceil(count / learner.micro)}
    kept = device_bytes(pending)
    if config.rollout.dynamic_sampling or config.rollout.probe:
        operands = (plan, state, frozen, pending)
        add("prepare", operands, (Part("score", streams),), kept + sampled)
        prepared = _shapes(PROGRAMS["prepare"].function, *operands)
    else:
        operands = (plan, state, frozen, pool, draw.rows, samples)
        if _reads_scores(plan, learner, frozen):
            add("score", operands, (Part("score", streams),), sampled)
        scored = _shapes(score_samples, *operands)
        scored = places.rows(scored, count)
        operands = (plan, state, pending, scored)
        prepared = _shapes(PROGRAMS["make_batch"].function, *operands)
    learnt = places.rows(prepared[0], count)
    preview = device_bytes(places.rows(prepared[1], count))
    each = {"while": math.ceil(count / batch.minibatches / learner.micro)}
    operands = (learner, state, learnt, key)
    add("update", operands, (Part("update", each),), device_bytes(learnt) + preview)
    return made


def _reads_scores(plan: Any, learner: Learner, frozen: Frozen) -> bool:
    """Whether anything is scored before the update."""
    needed = plan.old_logprobs == "recompute" or learner.valued is not None
    return needed or frozen.reference is not None


def _scores(plan: Any, count: int) -> PyTree:
    from rlx.rollout import Scores

    n, g = plan.sampling.prompts, plan.sampling.samples
    shapes = ((n, g), (n, g), (n, g, 1), (n, g, plan.sampling.max_new_tokens))
    return Scores(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def _decode_trips(config: Config, count: int, slots: int) -> float:
    """Turns of each of the loops that a sampler has, on the average: it has one for each width of
    its cache, or, with slots, one that fills them and one without rows to follow."""
    longest = STRIDE * math.ceil(config.sampling.max_new_tokens / STRIDE)
    if not slots or slots >= count:
        return longest / STRIDE / len(_widths(longest))
    return count / slots * longest / STRIDE / (2 if slots // 4 else 1)


def _offline(
    config: Config, places: Places, policy: assemble.Policy, learner: Learner, state: TrainState
) -> list[Planned]:
    sampling, size = config.sampling, unit(config)
    width, columns = round_up(sampling.max_prompt_tokens), round_up(sampling.max_new_tokens)
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
    reference = policy.params if assemble.uses_reference(config) else None
    reference = reference and places.parameters(parameter_axes(policy.config), reference)
    step = offline_run(learner, config.batch.prompts)
    held = device_bytes((state, reference, pool, data))
    return [
        Planned(
            "update",
            lambda *operands: step.lower(*operands, length=1),
            (state, reference, pool, data),
            (Part("update", {}),),
            held,
        )
    ]


def _pool(config: Config, width: int) -> Prompts:
    size = config.task.model_dump().get("train_size") or POOL
    text = jax.ShapeDtypeStruct((max(size, config.batch.prompts), width), jnp.int32)
    return Prompts(text, text, jax.eval_shape(lambda: jax.random.key(0)))


def _shapes(function: Callable, static: Any, *operands: PyTree) -> PyTree:
    return jax.eval_shape(lambda *given: function(static, *given), *operands)
