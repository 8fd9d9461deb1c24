"""How a batch goes through a pool of workers: requests out, results in, each row's limits kept."""

import contextlib
import math
import pickle
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Protocol, runtime_checkable

from rlx.rewards.score import Score
from rlx.rewards.worker import DONE, LAST, Failure, told

Item = tuple[str, int | Mapping]
"""A completion, and its row: by its number among the pool's rows, or as it is."""

MOST_ROWS = 64
MOST_CHARACTERS = 2**20
"""Of one request to a worker."""
STALL_SECONDS = 30.0
"""A worker that is at no row and says nothing for so long, beside a row's time, is replaced."""


class Worker:
    """A worker as the parent sees it."""

    def __init__(self, connection: Connection, slot: int, at: memoryview):
        self.connection, self.slot, self.at = connection, slot, at
        self.pid = 0
        self.request: list[int] = []
        self.done = 0
        self.heard = 0.0
        self.killed = 0.0
        """When; 0: not."""

    @property
    def left(self) -> list[int]:
        return self.request[self.done :]

    def deadline(self, seconds: float) -> float:
        begun = self.at[1]
        return (begun if begun < math.inf else self.heard + STALL_SECONDS) + seconds


@runtime_checkable
class Workers(Protocol):
    """What a batch asks of its pool."""

    seconds: float
    workers: list[Worker]

    def replace(self, worker: Worker) -> Worker: ...

    def kill(self, worker: Worker) -> None: ...

    def restart(self) -> None: ...

    def give_up(self) -> None:
        """Ends all workers; the next batch starts them anew."""


class Batch:
    """One batch on its way through a pool."""

    def __init__(self, pool: Workers, items: Sequence[Item]):
        self.pool, self.items = pool, items
        self.results: list[Score | Failure | None] = [None] * len(items)
        self.queue = deque(range(len(items)))
        self.idle = list(pool.workers)
        self.busy: dict[Connection, Worker] = {}
        self.suspects: set[int] = set()
        """Rows in which a worker ended; one more time, and it is their fault."""

    def run(self) -> list[Score | Failure]:
        try:
            try:
                self._run()
            except Exception:
                # the workers cannot be replaced one by one: once more with all of them new
                self.pool.restart()
                self.queue = deque(i for i, result in enumerate(self.results) if result is None)
                self.idle, self.busy = list(self.pool.workers), {}
                self._run()
        except Exception as error:
            self.pool.give_up()
            lost = Failure("died", told(error))
            return [lost if result is None else result for result in self.results]
        except BaseException:
            # an interrupt: answers to this batch must not be taken for the next one's
            self.pool.give_up()
            raise
        return self.results

    def _run(self) -> None:
        while self.queue or self.busy:
            while self.queue and self.idle:
                self._send(self.idle.pop(), self._cut())
            self._listen()

    def _cut(self) -> list[int]:
        """The next request: long ones cost less, short ones at the end keep all workers busy."""
        most = max(1, min(MOST_ROWS, len(self.queue) // (2 * len(self.pool.workers))))
        request, characters = [], 0
        while self.queue and len(request) < most and characters < MOST_CHARACTERS:
            request.append(self.queue.popleft())
            characters += len(self.items[request[-1]][0])
        return request

    def _send(self, worker: Worker, request: list[int]) -> None:
        worker.request, worker.done, worker.heard = request, 0, time.monotonic()
        self.busy[worker.connection] = worker
        # one that ended while it was idle is noticed when it is listened to
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            worker.connection.send([self.items[i] for i in request])

    def _go_on(self, worker: Worker) -> None:
        if self.queue:
            self._send(worker, self._cut())
        else:
            self.idle.append(worker)

    def _listen(self) -> None:
        running = [worker for worker in self.busy.values() if not worker.killed]
        soonest = min((w.deadline(self.pool.seconds) for w in running), default=math.inf)
        # a row may have begun since: look again when the earliest such could be overdue
        patience = min(max(0.0, soonest - time.monotonic()), self.pool.seconds)
        for connection in wait(list(self.busy), timeout=patience):
            worker = self.busy[connection]
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                self._ended(worker)
                continue
            follows, asked = message[:1], worker.left
            if follows == DONE and not worker.killed:
                # a worker without a request waits, so reading the results comes after
                self._go_on(self.busy.pop(connection))
            results = pickle.loads(message[1:])
            for i, result in zip(asked, results, strict=False):
                self.results[i] = result
            if follows != DONE or worker.killed:
                worker.done += len(results)
                worker.heard = time.monotonic()
            if follows == LAST:
                self._put_back(worker, worker.left)
        for worker in self.busy.values():
            if not worker.killed and worker.deadline(self.pool.seconds) <= time.monotonic():
                self.pool.kill(worker)

    def _ended(self, worker: Worker) -> None:
        """Settles what a worker that is no more was at."""
        place, begun = worker.at
        running = begun < math.inf
        overdue = running and worker.killed >= begun + self.pool.seconds
        if not worker.left or (worker.killed and running and not overdue):
            # killed just when it had finished the row that was overdue
            self._put_back(worker, worker.left)
            return
        guilty = worker.request[int(place)] if running else worker.left[0]
        others = [i for i in worker.left if i != guilty]
        if overdue:
            self.results[guilty] = Failure(
                "time", f"TimeoutError: it took longer than {self.pool.seconds:g} s"
            )
        elif guilty in self.suspects:
            self.results[guilty] = Failure(
                "died", "ChildProcessError: it ended its worker process (a crash, or an exit)"
            )
        else:
            # perhaps earlier rows, or somebody outside, did it: alone, in a new worker
            self.suspects.add(guilty)
            self._put_back(worker, others, [guilty])
            return
        self._put_back(worker, others)

    def _put_back(self, worker: Worker, rows: list[int], request: Sequence[int] = ()) -> None:
        """Replaces a worker, whose new self gets `request` at once; `rows` go to the queue."""
        del self.busy[worker.connection]
        self.queue.extendleft(reversed(rows))
        new = self.pool.replace(worker)
        if request:
            self._send(new, list(request))
        else:
            self.idle.append(new)
