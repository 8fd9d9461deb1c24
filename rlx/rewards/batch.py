"""The three ways to score a batch of completions: in process, all at once, in worker processes.

A verifier says by its attributes which one is its own:

- `bounded = True`: it ends soon and takes little memory whatever it reads, so it needs no limits.
- `many`: `many(list[(text, row)]) -> list[Score | Exception]` scores a whole batch in its own
  threads (a judge over a network). Where it also has `parts`, things with a `verifier`, then its
  `many` is called with `each`: a function (verifier, list) -> list, which scores those of a part
  as it would be scored by itself.
- neither: it runs in worker processes, where `imports`, names of modules, are loaded beforehand.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from rlx.rewards.dispatch import Item
from rlx.rewards.pool import MEMORY_BYTES, ROW_SECONDS, WorkerPool, spare_cores
from rlx.rewards.score import Score
from rlx.rewards.worker import Failure, attempt, many_of, mark


@runtime_checkable
class BatchScorer(Protocol):
    def score_all(self, items: Sequence[Item]) -> list[Score | Failure]:
        """The scores of a batch, in its order."""

    def close(self) -> None: ...


class InProcess:
    """One by one, with no limits."""

    def __init__(self, score: Callable[[str, Mapping], Score], rows: Sequence[Mapping]):
        self.score, self.rows = score, rows

    def score_all(self, items: Sequence[Item]) -> list[Score | Failure]:
        return [attempt(self.score, text, _row(self.rows, row)) for text, row in items]

    def close(self) -> None:
        pass


class AllAtOnce:
    """By the verifier's `many`, which keeps its own limits; `parts` are scored as they each are."""

    def __init__(
        self,
        many: Callable[..., Sequence[Score | Exception]],
        rows: Sequence[Mapping],
        parts: Mapping[Callable, BatchScorer] | None = None,
    ):
        self.many, self.rows, self.parts = many, rows, parts

    def score_all(self, items: Sequence[Item]) -> list[Score | Failure]:
        pairs = [(text, _row(self.rows, row)) for text, row in items]
        each = {} if self.parts is None else {"each": self._each}
        try:
            given = list(self.many(pairs, **each))
            if len(given) != len(pairs):
                raise ValueError(f"{len(given)} scores came for {len(pairs)} texts")
        except Exception as error:
            given = [error] * len(pairs)
        return [
            result.failure
            if isinstance(result, Failed)
            else attempt(lambda text, row, result=result: _raised(result), *pair)
            for pair, result in zip(pairs, given, strict=True)
        ]

    def close(self) -> None:
        for scorer in (self.parts or {}).values():
            scorer.close()

    def _each(self, verifier: Callable, pairs: Sequence[Item]) -> list[Score | Exception]:
        results = self.parts[verifier].score_all(pairs)
        return [Failed(result) if isinstance(result, Failure) else result for result in results]


class Failed(Exception):
    """A part's failure on its way through the whole's `many`."""

    def __init__(self, failure: Failure):
        super().__init__(failure.reason)
        self.failure = failure


def batch_scorer(
    score: Callable[[str, Mapping], Score],
    rows: Sequence[Mapping],
    *,
    workers: int | None = None,
    seconds: float = ROW_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> BatchScorer:
    """The verifier's own way to score; `workers` 0 scores in process whatever it is, and a number
    has so many workers. A verifier with `many` has none in any case, but its parts may.

    Raises BadInput where the verifier cannot run in another process.
    """
    many = many_of(score)
    if many is not None:
        parts = mark(score, "parts")
        if parts is None:
            return AllAtOnce(many, rows)
        limits = {"workers": workers, "seconds": seconds, "memory_bytes": memory_bytes}
        # a part's rows come with its texts: which they are is known only to the whole
        return AllAtOnce(
            many,
            rows,
            {
                verifier: batch_scorer(verifier, [], **limits)
                for verifier in dict.fromkeys(part.verifier for part in parts)
            },
        )
    if workers is None:
        workers = 0 if mark(score, "bounded", False) else spare_cores()
    if workers == 0:
        return InProcess(score, rows)
    return WorkerPool(score, rows, workers=workers, seconds=seconds, memory_bytes=memory_bytes)


def _row(rows: Sequence[Mapping], row: int | Mapping) -> Mapping:
    return rows[row] if isinstance(row, int) else row


def _raised(result: Score | Exception) -> Score:
    if isinstance(result, Exception):
        raise result
    return result
