"""From the sections `task` and `reward` to the task and what scores its rows."""

import pytest

from model.errors import BadInput
from model.tokenizer import load_tokenizer
from rlx.config import ConfigError, load, load_training
from rlx.policy import BUNDLED
from rlx.rewards import VERIFIERS
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
    score = ByTask({"a": judge, "b": rule}, {"score": 0.0, "correct": 1.0})
    rows = [("", {"task": name, "id": i}) for i, name in enumerate(["a", "b", "a", "c"])]
    first, second, third, unknown = score.many(rows)
    assert asked == [[0, 2]]
    assert first == third and first.components == {"score": 0.5, "correct": 0.0}
    assert second.components == {"score": 0.0, "correct": 1.0}
    assert isinstance(unknown, BadInput)
    assert not score.bounded


@pytest.mark.parametrize("order", [1, -1])
def test_a_mixture_has_verdicts_only_where_all_of_its_tasks_have(tmp_path, order):
    """Whichever comes first: else rows of the other count as wrong, and dynamic sampling drops
    them for ever."""
    file = tmp_path / "open.jsonl"
    file.write_text("".join(f'{{"question": "Why {i}?"}}\n' for i in range(6)))
    judge = "judge: {base_url: 'http://127.0.0.1:9', judge_model: M}"
    tasks = [
        "{name: sums, train_size: 8, heldout_size: 4}",
        f"{{name: open, file: {file}, heldout_size: 2, {judge}}}",
    ]
    given = ["task.name=mixture", f"task.tasks=[{', '.join(tasks[::order])}]"]
    own = tmp_path / "mine.py"
    own.write_text(OWN)
    with_own = [f"reward.verifiers=[{{name: task}}, {{name: '{own}:short', weight: 0.1}}]"]
    for settings in ([], with_own):
        assert not load_task(load(None, [*given, *settings])).verdicts
    stages = [with_own[0].replace("weight: 0.1", "threshold: 0.5"), "reward.combine=stages"]
    with pytest.raises(BadInput, match="calls nothing of open right or wrong"):
        load_task(load(None, [*given, *stages]))


def test_limits_that_nothing_keeps_are_refused():
    config = load(None, [*SUMS, "reward.row_seconds=3"])
    task = load_task(config)
    with pytest.raises(BadInput, match=r"reward\.row_seconds: expected unset.*reward\.workers=1"):
        make_verifier(config, task, task.train, load_tokenizer(BUNDLED["nano"]))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("countdown", {}),
        ("countdown", {"line_weight": 0.2}),
        ("maths", {"format_weight": 0.3}),
        ("choice", {}),
        ("pubmedqa", {}),
        ("gym", {"partial_weight": 0.5}),
    ],
)
def test_a_reward_is_the_weighted_sum_of_its_components(name, settings):
    """What `components_normalised` takes apart is the whole reward, and nothing else."""
    answer = {"choice": "B", "pubmedqa": "yes"}.get(name, "3")
    row = {"nums": [1, 2], "target": 3, "answer": answer, "options": ["1", "3"]}
    if name == "gym":
        row |= {"dataset": "basic_arithmetic", "metadata": {}, "options": {}}
    for text in ("1+2=3</think><answer>1+2</answer>", "<answer>B</answer>", "3", "yes", ""):
        score = VERIFIERS[name](text, row, **settings)
        parts = [weight * score.components[part] for part, weight in score.weights.items()]
        assert score.weights and score.reward == pytest.approx(sum(parts))


def test_a_sum_of_verifiers_has_a_part_for_each_with_its_sign(own):
    entries = f"[{{name: task}}, {{name: '{own}', weight: -0.2}}]"
    task = load_task(load(None, [*SUMS, f"reward.verifiers={entries}"]))
    score = task.score("", task.train[0])
    assert score.weights == {"task/reward": 1.0, "short/reward": -0.2}
    parts = [weight * score.components[part] for part, weight in score.weights.items()]
    assert score.reward == pytest.approx(sum(parts))


def test_a_part_that_one_task_of_a_mixture_does_not_count_is_none():
    """Else its rows would be paid for it."""
    one, two = TWO_SUMS[1], TWO_SUMS[1].replace("label: b, format_weight: 0,", "label: b,")
    for tasks, weights in ((one, {"format": 0.0, "correct": 1.0}), (two, {})):
        task = load_task(load(None, [TWO_SUMS[0], tasks]))
        assert task.score.components == dict.fromkeys(["format", "correct"], 0.0) | weights


TWO_SUMS = (
    "task.name=mixture",
    "task.tasks=[{name: countdown, label: a, format_weight: 0, train_size: 8, heldout_size: 4},"
    " {name: countdown, label: b, format_weight: 0, train_size: 8, heldout_size: 4}]",
)
