"""Several losses at once, and other advantages and reductions: the long form of `algorithm`."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.advantages import ADVANTAGES
from rlx.algorithms import ALGORITHMS, TERMS
from rlx.config import ConfigError, load, load_training, resolved_yaml
from rlx.config_text import formula
from rlx.derived import offline, rows, source, terms, unit
from rlx.ops import REDUCTIONS
from rlx.signatures import choices, hyper, short_names, term_names
from rlx.traced import loss_a_row, reads_values

TABLE = ALGORITHMS | TERMS

RECIPE = """\
algorithm:
  terms:
    - {name: gspo, weight: 1.0, clip_high: 5.0e-4}
    - name: dpo
      weight: 0.1
      beta: 0.2
    - {name: sft, weight: 5e-2}
    - {name: entropy, weight: 0.01}
    - {name: kl_k3, weight: 0.04}
"""


def yaml_file(folder: Path, text: str) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(text)
    return file


def listed(*names: str) -> str:
    return "algorithm.terms=[" + ", ".join(f"{{name: {name}}}" for name in names) + "]"


def refusal(*overrides: str, file: Path | None = None, read=load_training) -> str:
    with pytest.raises(ConfigError) as caught:
        read(file, overrides)
    return str(caught.value)


# --- what is read --------------------------------------------------------------------------------


def test_terms_are_read_in_their_order_with_weights_and_own_keys(tmp_path):
    chosen = terms(load_training(yaml_file(tmp_path, RECIPE), []))
    assert [(t.name, t.weight) for t in chosen] == [
        ("gspo", 1.0),
        ("dpo", 0.1),
        ("sft", 0.05),
        ("entropy", 0.01),
        ("kl_k3", 0.04),
    ]
    assert chosen[0].hyper == {
        "ddof": 0,
        "epsilon": 1e-4,
        "clip_low": 3e-4,  # left at its default, which the signature holds
        "clip_high": 5e-4,
    }
    assert chosen[1].hyper == {"beta": 0.2}
    assert chosen[1].row == ALGORITHMS["dpo"]
    for term in chosen:
        term.row.bind(**term.hyper)


def test_terms_are_read_from_the_command_line():
    config = load_training(None, ["algorithm.terms=[{name: grpo},{name: entropy,weight: 0.01}]"])
    assert [(t.name, t.weight) for t in terms(config)] == [("grpo", 1.0), ("entropy", 0.01)]


def test_the_short_form_is_one_term():
    config = load_training(None, ["algorithm.name=grpo", "algorithm.beta=0.1"])
    (term,) = terms(config)
    assert (term.name, term.weight, term.row) == ("grpo", 1.0, ALGORITHMS["grpo"])
    assert term.hyper == hyper(config.algorithm) and term.hyper["beta"] == 0.1
    assert terms(load(None, []))[0].name == "dapo"


def test_the_command_line_replaces_either_form_of_the_file(tmp_path):
    """The file's algorithm would else stand beside the terms that are to replace it."""
    short = yaml_file(tmp_path, "algorithm:\n  name: dapo\n  clip_high: 0.3\n")
    assert [t.name for t in terms(load(short, [listed("grpo", "entropy")]))] == ["grpo", "entropy"]
    long = yaml_file(tmp_path, RECIPE)
    assert [t.name for t in terms(load(long, ["algorithm.name=grpo"]))] == ["grpo"]


@pytest.mark.parametrize("named", ["  name: countdown\n", ""])
def test_another_task_takes_the_place_of_the_files(tmp_path, named):
    """The file's settings are of its own task, and would be unknown to the other."""
    file = yaml_file(tmp_path, f"task:\n{named}  numbers: [3]\n")
    other = load(file, ["task.name=chat", "task.file=talks.jsonl"]).task
    assert (other.name, other.file) == ("chat", "talks.jsonl")
    assert load(file, ["task.name=countdown"]).task.numbers == (3,)
    with pytest.raises(ConfigError, match=r"task\.numbers"):
        load(file, ["task.name=chat", "task.file=talks.jsonl", "task.numbers=[3]"])


