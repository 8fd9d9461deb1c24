"""The body of the one host callback: sampled tokens in, rewards out. No JAX but its arrays read.

A row that could not be scored is NaN in everything, counted and told; it is never silently zero.
"""

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int

from rlx.rewards.score import Score, Span, check_score


class HostVerifier:
    """Decodes and scores the rows of a rollout with one task's verifier.

    `components` names the last axis of the components, as the verifier names them for an empty
    completion of the first row. `failures` counts the completions that could not be scored, and
    `last_failure` tells the latest.
    """

    def __init__(
        self,
        score: Callable[[str, Mapping], Score],
        rows: Sequence[Mapping],
        decode: Callable[[list[int]], str],
        stop_ids: Collection[int],
    ):
        if not rows:
            raise ValueError("A verifier needs at least one row; the task has none.")
        self.score = score
        self.rows = rows
        self.decode = decode
        self.stop_ids = frozenset(stop_ids)
        self.components = tuple(score("", rows[0]).components)
        self.failures = 0
        self.last_failure = ""

    def __call__(
        self,
        row_ids: Int[Any, " N"],
        tokens: Int[Any, "N G T"],
        lengths: Int[Any, "N G"],
    ) -> tuple[
        Float32[np.ndarray, "N G"],
        Float32[np.ndarray, "N G"],
        Float32[np.ndarray, "N G C"],
        Float32[np.ndarray, "N G T"],
    ]:
        """Rewards, verdicts (1 or 0), components and token scores of N rows with G completions.

        `lengths` counts the sampled tokens, a final stop token included; what stands after them is
        never decoded. A span's score stands at the token that completes its last character.
        """
        # a callback's operands are jax arrays, and indexing those here would call JAX inside of it
        row_ids, tokens, lengths = np.asarray(row_ids), np.asarray(tokens), np.asarray(lengths)
        rewards = np.full(lengths.shape, np.nan, np.float32)
        correct = np.full(lengths.shape, np.nan, np.float32)
        components = np.full((*lengths.shape, len(self.components)), np.nan, np.float32)
        token_scores = np.full(tokens.shape, np.nan, np.float32)
        for n, g in np.ndindex(*lengths.shape):
            place = f"row {row_ids[n]}, sample {g}"
            try:
                text = self.text(tokens[n, g], lengths[n, g])
                score = self._score_checked(text, self._row(row_ids[n]))
                scores = self._token_scores(score.spans, text, tokens[n, g], lengths[n, g])
            except Exception as error:
                self._record(place, error)
                continue
            rewards[n, g] = score.reward
            correct[n, g] = np.nan if score.correct is None else score.correct
            components[n, g] = [score.components[name] for name in self.components]
            token_scores[n, g] = scores
        return rewards, correct, components, token_scores

    def text(self, tokens: Int[np.ndarray, " T"], length: int | np.integer) -> str:
        """The completion's text: its first `length` tokens without a final stop token."""
        return self.decode(self._text_ids(tokens, length))

    def score_text(self, text: str, row: Mapping, *, place: str = "a text") -> Score | None:
        """The score of a text, as the callback would give it; None, and counted, where it fails."""
        try:
            return self._score_checked(text, row)
        except Exception as error:
            self._record(place, error)
            return None

    def _text_ids(self, tokens: Int[np.ndarray, " T"], length: int | np.integer) -> list[int]:
        if not 0 <= length <= len(tokens):
            raise ValueError(f"length {length} of a completion with {len(tokens)} places")
        ids = tokens[:length].tolist()
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return ids

    def _token_scores(
        self,
        spans: Sequence[Span],
        text: str,
        tokens: Int[np.ndarray, " T"],
        length: int | np.integer,
    ) -> Float32[np.ndarray, " T"]:
        scores = np.zeros(len(tokens), np.float32)
        ids = self._text_ids(tokens, length) if spans else []
        for span in spans:
            # A token may hold part of a character only, which by itself decodes to a replacement
            # character: the prefix must read as the text does, not merely be as long.
            place = bisect.bisect_left(
                range(len(ids)),
                True,
                key=lambda i, end=span.end: self.decode(ids[: i + 1])[:end] == text[:end],
            )
            scores[place] += span.score
        return scores

    def _row(self, row_id: int | np.integer) -> Mapping:
        # a negative index would quietly be some other row
        if not 0 <= row_id < len(self.rows):
            raise IndexError(f"there are {len(self.rows)} rows")
        return self.rows[row_id]

    def _score_checked(self, text: str, row: Mapping) -> Score:
        score = self.score(text, row)
        check_score(score, text)
        if set(score.components) != set(self.components):
            raise ValueError(
                f"the components are {sorted(score.components)}, not {sorted(self.components)}"
            )
        return score

    def _record(self, place: str, error: Exception) -> None:
        self.failures += 1
        self.last_failure = f"{place}: {type(error).__name__}: {error}"
