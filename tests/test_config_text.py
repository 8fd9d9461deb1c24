"""What a configuration says of itself: resolved text that reads back, the help, the formula."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlx.algorithms import ADVANTAGES, ALGORITHMS, TERMS
from rlx.algorithms.critic import value
from rlx.algorithms.record import hyper_parameters
from rlx.config import load, load_training, resolved_yaml
from rlx.config_text import describe, formula
from rlx.derived import terms
from rlx.rewards import VERIFIERS
from rlx.settings import Config
from rlx.signatures import hyper, short_names


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
        ("algorithm.name=dpo",),
        ("algorithm.name=ppo", "critic.kind=model", "reward.kl=k1", "reward.kl_beta=0.1"),
        ("algorithm.name=grpo", "algorithm.advantage=gae", "algorithm.reduction=budget_mean"),
        ("algorithm.terms=[{name: gspo, clip_high: 5e-4}, {name: kl_k3, weight: 1e-5}]",),
        ("task.name=preference", "task.file=pairs.jsonl", "algorithm.name=dpo"),
        ("rollout.correction=sequence_mask", "rollout.probe=2", "rollout.replay=4"),
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
    for advantage in ADVANTAGES:
        for key in hyper(load(None, [f"algorithm.advantage={advantage}"]).algorithm):
            assert f"  algorithm.{key} " in text
    for verifier in VERIFIERS.values():
        for key in hyper_parameters(verifier):
            assert f"\n  {key} " in text
    assert "  algorithm.terms[i].weight " in text
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
        (["rollout.replay=4"], "recomputed"),
    ],
)
def test_the_formula_tells_the_old_logprobs_of_every_setting(overrides, told):
    """A resolved configuration is printed too, which says `current` where the recipe said auto."""
    assert f"old logprobs {told}" in formula(load(None, overrides))


@pytest.mark.parametrize("name", short_names())
def test_the_formula_says_where_the_kl_is(name):
    """DPO's beta is no weight of a KL term, and a row without a reference has no KL at all."""
    config = load(None, [f"algorithm.name={name}"])
    line = next(x for x in formula(config).splitlines() if x.startswith("KL  "))
    (term,) = terms(config)
    if not term.row.bind(**term.hyper).uses_reference():
        assert line.split()[1:] == ["none"]
    elif name == "grpo":
        assert "beta 0.04, where the formula has it" in line
    else:
        inside = "sigmoid" if name in ("dpo", "cdpo", "robust_dpo") else "pair's loss"
        assert f"inside the {inside}: beta 0.1" in line


def test_the_formula_has_every_term_with_its_weight():
    text = formula(
        load_training(
            None,
            [
                "algorithm.terms=[{name: gspo}, {name: dpo, weight: 0.1, beta: 0.3}, "
                "{name: entropy, weight: 0.02}, {name: kl_k3, weight: 0.04}]"
            ],
        )
    )
    assert text.startswith("loss         1 gspo + 0.1 dpo + 0.02 entropy + 0.04 kl_k3\n")
    for part in (
        "term         dpo, with the weight 0.1",
        "best_and_worst()",
        "dpo(beta = 0.3)",
        "inside the sigmoid: beta 0.3",
        "L = - H(pi)",
        "the term itself, with the weight 0.04",
    ):
        assert part in text


def test_the_formula_has_the_chosen_advantage_and_reduction():
    text = formula(
        load(
            None,
            [
                "algorithm.name=dr_grpo",
                "algorithm.advantage=whitened_returns",
                "algorithm.gamma=0.9",
                "algorithm.reduction=token_mean",
            ],
        )
    )
    assert "whitened_returns(gamma = 0.9)" in text and "token_mean()" in text
    assert "group_centred" not in text and "budget" not in text.partition("reduction")[2]


def test_the_formula_has_the_critic_and_what_the_reward_is_made_of():
    plain = formula(load_training(None, ["algorithm.name=ppo"]))
    default = hyper_parameters(value)["value_clip"].default
    assert "head on the policy's trunk; weight 0.1" in plain
    assert f"value(value_clip = {default})" in plain
    assert load(None, []).critic.value_clip == default
    assert "critic" not in formula(load_training(None, []))
    text = formula(
        load_training(
            None,
            [
                "algorithm.name=ppo",
                "critic.kind=model",
                "critic.path=folder",
                "critic.learning_rate=1e-5",
                "reward.source=model",
                "reward.model=judge",
                "reward.kl=k1",
                "reward.kl_beta=0.05",
                "reward.kl_target=6",
                "reward.running=true",
                "reward.clip=3",
                "reward.missing_stop_penalty=1.5",
            ],
        )
    )
    for part in (
        "a model of its own, from folder, learning rate 1e-05",
        "reward model judge",
        "KL           none in the loss",
        "in the reward: - beta k1 to the reference at each token, beta 0.05",
        "steered to 6 nats",
        "over their deviation",
        "within [-3, 3]",
        "1.5 for a truncated row",
    ):
        assert part in text and part not in plain


def test_the_formula_tells_corrections_and_which_groups_there_are():
    plain = formula(load_training(None, []))
    text = formula(
        load_training(
            None,
            [
                "rollout.correction=token_mask",
                "rollout.correction_cap=3",
                "rollout.probe=2",
                "rollout.retire_after=5",
                "rollout.replay=16",
                "rollout.replay_max_age=4",
            ],
        )
    )
    for part in (
        "token_mask(cap = 3.0, floor = 0.5)",
        "2 samples of a prompt first",
        "all right 5 visits",
        "up to 16 groups of the last 4 steps",
    ):
        assert part in text and part not in plain
    truncated = formula(load_training(None, ["rollout.correction=sequence_truncate"]))
    assert "sequence_truncate(cap = 2.0)" in truncated and "floor" not in truncated


def test_every_loss_has_a_formula():
    for name in (*ALGORITHMS, *TERMS):
        row = (ALGORITHMS | TERMS)[name]
        if name != "value" and row.source == "rollouts":
            assert " = " in formula(load(None, [f"algorithm.terms=[{{name: {name}}}]"]))
