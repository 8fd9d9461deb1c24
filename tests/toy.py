"""What tests of algorithms and steps share: a tiny policy, a pool, a verifier, a plan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from model.config import ModelConfig
from model.parameters import initialise
from model.qwen import Qwen
from rlx.algorithms import ALGORITHMS, TERMS
from rlx.data import prompt_pool
from rlx.learner import Learner, Term
from rlx.prepare import Plan
from rlx.prompts import Prompts
from rlx.rollout import Sampling
from rlx.shaping import Shaping
from rlx.types import Batch, Signal

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
    return right, right, right[..., None], np.zeros(tokens.shape, np.float32)


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
    advantages = jnp.asarray(rng.normal(size=(rows, 1)), jnp.float32)
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        mask=jnp.asarray(mask),
        sampler_logprobs=jnp.asarray(near[0]),
        old_logprobs=jnp.asarray(near[1]),
        ref_logprobs=jnp.asarray(near[2]),
        values=jnp.zeros((rows, width)),
        margins=jnp.zeros((rows, 1)),
        signals=(Signal(advantages, advantages, jnp.asarray(mask)),),
    )


def learner(name: str = "grpo", rate: float = 0.1, hyper: dict | None = None, **changes) -> Learner:
    """SGD, one update a batch, old log-probabilities as the batch has them."""
    base = Learner(
        model=Qwen(CONFIG),
        critic=None,
        terms=(Term(name, (ALGORITHMS | TERMS)[name].bind(**hyper or {})),),
        optimizer=optax.sgd(rate),
        schedule=optax.constant_schedule(rate),
        temperature=1.0,
        minibatches=1,
        epochs=1,
        micro=2,
        on_policy=False,
    )
    return base._replace(**changes)


def signal(name: str, mask, seed: int = 0) -> Signal:
    """What a row of the table learns from on made-up data: signs of pairs, an advantage a row, or,
    where a critic values each token, one a token and returns."""
    row, rng = (ALGORITHMS | TERMS)[name], np.random.default_rng(seed)
    rows = len(mask)
    if row.source == "pairs":
        advantages = np.tile([[1.0], [-1.0], [-1.0], [1.0]], (rows // 4, 1))
    elif row.source == "texts":
        advantages = np.ones((rows, 1))
    else:
        advantages = rng.normal(size=mask.shape if row.critic or name == "value" else (rows, 1))
    returns = jnp.asarray(rng.normal(size=advantages.shape), jnp.float32)
    return Signal(jnp.asarray(advantages, jnp.float32), returns, mask)


def together(names: tuple[str, ...], weights=None, **changes) -> Learner:
    """A learner that has all these rows as its terms, of these weights. The weights may be traced:
    one compiled program then gives the loss and the gradient of every row, one at a time."""
    given = {"grpo": {"beta": 0.5}, "dr_grpo": {"budget": 5}} | changes.pop("hyper", {})
    shares = [1.0] * len(names) if weights is None else weights
    rows = ALGORITHMS | TERMS
    terms = (
        Term(name, rows[name].bind(**given.get(name, {})), shares[i])
        for i, name in enumerate(names)
    )
    return learner(names[0], terms=tuple(terms), **changes)


def batch_of(names: tuple[str, ...], rows: int, seed: int = 0) -> Batch:
    """`batch` with a signal for each of the rows of the table, values, and margins of pairs."""
    made = batch(rows, seed=seed)
    rng = np.random.default_rng(seed + 1)
    margins = np.repeat(rng.uniform(0, 0.5, (rows // 2, 1)), 2, axis=0)
    return made._replace(
        values=jnp.asarray(rng.normal(size=made.mask.shape), jnp.float32),
        margins=jnp.asarray(margins, jnp.float32),
        signals=tuple(signal(name, made.mask, i) for i, name in enumerate(names)),
    )


@functools.cache
def headed_params():
    """`initial_params` with a critic's or a reward model's head that is not zero."""
    kernel = np.random.default_rng(9).normal(0, 0.2, (CONFIG.hidden_size, 1))
    return {**initial_params(), "value_head": {"kernel": jnp.asarray(kernel, jnp.float32)}}


def sampling(**changes) -> Sampling:
    base = Sampling(
        model=CONFIG,
        dtype=jnp.dtype("float32"),
        activations=jnp.dtype("float32"),
        prompts=2,
        samples=4,
        slots=0,
        max_new_tokens=3,
        temperature=1.0,
        stop_ids=(STOP,),
        pad_id=PAD,
        components=("answer",),
        verdicts=True,
        retire_after=0,
        probe=0,
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
        shaping=Shaping(),
        overlong_filter=False,
        replay_max_age=8,
        correction=None,
        old_logprobs="current" if on_policy else "recompute",
    )


def movement(before, after) -> float:
    """The largest change of any parameter."""
    gaps = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), before, after)
    return max(jax.tree.leaves(gaps))
