"""The typed configuration: what it reads, what it refuses, and that it says so in full.

Contradictions: test_config_rules.py. The resolved text, help and formula: test_config_text.py.
"""

from pathlib import Path

import pytest

from rlx.algorithms import ALGORITHMS, Algorithm
from rlx.config import ConfigError, load, load_training
from rlx.config_text import describe, formula
from rlx.settings import Config
from rlx.signatures import FILLED, hyper
from rlx.tasks import TASKS


def refusal(*overrides: str, read=load_training, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read(file, overrides)
    assert isinstance(caught.value, ValueError)  # what the command line turns into exit code 2
    return str(caught.value)


def yaml_file(folder: Path, text: str) -> Path:
    file = folder / "recipe.yaml"
    file.write_bytes(text.encode())
    return file


def test_the_defaults_are_a_training_run():
    config = load_training(None, [])
    assert config == load(None, [])
    assert config.algorithm.name == "dapo"
    assert config.optimizer.learning_rate == 1e-6
    assert config.run.name == "run"
    assert config == Config(run={"name": "run"})


# --- numbers, words and truth ------------------------------------------------------------------


@pytest.mark.parametrize("text, value", [("1e-6", 1e-6), ("1.0e-6", 1e-6), ("1", 1.0), (".5", 0.5)])
def test_a_number_is_read_as_one(text, value, tmp_path):
    """YAML 1.1 reads 1e-6 as text."""
    file = yaml_file(tmp_path, f"optimizer:\n  learning_rate: {text}\n")
    for config in (load(file, []), load(None, [f"optimizer.learning_rate={text}"])):
        assert config.optimizer.learning_rate == value
        assert type(config.optimizer.learning_rate) is float


@pytest.mark.parametrize("text", ["012", "1:30", "0x10", "1_000", "1.5", "1e1", "true", "no", ""])
def test_an_integer_is_written_in_one_way(text):
    """YAML 1.1 reads 012 as 10, 1:30 as 90, 0x10 as 16 and 1_000 as 1000."""
    assert "run.seed" in refusal(f"run.seed={text}")


@pytest.mark.parametrize("text", ["'1e-6'", "1e5", "nan", ".nan", ".inf", "true", "-1e-6", "0"])
def test_a_rate_is_a_positive_finite_number(text):
    assert "optimizer.learning_rate" in refusal(f"optimizer.learning_rate={text}")


@pytest.mark.parametrize("text", ["False", "false", "FALSE", "'False'"])
def test_false_is_false(text):
    """bool('False') is True."""
    assert load(None, [f"log.tensorboard={text}"]).log.tensorboard is False


@pytest.mark.parametrize("text", ["no", "off", "on", "yes", "0", "1", "junk", ""])
def test_only_true_and_false_are_booleans(text):
    message = refusal(f"run.resume={text}")
    assert "run.resume (command line): expected true or false" in message


@pytest.mark.parametrize("text", ["on", "no", "012", "1:30", "2024-01-01", "a=b", "/tmp/x"])
def test_text_stays_as_it_was_written(text, tmp_path):
    """YAML 1.1 makes `on` true and `2024-01-01` a date."""
    assert load(None, [f"run.dir={text}"]).run.dir == text
    assert load(yaml_file(tmp_path, f"run:\n  dir: {text}\n"), []).run.dir == text


@pytest.mark.parametrize("text", ["end with #### and the number", "a\nb\n\n# c", "So ", "try #3"])
def test_text_on_the_command_line_is_taken_whole(text):
    """YAML would end it before the comment, fold its lines and drop the blank."""
    assert load(None, [f"run.dir={text}"]).run.dir == text
    assert load(None, [f"run.dir='{text}'"]).run.dir == load(None, [f'run.dir="{text}"']).run.dir


def test_text_that_looks_like_a_number_wants_quotes():
    assert load(None, ["run.name='42'"]).run.name == "42"
    assert "quotes" in refusal("run.name=42")


def test_lists_are_read():
    assert load(None, ["task.numbers=[3]"]).task.numbers == (3,)
    assert "task.numbers (command line)" in refusal("task.numbers=[3, x]")
    assert "task.numbers" in refusal("task.numbers=3")


# --- files and overrides ------------------------------------------------------------------------


def test_an_override_decides_over_the_file(tmp_path):
    file = yaml_file(tmp_path, "loop:\n  steps: 7\nbatch:\n  prompts: 4\n")
    config = load(file, ["loop.steps=9", "run.name="])
    assert (config.loop.steps, config.batch.prompts) == (9, 4)
    assert config.run.name == "recipe"


def test_the_order_of_overrides_has_no_meaning():
    overrides = ["algorithm.beta=0.1", "loop.steps=3", "algorithm.name=grpo"]
    assert load(None, overrides) == load(None, overrides[::-1])
    assert "twice" in refusal("loop.steps=3", "loop.steps=4")


def test_equal_keys_in_a_file_are_refused(tmp_path):
    """PyYAML keeps the last of them without a word."""
    file = yaml_file(tmp_path, "loop:\n  steps: 3\n  steps: 4\n")
    message = refusal(file=file)
    assert "`steps` is there twice" in message and "line 3" in message
    assert "`loop`" in refusal(file=yaml_file(tmp_path, "loop: {steps: 3}\nloop: {chunk: 1}\n"))


@pytest.mark.parametrize(
    "text",
    ["- 1", "steps", "a: [", "a: b: c", "!!python/object:os.system x", "\x00", "a: 1\n---\n"],
)
def test_what_is_no_mapping_in_yaml_is_refused(text, tmp_path):
    assert "recipe.yaml" in refusal(file=yaml_file(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path):
    message = refusal("rollout.max_rounds=9", file=tmp_path / "gone.yaml")
    assert "gone.yaml" in message
    assert "max_rounds" not in message  # the file may have set dynamic_sampling
    assert str(tmp_path) in refusal(file=tmp_path)


def test_an_empty_section_or_file_sets_nothing(tmp_path):
    for text in ("", "# nothing\n", "loop:\n", "loop: {}\n"):
        assert load(yaml_file(tmp_path, text), []).loop.steps == 200


def test_an_override_without_a_value_is_refused_with_an_example():
    message = refusal("loop.steps")
    assert "`loop.steps`" in message and "optimizer.learning_rate=1e-6" in message
    assert "loop.steps" in refusal("loop=5")


# --- unknown keys ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "override, meant",
    [
        ("optimizer.lr=1e-6", "optimizer.learning_rate"),
        ("lr=1e-6", "optimizer.learning_rate"),
        ("learning_rate=1e-6", "optimizer.learning_rate"),
        ("optimiser.learning_rate=1e-6", "optimizer.learning_rate"),
        ("optimizer.lerning_rate=1e-6", "optimizer.learning_rate"),
        ("sampling.max_tokens=5", "sampling.max_new_tokens"),
        ("sampling.temp=1", "sampling.temperature"),
        ("algorithm.clip_lo=0.2", "algorithm.clip_low"),
        ("seed=1", "run.seed"),
        ("steps=1", "loop.steps"),
        ("batch.num_samples=4", "batch.samples"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(override, meant):
    path = override.partition("=")[0]
    message = refusal(override)
    assert f"{path} (command line): there is no such setting; did you mean {meant}" in message


def test_an_unknown_key_in_a_file_names_the_file(tmp_path):
    file = yaml_file(tmp_path, "optimizer:\n  zzzz: 1e-6\n")
    message = refusal(file=file)
    assert f"optimizer.zzzz ({file}:2)" in message and "optimizer.b1" in message
    assert "expected the section" in refusal(file=yaml_file(tmp_path, "loop.steps: 3\n"))


def test_a_key_of_another_algorithm_is_refused():
    message = refusal("algorithm.name=dapo", "algorithm.beta=0.1")
    assert "algorithm.beta" in message and "grpo" in message


def test_an_unknown_row_is_refused_with_the_names():
    message = refusal("algorithm.name=gpro", "algorithm.beta=0.1", "task.name=countdwn")
    assert "did you mean gspo or grpo?" in message and "did you mean countdown?" in message
    assert "algorithm.beta" not in message  # nobody knows whose key it would be
    assert "algorithm.name" in refusal("algorithm.name=[grpo]")


def test_all_problems_are_told_at_once():
    message = refusal(
        "lr=1e-6",
        "sampling.top_p=1.5",
        "batch.micro=5",
        "rollout.max_rounds=8",
        "loop.steps",
        "eval.every=7",
        "loop.chunk=2",
    )
    assert message.startswith("6 problems")
    for part in ("lr ", "top_p", "batch.micro", "max_rounds", "key.path=value", "eval.every"):
        assert part in message
    # loop.steps is not set by a broken override, and 200 is a multiple of 2: nothing on it
    assert "checkpoint.every" not in message


def test_a_rule_is_silent_where_its_setting_is_already_refused():
    message = refusal("batch.prompts=x", "batch.minibatches=7")
    assert message.startswith("1 problem ") and "batch.prompts" in message


# --- keys that come from signatures ------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_has_the_keys_and_defaults_of_its_functions(name):
    values = hyper(load(None, [f"algorithm.name={name}"]).algorithm)
    expected = {k: p.default for k, p in ALGORITHMS[name].hyper_parameters().items()}
    assert values == {k: v for k, v in expected.items() if k not in FILLED}


def test_a_new_row_brings_its_keys(monkeypatch):
    """A default that is written a second time would be the wrong one."""

    def estimate(rollout, *, gain: float = 2.5):
        """Scaled."""

    def loss(logprobs, *, depth: int = 3, clip_low: float = 0.1):
        """Loss."""

    def reduction(mask, *, budget: int | None = None):
        """Budget."""

    def load_rows(*, seed: int, file: str, size: int = 3):
        """`size` is how many rows there are."""

    monkeypatch.setitem(ALGORITHMS, "toy", Algorithm(estimate, loss, reduction))
    monkeypatch.setitem(TASKS, "toys", load_rows)
    config = load(
        None, ["algorithm.name=toy", "algorithm.depth=4", "task.name=toys", "task.file=f"]
    )
    assert hyper(config.algorithm) == {"gain": 2.5, "depth": 4, "clip_low": 0.1}
    assert hyper(config.algorithm, loss) == {"depth": 4, "clip_low": 0.1}
    assert hyper(config.task) == {"file": "f", "size": 3}
    assert "algorithm.depth" in refusal("algorithm.name=toy", "algorithm.depth=4.5")
    assert "algorithm.clip_low" in refusal("algorithm.name=toy", "algorithm.clip_low=3")
    assert "task.file: expected text; came nothing" in refusal("task.name=toys")
    assert "algorithm.budget" in refusal("algorithm.name=toy", "algorithm.budget=3")
    assert "budget = 1024" in formula(config)
    assert "`size` is how many rows there are" in describe()


def test_two_defaults_for_one_name_are_refused(monkeypatch):
    def estimate(rollout, *, epsilon: float = 1e-4): ...

    def loss(logprobs, *, epsilon: float = 1e-5): ...

    monkeypatch.setitem(ALGORITHMS, "toy", Algorithm(estimate, loss, lambda mask: mask))
    with pytest.raises(TypeError, match="epsilon"):
        load(None, ["algorithm.name=toy"])
