"""The judge: how its reply is read, that no failure of its is a zero, its settings and task."""

import json
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from judge_server import candidate, served, system_and_user, verdict

from model.errors import BadInput
from rlx.rewards.build import bind
from rlx.rewards.host import HostVerifier
from rlx.rewards.judge import SETTINGS, check, score, score_many
from rlx.rewards.judge_client import JudgeFailure
from rlx.rewards.judge_prompt import RUBRIC
from rlx.rewards.judge_reply import Malformed, read_reply, scaled
from rlx.score_file import score_file
from rlx.tasks.open_answers import load

ROOT = Path(__file__).parents[1]
ROW = {"question": "Why is the sky blue?", "reference": "Rayleigh scattering."}


def failure(completion: str, **given) -> str:
    with pytest.raises(JudgeFailure) as error:
        score(completion, ROW, **given)
    return str(error.value)


def test_the_reward_is_the_judges_score():
    with served(lambda body: verdict(0.8, 0.9, "mostly right")) as judge:
        result = score("It scatters.", ROW, **judge.settings)
    assert result.reward == 0.8 and result.correct is None
    assert result.components == {"score": 0.8, "confidence": 0.9}
    assert "mostly right" in result.reason
    (body,) = judge.bodies
    assert body["model"] == "stub" and body["temperature"] == 0.0
    assert body["response_format"]["type"] == "json_schema"
    system, user = system_and_user(body)
    assert RUBRIC in system and "from 0 to 1" in system
    assert "Why is the sky blue?" in user and "Rayleigh scattering." in user
    assert candidate(body) == "It scatters."


@pytest.mark.parametrize(
    ("said", "lowest", "highest", "share"),
    [
        (0.8, 0, 1, 0.8),  # digits joined give 0.08
        ("0.8", 0, 1, 0.8),
        (85.5, 0, 100, 0.855),
        ("85.5", 0, 100, 0.855),  # whole numbers only give 0.85 or NaN
        ("10/10", 0, 10, 1.0),
        (1, 0, 10, 0.1),  # a guessed scale gives 1.0
        (1, 1, 5, 0.0),
        (3, 1, 5, 0.5),
        (0, 0, 1, 0.0),
    ],
)
def test_a_score_is_a_share_of_the_scale_that_the_prompt_states(said, lowest, highest, share):
    scale = {"scale_lowest": float(lowest), "scale_highest": float(highest)}
    with served(lambda body: verdict(said)) as judge:
        assert score("x", ROW, **judge.settings, **scale).reward == pytest.approx(share)
    assert f"from {lowest} to {highest}" in system_and_user(judge.bodies[0])[0]


MALFORMED = [
    "INCORRECT",  # a substring says right
    "CORRECT",
    "The answer is not correct.",
    "As a judge, I weighed it. The final grade is B.",  # the first letter is an A
    "[[7]] ... overall [[3]]",
    "Score: 85",
    "0.8",
    "",
    "{}",
    "null",
    "[0.8, 0.9]",
    verdict(85),
    verdict(-3),
    verdict(1.0001),
    verdict("85"),
    verdict("-3"),
    verdict("nan"),
    verdict("inf"),
    verdict("1e-1"),
    verdict("0.8 of 1"),
    verdict("8/10"),  # of another scale than the one that was asked for
    verdict("0.2 or 0.9"),
    verdict("١"),
    verdict(True),
    verdict(None),
    verdict([1]),
    verdict(0.8, 1.5),
    verdict(0.8, -0.1),
    verdict(0.8, "0.9"),
    verdict(0.8, None),
    verdict(math.nan),
    verdict(math.inf),
    verdict(0.8, math.nan),
    '{"score": 1e999, "confidence": 1}',
    '{"score": 0, "score": 1, "confidence": 1}',  # the last of two keys says 1
    '{"score": 0.5}',
    '{"confidence": 1}',
    '{"score": 1, "confidence": 1, "verdict": "pass"}',
    verdict(0) + verdict(1),
    verdict(1) + " That is all.",
    "My verdict: " + verdict(1),
    f"```json\n{verdict(0)}\n```\n```json\n{verdict(1)}\n```",
    "<think>" + verdict(1),  # a think block that never ends
    "[" * 100_000,
    '{"score": ' + "1" * 5000 + ', "confidence": 1}',
    " " + "x" * 200_000,
]