@pytest.mark.parametrize(
    "chosen, expected",
    [
        (["algorithm.name=dapo"], ("rollouts", False, 1, 32)),
        (["algorithm.name=sft"], ("texts", True, 1, 4)),
        (["algorithm.name=dpo"], ("pairs", True, 2, 8)),
        (["algorithm.name=reward_model"], ("pairs", True, 2, 8)),
        ([listed("grpo", "dpo")], ("rollouts", False, 2, 32)),
        ([listed("dpo", "sft")], ("pairs", True, 2, 8)),
        ([listed("sft", "entropy")], ("texts", True, 1, 4)),
    ],
)
def test_the_first_term_says_what_there_is_to_learn_from(chosen, expected):
    """A pair is two rows: off-line, batch.prompts counts pairs."""
    config = load_training(None, [*chosen, "batch.prompts=4"])
    assert (source(config), offline(config), unit(config), rows(config)) == expected


# --- another advantage or reduction --------------------------------------------------------------


def test_another_advantage_brings_its_own_keys():
    plain = load(None, ["algorithm.name=grpo"])
    (term,) = terms(load(None, ["algorithm.name=grpo", "algorithm.advantage=whitened_returns"]))
    assert term.row.advantages is ADVANTAGES["whitened_returns"]
    assert "gamma" in term.hyper and "ddof" not in term.hyper
    assert term.row.loss is terms(plain)[0].row.loss
    message = refusal(
        "algorithm.name=grpo", "algorithm.advantage=whitened_returns", "algorithm.ddof=1"
    )
    assert "algorithm.ddof (command line): there is no such setting" in message


def test_another_reduction_takes_the_place_of_the_rows_own():
    (term,) = terms(load(None, ["algorithm.name=dr_grpo", "algorithm.reduction=token_mean"]))
    assert term.row.weights is REDUCTIONS["token_mean"]
    override = "algorithm.terms=[{name: grpo}, {name: entropy, reduction: sequence_mean}]"
    assert terms(load(None, [override]))[1].row.weights is REDUCTIONS["sequence_mean"]


def test_the_critic_comes_with_the_advantages_that_read_it():
    """By the row, GRPO with GAE would have values of zero, and PPO with z-scores an idle critic."""
    assert {name for name, f in ADVANTAGES.items() if reads_values(f)} == {"gae", "gae_whitened"}
    for row in (*ALGORITHMS.values(), *TERMS.values()):
        if row.advantages is not None and row is not TERMS["value"]:
            assert reads_values(row.advantages) == row.critic
    with_gae = load_training(None, ["algorithm.name=grpo", "algorithm.advantage=gae"])
    assert terms(with_gae)[0].row.critic
    without = load_training(None, ["algorithm.name=ppo", "algorithm.advantage=group_normalised"])
    assert not terms(without)[0].row.critic


@pytest.mark.parametrize("name", ["dpo", "ipo", "sft", "reward_model"])
def test_what_learns_from_data_has_one_advantage_and_reduction(name):
    for key, value in (("advantage", "gae"), ("reduction", "token_mean"), ("advantage", "")):
        message = refusal(f"algorithm.name={name}", f"algorithm.{key}={value}")
        assert f"algorithm.{key} (command line): expected unset, since {name}" in message


def test_a_term_without_advantages_takes_none():
    message = refusal("algorithm.terms=[{name: grpo}, {name: entropy, advantage: gae}]")
    assert "algorithm.terms[1].advantage (command line): expected unset, since entropy" in message


def test_an_unknown_advantage_is_refused_with_the_names_and_nothing_else():
    message = refusal("algorithm.advantage=gea", "algorithm.lam=0.9", "batch.samples=1")
    assert "algorithm.advantage (command line): expected one of" in message
    assert "did you mean gae?" in message
    # Nobody knows whose key `lam` would be, nor whether a group is compared.
    assert "lam" not in message and "batch.samples" not in message
    assert "reduction" in refusal("algorithm.reduction=[token_mean]")


# --- what is refused, and where it stands --------------------------------------------------------


def test_a_mistake_in_a_term_is_told_with_its_line(tmp_path):
    text = RECIPE.replace("beta: 0.2", "beta: 0").replace("clip_high: 5.0e-4", "clip_hihg: 5.0e-4")
    file = yaml_file(tmp_path, text)
    message = refusal(file=file)
    assert message.startswith("2 problems")
    assert f"algorithm.terms[1].beta ({file}:6): expected a number, above 0" in message
    assert f"algorithm.terms[0].clip_hihg ({file}:3): there is no such setting" in message
    assert "did you mean algorithm.terms[0].clip_high?" in message


