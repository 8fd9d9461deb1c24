"""The command line as a person uses it: whole runs of a tiny random model, in this process."""

import json
import os
import signal
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import yaml
from toy_run import lines, params_of, start
from transformers import AutoModelForCausalLM, AutoTokenizer

import run
from model.config import read_config
from model.heads import logits
from model.load import load_params
from model.parameters import head_kernel
from model.qwen import Qwen
from rlx.policy import checkpoint_folder
from rlx.record import Record

NANO = checkpoint_folder("nano")


def test_a_run_leaves_what_the_design_names(recipe, tmp_path):
    folder = tmp_path / "run"
    assert (
        start(
            recipe,
            folder,
            "loop.steps=2",
            "eval.every=1",
            "eval.problems=8",
            "log.tensorboard=true",
        )
        == 0
    )
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "config.yaml",
        "summary.json",
        "metrics.jsonl",
        "samples.jsonl",
        "checkpoints",
        "hf",
        "report.html",
        "tensorboard",
    }
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["before"]["n"] == summary["after"]["n"] == 8
    assert {"pass@1", "stderr"} <= summary["after"].keys()
    assert Path(summary["hf"]).is_dir() and Path(summary["checkpoint"]).is_dir()
    train = [line for line in lines(folder / "metrics.jsonl") if line["kind"] == "train"]
    assert [line["step"] for line in train] == [1, 2]
    assert [line["updates"] for line in train] == [2, 4]
    assert [line["prompts_drawn"] for line in train] == [4, 8]
    assert yaml.safe_load((folder / "config.yaml").read_text())["batch"]["prompts"] == 4


@pytest.fixture
def unheard():
    """A run that takes no SIGTERM fails: without a handler the process of all tests would end."""

    def refuse(*_):
        raise AssertionError("the run took no SIGTERM")

    before = signal.signal(signal.SIGTERM, refuse)
    yield
    assert signal.signal(signal.SIGTERM, before) is refuse


def terminated(step):
    """`Record.end` that sends SIGTERM at the end of this step."""
    end = Record.end

    def ended(self, before, length, metrics):
        if before + length == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return end(self, before, length, metrics)

    return ended


