"""From hidden states to logits, to log-probability and entropy without [B, T, V], and to values.

    params["value_head"]["kernel"]     # [D, 1] float32: a critic's head, or a reward model's

It stands in the parameters only where there is such a head; sampling and log-probabilities do not
read it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from model.attention import MASKED, Context
from model.chunked_softmax import chosen_and_entropy
from model.config import ModelConfig
from model.moe import LOADS, Load
from model.product import product
from model.qwen import Qwen
from model.sharding import apart, constrain, each_shard, together
from model.stream import Places, Stream


class Outputs(NamedTuple):
    """What one forward pass of the policy gives for its completion tokens."""

    logprobs: Float[Array, "B T"]
    entropy: Float[Array, "B T"]
    values: Float[Array, "B T+1"]
    """Of the state before each token, and after the last; zeros where the parameters have no
    `value_head`."""
    load: Load | None = None
    """Of the policy's routers, where it has experts; over all real tokens of the pass."""


def logits(
    config: ModelConfig,
    kernel: Float[Array, "D V"],
    hidden: Float[Array, "*batch D"],
    dtype: DTypeLike | None = None,
    first_id: int | Int[Array, ""] = 0,
) -> Float[Array, "*batch V"]:
    """Float32 logits. Ids that are no token of the tokenizer have no probability.

    `dtype` is that of the product's factors (None: as the hidden states); `first_id` that of the
    kernel's first column, where it is a part of the vocabulary.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    out = product(rows, kernel, jnp.dtype(dtype or hidden.dtype))
    out = out.reshape(*hidden.shape[:-1], -1)
    if config.num_tokens is None:
        return out
    ids = first_id + jnp.arange(config.vocab_size)
    return jnp.where(ids < config.num_tokens, out, MASKED)


def token_logprobs(
    config: ModelConfig,
    kernel: Float[Array, "_ _"],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    temperature: float | Float[Array, ""] = 1.0,
    *,
    ids_first: bool = False,
    needed: Bool[Array, "B T"] | None = None,
    dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probability of each target, and the entropy, of the softmax at `temperature`.

    Never more than a chunk of the logits exists (model/chunked_softmax.py). Chunks without a
    `needed` token cost nothing and give zeros. The kernel is [D, V], or [V, D] with `ids_first`, as
    an embedding lies; `dtype` is that of the products' factors (None: as the hidden states).
    """
    found = chosen_and_entropy(
        kernel,
        hidden.reshape(-1, hidden.shape[-1]),
        targets.reshape(-1),
        temperature,
        None if needed is None else needed.reshape(-1),
        used_ids=config.num_tokens or config.vocab_size,
        ids_first=ids_first,
        dtype=dtype or hidden.dtype,
    )
    return tuple(x.reshape(targets.shape) for x in found)


