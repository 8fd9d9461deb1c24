"""Held-out text that is given: preference pairs, and text to be imitated. Nothing is sampled.

Rows pass in micro-batches of the learner's own size, the last one filled up with masked rows: one
shape, one program, whatever the number of rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from model.heads import Outputs
from model.sharding import whole
from rlx.algorithms.record import clean
from rlx.evaluate import HEADLINES, Completion, summarise_pairs, summarise_texts
from rlx.learner import Learner, forward
from rlx.types import Batch, Mean


class _Given:
    """What both kinds share: the rows in micro-batches, and the forward pass."""

    headline: str
    rows: Sequence[Mapping[str, Any]] = ()
    verifier = None
    notes: tuple[str, ...] = ()

    def __init__(self, learner: Learner, data: Batch):
        self.count = len(data.mask)
        self.micro = learner.micro
        self.data = data
        width = data.mask.shape[1]
        self.outputs = jax.jit(
            lambda params, *text: whole(forward(learner, params, {}, *text, width))
        )

    @property
    def higher_is_better(self) -> bool:
        return HEADLINES[self.headline].higher_is_better

    def pieces(self, params: PyTree, count: int) -> Iterator[tuple[Outputs, Batch]]:
        """The first `count` rows."""
        count = min(count, self.count)
        for start in range(0, count, self.micro):
            places = np.arange(start, start + self.micro)
            inside = jnp.asarray(places < count)[:, None]
            piece = jax.tree.map(lambda x, p=places: x[p % self.count], self.data)
            piece = piece._replace(
                mask=piece.mask & inside,
                signals=tuple(s._replace(mask=s.mask & inside) for s in piece.signals),
            )
            yield self.outputs(params, piece.tokens, piece.positions), piece


class HeldoutPairs(_Given):
    """Rows 2i (chosen) and 2i + 1 (rejected), as the learner's first term sees them.

    `reference` are the frozen parameters where that term's loss reads them.
    """

    headline = "accuracy"

    def __init__(self, learner: Learner, data: Batch, reference: PyTree | None):
        # A critic of its own has no part in a loss of pairs.
        super().__init__(learner._replace(critic=None), data)
        if reference is not None:
            # By the very program that the policy passes through: a policy that equals its
            # reference then ties, where two programs would differ by rounding.
            scored = [outputs.logprobs for outputs, _ in self.pieces(reference, self.count)]
            scored = jnp.concatenate(scored)[: self.count]
            self.data = data._replace(ref_logprobs=scored)
        self.measure = jax.jit(lambda *piece: whole(pair_metrics(learner, *piece)))
        text = np.stack([np.asarray(data.tokens), np.asarray(data.positions)], axis=-1)
        width = text.shape[1] - data.mask.shape[1]
        _, same = np.unique(text[::2, :width], axis=0, return_inverse=True)
        self.prompts = same.reshape(-1)

    def evaluate(
        self, params: PyTree, count: int, *, greedy: bool
    ) -> tuple[dict[str, Any], list[Completion]]:
        """Metrics of the first `count` pairs, or of all where there are fewer: `n` tells. There is
        no text, and nothing to be greedy about."""
        measured = [self.measure(*piece) for piece in self.pieces(params, 2 * count)]
        pairs = {
            name: np.concatenate(values)[: min(2 * count, self.count) // 2]
            for name, values in _by_name(jax.device_get(measured)).items()
        }
        means = {name: float(np.mean(values)) for name, values in pairs.items()}
        margins = pairs["margin"]
        return means | summarise_pairs(margins, self.prompts[: len(margins)]), []


class HeldoutTexts(_Given):
    """Rows of text to be imitated, in the tokens under their mask."""

    headline = "nll"

    def __init__(self, learner: Learner, data: Batch):
        super().__init__(learner._replace(critic=None), data)
        self.measure = jax.jit(lambda *piece: whole(row_losses(*piece)))

    def evaluate(
        self, params: PyTree, count: int, *, greedy: bool
    ) -> tuple[dict[str, Any], list[Completion]]:
        """Metrics of the first `count` rows, or of all where there are fewer: `n` tells. There is
        no text, and nothing to be greedy about."""
        measured = [self.measure(*piece) for piece in self.pieces(params, count)]
        losses, lengths = (np.concatenate(x) for x in zip(*jax.device_get(measured), strict=True))
        used = lengths > 0
        return summarise_texts(losses[used], lengths[used]), []


def pair_metrics(
    learner: Learner, outputs: Outputs, batch: Batch
) -> dict[str, Float[Array, " pairs"]]:
    """Loss and metrics of each pair by itself, by the learner's first term."""
    algorithm = learner.terms[0].algorithm
    inputs = clean(algorithm.inputs(outputs, batch, batch.signals[0]))
    pairs = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), inputs)

    def of_pair(pair):
        loss, metrics = algorithm.loss(*pair)
        means = {n: m.total / m.count for n, m in metrics.items() if isinstance(m, Mean)}
        return {"loss": jnp.mean(loss)} | means

    return jax.vmap(of_pair)(pairs)


def row_losses(outputs: Outputs, batch: Batch) -> tuple[Float[Array, " B"], Int[Array, " B"]]:
    """Each row's summed negative log-probability, and its tokens."""
    losses = jnp.where(batch.mask, -outputs.logprobs, 0.0)
    return jnp.sum(losses, axis=1), jnp.sum(batch.mask, axis=1)


def _by_name(pieces: Sequence[Mapping[str, np.ndarray]]) -> dict[str, list[np.ndarray]]:
    return {name: [piece[name] for piece in pieces] for name in pieces[0]}
