"""One piece of work at a time beside the caller's own, in the order in which it is given."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Background:
    """A context manager around one worker thread. What goes wrong there is raised, once, by the
    next call here; leaving waits for the worker."""

    def __init__(self):
        self._worker = ThreadPoolExecutor(max_workers=1)
        self._last: Future | None = None

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._worker.shutdown(wait=True)
        # Another error on its way out is told before one of the worker.
        if error is None:
            self.join()

    def run(self, work: Callable, *operands: Any) -> None:
        """Begins the work when all earlier is done."""
        self.join()
        self._last = self._worker.submit(work, *operands)

    def join(self) -> None:
        """Until all work is done."""
        last, self._last = self._last, None
        if last is not None:
            last.result()
