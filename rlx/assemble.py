"""From a configuration to the parts of a run: model, task, learner, plan."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Key, PyTree

import model
from model.config import ModelConfig, read_config
from model.errors import BadInput
from model.load import load_params
from model.qwen import Qwen, initialise
from model.sample import Filters
from model.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from rlx.algorithms import ALGORITHMS, Algorithm
from rlx.config import Config, hyper, offline, rows, updates
from rlx.optimizer import make_optimizer, schedule
from rlx.rollout import Sampling
from rlx.settings import old_logprobs
from rlx.tasks import TASKS, Task
from rlx.train import Plan
from rlx.update import Learner

BUNDLED = {"nano": Path(model.__file__).parent / "assets" / "nano"}
SMALL_PARAMETERS = 1_000_000_000
"""Above it, whole steps under one jit would hold sampler and update in memory at once."""
UNROLLED_LAYERS = 32


class Keys(NamedTuple):
    """The root of all randomness, split once."""

    order: Key[jax.Array, ""]
    steps: Key[jax.Array, ""]
    evaluation: Key[jax.Array, ""]
    weights: Key[jax.Array, ""]


def random_keys(config: Config) -> Keys:
    return Keys(*jax.random.split(jax.random.key(config.run.seed), len(Keys._fields)))


class Policy(NamedTuple):
    """A checkpoint, ready to be used."""

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    params: PyTree
    dtype: jnp.dtype


def checkpoint_folder(path: str) -> Path:
    """The folder that `model.path` names. Raises BadInput where there is none."""
    folder = BUNDLED.get(path, Path(path))
    if not folder.is_dir():
        raise BadInput(
            f"model.path: expected a checkpoint folder in Hugging Face's format, or one of "
            f"{', '.join(BUNDLED)}; came {path}, which is no folder."
        )
    return folder


def load_policy(config: Config, key: Key[jax.Array, ""]) -> Policy:
    """Reads the checkpoint, or draws random weights for its shape. `config` is resolved."""
    folder = checkpoint_folder(config.model.path)
    tokenizer = load_tokenizer(folder)
    shape = read_config(folder)
    check_vocabulary(tokenizer, shape)
    if not tokenizer.stop_ids:
        raise BadInput(f"The tokenizer of {folder} has no token that ends a text.")
    shape = dataclasses.replace(shape, num_tokens=len(tokenizer))
    if config.model.weights == "random":
        params = initialise(shape, key)
    else:
        params = jax.tree.map(jnp.asarray, load_params(folder, shape))
    return Policy(folder, shape, tokenizer, params, jnp.dtype(config.model.dtype))


def check_length(config: ModelConfig, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    """Raises BadInput where a prompt and its completion have no room in the model."""
    longest = max(map(len, prompts))
    if longest + new_tokens > config.max_positions:
        raise BadInput(
            f"sampling.max_new_tokens: the longest prompt has {longest} tokens, and with "
            f"{new_tokens} more it goes beyond the model's {config.max_positions} positions."
        )


def resolve(config: Config) -> Config:
    """The configuration with each `auto` replaced by what it comes to on this machine."""
    model, rollout, loop = config.model, config.rollout, config.loop
    if model.dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        model = model.model_copy(update={"dtype": dtype})
    if not offline(config):
        rollout = rollout.model_copy(update={"old_logprobs": old_logprobs(config)})
        if loop.mode == "auto":
            shape = read_config(checkpoint_folder(model.path))
            small = parameter_count(shape) <= SMALL_PARAMETERS
            mode = "fused" if small and jax.process_count() == 1 else "staged"
            loop = loop.model_copy(update={"mode": mode})
    return config.model_copy(update={"model": model, "rollout": rollout, "loop": loop})


def parameter_count(config: ModelConfig) -> int:
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(lambda k: initialise(config, k), key)
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def load_task(config: Config) -> Task:
    try:
        return TASKS[config.task.name](seed=config.run.seed, **hyper(config.task))
    except BadInput as error:
        raise BadInput(f"task: {error}") from error


def bound_algorithm(config: Config) -> Algorithm:
    return ALGORITHMS[config.algorithm.name].bind(**hyper(config.algorithm))


def make_learner(config: Config, policy: Policy) -> Learner:
    rate = schedule(config.optimizer, updates(config))
    minibatch = rows(config) // config.batch.minibatches
    layers = policy.config.num_layers
    return Learner(
        model=Qwen(
            policy.config,
            policy.dtype,
            remat=config.model.remat == "block",
            unroll=layers if jax.default_backend() == "cpu" and layers <= UNROLLED_LAYERS else 1,
        ),
        algorithm=bound_algorithm(config),
        optimizer=make_optimizer(config.optimizer, rate),
        schedule=rate,
        # Given text was not sampled: there `sampling` is for evaluation only.
        temperature=1.0 if offline(config) else config.sampling.temperature,
        minibatches=config.batch.minibatches,
        epochs=config.batch.epochs,
        micro=config.batch.micro or minibatch,
        on_policy=config.rollout.old_logprobs == "current",
    )


def make_plan(config: Config, policy: Policy, components: tuple[str, ...]) -> Plan:
    rollout = config.rollout
    return Plan(
        sampling=Sampling(
            model=policy.config,
            dtype=policy.dtype,
            prompts=config.batch.prompts,
            samples=config.batch.samples,
            max_new_tokens=config.sampling.max_new_tokens,
            temperature=config.sampling.temperature,
            stop_ids=policy.tokenizer.stop_ids,
            pad_id=policy.tokenizer.pad_id,
            components=components,
            dynamic=rollout.dynamic_sampling,
            max_rounds=rollout.max_rounds if rollout.dynamic_sampling else 1,
            overlong_buffer=rollout.overlong_buffer,
        ),
        learner=make_learner(config, policy),
        overlong_filter=rollout.overlong_filter,
        old_logprobs=config.rollout.old_logprobs,
    )


def filters(config: Config) -> Filters | None:
    """What `sampling` forbids to be drawn, in evaluation and generation."""
    sampling = config.sampling
    if not sampling.top_k and sampling.top_p == 1 and not sampling.min_p:
        return None
    return Filters(sampling.top_k, sampling.top_p, sampling.min_p)
