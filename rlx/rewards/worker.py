"""What runs outside the parent when a verifier has worker processes. No JAX, and little else.

The parent starts one process, the nursery, with the verifier and the rows. It loads them once and
forks workers from then on: it has one thread and no JAX, so a fork is safe, takes milliseconds and
shares what is loaded. When the parent goes, however it goes, the nursery reads the end of its
control socket, kills its workers and ends.
"""

import ctypes
import gc
import math
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlx.rewards.score import RowError, Score, check_score

ORDER = struct.Struct("<cq")
FORK, KILL = b"f", b"k"
"""Orders to the nursery: fork a worker for a slot (its socket travels along), kill a process."""
MORE, DONE, LAST = b"m", b"d", b"l"
"""What follows a worker's message: more of the same request, the next request, nothing, as the
worker ends. It stands before the pickled results, for the parent to act on first."""

LOAD_SECONDS = 120
"""In which the nursery must have loaded the verifier."""
FLUSH_SECONDS = 0.05
"""Results wait at most so long, and a row's time: what a killed worker had not sent is lost."""
MOST_CHARACTERS = 500
"""Of what is told of a failure."""

SLOT = 2
"""Numbers of a worker's clock: the place in its request that it is at, and since when (monotonic
seconds, the same in all processes; infinite while it is at no row)."""

PR_SET_PDEATHSIG = 1


class Failure(NamedTuple):
    """Why a row has no score."""

    kind: Literal["row", "verifier", "time", "memory", "died"]
    """`row`: the row itself is bad, which is for the person to mend. The others are the
    verifier's: it raised or broke its word, took too long, took too much memory, ended the
    process."""
    reason: str


def attempt(score: Callable, text: str, row: Mapping) -> Score | Failure:
    """The verifier's score in plain types, or why there is none."""
    try:
        return checked(score(text, row), text)
    except RowError as error:
        return Failure("row", str(error)[:MOST_CHARACTERS])
    except MemoryError as error:
        return Failure("memory", told(error))
    except (Exception, SystemExit) as error:
        return Failure("verifier", told(error))


def checked(score: Any, text: str) -> Score:
    """The score in plain types, alike in every process; an error where it breaks its word."""
    if not isinstance(score, Score):
        raise TypeError(f"expected a Score, got {type(score).__name__}")
    check_score(score, text)
    if nothing := score.weights.keys() - score.components.keys():
        raise ValueError(f"the weights name {sorted(nothing)}, which are no components")
    if score.correct not in (True, False, None):
        raise ValueError(f"the verdict must be True, False or None, and is {score.correct!r}")
    return Score(
        float(score.reward),
        None if score.correct is None else bool(score.correct),
        {str(name): float(value) for name, value in score.components.items()},
        str(score.reason),
        tuple(score.spans),
        {str(name): float(value) for name, value in score.weights.items()},
    )


def told(error: BaseException) -> str:
    """The error's kind and message, of bounded length whatever it holds."""
    try:
        return f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]
    except Exception:
        return f"{type(error).__name__} (its message cannot be read)"


def mark(score: Callable, name: str, default: Any = None) -> Any:
    """What a verifier says of itself by an attribute, also where `partial` binds its settings."""
    while isinstance(score, partial) and not hasattr(score, name):
        score = score.func
    return getattr(score, name, default)


def many_of(score: Callable) -> Callable | None:
    """The verifier's `many`, with the settings that `partial` binds to the verifier."""
    own = getattr(score, "many", None)
    if own is not None or not isinstance(score, partial):
        return own
    inner = many_of(score.func)
    return None if inner is None else partial(inner, **score.keywords)


def main(control: int, clocks: int, memory_bytes: int) -> None:
    """The nursery's life; verifier and rows come on standard input, descriptors by number."""
    # the parent's standard output may be one JSON object and nothing else
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders = socket.socket(fileno=control)
    # SIGALRM's own action ends even a loop in C
    signal.alarm(LOAD_SECONDS)
    score, rows, fault = _load(sys.stdin.buffer.read())
    signal.alarm(0)
    # collections in the workers would write to, and so copy, all that is shared
    gc.freeze()
    children: set[int] = set()
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, ORDER.size, 1)
        children -= set(_ended(children))
        if len(order) < ORDER.size:
            break
        kind, number = ORDER.unpack(order)
        if kind == KILL:
            # only this process reaps them, so the number is still theirs
            if number in children:
                os.kill(number, signal.SIGKILL)
            continue
        nursery = os.getpid()
        child = os.fork()
        if child == 0:
            try:
                orders.close()
                _die_with(nursery)
                _limit_memory(memory_bytes)
                connection = Connection(descriptors[0])
                connection.send((os.getpid(), fault))
                if not fault:
                    _serve(connection, score, rows, clock(clocks, number))
            finally:
                os._exit(0)
        os.close(descriptors[0])
        children.add(child)
    for child in children:
        os.kill(child, signal.SIGKILL)


def clock(file: int, slot: int) -> memoryview:
    """A worker's place in the memory that it shares with the parent, a file."""
    shared = memoryview(mmap.mmap(file, 0)).cast("d")
    return shared[slot * SLOT : (slot + 1) * SLOT]


def _load(payload: bytes) -> tuple[Callable | None, Sequence[Mapping], str]:
    """Verifier, rows and what went wrong, empty if nothing did."""
    try:
        score, rows = pickle.loads(payload)
        for name in mark(score, "imports", ()):
            import_module(name)
    except (Exception, SystemExit) as error:
        return None, [], told(error)
    if "jax" in sys.modules:
        return None, [], "its module imports JAX, whose threads no fork survives"
    return score, rows, ""


def _serve(
    connection: Connection, score: Callable, rows: Sequence[Mapping], at: memoryview
) -> None:
    """Answers requests, each a list of (text, row or its number), in several messages where it
    takes long."""
    fresh = True

    def answer(results: list, follows: bytes) -> None:
        connection.send_bytes(follows + pickle.dumps(results))

    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        results, flushed = [], time.monotonic()
        for place, (text, row) in enumerate(request):
            row = rows[row] if isinstance(row, int) else row
            # in this order: who reads both halfway sees the new row as long begun, never the old
            # one as overdue
            at[1] = time.monotonic()
            at[0] = place
            result = attempt(score, text, row)
            at[1] = math.inf
            exhausted = isinstance(result, Failure) and result.kind == "memory"
            if exhausted and not fresh:
                # what earlier rows left behind may be to blame: once more in a new worker
                answer(results, MORE)
                at[0], at[1] = place, time.monotonic()
                os._exit(1)
            fresh = False
            results.append(result)
            now = time.monotonic()
            if exhausted:
                answer(results, LAST)
                os._exit(0)
            if place == len(request) - 1:
                answer(results, DONE)
            elif now - flushed > FLUSH_SECONDS:
                answer(results, MORE)
                results, flushed = [], now


def _ended(children: set[int]) -> list[int]:
    return [child for child in children if os.waitpid(child, os.WNOHANG)[0] == child]


def _die_with(nursery: int) -> None:
    """Where the nursery itself is killed nobody else would end this worker. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != nursery:
            os._exit(1)


def _limit_memory(memory_bytes: int) -> None:
    """So much above what is in use now, address space included. Where the system does not tell
    what is in use (macOS, which ignores such a limit too) there is none."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes,) * 2)
