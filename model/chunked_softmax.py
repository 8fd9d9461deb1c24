"""Log-probability and entropy under softmax over a vocabulary, a part of which exists at a time.

    logprobs, entropy = chosen_and_entropy(kernel, hidden, targets, temperature, ...)

Chunks of ids are the outer loop and chunks of tokens the inner one, both ways. Forth, maximum, sum
and mean logit of each token are carried from one chunk of ids to the next (the "online" softmax,
https://arxiv.org/abs/1805.02867, algorithm 3). Back, a chunk's logits are computed again; a part
of the kernel's gradient is whole before the next begins, so that it is written once.

On a mesh each device computes its own tokens with the ids of its part of the vocabulary, a chunk
of which it gathers at a time; what the parts found of a token is put together at the end. So logits
never travel, and neither does the whole kernel at once.

Letters: N tokens, in m chunks of n; V ids, v of a chunk; D width of a hidden state.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from model.attention import MASKED
from model.product import transposed
from model.sharding import BATCH, TENSOR, batch_shards, mesh_sizes, partition

CHUNK_TOKENS = 1024
CHUNK_IDS = 8192
"""Logits that exist at a time are their product: 32 MiB in float32, and as much on the way back."""


class Chunks(NamedTuple):
    """What is static of the computation."""

    ids: int
    """V; ids from `used_ids` on are no token, and have no share."""
    used_ids: int
    ids_first: bool
    """The kernel is [V, D], as an embedding lies, and not [D, V]."""
    dtype: DTypeLike
    """Of the factors of all products, which add up in float32."""
    tokens_each: int
    ids_each: int
    split: bool = False
    """This is one device's part of a mesh: the kernel's part over fsdp and tensor."""

    @property
    def count(self) -> int:
        return -(-self.ids // self.ids_each)

    @property
    def masked(self) -> bool:
        """Some chunk holds ids without a share, or ids of the chunk before it."""
        # A part of the vocabulary may be its last.
        return self.split or self.used_ids < self.ids or self.ids % self.ids_each > 0

    @property
    def width_axis(self) -> int:
        """Of a part of the kernel."""
        return 1 if self.ids_first else 0


class Part(NamedTuple):
    """A chunk of the kernel. The last one ends with the kernel, and so begins before its turn."""

    start: Int[Array, ""]
    """Of its ids in the kernel, or in a device's part of it."""
    first_id: Int[Array, ""]
    weights: Float[Array, "v D"] | Float[Array, "D v"]
    valid: Bool[Array, " v"]


class Statistics(NamedTuple):
    """Of each token's logits so far. With h the highest and e = exp(logit - h):"""

    highest: Float[Array, "m n"]
    total: Float[Array, "m n"]
    """The sum of e."""
    moment: Float[Array, "m n"]
    """The sum of e (logit - h)."""
    chosen: Float[Array, "m n"]
    """The target's logit."""


