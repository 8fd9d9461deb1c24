"""From a configuration to the parts of a run: model, task, learner, plan."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

import model
from model.config import ModelConfig, read_config
from model.load import load_params
from model.qwen import Qwen, initialise
from model.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from rlx.algorithms import ALGORITHMS, Algorithm
from rlx.config import Config, hyper, offline, rows, updates
from rlx.optimizer import optimizer, schedule
from rlx.rollout import Sampling
from rlx.tasks import TASKS, Task
from rlx.train import Plan
from rlx.update import Learner

BUNDLED = {"nano": Path(model.__file__).parent / "assets" / "nano"}
SMALL_PARAMETERS = 1_000_000_000
"""Above it, whole steps under one jit would hold sampler and update in memory at once."""
UNROLLED_LAYERS = 32


class Policy(NamedTuple):
    """A checkpoint, ready to be used."""

    folder: Path
    config: ModelConfig
    tokenizer: Tokenizer
    params: PyTree
    dtype: jnp.dtype


def checkpoint_folder(path: str) -> Path:
    """The folder that `model.path` names. Raises ValueError where there is none."""
    folder = BUNDLED.get(path, Path(path))
    if not folder.is_dir():
        raise ValueError(
            f"model.path: expected a checkpoint folder in Hugging Face's format, or one of "
            f"{', '.join(BUNDLED)}; came {path}, which is no folder."
        )
    return folder


def load_policy(config: Config) -> Policy:
    """Reads the checkpoint, or draws random weights for its shape."""
    folder = checkpoint_folder(config.model.path)
    tokenizer = load_tokenizer(folder)
    shape = read_config(folder)
    check_vocabulary(tokenizer, shape)
    if not tokenizer.stop_ids:
        raise ValueError(f"The tokenizer of {folder} has no token that ends a text.")
    shape = dataclasses.replace(shape, num_tokens=len(tokenizer))
    if config.model.weights == "random":
        params = initialise(shape, jax.random.key(config.run.seed))
    else:
        params = jax.tree.map(jnp.asarray, load_params(folder, shape))
    return Policy(folder, shape, tokenizer, params, compute_dtype(config))


def check_length(config: ModelConfig, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    """Raises ValueError where a prompt and its completion have no room in the model."""
    longest = max(map(len, prompts))
    if longest + new_tokens > config.max_positions:
        raise ValueError(
            f"sampling.max_new_tokens: the longest prompt has {longest} tokens, and with "
            f"{new_tokens} more it goes beyond the model's {config.max_positions} positions."
        )


def compute_dtype(config: Config) -> jnp.dtype:
    name = config.model.dtype
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def load_task(config: Config) -> Task:
    return TASKS[config.task.name](seed=config.run.seed, **hyper(config.task))


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
        optimizer=optimizer(config.optimizer, rate),
        schedule=rate,
        temperature=config.sampling.temperature,
        minibatches=config.batch.minibatches,
        epochs=config.batch.epochs,
        micro=config.batch.micro or minibatch,
        on_policy=not offline(config) and old_logprobs(config) == "current",
    )


def old_logprobs(config: Config) -> str:
    """`current` where a batch gets exactly one update, unless the configuration says otherwise."""
    if config.rollout.old_logprobs != "auto":
        return config.rollout.old_logprobs
    return "current" if config.batch.epochs * config.batch.minibatches == 1 else "recompute"


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
        old_logprobs=old_logprobs(config),
    )


def step_mode(config: Config, policy: Policy) -> str:
    """`fused` where all devices belong to this process and the model is small."""
    if config.loop.mode != "auto":
        return config.loop.mode
    size = sum(leaf.size for leaf in jax.tree.leaves(policy.params))
    return "fused" if jax.process_count() == 1 and size <= SMALL_PARAMETERS else "staged"
