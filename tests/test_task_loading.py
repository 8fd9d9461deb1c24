"""From the sections `task` and `reward` to the task and what scores its rows."""

import pytest

from model.errors import BadInput
from model.tokenizer import load_tokenizer
from rlx.config import ConfigError, load, load_training
from rlx.policy import BUNDLED
from rlx.rewards.pool import WorkerPool
from rlx.rewards.score import Score
from rlx.task_loading import load_task, make_verifier
from rlx.tasks.mixture import ByTask

SUMS = ("task.name=sums", "task.train_size=8", "task.heldout_size=4")
OWN = """
from rlx.rewards import Score

def short(completion, row, *, most=5):
    return Score(float(len(completion) <= most), None, {"length": float(len(completion))}, "")
"""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    return f"{file}:short"


def composed(own, combine="sum", weight=0.5):
    entries = f"[{{name: task}}, {{name: '{own}', weight: {weight}, most: 3}}]"
    return load(None, [*SUMS, f"reward.verifiers={entries}", f"reward.combine={combine}"])


def test_the_tasks_verifier_and_ones_own_add_up(own):
    task = load_task(composed(own))
    row = task.train[0]
    right = task.score(f" {row['answer']}", row)
    assert right.reward == 1.5 and right.correct and task.verdicts
    assert right.components["short/length"] == len(row["answer"]) + 1
    long = task.score(f" that is {row['answer']}", row)
    assert long.reward == 1.0 and long.correct


def test_of_stages_the_second_is_for_right_answers(own):
    """Added up, a short wrong answer would earn 0.5."""
    task = load_task(composed(own, "stages"))
    row = task.train[0]
    assert task.score(" x", row).reward == 0.0
    assert task.score(f" {row['answer']}", row).reward == 1.5


def test_a_reward_without_verdicts_is_told_to_be_one(own):
    task = load_task(load(None, [*SUMS, f"reward.verifiers=[{{name: '{own}'}}]"]))
    assert not task.verdicts


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["reward.verifiers=[{name: nothing}]"], r"reward\.verifiers\[0\]: name: .*came 'nothing'"),
        (["reward.verifiers=[{name: task, size: 2}]"], r"reward\.verifiers\[0\]: size"),
        (["reward.verifiers=[{name: choice}]"], r"reward\.verifiers: .*`options`"),
    ],
)
def test_a_wrong_verifier_is_refused_with_its_place(settings, told):
    with pytest.raises(BadInput, match=told):
        load_task(load(None, [*SUMS, *settings]))


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["reward.combine=stages"], "reward.combine"),
        (["reward.workers=0", "reward.row_seconds=3"], "reward.row_seconds"),
        (["reward.source=model", "reward.model=D", "reward.workers=2"], "reward.workers"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(settings, key):
    with pytest.raises(ConfigError, match=f"{key}: expected unset"):
        load_training(None, settings)


def test_limits_reach_the_workers(own):
    config = load(
        None,
        [
            *(*SUMS, f"reward.verifiers=[{{name: task}}, {{name: '{own}'}}]"),
            *("reward.workers=1", "reward.row_seconds=3", "reward.worker_mib=512"),
        ],
    )
    task = load_task(config)
    verifier = make_verifier(config, task, task.train, load_tokenizer(BUNDLED["nano"]))
    try:
        assert isinstance(verifier.scorer, WorkerPool)
        assert verifier.scorer.seconds == 3.0 and verifier.scorer.memory_bytes == 512 * 2**20
        (score,) = verifier.score_texts([f" {task.train[0]['answer']}"], [0])
        assert score.correct
    finally:
        verifier.close()


def test_in_a_mixture_a_verifier_of_many_rows_gets_its_own_at_once():
    """One by one, a judge would wait for each reply before it asks again."""
    asked = []

    def judge(completion, row):
        raise AssertionError("asked row by row")

    def many(rows):
        asked.append([row["id"] for _, row in rows])
        return [Score(0.5, None, {"score": 0.5}, "") for _ in rows]

    def rule(completion, row):
        return Score(1.0, True, {"correct": 1.0}, "")

    judge.many = many
    score = ByTask({"a": judge, "b": rule}, ("score", "correct"))
    rows = [("", {"task": name, "id": i}) for i, name in enumerate(["a", "b", "a", "c"])]
    first, second, third, unknown = score.many(rows)
    assert asked == [[0, 2]]
    assert first == third and first.components == {"score": 0.5, "correct": 0.0}
    assert second.components == {"score": 0.0, "correct": 1.0}
    assert isinstance(unknown, BadInput)
    assert not score.bounded
