"""The speed benchmarks run at a tiny size, and what they share says what they claim."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import learner  # noqa: E402
import nano_learning  # noqa: E402
import peers  # noqa: E402
import timing  # noqa: E402
import workload  # noqa: E402

SMALLEST = (
    *("--hidden=32", "--layers=1", "--heads=2", "--kv-heads=1", "--inter=64", "--vocab=64"),
    *("--prompts=2", "--samples=2", "--prompt-len=8", "--new-tokens=8", "--micro-batch=2"),
    *("--reps=1", "--warmup=1"),
)
KEYS = {
    *("bench", "impl", "size", "dtype", "params_m", "prompts", "samples", "prompt_len"),
    *("new_tokens", "micro_batch", "median_s", "min_s", "max_s", "reps", "clean", "first_call_s"),
    *("own_cores_used", "other_cores_used", "peak_rss_timed_mb", "tokens_per_s", "versions"),
    "maxrss_process_mb",
}


def run(*command, **variables):
    """What a program prints on standard output, its JSON lines read."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=os.environ | {"PEER_QUIET_BUDGET_S": "0", "PEER_MODELS": "/none"} | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def program(name, *arguments):
    (line,) = run(sys.executable, f"benchmarks/{name}.py", *arguments)
    return line


def options(*arguments):
    return workload.settle(workload.parser("Any").parse_args([*SMALLEST, *arguments]))


def test_a_rollout_reports_its_speed_and_what_its_slots_did():
    line = program("rollout", *SMALLEST)
    assert line.keys() >= KEYS | {"slots", "useful_share"}
    assert (line["bench"], line["impl"], line["size"]) == ("rollout", "rlx", "h32-l1-n2-k1-i64-v64")
    assert line["useful_share"] == 1


def test_an_update_reports_its_losses():
    line = program("update", *SMALLEST, "--dtype=bfloat16", "--remat=block")
    assert line.keys() >= KEYS | {
        "losses",
        "remat",
        "param_dtype",
        "share_prompts",
        "padding_share",
    }
    # A random policy is almost uniform, so that its ratios are known.
    _, _, advantages, old = workload.update_arrays(options())
    ratios = np.exp(-np.log(64) - old)
    surrogates = [r * advantages[:, None] for r in (ratios, np.clip(ratios, 0.8, 1.2))]
    assert line["losses"][0] == pytest.approx(-np.minimum(*surrogates).mean(), abs=0.03)
    assert line["param_dtype"] == "float32"


def test_an_iteration_reports_its_phases():
    line = program("iteration", *SMALLEST)
    assert line.keys() >= KEYS | {"phases_s", "reward"}
    assert line["bench"] == "e2e"
    assert {"sample", "verify", "update"} <= line["phases_s"].keys()
    # Eight words w3 to w63 and seven spaces: 23 to 31 characters.
    assert 0.023 <= line["reward"] <= 0.031


def test_the_ceilings_are_measured():
    line = program("ceilings", "--n=64", "--copy-mib=1", "--reps=1")
    for name in ("fp32_gflops", "bf16_gflops", "bf16_fp32_gflops", "copy_gbs"):
        assert line[f"{name}_best"] >= line[f"{name}_median"] > 0


def test_memory_tells_what_chunks_of_the_head_save():
    line = program("memory", "--shape=nano", "--rows=4", "--columns=64")
    assert 0 < line["chunked_mib"] <= line["whole_mib"]


def test_scaling_writes_a_point_and_draws(tmp_path):
    output, figure = tmp_path / "points.jsonl", tmp_path / "scaling.svg"
    where = (f"--output={output}", f"--figure={figure}")
    line = program("scaling", "--axes", "rows", "--largest=8", "--layers=1", "--copy-mib=1", *where)
    (point,) = map(json.loads, output.read_text().splitlines())
    assert line["points"] == [point]
    assert (point["axis"], point["value"]) == ("rows", 8)
    assert point["update_compiled_gflops"] >= 0.9 * point["update_gflops"]
    assert figure.read_text().count("<svg") == 1


def test_the_gpu_script_runs_on_a_cpu():
    lines = run("bash", "benchmarks/gpu.sh", SIZE="nano", PYTHON=sys.executable)
    parts = {line["part"]: line for line in lines}
    assert list(parts) == ["decode", "update", "transformers", "step"]
    assert parts["decode"]["tokens_per_s"] > 0
    for how in ("whole_rows", "streams"):
        assert parts["update"][how]["share_of_matmul_rate"] > 0
    assert parts["update"]["attention"] == "plain"
    assert parts["step"]["sampled_tokens"] > 0
    assert "sample" in parts["step"]["phases_s"]


def test_long_tailed_lengths_have_the_stated_mean_and_share_at_the_limit():
    chosen = options(
        *("--prompts=64", "--samples=16", "--new-tokens=512", "--length-distribution=long-tailed")
    )
    lengths = workload.lengths(chosen)
    assert lengths.min() >= 1
    assert lengths.max() == 512
    assert lengths.mean() / 512 == pytest.approx(0.25, abs=0.005)
    assert np.mean(lengths == 512) == pytest.approx(0.05, abs=0.003)
    assert (lengths[:32] != np.sort(lengths)[:32]).any(), "rows come in the order of their length"