@pytest.mark.parametrize("reply", MALFORMED, ids=lambda reply: reply[:40])
def test_a_malformed_reply_is_neither_zero_nor_one(reply):
    with pytest.raises(Malformed, match="malformed"):
        scaled(read_reply(reply).score, 0.0, 1.0)


def test_malformed_replies_fail_their_rows_alone():
    def answer(body):
        return "INCORRECT" if "bad" in candidate(body) else verdict(0.7)

    with served(answer) as judge:
        results = score_many([("a", ROW), ("bad", ROW), ("c", ROW)], **judge.settings)
    assert [getattr(r, "reward", None) for r in results] == [0.7, None, 0.7]
    assert isinstance(results[1], Malformed) and "INCORRECT" in str(results[1])


@pytest.mark.parametrize(
    "reply",
    [
        verdict(0.4),
        f"\n {verdict(0.4)}\n",
        f"```json\n{verdict(0.4)}\n```",
        f"```\n{verdict(0.4)}\n```",
        f"<think>It says </think> {verdict(1)}, but</think>\n{verdict(0.4)}",
    ],
)
def test_a_reply_may_have_a_fence_and_a_think_block(reply):
    assert read_reply(reply).score == 0.4


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"refusal": "I won't."}, "refused: I won't."),
        ({"content": "", "finish_reason": "content_filter"}, "refused"),
        ({"content": verdict(1), "finish_reason": "length"}, "cut at its limit"),
        ({"content": None}, "empty"),
        (verdict(1, 0.49), "confidence is 0.49, below 0.5"),
        ((401, "no such key"), "401.*no such key"),
        ((404, "no such model"), "404.*no such model"),
        ((500, "out of order"), "500.*out of order"),
        ((429, "too many"), "429"),
    ],
)
def test_refused_unsure_and_failed_requests_are_failures(answer, told):
    with served(lambda body: answer) as judge:
        assert re.search(told, failure("x", **judge.settings))


def test_confidence_at_the_threshold_counts():
    with served(lambda body: verdict(1, 0.5)) as judge:
        assert score("x", ROW, **judge.settings).reward == 1.0


def test_an_answer_that_is_no_chat_completion_is_a_failure(monkeypatch):
    from rlx.rewards.judge_client import read_completion

    for answer in ("<html>", None, {"choices": []}, object()):
        with pytest.raises(JudgeFailure, match="malformed"):
            read_completion(answer)


def test_in_a_rollout_a_row_without_a_verdict_is_nan_and_the_others_keep_their_rewards():
    def answer(body):
        return {"bad": "INCORRECT", "shy": verdict(1, 0.1), "good": verdict(0.75)}[candidate(body)]

    texts = ["good", "bad", "shy", ""]
    tokens = np.zeros((1, 4, 5), np.int32)
    for i, text in enumerate(texts):
        tokens[0, i, : len(text)] = [ord(letter) for letter in text]
    lengths = np.array([[len(text) for text in texts]])
    with served(answer) as judge:
        verifier = HostVerifier(
            bind(score, **judge.settings), [ROW], lambda ids: "".join(map(chr, ids)), [1]
        )
        assert judge.bodies == []  # the components' names cost no request
        rewards, correct, components, _ = verifier(np.array([0]), tokens, lengths)
    assert verifier.components == {"score": 1.0, "confidence": 0.0}
    np.testing.assert_array_equal(rewards, [[0.75, np.nan, np.nan, 0.0]])
    assert np.isnan(correct).all() and np.isnan(components[0, 1:3]).all()
    assert verifier.failures == 2 and "confidence" in verifier.last_failure


