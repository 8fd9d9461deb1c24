"""Runs of every kind from the command line: pipelines, preferences, critics, terms, groups."""

import json
from pathlib import Path

import chex
import numpy as np
import pytest
from toy_run import lines, params_of, start

import run
from model.config import read_config
from model.score_head import load_scorer
from rlx.algorithms import ALGORITHMS
from rlx.config import load_training
from rlx.derived import terms
from rlx.resolve import resolve

CONFIGS = Path(run.__file__).parent / "configs"
PAIRS = CONFIGS / "data" / "countdown_pairs.jsonl"
GIVEN = (
    *(f"task.file={PAIRS}", "task.train_size=32", "task.heldout_size=8", "-task.highest"),
    *("-task.language", "-batch.samples", "-rollout.overlong_buffer", "sampling.max_new_tokens=48"),
    *("loop.steps=2", "batch.minibatches=1", "-eval.greedy"),
)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def train_lines(folder):
    return [line for line in lines(folder / "metrics.jsonl") if line["kind"] == "train"]


@pytest.fixture(scope="module")
def reward_model(tiny_nano, tmp_path_factory):
    """Made by the stage that makes it for people."""
    base = tmp_path_factory.mktemp("stages")
    path = base / "tiny.yaml"
    path.write_text(f"model:\n  path: {tiny_nano}\n")
    folder = base / "reward"
    change = ("task.name=preference", "algorithm.name=reward_model")
    assert start(path, folder, *GIVEN, *change) == 0
    return folder