@pytest.mark.parametrize("weight", ["0", "-1", ".inf", ".nan", "true", "'1'", "[1]", ""])
def test_a_weight_is_a_positive_finite_number(weight):
    message = refusal(f"algorithm.terms=[{{name: grpo, weight: {weight}}}]")
    assert "algorithm.terms[0].weight (command line): expected a number, above 0" in message


def test_a_wrong_number_hides_no_other_mistake():
    """All is told at once, of what the terms are; nothing of what they would be instead."""
    message = refusal("algorithm.terms=[{name: gspo, clip_high: x}]", "batch.samples=1")
    assert "algorithm.terms[0].clip_high" in message
    assert "batch.samples: expected at least 2, since gspo" in message


def test_a_term_that_lacks_a_key_leaves_no_algorithm(monkeypatch):
    """The rules would speak of the default one."""

    def loss(logprobs, old_logprobs, ref_logprobs, advantages, mask, *, depth: int):
        """Loss."""

    monkeypatch.setitem(ALGORITHMS, "toy", ALGORITHMS["dapo"]._replace(loss=loss))
    for override, path in (
        ("algorithm.name=toy", "algorithm"),
        (listed("toy"), "algorithm.terms[0]"),
    ):
        message = refusal(override, "batch.samples=1")
        assert f"{path}.depth: expected a whole number; came nothing" in message
        assert message.startswith("1 problem ")


def test_a_name_stands_once():
    message = refusal(listed("grpo", "entropy", "grpo"))
    assert "algorithm.terms[2].name (command line): expected each name once" in message
    assert "algorithm.terms[0]" in message


@pytest.mark.parametrize(
    "name, told",
    [
        ("gpro", "did you mean gspo or grpo?"),
        ("kl_k1", "reward.kl=k1"),
        ("value", "comes with an algorithm that has a critic"),
        ("[grpo]", "expected one of"),
        ("", "expected one of"),
    ],
)
def test_an_unknown_term_is_refused_with_the_reason(name, told):
    message = refusal(f"algorithm.terms=[{{name: grpo}}, {{name: {name}}}]")
    assert "algorithm.terms[1].name (command line)" in message and told in message
    assert message.startswith("1 problem ")


def test_a_term_is_no_algorithm_of_its_own():
    assert "stands beside an algorithm" in refusal("algorithm.name=entropy")
    assert "reward.kl=k1" in refusal("algorithm.name=kl_k1")
    assert "section critic" in refusal("algorithm.name=value")


@pytest.mark.parametrize("text", ["grpo", "[]", "{name: grpo}", "3", ""])
def test_terms_are_a_list(text):
    message = refusal(f"algorithm.terms={text}")
    assert "algorithm.terms (command line): expected a list of terms" in message
    assert "{name: entropy, weight: 0.01}" in message


@pytest.mark.parametrize("item", ["grpo", "{weight: 1}", "{nmae: grpo}", "[grpo]", "null"])
def test_a_term_is_a_name_and_its_settings(item):
    message = refusal(f"algorithm.terms=[{{name: grpo}}, {item}]")
    assert "algorithm.terms[1] (command line): expected settings, `name` among them" in message


def test_nothing_stands_beside_the_terms(tmp_path):
    """It would be ignored, or be a second algorithm."""
    file = yaml_file(tmp_path, "algorithm:\n  name: dapo\n  terms: [{name: grpo}]\n  beta: 0.1\n")
    message = refusal(file=file)
    assert f"algorithm.name ({file}:2): expected unset" in message
    assert f"algorithm.beta ({file}:4): expected inside a term" in message
    assert "algorithm.name" in refusal("algorithm.name=dapo", listed("grpo"))
    file = yaml_file(tmp_path, RECIPE)
    assert "expected inside a term" in refusal("algorithm.beta=0.1", file=file)
    assert "the whole list" in refusal("algorithm.terms[1].beta=0.1", file=file)


def test_a_key_of_another_term_is_refused_with_its_takers():
    message = refusal("algorithm.terms=[{name: dapo, beta: 0.1}, {name: entropy, weihgt: 1}]")
    assert (
        "algorithm.terms[0].beta (command line): there is no such setting of this term" in message
    )
    assert "grpo" in message and "did you mean algorithm.terms[1].weight" in message


def test_a_term_is_offered_its_own_keys_only():
    message = refusal("algorithm.terms=[{name: grpo}, {name: entropy, steps: 1}]")
    assert "expected one of algorithm.terms[1].name, algorithm.terms[1].weight" in message
    assert "loop" not in message


