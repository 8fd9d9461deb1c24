"""The Countdown task: its problems, its prompts, and the worked traces."""

import inspect
import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from rlx.tasks import TASKS, Task, countdown
from rlx.tasks.countdown import PROMPTS, key

load = TASKS["countdown"]
ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared/data/countdown/countdown_cd3_test.jsonl"


def keys(rows: list[dict]) -> list:
    return [key((row["nums"], row["target"])) for row in rows]


def reachable(numbers: tuple[Fraction, ...]) -> set[Fraction]:
    """Every value of an expression that uses each number once, by exhaustion."""
    if len(numbers) == 1:
        return set(numbers)
    values = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        others = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
        for joined in [a + b, a - b, a * b] + ([a / b] if b else []):
            values |= reachable((joined, *others))
    return values


def test_generated_problems_are_solvable_distinct_and_within_their_settings():
    task = load(seed=3, train_size=60, heldout_size=30, numbers=(2, 3), highest=20)
    assert isinstance(task, Task)
    assert (len(task.train), len(task.heldout)) == (60, 30)
    rows = task.train + task.heldout
    assert len(set(keys(rows))) == 90  # also: training and held-out problems are disjoint
    for row in rows:
        assert len(row["nums"]) in (2, 3) and 1 <= min(row["nums"]) <= max(row["nums"]) <= 20
        assert 1 <= row["target"] <= 99
        assert row["target"] in reachable(tuple(map(Fraction, row["nums"])))


def test_the_default_size_is_met_with_equal_shares():
    task = load(seed=0)
    assert (len(task.train), len(task.heldout)) == (16384, 1024)
    assert not set(keys(task.train)) & set(keys(task.heldout))
    shares = Counter(len(row["nums"]) for row in task.train)
    assert shares[3] == pytest.approx(8192, rel=0.05) and shares[4] == 16384 - shares[3]


def test_heldout_problems_depend_on_neither_seed_nor_size():
    """A model that another seed's run has trained must not have seen them."""
    small, large = (load(seed=1, train_size=size, heldout_size=50) for size in (10, 500))
    assert small.heldout == large.heldout
    assert small.train == large.train[:10]
    other = load(seed=2, train_size=500, heldout_size=50)
    assert other.heldout == small.heldout
    assert other.train[:10] != small.train
    assert not set(keys(other.train)) & set(keys(small.heldout))


def test_problems_are_the_same_in_every_process():
    code = "from rlx.tasks import TASKS; print(TASKS['countdown'](seed=5, train_size=20).train)"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().strip() == str(load(seed=5, train_size=20).train)


def test_a_count_without_new_problems_gives_its_share_to_the_others(monkeypatch):
    monkeypatch.setattr(countdown, "MOST_DRAWS", 5000)
    task = load(seed=0, train_size=300, heldout_size=10, numbers=(2, 3), highest=6)
    shares = Counter(len(row["nums"]) for row in task.train + task.heldout)
    assert shares[2] < 80 and shares[2] + shares[3] == 310


def test_all_problems_of_a_file_or_so_many_and_that_is_said(tmp_path):
    """A recipe's `train_size` is an upper limit for a file: what it leaves out must not go
    unnoticed."""
    file = tmp_path / "problems.jsonl"
    rows = [{"nums": [i, 1], "target": i + 1} for i in range(1, 41)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = load(seed=0, file=str(file), heldout_size=4, train_size=0)
    assert len(whole.train) == 36 and whole.notes == ()
    some = load(seed=0, file=str(file), heldout_size=4, train_size=5)
    assert len(some.train) == 5 and "5 of 36 problems of" in some.notes[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"numbers": ()}, "`numbers`"),
        ({"numbers": (1,)}, "2 to 6, not .1."),
        ({"numbers": (7,)}, "`numbers`"),
        ({"numbers": (3, 3)}, "`numbers`"),
        ({"lowest": 0}, "`lowest` must be at least 1, not 0"),
        ({"lowest": 5, "highest": 4}, "`highest` = 4 is below `lowest` = 5"),
        ({"target_lowest": 0}, "`target_lowest`"),
        ({"target_lowest": 9, "target_highest": 8}, "`target_highest` = 8"),
        ({"train_size": 0}, "`train_size` must be at least 1, not 0"),
        ({"heldout_size": 0}, "`heldout_size`"),
        ({"language": "fr"}, "en, zh, brief, not 'fr'"),
        ({"format_weight": -0.1}, "`format_weight`"),
        ({"format_weight": float("nan")}, "`format_weight`"),
        ({"line_weight": -0.1}, "`line_weight`"),
        ({"line_weight": float("inf")}, "`line_weight`"),
        # 1+1, 1*1 and 1/1: two problems in all
        (
            {"numbers": (2,), "highest": 1, "train_size": 3, "heldout_size": 1},
            "Asked for 4 .* found only 2 ",
        ),
        ({"target_lowest": 10**9, "target_highest": 10**9, "heldout_size": 1}, "found only 0 "),
        ({"file": "none.jsonl"}, "none.jsonl"),
        ({"file": "none.jsonl", "highest": 9, "numbers": (2,)}, "`numbers`, `highest` would be"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(settings, message, monkeypatch):
    monkeypatch.setattr(countdown, "MOST_DRAWS", 5000)
    with pytest.raises(ValueError, match=message):
        load(seed=0, **settings)


def test_settings_are_keywords_with_plain_types():
    parameters = inspect.signature(load).parameters.values()
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)
    assert {parameter.annotation for parameter in parameters} == {
        int,
        float,
        str,
        tuple[int, ...],
    }


