"""Scoring a file of completions: all lines or none, and failures that stay visible."""

import json
from pathlib import Path

import pytest

from model.errors import BadInput
from rlx.rewards import VERIFIERS, Score
from rlx.rewards.score import Span
from rlx.score_file import score_file

RIGHT = "x</think><answer>1+2</answer>"


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def test_a_file_is_scored_line_by_line(tmp_path):
    rows = [
        {"completion": RIGHT, "nums": [1, 2], "target": 3, "id": "a"},
        {"completion": "<think>x\u2028</think><answer>1*2</answer>", "nums": [1, 2], "target": 3},
    ]
    source, result = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "deep" / "out.jsonl"
    summary = score_file("countdown", source, result)
    lines = [json.loads(line) for line in result.read_text().splitlines()]
    assert [line["correct"] for line in lines] == [True, False]
    assert [line["format"] for line in lines] == [1.0, 1.0]
    assert [line["reward"] for line in lines] == pytest.approx([1.1, 0.1])
    assert [line["completion"] for line in lines] == [row["completion"] for row in rows]
    assert lines[0]["id"] == "a" and lines[0]["reason"] == "correct"
    assert (summary["rows"], summary["failures"], summary["solve_rate"]) == (2, 0, 0.5)
    assert summary["mean_reward"] == pytest.approx(0.6)
    assert list(result.parent.iterdir()) == [result]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"nums": [1, 2], "target": 3}, "completion"),
        ({"completion": 5, "nums": [1, 2], "target": 3}, "completion"),
        ({"completion": "", "target": 3}, "nums"),
        ({"completion": "", "nums": [1, 2], "target": "3"}, "target"),
    ],
)
def test_a_malformed_line_is_named_and_nothing_is_written(tmp_path, bad, named):
    good = {"completion": "", "nums": [1, 2], "target": 3}
    source, result = write_lines(tmp_path / "in.jsonl", [good, bad]), tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match=rf"in\.jsonl:2: .*`{named}`"):
        score_file("countdown", source, result)
    assert list(tmp_path.iterdir()) == [source]


def test_failed_rows_stay_in_the_denominator(tmp_path, monkeypatch):
    def verifier(completion, row):
        if row["target"] < 0:
            raise RuntimeError("no luck")
        return countdown(completion, row)

    countdown = VERIFIERS["countdown"]
    monkeypatch.setitem(VERIFIERS, "countdown", verifier)
    right = {"completion": RIGHT, "nums": [1, 2], "target": 3}
    wrong, failed = right | {"target": 4}, right | {"target": -1}
    rows = [right] * 108 + [wrong] * 40 + [failed] * 24
    source, result = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    summary = score_file("countdown", source, result, workers=0)
    assert summary["solve_rate"] == pytest.approx(108 / 172)  # 108 / 148 if failures are dropped
    assert summary["failures"] == 24
    last = json.loads(result.read_text().splitlines()[-1])
    assert last["reward"] is None and last["correct"] is None
    assert "RuntimeError: no luck" in last["reason"]


def test_an_unknown_task_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"'countdwn'.*countdown"):
        score_file("countdwn", tmp_path / "in.jsonl", tmp_path / "out.jsonl")


def test_spans_are_written_where_there_are_any_and_checked(tmp_path, monkeypatch):
    def verifier(completion, row):
        spans = (Span(1, row["end"], 0.5),) if row["end"] else ()
        return Score(0.5, False, {}, "", spans)

    monkeypatch.setitem(VERIFIERS, "countdown", verifier)
    rows = [{"completion": "abc", "end": end} for end in (0, 3, 4)]
    source, result = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert score_file("countdown", source, result, workers=0)["failures"] == 1
    none, one, beyond = (json.loads(line) for line in result.read_text().splitlines())
    assert "spans" not in none
    assert one["spans"] == [{"start": 1, "end": 3, "score": 0.5}]
    assert beyond["reward"] is None and "from 1 to 4 in a text of 3" in beyond["reason"]


def test_a_line_without_a_text_fails_alone(tmp_path):
    """As `generate` writes it where the logits were not finite."""
    row = {"completion": RIGHT, "nums": [1, 2], "target": 3}
    source = write_lines(tmp_path / "in.jsonl", [row | {"completion": None}, row])
    summary = score_file("countdown", source, tmp_path / "out.jsonl", workers=0)
    assert (summary["failures"], summary["solve_rate"]) == (1, 0.5)
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["reward"] is None and "no completion" in first["reason"] and second["correct"]
    # All failed: nothing was solved, and something could have been.
    source = write_lines(tmp_path / "in.jsonl", [row | {"completion": None}])
    assert score_file("countdown", source, tmp_path / "out.jsonl", workers=0)["solve_rate"] == 0.0


def test_worker_processes_write_the_same_lines(tmp_path):
    rows = [
        {"completion": f"x</think><answer>{a}+2</answer>", "nums": [a, 2], "target": 9}
        for a in range(1, 40)
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    assert score_file("countdown", source, here, workers=0)["solve_rate"] == 1 / 39
    score_file("countdown", source, there, workers=2)
    assert here.read_text() == there.read_text()


def test_a_bad_line_is_named_by_worker_processes_too(tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"completion": "", "nums": [], "target": 3}])
    with pytest.raises(ValueError, match=r"in\.jsonl:1: `nums`"):
        score_file("countdown", source, tmp_path / "out.jsonl", workers=1)
    assert list(tmp_path.iterdir()) == [source]


def test_settings_of_the_verifier_are_read(tmp_path):
    """By the default rule the boxed 18 counts; by the stated one there is no answer."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"completion": r"\boxed{18}", "answer": "18"}) + "\n")
    assert score_file("maths", source, output, workers=0)["solve_rate"] == 1.0
    strict = score_file("maths", source, output, ["task.extraction=hashes"], workers=0)
    assert strict["solve_rate"] == 0.0


@pytest.mark.parametrize(
    ("task", "settings", "told"),
    [
        ("maths", ["task.extraction=no"], "task.extraction: .*'hashes'.*came 'no'"),
        ("maths", ["task.size=1"], "task.size: there is no such setting"),
        ("maths", ["extraction=boxed"], "extraction: expected a setting of the verifier"),
        ("judge", [], "judge needs the settings base_url, judge_model|base_url: Field required"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_scored(tmp_path, task, settings, told):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"completion": "", "answer": "1", "question": "?"}) + "\n")
    with pytest.raises(BadInput, match=told):
        score_file(task, source, output, settings)
    assert not output.exists()
