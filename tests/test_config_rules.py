"""What a configuration may not say: impossible values, contradictions, settings without effect."""

import pytest

from rlx.config import ConfigError, check_training, load, load_training, rows, updates


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_training(None, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    "override, limit",
    [
        ("algorithm.clip_low=3", "at least 0, below 1"),
        ("algorithm.clip_low=1", "below 1"),
        ("algorithm.clip_high=-0.1", "at least 0"),
        ("algorithm.ddof=2", "at most 1"),
        ("sampling.temperature=-1", "at least 0"),
        ("sampling.top_p=1.5", "at most 1"),
        ("batch.prompts=0", "at least 1"),
        ("loop.steps=0", "at least 1"),
        ("optimizer.b2=1", "below 1"),
        ("task.format_weight=2", "at most 1"),
        ("model.dtype=float16", "one of auto, float32, bfloat16"),
        ("model.path=", "not empty"),
        ("run.name=a/b", "matches"),
    ],
)
def test_an_impossible_value_is_refused_with_the_allowed_ones(override, limit):
    path = override.partition("=")[0]
    message = refusal(override)
    assert f"{path} (command line): expected" in message and limit in message


def test_a_group_of_one_is_told_what_it_lacks():
    """Not that 1 does not divide something."""
    message = refusal("batch.samples=1")
    assert "batch.samples: expected at least 2" in message and "divi" not in message


@pytest.mark.parametrize("name, value", [("top_k", "5"), ("top_p", "0.9"), ("min_p", "0.1")])
def test_training_samples_what_it_trains(name, value):
    """A filtered sample's log-probability is not the full softmax's."""
    assert "distribution" in refusal(f"sampling.{name}={value}")
    assert getattr(load(None, [f"sampling.{name}={value}"]).sampling, name) == float(value)


def test_training_is_not_greedy():
    assert "sampling.temperature" in refusal("sampling.temperature=0")
    assert load(None, ["sampling.temperature=0"]).sampling.temperature == 0


def test_rows_that_do_not_divide_are_refused_with_both_numbers():
    message = refusal("batch.prompts=3", "batch.samples=4", "batch.minibatches=5")
    assert "3 * 4 = 12" in message and "came 5" in message
    message = refusal("batch.prompts=3", "batch.samples=4", "batch.minibatches=2", "batch.micro=4")
    assert "rows, 6" in message and "came 4" in message
    load_training(None, ["batch.prompts=3", "batch.samples=4", "batch.micro=3"])


@pytest.mark.parametrize(
    "path, value, cause",
    [
        ("rollout.max_rounds", "8", "rollout.dynamic_sampling=true"),
        ("optimizer.final_fraction", "0.1", "optimizer.schedule=linear"),
        ("eval.problems", "8", "eval.every=5"),
    ],
)
def test_a_setting_without_its_cause_is_refused(path, value, cause):
    without = [f"{path}={value}"] + (["eval.every=0"] if path.startswith("eval") else [])
    assert f"{path}: expected unset" in refusal(*without)
    load_training(None, [f"{path}={value}", cause])


@pytest.mark.parametrize("setting", ["b1=0.5", "b2=0.5", "eps=1e-3", "weight_decay=0.1"])
def test_sgd_has_no_moments(setting):
    assert setting.partition("=")[0] in refusal("optimizer.name=sgd", f"optimizer.{setting}")


@pytest.mark.parametrize(
    "setting",
    [
        "rollout.overlong_filter=true",
        "rollout.old_logprobs=sampler",
        "batch.samples=4",
    ],
)
def test_an_algorithm_that_samples_nothing_ignores_no_sampling(setting):
    path = setting.partition("=")[0]
    assert f"{path}: expected unset" in refusal("algorithm.name=sft", setting)
    load_training(None, ["algorithm.name=sft", "batch.samples=1"])


def test_a_step_of_data_counts_its_rows():
    sft = load_training(None, ["algorithm.name=sft", "batch.prompts=12", "batch.micro=6"])
    assert rows(sft) == 12
    assert rows(load(None, ["batch.prompts=12"])) == 96


def test_warmup_ends_within_the_run():
    run = ["loop.steps=5", "batch.epochs=2", "batch.minibatches=4"]
    assert updates(load_training(None, [*run, "optimizer.warmup_steps=39"])) == 40
    message = refusal(*run, "optimizer.warmup_steps=40")
    assert "5 * 2 * 4" in message and "came 40" in message


def test_what_happens_between_chunks_happens_at_their_ends():
    message = refusal("loop.chunk=4", "loop.steps=9", "checkpoint.every=6", "eval.every=10")
    for path in ("loop.steps", "checkpoint.every", "eval.every"):
        assert f"{path}: expected a multiple of loop.chunk, 4" in message
    load_training(None, ["loop.chunk=4", "loop.steps=8", "checkpoint.every=0", "eval.every=0"])


def test_overlong_buffer_fits_the_completion():
    assert "overlong_buffer" in refusal("sampling.max_new_tokens=16", "rollout.overlong_buffer=17")
    load_training(None, ["sampling.max_new_tokens=16", "rollout.overlong_buffer=16"])


def test_the_updates_own_logprobs_serve_one_update_a_batch():
    assert "came current" in refusal("rollout.old_logprobs=current", "batch.minibatches=2")
    load_training(None, ["rollout.old_logprobs=current"])


def test_a_resume_names_its_folder():
    assert "run.dir" in refusal("run.resume=true")
    load_training(None, ["run.resume=true", "run.dir=runs/x"])


def test_check_training_speaks_as_load_training_does():
    overrides = ["batch.samples=1", "sampling.top_k=3"]
    with pytest.raises(ConfigError) as caught:
        check_training(load(None, overrides))
    assert str(caught.value) == refusal(*overrides)
