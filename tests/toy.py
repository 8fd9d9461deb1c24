"""What tests of algorithms and steps share: a tiny policy, a pool, a verifier, a plan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from model.config import ModelConfig
from model.qwen import Qwen, initialise
from rlx.algorithms import ALGORITHMS
from rlx.data import prompt_pool
from rlx.rollout import Prompts, Sampling
from rlx.train import Plan
from rlx.types import Batch
from rlx.update import Learner

PAD, STOP, LUCKY = 0, 1, 7
"""Ids with a role: padding, the stop token, and the one that the verifier pays for."""

CONFIG = ModelConfig(
    family="qwen2",
    vocab_size=16,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rope_theta=10_000.0,
    norm_epsilon=1e-6,
    tie_embeddings=True,
    qkv_bias=True,
    output_bias=False,
    qk_norm=False,
    max_positions=64,
)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """For a module that imports it: LLVM's passes are half of compiling programs this small."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def initial_params():
    """With noise on every leaf, biases included, so that a tiny model is far from uniform."""
    params = initialise(CONFIG, jax.random.key(0))
    rng = np.random.default_rng(0)

    def noisy(leaf):
        return leaf + jnp.asarray(rng.normal(0, 0.2, leaf.shape), jnp.float32)

    return jax.tree.map(noisy, params)


def pool(count: int = 6, seed: int = 0) -> Prompts:
    """`count` different prompts of two to four tokens, in a pool of width 8."""
    rng = np.random.default_rng(seed)
    texts = [[2 + i % 14, *rng.integers(2, 16, 1 + i % 3).tolist()] for i in range(count)]
    return prompt_pool(texts, PAD, jax.random.key(seed))


def verifier(rows, tokens, lengths):
    """1 for a completion that begins with the lucky token. Plain NumPy."""
    right = (tokens[:, :, 0] == LUCKY).astype(np.float32)
    return right, right, right[..., None]


def batch(rows: int = 4, width: int = 5, seed: int = 0, prompt: int = 3) -> Batch:
    """Completions of unequal length, with old and reference log-probabilities near uniform."""
    rng = np.random.default_rng(seed)
    lengths = 1 + rng.permutation(rows) % width
    mask = np.arange(width) < lengths[:, None]
    tokens = rng.integers(2, 16, (rows, prompt + width))
    tokens[:, prompt:][~mask] = PAD
    places = np.arange(prompt + width)
    positions = np.where(np.pad(mask, ((0, 0), (prompt, 0)), constant_values=True), places, -1)
    near = rng.normal(-2.77, 0.3, (3, rows, width)).astype(np.float32)
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        mask=jnp.asarray(mask),
        sampler_logprobs=jnp.asarray(near[0]),
        old_logprobs=jnp.asarray(near[1]),
        ref_logprobs=jnp.asarray(near[2]),
        advantages=jnp.asarray(rng.normal(size=(rows, 1)), jnp.float32),
    )


def learner(name: str = "grpo", rate: float = 0.1, **changes) -> Learner:
    """SGD, one update a batch, old log-probabilities as the batch has them."""
    base = Learner(
        model=Qwen(CONFIG),
        algorithm=ALGORITHMS[name],
        optimizer=optax.sgd(rate),
        schedule=optax.constant_schedule(rate),
        temperature=1.0,
        minibatches=1,
        epochs=1,
        micro=2,
        on_policy=False,
    )
    return base._replace(**changes)


def sampling(**changes) -> Sampling:
    base = Sampling(
        model=CONFIG,
        dtype=jnp.dtype("float32"),
        prompts=2,
        samples=4,
        max_new_tokens=3,
        temperature=1.0,
        stop_ids=(STOP,),
        pad_id=PAD,
        components=("answer",),
        dynamic=False,
        max_rounds=1,
        overlong_buffer=0,
    )
    return base._replace(**changes)


def plan(name: str = "grpo", sample: dict | None = None, **changes) -> Plan:
    """One update a step on what was just sampled, unless told otherwise."""
    fields = {"micro": 4, "on_policy": True} | changes
    on_policy = fields["on_policy"]
    return Plan(
        sampling=sampling(**(sample or {})),
        learner=learner(name, **fields),
        overlong_filter=False,
        old_logprobs="current" if on_policy else "recompute",
    )


def movement(before, after) -> float:
    """The largest change of any parameter."""
    gaps = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), before, after)
    return max(jax.tree.leaves(gaps))
