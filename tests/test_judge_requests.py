"""A judge's requests: tries, limits of time and number, order, and the cache on disk."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from judge_server import candidate, served, verdict

from model.errors import BadInput
from rlx.rewards import judge_client
from rlx.rewards.judge import check, score, score_many
from rlx.rewards.judge_client import JudgeFailure

ROOT = Path(__file__).parents[1]
ROW = {"question": "Why is the sky blue?", "reference": "Rayleigh scattering."}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """No long waits between tries."""
    monkeypatch.setattr(judge_client, "LONGEST_WAIT", 0.02)


def failure(completion: str, **given) -> str:
    with pytest.raises(JudgeFailure) as error:
        score(completion, ROW, **given)
    return str(error.value)


def test_a_batch_keeps_its_order_asks_once_for_the_same_and_no_more_at_once_than_allowed():
    def answer(body):
        time.sleep(0.02)
        return verdict(int(candidate(body)) / 100)

    pairs = [(str(i % 20), ROW) for i in range(40)]
    with served(answer) as judge:
        results = score_many(pairs, **judge.settings, concurrency=4)
    assert [result.reward for result in results] == [(i % 20) / 100 for i in range(40)]
    assert len(judge.bodies) == 20
    assert 2 <= judge.most_at_once <= 4


def test_passing_failures_are_tried_again():
    answers = iter([(429, "slow down"), (503, "busy"), verdict(0.6)])
    with served(lambda body: next(answers)) as judge:
        judge.headers["retry-after"] = "0.01"
        assert score("x", ROW, **judge.settings | {"retries": 2}).reward == 0.6
    assert len(judge.bodies) == 3


def test_tries_have_an_end():
    with served(lambda body: (500, "broken")) as judge:
        assert "tries: 3" in failure("x", **judge.settings | {"retries": 2})
    assert len(judge.bodies) == 3


def test_what_will_not_pass_is_not_tried_again():
    with served(lambda body: (401, "no key")) as judge:
        failure("x", **judge.settings | {"retries": 5})
    assert len(judge.bodies) == 1


def test_a_server_without_structured_output_is_asked_without():
    def answer(body):
        return (400, "unknown field response_format") if "response_format" in body else verdict(0.3)

    pairs = [(str(i), ROW) for i in range(5)]
    with served(answer) as judge:
        results = score_many(pairs, **judge.settings, concurrency=1)
    assert [r.reward for r in results] == [0.3] * 5
    assert len(judge.bodies) == 6  # refused once, and remembered


def test_a_text_that_the_server_refuses_does_not_give_the_batch_up():
    def answer(body):
        return (400, "too long") if "long" in candidate(body) else verdict(0.3)

    pairs = [(f"long {i}", ROW) for i in range(12)] + [("short", ROW)]
    with served(answer) as judge:
        results = score_many(pairs, **judge.settings, concurrency=1)
    assert all("400" in str(r) for r in results[:-1]) and results[-1].reward == 0.3


@pytest.mark.parametrize("drip_seconds", [0.0, 0.02])
def test_a_late_reply_is_a_failure_even_where_the_server_drips(drip_seconds):
    """Each byte comes within the limit of a read; the whole does not come within the limit."""

    def answer(body):
        time.sleep(0 if drip_seconds else 1.5)
        return verdict(1)

    with served(answer) as judge:
        judge.drip_seconds = drip_seconds
        start = time.perf_counter()
        given = judge.settings | {"seconds": 0.4}
        # the first request imports the client
        score_many([], **given)
        assert "within 0.4 s" in failure("x", **given)
        assert time.perf_counter() - start < 6


def test_a_dead_server_does_not_hold_each_row_up():
    with served(lambda body: verdict()) as judge:
        given = judge.settings
    results = score_many(
        [(str(i), ROW) for i in range(100)], **given | {"retries": 1, "concurrency": 2}
    )
    assert all(isinstance(result, JudgeFailure) for result in results)
    assert sum("not asked" in str(result) for result in results) >= 90
    assert "not asked" in str(results[-1]) and "no connection" in str(results[-1])


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("STUB_KEY", "secret")
    with served(lambda body: verdict()) as judge:
        score("x", ROW, **judge.settings, api_key_env="STUB_KEY")
    assert judge.keys == ["Bearer secret"]
    monkeypatch.delenv("STUB_KEY")
    with pytest.raises(BadInput, match=r"api_key_env.*STUB_KEY"):
        check(**judge.settings, api_key_env="STUB_KEY")


def test_a_running_event_loop_is_no_obstacle():
    async def in_a_loop():
        return score("x", ROW, **judge.settings)

    with served(lambda body: verdict(0.9)) as judge:
        assert asyncio.run(in_a_loop()).reward == 0.9


def test_breaking_off_breaks_the_requests_off():
    """Ctrl-C in a batch of thousands: what was not asked yet is not paid for."""

    def answer(body):
        if len(judge.bodies) > 1 and body is judge.bodies[1]:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        return verdict()

    # A process that was started in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with served(answer) as judge:
        try:
            with pytest.raises(KeyboardInterrupt):
                score_many([(str(i), ROW) for i in range(60)], **judge.settings, concurrency=2)
        finally:
            signal.signal(signal.SIGINT, before)
        time.sleep(0.3)  # what was on its way arrives
        asked = len(judge.bodies)
        time.sleep(0.3)
    assert len(judge.bodies) == asked < 30


def test_the_budget_counts_every_request_of_this_process():
    with served(lambda body: (500, "broken")) as judge:
        given = judge.settings | {"judge_model": "budgeted", "retries": 1, "budget": 3}
        results = score_many([(str(i), ROW) for i in range(4)], **given, concurrency=1)
    assert len(judge.bodies) == 3
    assert "over the budget: 3" in str(results[-1])


# --- the cache ---


def test_what_was_asked_before_is_not_asked_again(tmp_path):
    with served(lambda body: verdict(0.6)) as judge:
        given = judge.settings | {"cache": str(tmp_path / "cache")}
        first = score("x", ROW, **given)
        assert score("x", ROW, **given) == first
        assert score("x", ROW, **given | {"min_confidence": 0.8, "retries": 9}) == first
        assert len(judge.bodies) == 1
        # the confidence is looked at anew
        assert "below 0.95" in failure("x", **given | {"min_confidence": 0.95})
        assert len(judge.bodies) == 1
        for other in (
            {"rubric": "Another."},
            {"judge_model": "other"},
            {"judge_temperature": 0.5},
            {"judge_tokens": 5},
            {"scale_highest": 10.0},
        ):
            before = len(judge.bodies)
            score("x", ROW, **given | other)
            assert len(judge.bodies) == before + 1
        score("y", ROW, **given)
        score("x", ROW | {"question": "Other?"}, **given)
        assert len(judge.bodies) == 8


def test_malformed_replies_are_not_kept_and_broken_files_are_asked_anew(tmp_path):
    replies = iter(["INCORRECT", verdict(0.6), verdict(0.7)])
    with served(lambda body: next(replies)) as judge:
        given = judge.settings | {"cache": str(tmp_path)}
        failure("x", **given)
        assert score("x", ROW, **given).reward == 0.6
        (file,) = tmp_path.rglob("*.json")
        assert json.loads(file.read_text())["reply"] == verdict(0.6)
        file.write_text(file.read_text()[:20])
        assert score("x", ROW, **given).reward == 0.7


CHILD = """
import json, sys
from rlx.rewards.judge import score_many
row = {"question": "Q"}
pairs = [(str(i), row) for i in range(int(sys.argv[3]))]
results = score_many(pairs, base_url=sys.argv[1], judge_model="stub", cache=sys.argv[2],
                     retries=0, concurrency=3, budget=int(sys.argv[4]))
print(json.dumps([getattr(r, "reward", None) for r in results]))
"""


def together(*arguments) -> list[list]:
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    children = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    return [json.loads(child.communicate(timeout=120)[0]) for child in children]


def test_two_processes_share_a_cache_and_its_budget(tmp_path):
    def answer(body):
        time.sleep(0.05)
        return verdict(0.5)

    with served(answer) as judge:
        assert together(judge.url, tmp_path / "a", 12, 0) == [[0.5] * 12] * 2
        files = list((tmp_path / "a").rglob("*.json"))
        assert len(files) == 12 and all(json.loads(f.read_text())["reply"] for f in files)
        assert not list((tmp_path / "a").rglob("*.partial"))
        judge.bodies.clear()
        scored = together(judge.url, tmp_path / "b", 12, 9)
        assert len(judge.bodies) == 9
        assert (tmp_path / "b/requests").stat().st_size >= 9
        # all rows that were not paid for are failures
        assert {reward for rewards in scored for reward in rewards} <= {0.5, None}
        assert None in scored[0] + scored[1]
