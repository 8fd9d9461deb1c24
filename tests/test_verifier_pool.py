"""Worker processes: a row that hangs, eats memory or ends its process is NaN, and it alone is."""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from model.errors import BadInput
from rlx.rewards import Score, countdown
from rlx.rewards.batch import AllAtOnce, InProcess, batch_scorer
from rlx.rewards.build import bind
from rlx.rewards.compose import Part, weighted
from rlx.rewards.host import HostVerifier
from rlx.rewards.pool import WorkerPool
from rlx.rewards.score import RowError, Span
from rlx.rewards.worker import Failure
from rlx.tasks.mixture import ByTask

ROWS = [{"number": i} for i in range(7)]
LIMITS = {"seconds": 1.0, "memory_bytes": 200 * 2**20}


def eat_memory():
    eaten = []
    while True:
        eaten.append(bytes(2**20 * 16))


def raise_error(error: BaseException):
    raise error


class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError("no message")


NAN = Score(float("nan"), False, {"part": 0.0}, "")

MISDEEDS = {
    "sleep": ("time", lambda: time.sleep(600)),
    # both hold the interpreter's lock in C: no signal handler and no thread could end them
    "power": ("time", lambda: 10**10**9),
    "pattern": ("time", lambda: re.match(r"(a+)+$", "a" * 60 + "b")),
    "python loop": ("time", lambda: all(number == 0 for number in iter(int, 1))),
    "memory": ("memory", eat_memory),
    "one large block": ("memory", lambda: bytes(2**33)),
    "exit": ("died", lambda: os._exit(0)),
    "crash": ("died", lambda: ctypes.string_at(0)),
    "kill": ("died", lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "raise": ("verifier", lambda: raise_error(RuntimeError("no luck"))),
    "sys.exit": ("verifier", lambda: sys.exit(1)),
    "long message": ("verifier", lambda: raise_error(RuntimeError("x" * 10**7))),
    "no message": ("verifier", lambda: raise_error(Unreadable())),
    "nan": ("verifier", lambda: NAN),
    "no score": ("verifier", lambda: 1.0),
    "no verdict": ("verifier", lambda: Score(0.0, 0.5, {"part": 0.0}, "")),
    "no number": ("verifier", lambda: Score(0.0, False, {"part": print}, "")),
    "bad row": ("row", lambda: raise_error(RowError("`number` is odd"))),
}


def misbehave(text, row):
    """Does what the text names; else a score that tells text and row."""
    if text in MISDEEDS:
        return MISDEEDS[text][1]()
    value = len(text) / 8 + row["number"]
    spans = (Span(0, 1, value),) if text else ()
    return Score(value, row["number"] % 2 == 0, {"part": value}, text, spans)


def leak(text, row, leaked=[]):  # noqa: B006 - what it remembers is the point
    leaked.append(bytes(2**20 * 30))
    return Score(1.0, None, {}, "")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def soon(condition, seconds=20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(misbehave, ROWS, workers=2, **LIMITS) as pool:
        yield pool


def items(count: int) -> list:
    return [(f"text {i}", i % len(ROWS)) for i in range(count)]


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_a_misdeed_costs_its_own_row_and_no_other(pool, misdeed):
    batch = items(60)
    batch[17] = (misdeed, 3)
    start = time.monotonic()
    results = pool.score_all(batch)
    assert time.monotonic() - start < 20
    kind, _ = MISDEEDS[misdeed]
    assert isinstance(results[17], Failure) and results[17].kind == kind
    assert 0 < len(results[17].reason) <= 500
    expected = InProcess(misbehave, ROWS).score_all(items(60))
    # the rest of its request, scored or not before, would be NaN with it
    assert results[:17] + results[18:] == expected[:17] + expected[18:]
    assert len(pool.pids) == 2 and soon(lambda: all(map(alive, pool.pids)))
    assert pool.score_all(items(60)) == expected


def test_a_rollouts_rows_are_nan_where_their_workers_ended():
    texts = [["good", "sleep", "fine", "exit"], ["sound", "long message", "well", "x"]]
    width = 12
    tokens = np.array(
        [[[*map(ord, text), *[0] * (width - len(text))] for text in group] for group in texts]
    )
    lengths = np.array([[len(text) for text in group] for group in texts])
    host = HostVerifier(
        misbehave, ROWS, lambda ids: "".join(map(chr, ids)), {0}, workers=2, seconds=1.0
    )
    rewards, correct, components, places = host(np.array([2, 3]), tokens, lengths)
    host.close()
    bad = np.array([[0, 1, 0, 1], [0, 1, 0, 0]], bool)
    for part in (rewards, correct, components, places):
        assert np.isnan(part[bad]).all() and not np.isnan(part[~bad]).any()
    np.testing.assert_array_equal(rewards[~bad], [2.5, 2.5, 3.625, 3.5, 3.125])
    np.testing.assert_array_equal(places[~bad][:, 0], rewards[~bad])
    assert host.failures == 3
    assert host.last_failure.startswith("row 3, sample 1: RuntimeError: xxx")
    assert len(host.last_failure) < 600  # a message of 10 MB would fill the log


def test_the_reasons_say_what_happened(pool):
    slow, gone, raised, odd = pool.score_all(
        [("sleep", 0), ("exit", 0), ("raise", 0), ("bad row", 0)]
    )
    assert slow.reason == "TimeoutError: it took longer than 1 s"
    assert "ended its worker process" in gone.reason
    assert raised == Failure("verifier", "RuntimeError: no luck")
    assert odd == Failure("row", "`number` is odd")


def test_a_batch_of_nothing_else_ends_within_its_limits(pool):
    start = time.monotonic()
    results = pool.score_all([("power", 0), ("memory", 1), ("exit", 2)] * 3)
    assert [result.kind for result in results] == ["time", "memory", "died"] * 3
    assert time.monotonic() - start < 25  # three timeouts over two workers


def test_waiting_in_the_queue_takes_none_of_a_rows_time():
    # 200 rows of 20 ms behind one worker wait for up to 4 s each; the limit of a row is 1 s
    with WorkerPool(nap, ROWS, workers=1, seconds=1.0) as pool:
        batch = [(f"{i}", 0) for i in range(200)]
        batch[90] = ("600", 0)
        (pid,) = pool.pids
        results = pool.score_all(batch)
        kinds = [getattr(result, "kind", "scored") for result in results]
        assert kinds == ["scored"] * 90 + ["time"] + ["scored"] * 109
        assert pool.size == len(pool.pids) == 1
        assert pool.pids != [pid] and soon(lambda: not alive(pid))


def nap(text, row):
    time.sleep(600 if text == "600" else 0.02)
    return Score(1.0, True, {}, text)


def test_results_depend_neither_on_the_workers_nor_on_the_rest_of_the_batch():
    batch = [*items(100), ("exit", 1), ("raise", 2), *items(30), ("nan", 3), ("bad row", 1)]
    found = []
    for workers in (1, 2, 3):
        with WorkerPool(misbehave, ROWS, workers=workers, **LIMITS) as pool:
            found.append(pool.score_all(batch))
            assert pool.score_all(batch[::-1]) == found[0][::-1]
    assert found[0] == found[1] == found[2]


def test_what_earlier_rows_left_in_memory_is_no_rows_fault():
    # every row leaves 30 MiB behind: a worker is full after six, and each is the seventh of one
    with WorkerPool(leak, ROWS, workers=1, memory_bytes=200 * 2**20) as pool:
        assert pool.score_all([("", 0)] * 40) == [Score(1.0, None, {}, "")] * 40


def test_a_row_may_come_along_and_long_texts_and_odd_characters_arrive(pool):
    texts = ["\ud800", "x" * 3_000_000, "\0", "\u2028"]
    results = pool.score_all([(text, {"number": 40}) for text in texts])
    assert [result.reason for result in results] == texts
    assert results[0].reward == 40.125
    assert pool.score_all([]) == []


def test_a_worker_that_somebody_else_kills_costs_no_row(pool):
    for _ in range(3):
        os.kill(pool.pids[0], signal.SIGKILL)
        results = pool.score_all(items(40))
        assert results == InProcess(misbehave, ROWS).score_all(items(40))


def test_workers_know_no_jax_and_one_verifier_without_it():
    with WorkerPool(modules, ROWS, workers=1) as pool:
        (result,) = pool.score_all([("", 0)])
    loaded = set(result.reason.split())
    assert not loaded & {"jax", "jaxlib", "flax", "transformers", "torch"}
    assert {"rlx.rewards.worker", "sqlite3"} <= loaded
    assert result.reward == 1.0  # threads


def modules(text, row):
    threads = len(list(Path("/proc/self/task").iterdir())) if Path("/proc/self").exists() else 1
    return Score(float(threads), None, {}, " ".join(sys.modules))


modules.imports = ("sqlite3",)


class NeedsJax:
    """Stands for a verifier whose module imports JAX."""

    imports = ("jax",)
    __call__ = staticmethod(misbehave)


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (lambda text, row: NAN, "cannot be sent to worker processes"),
        (NeedsJax(), "NeedsJax.*imports JAX"),
        (type("Lost", (), {"__call__": misbehave, "__module__": "no_module"})(), "cannot be sent"),
    ],
)
def test_a_verifier_that_cannot_run_elsewhere_is_refused(score, reason):
    with pytest.raises(BadInput, match=reason):
        WorkerPool(score, ROWS, workers=1).start()


