"""What a configuration says of itself: resolved text that reads back, the help, the formula."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlx.algorithms import ALGORITHMS
from rlx.config import Config, describe, formula, load, load_training, resolved_yaml


def yaml_file(folder: Path, text: str) -> Path:
    file = folder / "recipe.yaml"
    file.write_bytes(text.encode())
    return file


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("algorithm.name=grpo", "algorithm.beta=0", "task.numbers=[3]"),
        ("algorithm.name=sft",),
        ("rollout.dynamic_sampling=true", "rollout.max_rounds=9"),
        ("run.name='1e-6'", "run.dir='012'", "log.tensorboard=false"),
    ],
)
def test_a_resolved_configuration_reads_back(overrides, tmp_path):
    """A default written out must not count as a setting that nobody reads."""
    config = load_training(None, overrides)
    again = load_training(yaml_file(tmp_path, resolved_yaml(config)), [])
    assert again == config
    assert resolved_yaml(again) == resolved_yaml(config)


@settings(max_examples=100, deadline=None)
@example(text="\x85")
@given(text=st.text() | st.sampled_from(["on", "1e-6", "1e5", "~", "null", "True", ".5", "0o7"]))
def test_any_text_reads_back(text, tmp_path_factory):
    """PyYAML writes the text 1e-6 without quotes, which then is a number here.

    And it writes U+0085 as it stands, which then is a space.
    """
    config = Config(run={"name": "x", "dir": text})
    file = yaml_file(tmp_path_factory.mktemp("text"), resolved_yaml(config))
    assert load(file, []) == config


@settings(max_examples=100, deadline=None)
@given(rate=st.floats(min_value=1e-300, max_value=10))
def test_any_rate_reads_back(rate, tmp_path_factory):
    config = Config(run={"name": "x"}, optimizer={"learning_rate": rate})
    file = yaml_file(tmp_path_factory.mktemp("rate"), resolved_yaml(config))
    assert load(file, []) == config


def test_help_lists_every_setting():
    text = describe()
    for name in ALGORITHMS:
        config = load(None, [f"algorithm.name={name}"])
        for section, settings_of in config:
            for key, _ in settings_of:
                assert f"  {section}.{key} " in text
    assert "default 1e-06" in text
    for paragraph in text.split("\n\n"):  # each setting's second line tells what it is
        told = [line.strip() for line in paragraph.splitlines()[2::2]]
        assert all(told), paragraph


def test_the_formula_has_the_values_that_run():
    text = formula(load(None, ["algorithm.name=grpo", "algorithm.clip_high=0.3"]))
    assert "group_normalised(ddof = 0, epsilon = 0.0001)" in text
    assert "clip_low = 0.2, clip_high = 0.3, beta = 0.04" in text
    assert "ratio within [0.8, 1.3]" in text and "beta 0.04" in text
    assert "sequence_mean" in text and "L = " in text
    assert "beta is 0" in formula(load(None, ["algorithm.name=grpo", "algorithm.beta=0"]))
    assert "KL           none" in formula(load(None, ["algorithm.name=dapo"]))


def test_the_formula_tells_the_options_that_change_the_objective():
    plain = formula(load(None, []))
    text = formula(
        load(
            None,
            [
                "rollout.dynamic_sampling=true",
                "sampling.max_new_tokens=100",
                "rollout.overlong_buffer=20",
                "rollout.overlong_filter=true",
                "batch.epochs=2",
            ],
        )
    )
    for part in ("drawn again", "clip((80 - length) / 20, -1, 0)", "truncated", "recomputed"):
        assert part in text and part not in plain
    assert "advantage    none" in formula(load(None, ["algorithm.name=sft"]))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], "the update's own"),
        (["batch.minibatches=2"], "recomputed"),
        (["rollout.old_logprobs=recompute"], "recomputed"),
        (["rollout.old_logprobs=current"], "the update's own"),
        (["rollout.old_logprobs=sampler"], "the sampler's own"),
    ],
)
def test_the_formula_tells_the_old_logprobs_of_every_setting(overrides, told):
    """A resolved configuration is printed too, which says `current` where the recipe said auto."""
    assert f"old logprobs {told}" in formula(load(None, overrides))
