"""What gives a rollout its rewards: a verifier on the host, or a reward model on the device.

Each returns `verify(frozen, pool, rows, samples) -> Scores`, a part of a step.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.heads import last_scores
from model.qwen import Qwen
from model.sharding import in_row_order, micro_batches, whole
from rlx import hosts
from rlx.frozen import on_device
from rlx.rollout import Sampling, Scores, whole_rows


def callback_verifier(sampling: Sampling, verifier: Callable) -> Callable:
    """The host's verifier as a part of a jitted program."""
    widths = ((), (), (len(sampling.components),), (sampling.max_new_tokens,))

    def on_host(rows, tokens, lengths):
        # No JAX in here: a callback that starts a computation can wait for itself.
        return Scores(*verifier(*host_arrays(rows, tokens, lengths)))

    def verify(frozen, pool, rows, samples):
        n, group = rows.shape[0], samples.mask.shape[0] // rows.shape[0]
        shapes = Scores(*(jax.ShapeDtypeStruct((n, group, *w), np.float32) for w in widths))
        # One device calls the host, once: it has to hold all rows.
        tokens, lengths = whole((samples.tokens, jnp.sum(samples.mask, axis=1)))
        return jax.pure_callback(on_host, shapes, rows, tokens, lengths)

    return verify


def host_verifier(verifier: Callable) -> Callable:
    """The host's verifier, called between jitted programs. On several hosts each verifies rows that
    it holds, each row once, and all get all scores."""

    def verify(frozen, pool, rows, samples):
        # They stay on the host: to make a jax array would wait for what the device is at.
        if not hosts.several():
            lengths = np.asarray(samples.mask).sum(axis=1)
            return Scores(*verifier(*host_arrays(rows, samples.tokens, lengths)))
        rows = hosts.fetched(rows)
        group = len(samples.mask) // len(rows)
        places, tokens, lengths = [], [], []
        pieces = zip(*map(hosts.own_pieces, (samples.tokens, samples.mask)), strict=True)
        for (start, own_tokens), (_, mask) in pieces:
            # The groups of a prompt lie together.
            places.extend(range(start // group, (start + len(mask)) // group))
            tokens.append(own_tokens)
            lengths.append(mask.sum(axis=1))
        scores = None
        if places:
            of_own = (rows[places], np.concatenate(tokens), np.concatenate(lengths))
            scores = verifier(*host_arrays(*of_own))
        return Scores(*_all_scores(len(rows), hosts.gathered((places, scores))))

    return verify


def _all_scores(
    count: int, every: list[tuple[list[int], tuple[np.ndarray, ...] | None]]
) -> list[np.ndarray]:
    """Of `count` prompts, from what each process scored at which places."""
    scored = [(places, scores) for places, scores in every if places]
    order = np.argsort(np.concatenate([places for places, _ in scored]))
    if len(order) != count:
        raise RuntimeError(f"{len(order)} of {count} prompts were verified.")
    return [np.concatenate(x)[order] for x in zip(*(s for _, s in scored), strict=True)]


def model_verifier(model: Qwen, micro: int) -> Callable:
    """A reward model in the verifier's place: its score after the last token is the reward, and
    nothing is right or wrong. At most `micro` rows are scored at a time."""

    def verify(frozen, pool, rows, samples):
        text = whole_rows(pool, rows, samples)
        piece = math.gcd(micro, len(text[0]))
        pieces = jax.tree.map(lambda x: micro_batches(x, piece), text)
        params = on_device(frozen.reward_model)
        scores = jax.lax.map(lambda p: last_scores(model, params, *p), pieces)
        scores = in_row_order(scores).reshape(rows.shape[0], -1)
        return Scores(
            scores,
            jnp.full_like(scores, jnp.nan),
            scores[..., None],
            jnp.zeros((*scores.shape, samples.mask.shape[1]), jnp.float32),
        )

    return verify


def host_arrays(rows: Any, tokens: Any, lengths: Any) -> tuple[np.ndarray, ...]:
    """As a verifier takes them: rows `[N]`, tokens `[N G T]`, lengths `[N G]`."""
    rows, tokens, lengths = map(np.asarray, (rows, tokens, lengths))
    return rows, tokens.reshape(len(rows), -1, tokens.shape[1]), lengths.reshape(len(rows), -1)