class Breaks:
    """Cannot be loaded where it comes to."""

    def __init__(self, how: str):
        self.how = how

    def __call__(self, text, row):
        raise AssertionError("it is never loaded")

    def __reduce__(self):
        return break_down, (self.how,)


def break_down(how: str):
    if how == "exit":
        os._exit(1)
    raise RuntimeError("no luck")


@pytest.mark.parametrize(("how", "told"), [("raise", "no luck"), ("exit", "ended while")])
def test_a_verifier_that_fails_to_load_is_told(how, told):
    pool = WorkerPool(Breaks(how), ROWS, workers=2)
    with pytest.raises(BadInput, match=told):
        pool.score_all([("", 0)])
    pool.close()


def test_close_ends_the_workers_and_a_later_batch_starts_them():
    pool = WorkerPool(misbehave, ROWS, workers=2)
    assert pool.pids == []
    first = pool.score_all(items(5))
    pids = pool.pids
    assert len(pids) == 2 and all(map(alive, pids))
    pool.close()
    pool.close()
    assert soon(lambda: not any(map(alive, pids)))
    assert pool.score_all(items(5)) == first
    pids = pool.pids
    del pool
    assert soon(lambda: not any(map(alive, pids)))


ORPHANS = """
import sys, threading, time
sys.path[:0] = {path}
from test_verifier_pool import ROWS, misbehave
from rlx.rewards.build import bind
from rlx.rewards.compose import Part, weighted
from rlx.rewards.host import HostVerifier
from rlx.rewards.pool import WorkerPool
pool = WorkerPool(misbehave, ROWS, workers=2, seconds=600)
pool.start()
print(*pool.pids, pool._process.pid, flush=True)
threading.Thread(target=pool.score_all, args=([("power", 0), ("sleep", 0)],), daemon=True).start()
time.sleep({sleep})
"""


