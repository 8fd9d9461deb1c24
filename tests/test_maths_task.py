"""The maths task: rows of GSM8K, MATH and AIME, and the prompt that states the verifier's rule."""

import json
import pickle
from pathlib import Path

import pytest

from model.errors import BadInput
from rlx.tasks.maths import FORMS, load

SHARED = Path(__file__).parents[2] / "shared"

GSM8K = [{"question": f"What is {i} + {i}?", "answer": f"{i}+{i}=\n#### {2 * i}"} for i in range(6)]
MATH = [
    {"problem": "Halve one.", "solution": r"It is $\boxed{\frac12}$, not \boxed{2", "level": "1"},
    {"problem": "Three?", "solution": r"so $\boxed 3$."},
    {
        "problem": "Which?",
        "solution": r"\boxed{1} is wrong, \boxed{(1,2]} right",
        "answer": "(1,2]",
    },
]


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def gsm8k(tmp_path):
    return write(tmp_path / "gsm8k.jsonl", GSM8K)


def test_rows_of_gsm8k_and_math(tmp_path, gsm8k):
    task = load(seed=0, file=gsm8k, heldout_size=2)
    assert [row["answer"] for row in task.train] == ["0", "2", "4", "6"]
    assert [row["answer"] for row in task.heldout] == ["8", "10"]
    other = load(seed=0, file=write(tmp_path / "math.jsonl", MATH), heldout_size=1)
    answers = [row["answer"] for row in other.train + other.heldout]
    assert answers == [r"\frac12", "3", "(1,2]"]
    assert other.score(r"\boxed{(1,2]}", other.heldout[0]).correct


def test_nothing_held_out_is_trained_on(tmp_path):
    again = [*GSM8K, {"question": " what is 5 +  5?", "answer": "10"}]
    path = write(tmp_path / "again.jsonl", again)
    task = load(seed=0, file=path, heldout_size=1)
    assert [row["answer"] for row in task.train] == ["0", "2", "4", "6", "8"]
    assert load(seed=1, file=path, heldout_size=1, train_size=2).train == task.train[:2]
    other = load(seed=0, file=path, heldout_file=write(tmp_path / "held.jsonl", GSM8K[:2]))
    assert [row["answer"] for row in other.train] == ["4", "6", "8", "10", "10"]
    assert [row["answer"] for row in other.heldout] == ["0", "2"]


@pytest.mark.parametrize("extraction", FORMS)
def test_the_prompt_states_the_rule_and_its_echo_earns_nothing(gsm8k, extraction):
    task = load(seed=0, file=gsm8k, heldout_size=1, extraction=extraction, system="Be brief.")
    row = task.train[2]
    prompt = row["prompt"]
    assert prompt[0] == {"role": "system", "content": "Be brief."}
    assert FORMS[extraction].instruction in prompt[1]["content"]
    echo = "".join(message["content"] for message in prompt[1:])
    if extraction not in ("last_number", "any"):  # those two read the question's own numbers
        assert not task.score(echo, row).correct
    for text in ("4", "#### 4", r"\boxed{4}", "x</think><answer>4</answer>"):
        assert isinstance(task.score(text, row).correct, bool)
    right = {"hashes": "#### 4", "block": "x</think><answer>4</answer>"}
    result = task.score(right.get(extraction, r"\boxed{4}"), row)
    assert result.correct and result.reward == pytest.approx(1.1)


def test_the_score_can_be_sent_to_a_worker(gsm8k):
    task = load(seed=0, file=gsm8k, heldout_size=1, extraction="hashes", format_weight=0.5)
    score = pickle.loads(pickle.dumps(task.score))
    assert score("#### 4", task.train[2]).reward == 1.5
    assert task.answer("#### 4.0<|im_end|>") == "4"


def test_columns_and_numbers(tmp_path):
    rows = [{"q": f"Number {i}?", "a": float(i)} for i in range(3)]
    path = write(tmp_path / "rows.jsonl", rows)
    task = load(seed=0, file=path, heldout_size=1, columns={"question": "q", "answer": "a"})
    assert task.score(r"\boxed{1}", task.train[1]).correct
    with pytest.raises(BadInput, match="columns"):
        load(seed=0, file=path, columns={"problem": "q"})


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"answer": "1"}, "expected `question` or `problem`"),
        ({"question": "x", "answer": ""}, "empty"),
        ({"question": "x"}, "expected `answer` or `solution`"),
        ({"question": "", "answer": "1"}, "not empty"),
        ({"question": 5, "answer": "1"}, "must be a text"),
        ({"question": "x", "answer": [1]}, "must be a text or a finite number"),
        ({"question": "x", "solution": "no box here, " * 50}, "longer than"),
    ],
)
def test_a_bad_row_is_refused_with_its_place_or_left_out_and_told(tmp_path, row, told):
    path = write(tmp_path / "bad.jsonl", [*GSM8K, row])
    with pytest.raises(BadInput, match=rf"bad\.jsonl:7: .*{told}"):
        load(seed=0, file=path, heldout_size=1)
    task = load(seed=0, file=path, heldout_size=1, bad_rows="skip")
    assert len(task.train) == 5 and "1 of 7 rows" in task.notes[0]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"file": ""}, "`file` must name"),
        ({"format_weight": -1.0}, "`format_weight`"),
        ({"heldout_size": 6}, "leaves none to train"),
        ({"train_size": -1}, "`train_size`"),
    ],
)
def test_settings_that_cannot_be_met(gsm8k, settings, told):
    with pytest.raises(BadInput, match=told):
        load(**{"seed": 0, "file": gsm8k, "heldout_size": 1} | settings)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data folder is not here")
@pytest.mark.parametrize(
    ("path", "count"),
    [
        ("gsm8k/test.jsonl", 1319),
        ("gsm8k/train_head1000.jsonl", 1000),
        ("math_problems/math.json", 500),
        ("math_problems/aime.json", 30),
    ],
)
def test_whole_files(path, count):
    task = load(seed=0, file=str(SHARED / "data" / path), heldout_size=10)
    assert len(task.train) + len(task.heldout) == count and task.notes == ()
    for row in task.train:
        assert task.score(rf"\boxed{{{row['answer']}}}", row).correct