def chosen_and_entropy(
    kernel: Float[Array, "_ _"],
    hidden: Float[Array, "N D"],
    targets: Int[Array, " N"],
    temperature: float | Float[Array, ""],
    needed: Bool[Array, " N"] | None = None,
    *,
    used_ids: int,
    ids_first: bool,
    dtype: DTypeLike,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Of softmax(hidden @ kernel / temperature), the temperature having no gradient.

    Chunks of tokens none of which is `needed` cost nothing and give zeros.
    """
    sizes = mesh_sizes()
    shards = batch_shards()
    ids = kernel.shape[0 if ids_first else 1] // sizes.get(TENSOR, 1)
    count = targets.shape[0] // shards
    pieces = -(-count // CHUNK_TOKENS)
    chunks = Chunks(
        ids,
        used_ids,
        ids_first,
        jnp.dtype(dtype),
        tokens_each=-(-count // pieces),
        ids_each=-(-ids // -(-ids // CHUNK_IDS)),
        split=bool(sizes),
    )
    padding = pieces * chunks.tokens_each - count

    def cut(x):
        """The tokens of each part of the batch, in as many chunks, one part behind the other."""
        x = x.reshape(shards, count, *x.shape[1:])
        x = jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(shards * pieces, chunks.tokens_each, *x.shape[2:])

    used = None if needed is None else jnp.any(cut(needed), axis=1)
    temperature = jnp.asarray(temperature, jnp.float32)
    found = _in_chunks(chunks, kernel, cut(hidden), cut(targets), temperature, used)
    return tuple(x.reshape(shards, -1)[:, :count].reshape(-1) for x in found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_chunks(chunks, kernel, hidden, targets, temperature, used):
    return _forward(chunks, kernel, hidden, targets, temperature, used)[0]


def _forward(chunks, kernel, hidden, targets, temperature, used):
    operands = (kernel, hidden, targets, temperature, used)
    forward = functools.partial(_forward_part, chunks)
    if chunks.split:
        rows = PartitionSpec(BATCH)
        forward = jax.shard_map(
            forward,
            in_specs=(_kernel_axes(chunks), rows, rows, PartitionSpec(), rows),
            out_specs=rows,
            check_vma=False,
        )
    outputs, (log_total, entropy) = forward(*operands)
    return outputs, (*operands, log_total, entropy)


def _backward(chunks, kept, slopes):
    backward = functools.partial(_backward_part, chunks)
    if chunks.split:
        rows = PartitionSpec(BATCH)
        backward = jax.shard_map(
            backward,
            in_specs=(_kernel_axes(chunks), rows, rows, PartitionSpec(), rows, rows, rows, rows),
            out_specs=(_kernel_axes(chunks), rows),
            check_vma=False,
        )
    return *backward(*kept, slopes), None, None, None


_in_chunks.defvjp(_forward, _backward)


def _kernel_axes(chunks: Chunks) -> PartitionSpec:
    return partition("vocab", "embed") if chunks.ids_first else partition("embed", "vocab")


def _forward_part(chunks, kernel, hidden, targets, temperature, used):
    def of_ids(statistics, index):
        part = _part(chunks, kernel, index)

        def of_tokens(statistics, hidden, targets):
            logits = _logits(chunks, part, hidden, temperature)
            highest = jnp.maximum(statistics.highest, jnp.max(logits, axis=-1))
            lower = logits - highest[:, None]
            share = jnp.exp(lower)
            # What was gathered so far was relative to a maximum that may have been lower.
            shift = statistics.highest - highest
            total, moment = (x * jnp.exp(shift) for x in (statistics.total, statistics.moment))
            return Statistics(
                highest,
                total + jnp.sum(share, axis=-1),
                moment + total * shift + jnp.sum(share * lower, axis=-1),
                jnp.where(_has(part, targets), _at(part, logits, targets), statistics.chosen),
            )

        def unchanged(statistics, *_):
            return statistics

        pieces = (statistics, hidden, targets)
        return _map(of_tokens, unchanged, used, pieces), None

    zeros = jnp.zeros(targets.shape, jnp.float32)
    first = Statistics(jnp.full_like(zeros, MASKED), zeros, zeros, zeros)
    statistics, _ = jax.lax.scan(of_ids, first, jnp.arange(chunks.count))
    highest, total, moment, chosen = _of_all_parts(statistics) if chunks.split else statistics
    if used is not None:
        total = jnp.where(used[:, None], total, 1.0)
        highest = jnp.where(used[:, None], highest, 0.0)
    entropy = jnp.log(total) - moment / total
    log_total = highest + jnp.log(total)
    return (chosen - log_total, entropy), (log_total, entropy)


def _of_all_parts(part: Statistics) -> Statistics:
    """What the parts of the vocabulary found of the same tokens, put together."""
    highest = jax.lax.pmax(part.highest, TENSOR)
    shift = part.highest - highest
    total = part.total * jnp.exp(shift)
    moment = part.moment * jnp.exp(shift) + total * shift
    # A target's logit stands in the part that holds its id, and is zero in the others.
    return Statistics(highest, *jax.lax.psum((total, moment, part.chosen), TENSOR))


def _backward_part(chunks, kernel, hidden, targets, temperature, used, log_total, entropy, slopes):
    """d log p_i / d z = 1_i - p; d H / d z = -p (log p + H)."""

    def of_ids(gradients, index):
        of_kernel, of_hidden = gradients
        part = _part(chunks, kernel, index)

        def of_tokens(of_hidden, hidden, targets, log_total, entropy, slopes):
            of_logprob, of_entropy = (slope[:, None] for slope in slopes)
            logprobs = _logits(chunks, part, hidden, temperature) - log_total[:, None]
            slope = -jnp.exp(logprobs) * (of_logprob + of_entropy * (logprobs + entropy[:, None]))
            places = part.first_id + jnp.arange(chunks.ids_each)
            slope = slope + jnp.where(places == targets[:, None], of_logprob, 0.0)
            if chunks.masked:
                slope = jnp.where(part.valid, slope, 0.0)
            slope = (slope / temperature).astype(chunks.dtype)
            factors = (hidden.astype(chunks.dtype), slope)
            pair = (slope, factors[0]) if chunks.ids_first else factors
            of_part = _product(*pair, contracted=(0, 0))
            side = 0 if chunks.ids_first else 1
            return of_hidden + _product(slope, part.weights, contracted=(1, side)), of_part

        def nothing(of_hidden, *_):
            return of_hidden, jnp.zeros(part.weights.shape, jnp.float32)

        def add(of_part, piece):
            of_hidden, more = _either(of_tokens, nothing, *piece)
            return of_part + more, of_hidden

        pieces = (of_hidden, hidden, targets, log_total, entropy, slopes)
        none = jnp.zeros(part.weights.shape, jnp.float32)
        of_part, of_hidden = jax.lax.scan(add, none, (used, pieces))
        if chunks.split:
            of_part = jax.lax.psum_scatter(
                jax.lax.psum(of_part, "data"),
                "fsdp",
                scatter_dimension=chunks.width_axis,
                tiled=True,
            )
        # Added, since the last chunk holds ids of the one before, of which it has no gradient.
        axis = 0 if chunks.ids_first else 1
        so_far = jax.lax.dynamic_slice_in_dim(of_kernel, part.start, chunks.ids_each, axis)
        of_kernel = jax.lax.dynamic_update_slice_in_dim(
            of_kernel, so_far + of_part, part.start, axis
        )
        return (of_kernel, of_hidden), None

    zeros = (jnp.zeros(kernel.shape, jnp.float32), jnp.zeros(hidden.shape, jnp.float32))
    (of_kernel, of_hidden), _ = jax.lax.scan(of_ids, zeros, jnp.arange(chunks.count))
    if chunks.split:
        of_hidden = jax.lax.psum(of_hidden, TENSOR)
    return of_kernel.astype(kernel.dtype), of_hidden.astype(hidden.dtype)


def _part(chunks: Chunks, kernel, index) -> Part:
    turn = index * chunks.ids_each
    start = jnp.minimum(turn, chunks.ids - chunks.ids_each)
    axis = 0 if chunks.ids_first else 1
    weights = jax.lax.dynamic_slice_in_dim(kernel, start, chunks.ids_each, axis)
    weights = weights.astype(chunks.dtype)
    before = 0
    if chunks.split:
        before = jax.lax.axis_index(TENSOR) * chunks.ids
        weights = jax.lax.all_gather(weights, "fsdp", axis=chunks.width_axis, tiled=True)
    ids = start + jnp.arange(chunks.ids_each)
    valid = (ids >= turn) & (before + ids < chunks.used_ids)
    return Part(start, before + start, weights, valid)


def _logits(chunks: Chunks, part: Part, hidden: Float[Array, "n D"], temperature):
    side = 1 if chunks.ids_first else 0
    out = _product(hidden.astype(chunks.dtype), part.weights, contracted=(1, side)) / temperature
    return jnp.where(part.valid, out, MASKED) if chunks.masked else out


def _product(left, right, contracted: tuple[int, int]):
    left = left if contracted[0] == 1 else transposed(left)
    right = right if contracted[1] == 0 else transposed(right)
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)


def _has(part: Part, targets):
    place = targets - part.first_id
    inside = (place >= 0) & (place < part.valid.shape[0])
    return inside & part.valid[jnp.clip(place, 0, part.valid.shape[0] - 1)]


def _at(part: Part, logits, targets):
    place = jnp.clip(targets - part.first_id, 0, logits.shape[1] - 1)
    return jnp.take_along_axis(logits, place[:, None], axis=-1)[:, 0]


def _either(of_tokens, otherwise, used, pieces):
    """The first of the two, or the second where no token is used."""
    if used is None:
        return of_tokens(*pieces)
    return jax.lax.cond(used, of_tokens, otherwise, *pieces)


def _map(of_tokens, otherwise, used, pieces):
    return jax.lax.map(lambda piece: _either(of_tokens, otherwise, *piece), (used, pieces))