@pytest.mark.parametrize("end", ["killed", "finished", "nursery killed"])
def test_no_process_outlives_the_parent(end):
    path = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    code = ORPHANS.format(path=path, sleep=1 if end == "finished" else 600)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        *workers, nursery = map(int, parent.stdout.readline().split())
        time.sleep(0.5)
        if end == "finished":
            assert parent.wait(timeout=30) == 0
        else:
            assert all(map(alive, [*workers, nursery]))
            os.kill(nursery if end == "nursery killed" else parent.pid, signal.SIGKILL)
        # one of them is in a loop in C, which reads no pipe
        assert soon(lambda: not any(map(alive, [*workers, nursery])))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def end_nursery(text, row):
    if text == "end":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return Score(1.0, None, {}, "")


def test_the_process_that_starts_the_workers_is_replaced_too():
    pool = WorkerPool(end_nursery, ROWS, workers=2)
    expected = pool.score_all(items(30))
    os.kill(pool._process.pid, signal.SIGKILL)
    assert soon(lambda: not alive(pool._process.pid))
    assert pool.score_all(items(30)) == expected
    # a row that ends it again and again costs its batch, and not the run
    results = pool.score_all([("end", 0), *items(5)])
    assert results[0].kind == "died"
    assert pool.score_all(items(30)) == expected
    pool.close()


def countdown_like(text, row):
    return misbehave(text, row)


countdown_like.bounded = True


def test_a_verifier_says_how_it_is_scored():
    assert isinstance(batch_scorer(countdown_like, ROWS), InProcess)
    assert isinstance(batch_scorer(partial(countdown_like), ROWS), InProcess)
    assert isinstance(batch_scorer(countdown_like, ROWS, workers=1), WorkerPool)
    assert isinstance(batch_scorer(misbehave, ROWS), WorkerPool)
    assert isinstance(batch_scorer(misbehave, ROWS, workers=0), InProcess)
    with pytest.raises(ValueError, match="at least one worker"):
        batch_scorer(misbehave, ROWS, workers=-1)


def judge(text, row, *, threshold=0.5):
    raise AssertionError("one by one is what `many` is there to avoid")


def judge_many(pairs, *, threshold=0.5):
    return [
        RuntimeError("no answer")
        if text == "lost"
        else Score(threshold, row["number"] > 0, {}, text)
        for text, row in pairs
    ]