def test_equal_keys_in_a_term_are_refused():
    assert "there twice" in refusal("algorithm.terms=[{name: grpo, name: dapo}]")


def test_a_node_that_holds_itself_ends(tmp_path):
    """The walk over the lines of a file would else never come back."""
    for text in ("run: &a [*a]\n", "run: &a {'': *a}\n", "algorithm:\n  terms: &a [*a]\n"):
        assert "recipe.yaml" in refusal(file=yaml_file(tmp_path, text))


# --- what stands together ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ("grpo", "dpo", "sft", "entropy", "kl_k2", "kl_k3", "kl_r_k3"),
        ("ppo", "gspo"),
        ("gspo", "ppo"),
        ("dpo", "ipo", "sft", "entropy", "kl_k2", "kl_k3"),
        ("sft", "entropy"),
        ("reward_model",),
    ],
)
def test_these_stand_together(names):
    load_training(None, [listed(*names)])


@pytest.mark.parametrize(
    "names, place, told",
    [
        (("entropy", "grpo"), 0, "decides what text there is"),
        (("kl_k3",), 0, "stands beside one"),
        (("ppo", "grpo", "ppo_dual_clip"), 2, "ppo and ppo_dual_clip"),
        (("grpo", "reward_model"), 1, "stands alone"),
        (("dpo", "reward_model"), 1, "stands alone"),
        (("reward_model", "dpo"), 1, "stands alone"),
        (("reward_model", "entropy"), 1, "stands alone"),
        (("dpo", "grpo"), 1, "grpo from sampled text"),
        (("dpo", "kl_r_k3"), 1, "a ratio to the sampling policy"),
        (("sft", "dpo"), 1, "are no pairs"),
        (("sft", "dapo"), 1, "dapo from sampled text"),
        (("sft", "kl_k3"), 1, "no reference"),
    ],
)
def test_these_do_not_and_the_reason_is_told(names, place, told):
    message = refusal(listed(*names))
    assert f"algorithm.terms[{place}].name: expected" in message and told in message
    load(None, [listed(*names)])  # each is right by itself


def test_two_advantages_of_one_critic_are_one_too_many():
    override = "algorithm.terms=[{name: ppo}, {name: grpo, advantage: gae}]"
    assert "expected one term with a critic" in refusal(override)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_combination_reads_back(data, tmp_path_factory):
    """A default written out must not count as set, nor a weight lose a digit."""
    on_line = [name for name in ALGORITHMS if not ALGORITHMS[name].critic]
    first = data.draw(st.sampled_from([n for n in on_line if ALGORITHMS[n].source == "rollouts"]))
    beside = [*on_line, "entropy", "kl_k2", "kl_k3", "kl_r_k3"]
    others = data.draw(st.lists(st.sampled_from(beside), unique=True, max_size=4))
    chosen = []
    for name in [first, *(name for name in others if name != first)]:
        keys = {"name": name}
        weight = data.draw(st.none() | st.floats(1e-9, 1e9))
        keys |= {} if weight is None else {"weight": repr(weight)}
        for key, table in choices(name).items():
            if data.draw(st.booleans()):
                names = [n for n, f in table.items() if key == "reduction" or not reads_values(f)]
                names = [n for n in names if n != "row_mean" or loss_a_row(TABLE[name].loss)]
                keys[key] = data.draw(st.sampled_from(names))
        chosen.append("{" + ", ".join(f"{k}: {v}" for k, v in keys.items()) + "}")
    config = load_training(None, [f"algorithm.terms=[{', '.join(chosen)}]"])
    file = tmp_path_factory.mktemp("terms") / "run.yaml"
    file.write_text(resolved_yaml(config))
    again = load_training(file, [])
    assert again == config and resolved_yaml(again) == resolved_yaml(config)
    # The rows are compared by their functions: a table of another read would be another algorithm.
    assert terms(again) == terms(config)
    assert formula(again) == formula(config)


@pytest.mark.parametrize("name", short_names())
def test_either_form_of_one_algorithm_is_the_same_run(name):
    short, long = (load(None, [o]) for o in (f"algorithm.name={name}", listed(name)))
    assert terms(short) == terms(long)
    assert formula(short) == formula(long)


def test_every_name_is_a_row_and_the_critics_own_is_none():
    assert set(term_names()) == (ALGORITHMS.keys() | TERMS.keys()) - {"value"}
    assert set(short_names()) == ALGORITHMS.keys() | {"reward_model"}
