"""From hidden states to logits, and to log-probability and entropy without [B, T, V]."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from model.attention import MASKED
from model.config import ModelConfig
from model.qwen import Qwen, head_kernel

CHUNK_LOGITS = 2**24
"""Logits that exist at a time: 64 MiB in float32, and as much again on the way back."""
CHUNK_TOKENS = 2048


class Outputs(NamedTuple):
    """What one forward pass of the policy gives for its completion tokens."""

    logprobs: Float[Array, "B T"]
    entropy: Float[Array, "B T"]


def logits(
    config: ModelConfig, kernel: Float[Array, "D V"], hidden: Float[Array, "*batch D"]
) -> Float[Array, "*batch V"]:
    """Float32 logits. Ids that are no token of the tokenizer have no probability."""
    kernel = kernel.astype(hidden.dtype)
    out = jnp.einsum("...d,dv->...v", hidden, kernel, preferred_element_type=jnp.float32)
    if config.num_tokens is None:
        return out
    return jnp.where(jnp.arange(config.vocab_size) < config.num_tokens, out, MASKED)


def token_logprobs(
    config: ModelConfig,
    kernel: Float[Array, "D V"],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    temperature: float | Float[Array, ""] = 1.0,
) -> Outputs:
    """Log-probability of each target, and the entropy, of the softmax at `temperature`.

    The tokens pass in chunks; each chunk's logits are computed again on the way back.
    """
    shape, width = targets.shape, hidden.shape[-1]
    count = targets.size
    chunk = max(1, min(count, CHUNK_TOKENS, CHUNK_LOGITS // config.vocab_size))
    padding = -count % chunk
    hidden = jnp.pad(hidden.reshape(count, width), ((0, padding), (0, 0)))
    targets = jnp.pad(targets.reshape(count), (0, padding))

    @jax.checkpoint
    def of_chunk(pair):
        scaled = logits(config, kernel, pair[0]) / temperature
        log_total = jax.nn.logsumexp(scaled, axis=-1)
        chosen = jnp.take_along_axis(scaled, pair[1][:, None], axis=-1)[:, 0]
        expected = jnp.sum(jnp.exp(scaled - log_total[:, None]) * scaled, axis=-1)
        return chosen - log_total, log_total - expected

    chunks = (hidden.reshape(-1, chunk, width), targets.reshape(-1, chunk))
    logprobs, entropy = jax.lax.map(of_chunk, chunks)
    return Outputs(
        logprobs.reshape(-1)[:count].reshape(shape), entropy.reshape(-1)[:count].reshape(shape)
    )


def completion_outputs(
    model: Qwen,
    params: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    width: int,
    temperature: float | Float[Array, ""] = 1.0,
) -> Outputs:
    """Of the last `width` columns, each predicted by the column before it."""
    hidden = model.apply({"params": params}, tokens, positions)
    kernel = head_kernel(model.config, params)
    hidden = hidden[:, -width - 1 : -1]
    return token_logprobs(model.config, kernel, hidden, tokens[:, -width:], temperature)