judge.many = judge_many


def test_a_verifier_that_scores_many_gets_the_whole_batch_with_its_settings():
    scorer = batch_scorer(partial(judge, threshold=0.75), ROWS, workers=3)
    assert isinstance(scorer, AllAtOnce)
    assert scorer.score_all([("a", 0), ("lost", 1), ("b", 2)]) == [
        Score(0.75, False, {}, "a"),
        Failure("verifier", "RuntimeError: no answer"),
        Score(0.75, True, {}, "b"),
    ]


def test_the_rules_before_a_judge_keep_their_limits():
    rules, judged = Part("rules", 1.0, misbehave), Part("judge", 0.5, bind(judge, threshold=0.25))
    whole = weighted([rules, judged])
    scorer = batch_scorer(whole, ROWS, workers=1, seconds=1.0)
    with contextlib.closing(scorer):
        first, slow, ended, odd, last = scorer.score_all(
            [("a", 0), ("sleep", 1), ("exit", 2), ("bad row", 3), ("b", 4)]
        )
    # in this process `sleep` would stop a run for ten minutes, and `exit` would end it
    assert (slow.kind, ended.kind) == ("time", "died")
    assert odd == Failure("row", "`number` is odd")
    assert (first.reward, last.reward) == (0.125 + 0.125, 4.125 + 0.125)


@pytest.mark.parametrize("many", [lambda pairs: [NAN], lambda pairs: 1 / 0, lambda pairs: None])
def test_a_whole_batch_that_fails_is_no_row_the_less(many):
    results = AllAtOnce(many, ROWS).score_all([("a", 0), ("b", 1)])
    assert len(results) == 2
    assert all(isinstance(result, Failure) for result in results)


def test_numbers_of_numpy_come_back_plain():
    given = Score(np.float32(0.5), np.bool_(True), {"part": np.float64(1)}, "", ())
    scorer = InProcess(lambda text, row: given, ROWS)
    (result,) = scorer.score_all([("", 0)])
    assert result == Score(0.5, True, {"part": 1.0}, "")
    assert type(result.reward) is float and result.correct is True


def test_countdown_scores_alike_in_process_and_in_workers():
    rows = [{"nums": [2, 3], "target": 5}, {"target": 5}]
    texts = ["x</think><answer>2+3</answer>", "x</think><answer>2*3</answer>", ""]
    batch = [(text, row) for text in texts for row in (0, 1)]
    score = partial(countdown.score, line_weight=0.2)
    with WorkerPool(score, rows, workers=2) as pool:
        results = pool.score_all(batch)
    assert results == InProcess(score, rows).score_all(batch)
    assert [getattr(result, "kind", "scored") for result in results] == ["scored", "row"] * 3


def test_the_benchmark_reports_both_ways_to_score():
    root = Path(__file__).parents[1]
    command = [sys.executable, "benchmarks/verifiers.py", "countdown", "--rows=60", "--reps=1"]
    done = subprocess.run(
        [*command, "--workers=2"],
        cwd=root,
        env=os.environ | {"PEER_QUIET_BUDGET_S": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = json.loads(done.stdout)
    assert line["same"] and line["unscored"] == 0 and 0.4 < line["right_share"] < 0.6
    assert line["in_process_rows_per_s"] > 0 and line["pool_first_rows_per_s"] > 0


def test_the_limits_of_a_verifier_within_a_mixture_within_a_sum():
    """A judge among the tasks makes the whole one of many rows; the others keep their workers."""
    judge, rule = partial(_judged, size=1), partial(_rule, size=1)
    judge.many = lambda rows: [_judged(*row, size=1) for row in rows]
    mixed = ByTask({"a": judge, "b": rule}, {"score": 1.0})
    whole = weighted([Part("task", 1.0, mixed), Part("more", 1.0, rule)])
    scorer = batch_scorer(whole, [{"task": "a"}, {"task": "b"}], workers=1, seconds=7.0)
    try:
        inner = scorer.parts[mixed]
        assert isinstance(scorer.parts[rule], WorkerPool)
        assert isinstance(inner.parts[rule], WorkerPool) and inner.parts[rule].seconds == 7.0
        first, second = scorer.score_all([("x", 0), ("xyz", 1)])
        assert (first.reward, second.reward) == (0.5 + 1, 3 + 3)
    finally:
        scorer.close()


def _judged(completion, row, *, size):
    return Score(0.5, None, {"score": 0.5}, "", weights={"score": 1.0})


def _rule(completion, row, *, size):
    return Score(float(len(completion)), None, {"score": 0.0}, "", weights={"score": 1.0})