def test_each_stage_reads_the_folder_that_the_last_one_left(recipe, tmp_path, capsys):
    """Fine-tuning, a reward model, PPO against it with a critic that begins as it."""
    sft, reward, ppo = (tmp_path / name for name in ("sft", "reward", "ppo"))
    change = ("task.name=chat", "algorithm.name=sft", "batch.packing=true")
    assert start(recipe, sft, *GIVEN, *change) == 0
    assert summary(sft)["headline"] == "nll"
    assert summary(sft)["after"]["nll"] < summary(sft)["before"]["nll"]

    policy = ("-model.weights", f"model.path={sft / 'hf'}")
    change = ("task.name=preference", "algorithm.name=reward_model", "optimizer.learning_rate=1e-2")
    assert start(recipe, reward, *GIVEN, *policy, *change) == 0
    before, after = summary(reward)["before"], summary(reward)["after"]
    assert before["accuracy"] == 0.5 and before["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert after["loss"] != before["loss"]
    head = load_scorer(reward / "hf", read_config(reward / "hf"))["value_head"]["kernel"]
    assert np.abs(head).max() > 1e-3
    # What it leaves is no policy, and is refused as one.
    change = ("task.name=chat", "algorithm.name=sft", "-model.weights")
    scorer = f"model.path={reward / 'hf'}"
    assert start(recipe, tmp_path / "no", *GIVEN, *change, scorer) == 2
    assert "reward model" in capsys.readouterr().err

    change = (
        *("task.name=preference", "algorithm.name=ppo", "batch.samples=2", "batch.minibatches=2"),
        *("reward.source=model", f"reward.model={reward / 'hf'}", "reward.kl=k1"),
        *("reward.kl_beta=0.05", "reward.kl_target=1.0", "reward.running=true", "reward.clip=3"),
        *("reward.missing_stop_penalty=0.5", "critic.kind=model", "batch.epochs=2"),
        *(f"critic.path={reward / 'hf'}", "critic.learning_rate=1e-3"),
    )
    given = [g for g in GIVEN if not g.startswith(("-batch.samples", "batch.minibatches"))]
    assert start(recipe, ppo, *given, *policy, *change) == 0
    assert summary(ppo)["headline"] == "reward"
    last = train_lines(ppo)[-1]
    assert {
        "kl/beta",
        "kl/completion",
        "explained_variance",
        "loss/ppo",
        "loss/value",
    } <= last.keys()
    assert "solve_rate" not in last
    assert last["updates"] == 8
    assert last["kl/beta"] != 0.05
    sample = lines(ppo / "samples.jsonl")[0]
    assert sample["correct"] is None and sample["reward"] == sample["components"]["score"]
    # Its policy is a policy, and its critic has a folder of its own.
    assert params_of(ppo).keys() == params_of(sft).keys()
    assert "value_head" in load_scorer(ppo / "critic", read_config(ppo / "critic"))


def test_a_preference_run_is_measured_on_held_out_pairs(recipe, tmp_path):
    folder = tmp_path / "dpo"
    change = (
        "task.name=preference",
        "algorithm.terms=[{name: dpo}, {name: sft, weight: 0.1}]",
        "optimizer.learning_rate=1e-2",
    )
    assert start(recipe, folder, *GIVEN, *change) == 0
    before = summary(folder)["before"]
    assert before["accuracy"] == 0.5 and before["margin"] == 0.0
    assert before["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert summary(folder)["algorithm"] == "dpo + sft"
    line = train_lines(folder)[0]
    assert {"loss/dpo", "loss/sft", "sft/nll", "rewards/chosen", "accuracy"} <= line.keys()
    assert line["loss"] == pytest.approx(line["loss/dpo"] + 0.1 * line["loss/sft"], rel=1e-5)


def test_export_of_a_reward_model_and_of_a_policy_with_a_critic(
    recipe,
    reward_model,
    tmp_path,
):
    again = tmp_path / "again"
    assert run.main(["export", "--run", str(reward_model), "--output", str(again)]) == 0
    shape = read_config(again)
    chex.assert_trees_all_equal(load_scorer(again, shape), load_scorer(reward_model / "hf", shape))


@pytest.mark.parametrize("critic", ["head", "model"])
def test_a_run_with_a_critic_resumes_bit_for_bit(recipe, tmp_path, critic):
    """Critic, its moments, the adaptive weight and the kept groups are a part of the state: begun
    anew, any of them would change the third step."""
    common = (
        *("algorithm.name=ppo", f"critic.kind={critic}", "checkpoint.every=2"),
        *("reward.kl=k3", "reward.kl_beta=0.1", "reward.kl_target=0.01", "reward.running=true"),
        *("reward.kl_horizon=20", "-rollout.overlong_buffer"),
    )
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert start(recipe, whole, "loop.steps=4", *common) == 0
    assert start(recipe, stopped, "loop.steps=2", *common) == 0
    assert start(recipe, stopped, "loop.steps=4", *common, "run.resume=true") == 0
    chex.assert_trees_all_equal(params_of(whole), params_of(stopped))
    timed = ("seconds", "tokens_per_second")
    told = [
        {k: v for k, v in line.items() if not k.startswith(timed)} for line in train_lines(whole)
    ]
    assert told == [
        {k: v for k, v in line.items() if not k.startswith(timed)} for line in train_lines(stopped)
    ]
    betas = [line["kl/beta"] for line in told]
    assert betas[0] == pytest.approx(0.1) and len(set(betas)) == 4


def test_groups_terms_and_corrections_run_together(recipe, tmp_path):
    folder = tmp_path / "run"
    change = (
        "algorithm.terms=[{name: gspo}, {name: dpo, weight: 0.1}, {name: sft, weight: 0.05}, "
        "{name: entropy, weight: 0.01}, {name: kl_k3, weight: 0.04}]",
        *("rollout.probe=2", "rollout.retire_after=1", "rollout.replay=4", "loop.steps=3"),
        "rollout.correction=sequence_truncate",
    )
    assert start(recipe, folder, *change) == 0
    line = train_lines(folder)[-1]
    for name in ("gspo", "dpo", "sft", "entropy", "kl_k3"):
        assert np.isfinite(line[f"loss/{name}"])
    assert {"probe/informative", "replay/held", "correction/ratio", "kl_k3/kl"} <= line.keys()
    assert line["correction/ratio"] == pytest.approx(1.0, abs=1e-3)


def test_a_checkpoint_is_evaluated_by_a_reward_model(tiny_nano, reward_model, capsys):
    settings = [
        *("task.name=preference", f"task.file={PAIRS}", "task.heldout_size=8"),
        *("reward.source=model", f"reward.model={reward_model / 'hf'}", "eval.greedy=false"),
        *("eval.final_problems=8", "sampling.max_new_tokens=16", f"model.path={tiny_nano}"),
        "model.weights=random",
    ]
    empty = reward_model / "empty.yaml"
    empty.write_text("{}\n")
    assert run.main(["eval", "--json", "--config", str(empty), *settings]) == 0
    result = json.loads(capsys.readouterr().out)
    assert np.isfinite(result["reward"]) and result["n"] == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("task.name=preference", "algorithm.name=dapo", "batch.samples=2"), "reward.source=model"),
        (("task.name=chat", "algorithm.name=dpo"), "preference pairs"),
        (("task.name=preference", "algorithm.name=sft"), "worked examples"),
    ],
)
def test_a_task_without_what_the_algorithm_needs_is_refused(
    recipe,
    tmp_path,
    capsys,
    change,
    message,
):
    given = [g for g in GIVEN if g != "-batch.samples"]
    assert start(recipe, tmp_path / "run", *given, "batch.samples=1", *change) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_right(path):
    if path.stem.startswith(("tiny_", "nano_")) or path.stem.endswith("_nano"):
        resolve(load_training(path, []))
    else:
        load_training(path, [])


def test_every_algorithm_has_a_recipe_of_its_own():
    found = {
        term.name
        for path in CONFIGS.glob("tiny_*.yaml")
        for term in terms(load_training(path, []))
        if len(terms(load_training(path, []))) == 1
    }
    assert found >= {*ALGORITHMS, "reward_model"}