@pytest.mark.usefixtures("unheard")
@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_a_resumed_run_equals_the_run_that_was_not_stopped(recipe, tmp_path, mode, monkeypatch):
    """Bit for bit, with the same lines in metrics.jsonl, each step once. SIGTERM stops a run in
    order: at the end of its step, with a checkpoint though none is due, and without a model."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    common = (f"loop.mode={mode}", "checkpoint.every=3", "optimizer.warmup_steps=3", "loop.steps=4")
    assert start(recipe, whole, *common) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Record, "end", terminated(2))
        assert start(recipe, stopped, *common) == 0
    summary = json.loads((stopped / "summary.json").read_text())
    assert (summary["steps"], summary["hf"], summary["after"]) == (2, None, None)
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["2"]
    assert not (stopped / "hf").exists()
    assert start(recipe, stopped, *common, "run.resume=true") == 0
    chex.assert_trees_all_equal(params_of(whole), params_of(stopped))
    timed = ("seconds", "tokens_per_second")  # also of each phase

    def steps(folder):
        found = [x for x in lines(folder / "metrics.jsonl") if x["kind"] == "train"]
        return [{k: v for k, v in x.items() if not k.startswith(timed)} for x in found]

    assert steps(whole) == steps(stopped)
    # It says nothing of a run that doesn't move.
    assert all(line["update_norm"] > 0 for line in steps(whole)[2:])


def test_resume_refuses_other_settings_and_a_second_run_the_same_folder(recipe, tmp_path, capsys):
    folder = tmp_path / "run"
    assert start(recipe, folder, "loop.steps=1") == 0
    assert start(recipe, folder, "loop.steps=1") == 2
    assert "already holds a run" in capsys.readouterr().err
    assert start(recipe, folder, "loop.steps=2", "run.resume=true", "algorithm.clip_high=0.3") == 2
    assert "algorithm.clip_high: the run began with 0.28" in capsys.readouterr().err


def test_a_run_goes_on_by_its_folder_alone(recipe, tmp_path, capsys):
    """The words that it ends with are enough: it takes the settings that it began with."""
    folder = tmp_path / "run"
    assert start(recipe, folder, "loop.steps=1", "optimizer.learning_rate=2e-3") == 0
    assert run.main(["run.resume=true", f"run.dir={folder}", "loop.steps=2"]) == 0
    assert [x["step"] for x in lines(folder / "metrics.jsonl") if x["kind"] == "train"] == [1, 2]
    assert yaml.safe_load((folder / "config.yaml").read_text())["batch"]["prompts"] == 4
    # Rows that are others now: what was trained on might be held out.
    data = json.loads((folder / "data.json").read_text())
    (folder / "data.json").write_text(json.dumps(data | {"held-out": 1}))
    capsys.readouterr()
    assert run.main(["run.resume=true", f"run.dir={folder}", "loop.steps=3"]) == 2
    assert "the held-out rows are others now" in capsys.readouterr().err


def test_grpo_with_its_reference_and_sft_run_from_the_command_line(recipe, tmp_path):
    grpo = tmp_path / "grpo"
    assert start(recipe, grpo, "algorithm.name=grpo", "loop.steps=2") == 0
    kl = [x["kl"] for x in lines(grpo / "metrics.jsonl") if x["kind"] == "train"]
    assert all(value is None or value >= 0 for value in kl)
    sft = tmp_path / "sft"
    more = ("algorithm.name=sft", "loop.steps=4", "loop.chunk=2", "sampling.max_new_tokens=64")
    assert start(recipe, sft, *more, "-batch.samples", "-rollout.overlong_buffer") == 0
    nll = [x["nll"] for x in lines(sft / "metrics.jsonl") if x["kind"] == "train"]
    assert len(nll) == 4


def test_json_prints_one_object_and_nothing_else(recipe, tmp_path, capsys):
    folder = tmp_path / "run"
    assert start(recipe, folder, "--json", "loop.steps=1") == 0
    out = capsys.readouterr().out
    assert json.loads(out)["steps"] == 1


def test_bad_input_ends_with_2_and_a_reason(capsys, tmp_path):
    missing = tmp_path / "none.yaml"
    cases = [
        (["batch.promts=3"], "batch.prompts"),
        (["--config", str(missing)], "none.yaml"),
        (["model.path=nowhere"], "nowhere"),
        (["--nonsense"], "--nonsense"),
        (["algorithm.name=sfd"], "did you mean sft"),
        (["batch.prompts=64", "task.train_size=32"], "32 training prompts"),
        (["score", "--task", "countdown", "--input", "x.jsonl", "--output", "y.jsonl"], "x.jsonl"),
    ]
    for given, named in cases:
        assert run.main(given) == 2
        assert named in capsys.readouterr().err


def test_settings_may_stand_before_the_flags(capsys):
    assert run.main(["loop.steps=7", "--print-config", "run.seed=3"]) == 0
    out = capsys.readouterr().out
    assert "steps: 7" in out and "seed: 3" in out and "eq. 8" in out


def test_help_lists_every_setting(capsys):
    assert run.main(["--help"]) == 0
    out = capsys.readouterr().out
    for setting in (
        "batch.micro",
        "optimizer.learning_rate",
        "algorithm.clip_high",
        "task.numbers",
    ):
        assert setting in out


def test_generate_writes_n_lines_a_prompt_in_order(tmp_path, capsys):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [
        {"id": 1, "prompt": "1+1="},
        {"id": 2, "messages": [{"role": "user", "content": "3 5 9 make 24"}]},
        {"id": 3, "prompt_ids": [5, 6, 7]},
    ]
    source.write_text("\n".join(map(json.dumps, prompts)) + "\n")
    given = ["generate", "--model", "nano", "--input", str(source), "--output", str(output)]
    assert run.main([*given, "--n", "2", "--json", "sampling.max_new_tokens=8"]) == 0
    assert json.loads(capsys.readouterr().out)["completions"] == 6
    found = lines(output)
    assert [line["id"] for line in found] == [1, 1, 2, 2, 3, 3]
    for line in found:
        assert len(line["token_ids"]) == len(line["logprobs"]) <= 8
        assert line["finish_reason"] in ("stop", "length")
        assert max(line["logprobs"]) <= 0
    assert found[0]["token_ids"] != found[1]["token_ids"]


def test_generate_names_the_line_that_is_wrong(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt_ids": [99999]}\n')
    given = ["generate", "--model", "nano", "--input", str(source)]
    assert run.main([*given, "--output", str(tmp_path / "out.jsonl")]) == 2
    assert f"{source}:2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["eval", "eval.problems=4"], "never reads eval.problems"),
        (["eval", "run.dir=a"], "never reads run.dir"),
        (["generate", "--input", "x", "--output", "y", "run.dir=a"], "never reads run.dir"),
        (["eval", "sampling.temperature=0", "eval.samples=4"], "eval.samples: expected 1"),
    ],
)
def test_what_a_command_would_not_read_is_refused(given, told, capsys):
    assert run.main(given) == 2
    assert told in capsys.readouterr().err


def test_eval_tells_pass_at_k_and_majority(capsys):
    given = ["eval", "--json", "eval.final_problems=8", "eval.samples=4"]
    assert run.main([*given, "task.heldout_size=8", "sampling.max_new_tokens=24"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["n"] == 8
    assert result["pass@1"] <= result["pass@2"] <= result["pass@4"]
    assert {"maj@4", "stderr", "truncated", "greedy"} <= result.keys()


def test_export_writes_a_checkpoint_of_the_run(recipe, tmp_path):
    folder, output = tmp_path / "run", tmp_path / "out"
    assert start(recipe, folder, "loop.steps=2", "checkpoint.every=1") == 0
    given = ["export", "--run", str(folder), "--output", str(output)]
    assert run.main([*given, "--step", "7"]) == 2
    assert run.main(given) == 0
    chex.assert_trees_all_equal(params_of(folder), load_params(output, read_config(output)))


def test_the_last_and_the_best_checkpoint_are_kept(recipe, tmp_path):
    folder = tmp_path / "run"
    more = ("loop.steps=4", "checkpoint.every=1", "checkpoint.keep=2", "eval.every=1")
    assert start(recipe, folder, *more, "eval.problems=8") == 0
    steps = sorted(int(path.name) for path in (folder / "checkpoints").iterdir())
    assert steps[-2:] == [3, 4] and len(steps) <= 3


def test_evaluation_says_what_a_command_never_reads(capsys):
    assert run.main(["eval", "optimizer.learning_rate=1"]) == 2
    assert "never reads optimizer" in capsys.readouterr().err
    assert run.main(["export", "--run", "x", "--output", "y", "model.path=z"]) == 2


def test_the_bundled_model_is_a_checkpoint_that_transformers_loads():
    """And encodes prompts by the very tokenizer that it was trained with."""
    reference = AutoModelForCausalLM.from_pretrained(NANO)
    tokenizer = AutoTokenizer.from_pretrained(NANO)
    text = "<|im_start|>user\nUse 3 5 9.<|im_end|>\n"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0]) == text
    with torch.no_grad():
        wanted = reference(ids).logits[0].numpy()
    shape = read_config(NANO)
    params = jax.tree.map(jnp.asarray, load_params(NANO, shape))
    tokens = jnp.asarray(ids.numpy())
    hidden = Qwen(shape).apply({"params": params}, tokens, jnp.arange(tokens.shape[1])[None])
    got = logits(shape, head_kernel(shape, params), hidden)[0]
    np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max())