@pytest.mark.parametrize("language", PROMPTS)
def test_prompts_hold_the_problem_and_end_in_the_prefill(language):
    row = load(seed=0, train_size=1, heldout_size=1, language=language).train[0]
    system, user, assistant = row["prompt"]
    assert [m["role"] for m in row["prompt"]] == ["system", "user", "assistant"]
    assert system["content"]
    shown = [int(number) for number in re.findall(r"\d+", user["content"])]
    assert shown[: len(row["nums"]) + 1] == [*row["nums"], row["target"]]
    assert "<think>" in user["content"] and "<answer>" in user["content"]
    assert assistant["content"] == row["prefill"] and row["prefill"].endswith("<think>")


def test_the_brief_prompt_is_exactly_this():
    row = load(seed=0, train_size=1, heldout_size=1, language="brief").train[0]
    numbers = " ".join(map(str, row["nums"]))
    assert row["prompt"] == [
        {"role": "system", "content": "Use each number once."},
        {
            "role": "user",
            "content": f"Write <think> and <answer> for {numbers} to make {row['target']}.",
        },
        {"role": "assistant", "content": "<think>"},
    ]


def test_the_score_takes_the_format_weight():
    task = load(seed=0, train_size=1, heldout_size=1, format_weight=0.25)
    wrong = task.score("x</think><answer>0</answer>", task.train[0])
    assert (wrong.reward, wrong.correct) == (0.25, False)


def test_the_score_takes_the_line_weight():
    row = {"nums": [3, 5, 9], "target": 24}
    for weight, reward in ((0.0, 0.01), (0.5, 0.51)):
        task = load(seed=0, train_size=1, heldout_size=1, line_weight=weight)
        assert task.score("24-9=15\n</think>", row).reward == pytest.approx(reward)
    assert task.verdicts and task.pairs is None and task.conversations is None


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_file_alone_gives_its_last_distinct_problems_as_heldout(tmp_path):
    rows = [{"nums": [1, 2, n], "target": n} for n in range(3, 9)]
    rows += [{"nums": [8, 2, 1], "target": 8}, {"nums": [1, 2, 3], "target": 3}]
    task = load(seed=0, file=write(tmp_path / "a.jsonl", rows), heldout_size=2)
    assert [row["target"] for row in task.heldout] == [7, 8]
    # the repeated statement of problem 8, in another order, is not trained on
    assert [row["target"] for row in task.train] == [3, 4, 5, 6, 3]


def test_two_files_never_overlap(tmp_path):
    train = write(tmp_path / "a.jsonl", [{"nums": [1, 2], "target": n} for n in (1, 2, 3)])
    heldout = write(tmp_path / "b.jsonl", [{"nums": [2, 1], "target": 3}])
    task = load(seed=0, file=train, heldout_file=heldout)
    assert [row["target"] for row in task.train] == [1, 2]
    assert [row["target"] for row in task.heldout] == [3]
    more = write(tmp_path / "c.jsonl", [{"nums": [2, 1], "target": n} for n in (3, 2)])
    task = load(seed=0, file=train, heldout_file=more, heldout_size=1)
    # problem 2 is beyond the held-out size, yet belongs to the held-out file
    assert [row["target"] for row in task.train] == [1]
    assert [row["target"] for row in task.heldout] == [3]
    with pytest.raises(ValueError, match="none is left to train"):
        load(seed=0, file=heldout, heldout_file=heldout)


def test_generated_training_leaves_out_a_heldout_file(tmp_path):
    everything = load(seed=0, train_size=200, heldout_size=1).train
    rows = [{"nums": row["nums"], "target": row["target"]} for row in everything[:50]]
    task = load(seed=0, train_size=200, heldout_file=write(tmp_path / "a.jsonl", rows))
    assert set(keys(task.heldout)) == set(keys(rows))
    assert len(task.train) == 200 and not set(keys(task.train)) & set(keys(rows))


def test_a_file_that_is_smaller_than_the_heldout_size_is_refused(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"nums": [1, 2], "target": n} for n in range(5)])
    with pytest.raises(ValueError, match=r"holds 5 distinct problems; .*`heldout_size` = 5"):
        load(seed=0, file=file, heldout_size=5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"nums": [1, 2]}, "`target`"),
        ({"numbers": [1, 2], "target": 3}, "`nums`"),
        ({"nums": [1, "2"], "target": 3}, "`nums`"),
        ({"input": "1,x", "output": "3"}, "`input`"),
        ({"input": "1,2", "output": None}, "`output`"),
    ],
)
def test_a_bad_problem_is_named_with_file_and_line(tmp_path, row, message):
    file = write(tmp_path / "a.jsonl", [{"nums": [1, 2], "target": 3}, row])
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{message}"):
        load(seed=0, file=file)


@pytest.mark.skipif(not DATA.exists(), reason="the optional data folder is not there")
def test_the_256_public_problems_are_read_and_solvable():
    task = load(seed=0, file=str(DATA), heldout_size=56)
    rows = task.train + task.heldout
    assert len(rows) == 256
    assert rows[0]["nums"] == [30, 100, 93] and rows[0]["target"] == 23
    for row in rows[::8]:
        assert row["target"] in reachable(tuple(map(Fraction, row["nums"])))