def test_the_arrays_are_the_peers():
    # As NumPy's generator of seeds 1 and 2 gives them to the peers' programs.
    chosen = options("--vocab=512", "--prompts=8", "--samples=8")
    ids = workload.prompt_ids(chosen)
    np.testing.assert_array_equal(
        ids, np.random.default_rng(1).integers(3, 512, size=(8, chosen.prompt_len))
    )
    prompts, completions, advantages, old = workload.update_arrays(chosen)
    rng = np.random.default_rng(2)
    np.testing.assert_array_equal(completions, rng.integers(3, 512, size=(64, 8)))
    np.testing.assert_array_equal(advantages, rng.standard_normal(64).astype(np.float32))
    np.testing.assert_array_equal(prompts[8:16], np.broadcast_to(ids[1], (8, 8)))
    assert old.mean() == pytest.approx(-np.log(512), abs=0.02)


@pytest.mark.parametrize("size", ["tiny", "small"])
def test_the_parameters_are_counted(size):
    chosen = workload.settle(workload.parser("Any").parse_args([f"--size={size}"]))
    assert round(workload.parameter_count(chosen) / 1e6) == {"tiny": 3, "small": 39}[size]


def test_a_noisy_repetition_is_left_out_where_enough_are_clean():
    rows = [(1.0, 2.0, 0.0), (9.0, 1.0, 0.9), (2.0, 2.0, 0.1), (3.0, 2.0, 0.0)]
    found = timing.summary(rows, first=20.0)
    assert (found["median_s"], found["reps"], found["reps_all"]) == (2.0, 3, 4)
    assert found["clean"]
    assert not timing.summary(rows[:2], first=20.0)["clean"]


def test_the_table_takes_medians_and_the_best_peer():
    def line(contest, label, seconds, megabytes):
        rates = {"median_s": seconds, "peak_rss_timed_mb": megabytes, "tokens_per_s": 100 / seconds}
        return {"contest": contest, "label": label, "clean": True, **rates}

    lines = [line("rollout", "rlx", s, 500) for s in (1.0, 2.0, 9.0)]
    lines += [line("rollout", "trl", 6.0, 1000), line("rollout", "tunix", 5.0, 2000)]
    lines += [line("update", "rlx", 3.0, 400), line("update", "trl", 3.0, 800)]
    lines += [line("iteration", "rlx", 5.5, 400)]
    text = "\n".join(peers.table(lines))
    assert "rollout: 2.50 times the speed of the best peer (tunix); peak memory 0.50" in text
    assert "update: 1.00 times the speed of the best peer (trl); peak memory 0.50" in text
    assert "iteration: 1.10 of our rollout and update together" in text


def test_a_peer_that_fails_is_told_and_left_out(tmp_path, capsys):
    entry = peers.Entry("rollout", "trl", "torch", ("nothing.py",))
    where = workload.argparse.Namespace(
        reps=1, size="tiny", torch_python=sys.executable, jax_python="", peers=tmp_path, timeout=60
    )
    assert peers.run(entry, where) is None
    assert "rollout trl: left out" in capsys.readouterr().err


def test_a_comparison_of_learning_needs_a_standard_error(monkeypatch, capsys):
    """Of one seed it would be NaN, which JSON lacks."""
    for seeds in (["0"], ["1", "1"]):
        monkeypatch.setattr(sys, "argv", ["nano_learning.py", "--seeds", *seeds])
        with pytest.raises(SystemExit):
            nano_learning.main()
        assert "expected two seeds or more" in capsys.readouterr().err


def test_a_comparison_of_learning_tells_both_times(monkeypatch, capsys):
    score = {"pass@1": 0.5, "n": 8, "greedy": {"pass@1": 0.25}}

    def run(config, *settings):
        # The control's last evaluation and its export come on top of its limit.
        limits = [s.partition("=")[2] for s in settings if s.startswith("loop.max_seconds=")]
        seconds = float(limits[0]) + 30 if limits else 500.0
        return {"before": score, "after": score, "steps": 1, "seconds": seconds}

    monkeypatch.setattr(nano_learning, "run", run)
    monkeypatch.setattr(sys, "argv", ["nano_learning.py", "--seeds", "0", "1"])
    nano_learning.main()
    line = json.loads(capsys.readouterr().out)
    assert line["seconds"] == {"mean": 500.0, "stderr": 0.0}
    assert line["control_seconds"] == {"mean": 530.0, "stderr": 0.0}


def test_a_learner_on_a_gpu_attends_as_a_run_does():
    """By plain products it would write out the scores of all pairs."""
    from model.device import Device, made_for

    given = options("--dtype=bfloat16")
    given.remat, given.share_prompts, given.packing = "none", 0, 0
    config = workload.model_config(given)
    assert learner.make_learner(given, config, on_policy=True).model.attention == "plain"
    with made_for(Device("cuda", (9, 0))):
        chosen = learner.make_learner(given, config, on_policy=True, unrolled=False)
    assert chosen.model.attention == "cudnn"