# --- settings, travel, the task ---


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"base_url": "localhost:8000"}, "base_url"),
        ({"judge_model": ""}, "judge_model"),
        ({"judged": "all"}, "judged.*completion"),
        ({"scale_highest": 0.0}, "scale_highest"),
        ({"scale_highest": math.inf}, "scale_highest"),
        ({"min_confidence": 1.5}, "min_confidence"),
        ({"min_confidence": math.nan}, "min_confidence"),
        ({"seconds": 0.0}, "seconds"),
        ({"concurrency": 0}, "concurrency"),
        ({"retries": -1}, "retries"),
        ({"budget": -1}, "budget"),
        ({"judge_temperature": 3.0}, "judge_temperature"),
        ({"rubric": "missing.md"}, "missing.md"),
        ({"rubric": " "}, "rubric"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE"),
        ({"model": "x"}, "model"),
        ({"cache": "/dev/null/x"}, "cache"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_asked(given, told):
    base = {"base_url": "http://127.0.0.1:9", "judge_model": "m"}
    check(**base)
    with pytest.raises(BadInput, match=told):
        check(**base | given)


def test_settings_that_lack_a_judge_are_refused():
    with pytest.raises(BadInput, match="base_url, judge_model"):
        check()
    assert {"base_url", "judge_model", "budget"} <= SETTINGS.keys()


def test_a_judge_with_its_settings_travels_to_other_processes():
    with served(lambda body: verdict(0.9)) as judge:
        verifier = pickle.loads(pickle.dumps(bind(score, **judge.settings)))
        assert verifier("x", ROW).reward == 0.9
        assert [r.reward for r in verifier.many([("x", ROW), ("", ROW)])] == [0.9, 0.0]


def test_the_client_is_imported_by_the_first_request_only():
    code = "import sys, rlx.rewards.judge; print({'openai', 'jax'} & sys.modules.keys())"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "set()"


def test_the_task_of_open_answers(tmp_path):
    file = tmp_path / "open.jsonl"
    rows = [{"question": f"Q{i}?", "reference": f"A{i}"} for i in range(6)] + [{"question": "Q0 ?"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with served(lambda body: verdict(0.9)) as judge:
        task = load(seed=0, file=str(file), heldout_size=2, system="S", judge=judge.settings)
        assert task.score("x", task.train[0]).reward == 0.9
    assert (len(task.train), len(task.heldout)) == (5, 2) and not task.verdicts
    assert task.train[0]["prompt"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q0?"},
    ]
    held = {row["question"] for row in task.heldout}
    assert not held & {row["question"] for row in task.train}
    assert load(seed=0, file=str(file), heldout_size=2).score is None
    with pytest.raises(BadInput, match=r"judge: .*judge_model"):
        load(seed=0, file=str(file), judge={"base_url": judge.url})
    with pytest.raises(BadInput, match="judge: seconds"):
        load(seed=0, file=str(file), judge=judge.settings | {"seconds": "soon"})


def test_nothing_is_asked_where_a_row_is_bad(tmp_path):
    """All replies would be paid for, and lost with the error."""
    file = tmp_path / "in.jsonl"
    rows = [{"completion": f"c{i}", "question": "Q?"} for i in range(5)] + [{"completion": "x"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with served(lambda body: verdict(0.9)) as judge:
        given = [f"task.base_url={judge.url}", "task.judge_model=stub"]
        with pytest.raises(BadInput, match=r"in\.jsonl:6"):
            score_file("judge", file, tmp_path / "out.jsonl", given)
        file.write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[0] | {"prefill": 3}) + "\n")
        with pytest.raises(BadInput, match=r"in\.jsonl:2"):
            score_file("judge", file, tmp_path / "out.jsonl", given)
        assert judge.bodies == []
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
        summary = score_file("judge", file, tmp_path / "out.jsonl", given)
    # Nothing is right or wrong: 0 would say that all were wrong.
    assert summary["solve_rate"] is None and summary["mean_reward"] == pytest.approx(0.9)


def test_a_row_without_a_question_is_refused_or_left_out(tmp_path):
    file = tmp_path / "open.jsonl"
    file.write_text('{"question": "A?"}\n{"question": 3}\n{"question": "B?"}\n{"q": "C?"}\n')
    with pytest.raises(BadInput, match=r"open.jsonl:2: expected a text `question`; came 3"):
        load(seed=0, file=str(file), heldout_size=1)
    task = load(seed=0, file=str(file), heldout_size=1, bad_rows="skip")
    assert len(task.train + task.heldout) == 2 and "open.jsonl:2" in task.notes[0]
