"""The body of the one host callback: sampled tokens in, rewards out. No JAX but its arrays read.

A row that could not be scored is NaN in everything, counted and told; it is never silently zero.
"""

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int

from rlx.rewards.batch import BatchScorer, batch_scorer
from rlx.rewards.pool import MEMORY_BYTES, ROW_SECONDS, WorkerPool
from rlx.rewards.score import RowError, Score, Span
from rlx.rewards.worker import Failure, mark, told


class HostVerifier:
    """Decodes and scores the rows of a rollout with one task's verifier.

    `components` names the last axis of the components and says what each counts in the reward, as
    the verifier does for an empty completion of the first row; a verifier that has an attribute
    `components` is not asked.
    `failures` counts the completions that could not be scored, and `last_failure` tells the latest.

    `workers`, `seconds` a row and `memory_bytes` a worker are `batch_scorer`'s; without workers
    there are no limits. Raises BadInput where the verifier cannot run in another process, RowError
    where the first row is bad.
    """

    def __init__(
        self,
        score: Callable[[str, Mapping], Score],
        rows: Sequence[Mapping],
        decode: Callable[[list[int]], str],
        stop_ids: Collection[int],
        *,
        workers: int | None = 0,
        seconds: float = ROW_SECONDS,
        memory_bytes: int = MEMORY_BYTES,
    ):
        if not rows:
            raise ValueError("A verifier needs at least one row; the task has none.")
        self.rows = rows
        self.decode = decode
        self.stop_ids = frozenset(stop_ids)
        self.scorer = batch_scorer(
            score, rows, workers=workers, seconds=seconds, memory_bytes=memory_bytes
        )
        if isinstance(self.scorer, WorkerPool):
            self.scorer.start()
        self.components = weighed_components(score, self.scorer)
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
        items, cells = [], []
        for n, g in np.ndindex(*lengths.shape):
            try:
                row = self._row_number(row_ids[n])
                items.append((self.text(tokens[n, g], lengths[n, g]), row))
                cells.append((n, g))
            except Exception as error:
                self._record(f"row {row_ids[n]}, sample {g}", told(error))
        results = self.scorer.score_all(items)
        for (n, g), (text, row), result in zip(cells, items, results, strict=True):
            score = self._checked(result, f"row {row}, sample {g}")
            if score is None:
                continue
            try:
                scores = self._token_scores(score.spans, text, tokens[n, g], lengths[n, g])
            except Exception as error:
                self._record(f"row {row}, sample {g}", told(error))
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
        (result,) = self.scorer.score_all([(text, row)])
        return self._checked(result, place)

    def score_texts(
        self, texts: Sequence[str], rows: Sequence[int], *, place: str = "row"
    ) -> list[Score | None]:
        """The same of many, each of a row by its number; `place` stands before it in a failure."""
        items = [(text, self._row_number(row)) for text, row in zip(texts, rows, strict=True)]
        results = zip(self.scorer.score_all(items), rows, strict=True)
        return [self._checked(result, f"{place} {row}") for result, row in results]

    def close(self) -> None:
        """Ends the worker processes, where there are any."""
        self.scorer.close()

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

    def _row_number(self, row: int | np.integer) -> int:
        # a negative index would quietly be some other row
        if not 0 <= row < len(self.rows):
            raise IndexError(f"there are {len(self.rows)} rows")
        return int(row)

    def _checked(self, result: Score | Failure, place: str) -> Score | None:
        if isinstance(result, Failure):
            self._record(place, result.reason)
            return None
        if set(result.components) != set(self.components):
            came, wanted = sorted(result.components), sorted(self.components)
            self._record(place, f"ValueError: the components are {came}, not {wanted}")
            return None
        return result

    def _record(self, place: str, reason: str) -> None:
        self.failures += 1
        self.last_failure = f"{place}: {reason}"


def weighed_components(score: Callable, scorer: BatchScorer) -> dict[str, float]:
    """A verifier's components, in the order in which it gives them, and their weights."""
    named = mark(score, "components")
    if named is not None:
        return dict(named) if isinstance(named, Mapping) else dict.fromkeys(named, 0.0)
    (result,) = scorer.score_all([("", 0)])
    if isinstance(result, Score):
        return {name: result.weights.get(name, 0.0) for name in result.components}
    if result.kind == "row":
        raise RowError(result.reason)
    raise RuntimeError(
        f"The verifier could not score an empty completion of row 0: {result.reason}"
    )