def policy_logprobs(
    model: Qwen,
    params: PyTree,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    temperature: float | Float[Array, ""],
    needed: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`token_logprobs` of the model's own head, which no pass transposes."""
    tied = model.config.tie_embeddings
    return token_logprobs(
        model.config,
        params["embed"]["embedding"] if tied else params["lm_head"]["kernel"],
        hidden,
        targets,
        temperature,
        ids_first=tied,
        needed=needed,
        dtype=model.dtype,
    )


def completion_outputs(
    model: Qwen,
    params: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    width: int,
    temperature: float | Float[Array, ""] = 1.0,
) -> Outputs:
    """Of the last `width` columns, each predicted by the column before it.

    That column is the state before the token: its value is of the same hidden state.
    """
    hidden, load = _hidden_and_load(model, params, tokens, positions)
    hidden, targets = hidden[:, -width - 1 :], tokens[:, -width:]
    logprobs, entropy = policy_logprobs(model, params, hidden[:, :-1], targets, temperature)
    has_head = "value_head" in params
    values = head_values(params, hidden) if has_head else jnp.zeros(hidden.shape[:2], jnp.float32)
    return Outputs(logprobs, entropy, values, load)


def _hidden_and_load(model: Qwen, params: PyTree, *where) -> tuple[Float[Array, "B S D"], PyTree]:
    if not model.config.num_experts:
        return model.apply({"params": params}, *where), None
    hidden, left = model.apply({"params": params}, *where, mutable=[LOADS])
    return hidden, left[LOADS]["layers"]["mlp"]["load"]


def stream_outputs(
    model: Qwen,
    params: PyTree,
    stream: Stream,
    places: Places,
    width: int,
    temperature: float | Float[Array, ""] = 1.0,
) -> Outputs:
    """`completion_outputs` of the rows of a stream, or of streams side by side. Beyond a row's end
    stands garbage; the value after its last token only where the row is laid out with one more."""
    hidden, load = _hidden_and_load(model, params, *_text(stream))
    logprobs, entropy = policy_logprobs(
        model, params, hidden, stream.targets, temperature, stream.predicts
    )
    has_head = "value_head" in params
    values = head_values(params, hidden) if has_head else jnp.zeros(hidden.shape[:2], jnp.float32)
    logprobs, entropy, values = (
        _by_row(x, stream, places, width) for x in (logprobs, entropy, values)
    )
    return Outputs(logprobs[:, :-1], entropy[:, :-1], values, load)


def _text(stream: Stream) -> tuple[Int[Array, "B S"], Int[Array, "B S"], Context]:
    return stream.tokens, stream.positions, stream.context


def _by_row(
    x: Float[Array, "..."], stream: Stream, places: Places, width: int
) -> Float[Array, "B {width}+1"]:
    """What stands at each row's columns in its stream."""
    streams = stream.context.prompt_blocks.shape[0]
    columns = apart(places.starts, streams)[..., None] + jnp.arange(width + 1)
    columns = jnp.minimum(columns, stream.tokens.size // streams - 1)
    rows = each_shard(lambda x, columns: x[columns], x.reshape(streams, -1), columns)
    return constrain(together(rows), "batch")


def with_value_head(config: ModelConfig, params: PyTree) -> PyTree:
    """The parameters with a value head: the one they have, or one of zeros.

    A critic then starts at V = 0, and a reward model prefers neither text of a pair (loss log 2).
    """
    zeros = {"kernel": jnp.zeros((config.hidden_size, 1), jnp.float32)}
    return {"value_head": zeros} | params


def head_values(params: PyTree, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch"]:
    """The value head's float32 product with each hidden state."""
    # GPU and TPU would round the factors of a float32 product by default.
    kernel = params["value_head"]["kernel"].astype(jnp.float32)
    exact = jax.lax.Precision.HIGHEST
    return jnp.matmul(hidden.astype(jnp.float32), kernel, precision=exact)[..., 0]


def state_values(
    model: Qwen,
    params: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    width: int,
) -> Float[Array, "B {width}+1"]:
    """The value before each of the last `width` columns, and after the last of them.

    Column t is `completion_outputs`' value of token t. After a row's last real token at completion
    column k the value stands in column k + 1; columns beyond it are padding's.
    """
    hidden = model.apply({"params": params}, tokens, positions)
    return head_values(params, hidden[:, -width - 1 :])


def stream_values(
    model: Qwen, params: PyTree, stream: Stream, places: Places, width: int
) -> Float[Array, "B {width}+1"]:
    """`state_values` of the rows of a stream, as `stream_outputs` has them. It needs no other
    head."""
    hidden = model.apply({"params": params}, *_text(stream))
    return _by_row(head_values(params, hidden), stream, places, width)


def last_scores(
    model: Qwen, params: PyTree, tokens: Int[Array, "B S"], positions: Int[Array, "B S"]
) -> Float[Array, " B"]:
    """The head at each row's last token (its last column with a position), on whichever side the
    row is padded. A row of padding alone has a score that means nothing."""
    hidden = model.apply({"params": params}, tokens, positions)
    columns = jnp.arange(tokens.shape[1])
    last = jnp.argmax(jnp.where(positions >= 0, columns, -1), axis=1)
    return head_values(params, hidden[jnp.arange(tokens.shape[0]), last])
