"""Worker processes for a verifier: limits of time and memory a row, and no row lost to another.

A row that takes too long, takes too much memory or ends its process has a Failure in place of its
score; its worker is replaced, and the other rows of its batch are scored all the same. The time of
a row begins when a worker begins it: no queue counts. What comes out depends neither on the number
of workers nor on how rows are cut into requests.
"""

import contextlib
import json
import math
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Pipe
from pathlib import Path

from model.errors import BadInput
from rlx.rewards.dispatch import Batch, Item, Worker
from rlx.rewards.score import Score
from rlx.rewards.worker import (
    FORK,
    KILL,
    LOAD_SECONDS,
    ORDER,
    SLOT,
    Failure,
    clock,
    mark,
    told,
)

ROW_SECONDS = 10.0
MEMORY_BYTES = 2 * 2**30

NURSERY = "import json, sys; sys.path[:], *numbers = json.loads(sys.argv[1]); "
NURSERY += "from rlx.rewards.worker import main; main(*numbers)"

# One thread a process, and the same order of sets in every run.
ENVIRONMENT = {"PYTHONHASHSEED": "0"} | dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)


def spare_cores() -> int:
    """One less than the cores that this process may use, but at least one."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    return max(1, cores - 1)


class WorkerPool:
    """Scores batches in worker processes, which start with the first batch or `start()`.

    `score` and `rows` are pickled once. Of `score`'s attributes, `imports` names modules to be
    loaded before the first row. `close()`, the end of a `with` block, the collection of the pool
    and the end of the parent, however it comes, end the workers.

    Raises BadInput where the verifier cannot be taken to, or loaded in, another process.
    """

    def __init__(
        self,
        score: Callable[[str, Mapping], Score],
        rows: Sequence[Mapping],
        *,
        workers: int | None = None,
        seconds: float = ROW_SECONDS,
        memory_bytes: int = MEMORY_BYTES,
    ):
        self.size = spare_cores() if workers is None else workers
        if self.size < 1:
            raise ValueError(f"a pool needs at least one worker, not {self.size}")
        self.seconds, self.memory_bytes = seconds, memory_bytes
        self.name = mark(score, "__qualname__", type(score).__name__)
        try:
            self._payload = pickle.dumps((score, list(rows)))
        except Exception as error:
            raise BadInput(
                f"The verifier {self.name} cannot be sent to worker processes ({told(error)}); "
                "expected a function of a module that can be imported, or reward.workers=0."
            ) from error
        self._lock = threading.Lock()
        self.workers: list[Worker] = []
        self._end: weakref.finalize | None = None

    def __enter__(self) -> "WorkerPool":
        self.start()
        return self

    def __exit__(self, *error) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Of the workers."""
        return [worker.pid for worker in self.workers]

    def start(self) -> None:
        """Starts the workers where they do not run."""
        with self._lock:
            self._start()

    def close(self) -> None:
        """Ends the workers; a later batch starts them again."""
        with self._lock:
            self.give_up()

    def score_all(self, items: Sequence[Item]) -> list[Score | Failure]:
        """The scores of a batch, in its order."""
        with self._lock:
            self._start()
            return Batch(self, items).run()

    def _start(self) -> None:
        if self._end is not None:
            return
        file = tempfile.TemporaryFile()  # noqa: SIM115 - the nursery keeps it
        file.write(bytes(8 * SLOT * self.size))
        file.flush()
        control, theirs = socket.socketpair()
        numbers = (theirs.fileno(), file.fileno())
        path = [str(Path(entry).absolute()) for entry in sys.path]
        process = subprocess.Popen(
            # -P: a file json.py of the working folder is not to be imported
            [sys.executable, "-P", "-c", NURSERY, json.dumps([path, *numbers, self.memory_bytes])],
            stdin=subprocess.PIPE,
            pass_fds=numbers,
            env=os.environ | ENVIRONMENT,
            # an interrupt at the terminal is for the parent, which may want its rewards yet
            start_new_session=True,
        )
        theirs.close()
        self._process, self._control, self._clocks = process, control, file
        self._end = weakref.finalize(self, _end, process, control)
        # a nursery that could not start tells it by its silence, below
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._payload)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            # all are ordered before the first is waited for
            self.workers = [self._order(slot) for slot in range(self.size)]
            for worker in self.workers:
                self._greet(worker)
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        if self._end is None:
            return
        for worker in self.workers:
            worker.connection.close()
        self.workers = []
        self._end()
        self._end = None
        self._clocks.close()

    def restart(self) -> None:
        self.give_up()
        self._start()

    def _order(self, slot: int) -> Worker:
        connection, theirs = Pipe()
        at = clock(self._clocks.fileno(), slot)
        at[0], at[1] = 0, math.inf
        with contextlib.suppress(BrokenPipeError, ConnectionResetError), theirs:
            order = ORDER.pack(FORK, slot)
            socket.send_fds(self._control, [order], [theirs.fileno()])
        return Worker(connection, slot, at)

    def _greet(self, worker: Worker) -> None:
        """Raises BadInput where the verifier was not loaded."""
        fault = "its process ended while it was loaded"
        if not worker.connection.poll(LOAD_SECONDS):
            fault = f"it was not loaded within {LOAD_SECONDS} s"
        else:
            with contextlib.suppress(EOFError, OSError):
                worker.pid, fault = worker.connection.recv()
        if fault:
            raise BadInput(f"The verifier {self.name} cannot run in a worker process: {fault}.")

    def replace(self, worker: Worker) -> Worker:
        worker.connection.close()
        if self._process.poll() is not None:
            raise ChildProcessError("the process that starts the workers ended")
        new = self._order(worker.slot)
        self.workers[self.workers.index(worker)] = new
        self._greet(new)
        return new

    def kill(self, worker: Worker) -> None:
        worker.killed = time.monotonic()
        # where the nursery is gone, so are its workers
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(ORDER.pack(KILL, worker.pid))


def _end(process: subprocess.Popen, control: socket.socket) -> None:
    control.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
