"""`run.py data`: what the model will see, counted and shown; no weights, nothing compiled."""

import json
from pathlib import Path

import pytest
from toy_run import arguments

import run
from model.tokenizer import load_tokenizer
from rlx.compilation import Compilation
from rlx.config import load
from rlx.data import encode_prompts, worked_examples
from rlx.data_command import inspect
from rlx.policy import checkpoint_folder
from rlx.task_loading import load_task

PAIRS = Path(run.__file__).parent / "configs" / "data" / "countdown_pairs.jsonl"
SHARED = Path(run.__file__).parents[1] / "shared" / "data"
FEW = ("task.train_size=16", "task.heldout_size=8")


@pytest.fixture(scope="module")
def nano():
    return load_tokenizer(checkpoint_folder("nano"))


def shown(capsys, *given):
    """The object that the command prints; it must end well."""
    assert run.main(["data", "--json", *given]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_first_prompts_are_those_that_are_sampled_from(capsys, nano):
    """With the template's special tokens and the prefill: neither the messages nor their text."""
    result = shown(capsys, *FEW, "--show", "2", "task.language=brief")
    assert (result["task"], result["kind"]) == ("countdown", "prompts")
    first = result["first"][0]
    nums = " ".join(map(str, first["fields"]["nums"]))
    assert first["prompt"] == (
        "<|im_start|>system\nUse each number once.<|im_end|>\n<|im_start|>user\nWrite <think> and "
        f"<answer> for {nums} to make {first['fields']['target']}.<|im_end|>\n"
        "<|im_start|>assistant\n<think>"
    )
    assert first["tokens"]["prompt"] == len(nano.encode(first["prompt"]))
    assert len(result["first"]) == 2
    assert result["components"] == ["format", "correct"]


def test_tokens_are_counted_and_rows_beyond_the_limit_named(capsys, nano):
    given = (*FEW, "task.language=brief", "sampling.max_prompt_tokens=41")
    result = shown(capsys, *given, "--show", "16")
    lengths = sorted(row["tokens"]["prompt"] for row in result["first"])
    assert len(lengths) == 16 and lengths[0] < 41 < lengths[-1]
    tokens = result["train"]["tokens"]["prompt"]
    assert (tokens["min"], tokens["max"]) == (lengths[0], lengths[-1])
    assert tokens["median"] == (lengths[7] + lengths[8]) / 2
    assert tokens["over"] == sum(length > 41 for length in lengths)
    assert result["train"]["rows"] == 16 and result["heldout"]["rows"] == 8
    where = [i for i, row in enumerate(result["first"]) if row["tokens"]["prompt"] > 41]
    (note,) = [note for note in result["notes"] if "training rows" in note]
    assert note.startswith(f"{tokens['over']} of 16 training rows have a prompt of more than 41")
    assert f"(counted from 0: {', '.join(map(str, where[:5]))}" in note
    assert note.endswith("training refuses them.")
    skipped = shown(capsys, *given, "sampling.long_prompts=skip")
    assert any(note.endswith("training leaves them out.") for note in skipped["notes"])


def test_a_text_beyond_the_models_positions_is_told(capsys):
    result = shown(capsys, *FEW, "sampling.max_new_tokens=100000")
    assert any("100" in note and "positions; training refuses" in note for note in result["notes"])
    assert not shown(capsys, *FEW, "sampling.max_new_tokens=16")["notes"]


def test_pairs_are_shown_with_both_answers_and_their_ends(capsys, nano):
    given = (f"task.file={PAIRS}", "task.name=preference", "algorithm.name=dpo", "--config")
    result = shown(capsys, *given, str(PAIRS.parents[1] / "tiny_dpo.yaml"), *FEW)
    assert (result["kind"], result["train"]["rows"]) == ("pairs", 16)
    assert list(result["train"]["tokens"]) == ["prompt", "chosen", "rejected"]
    first = result["first"][0]
    for side in ("chosen", "rejected"):
        assert first[side].endswith("</answer><|im_end|>")
        assert first["tokens"][side] == len(nano.encode(first[side]))
    assert first["chosen"] != first["rejected"]


def test_chats_are_shown_whole_with_what_is_learnt(capsys, recipe):
    given = (f"task.file={PAIRS}", "task.name=chat", "algorithm.name=sft", *FEW)
    result = shown(capsys, "--config", str(recipe), *given, "sampling.max_prompt_tokens=20")
    assert (result["kind"], list(result["train"]["tokens"])) == ("chats", ["text"])
    first = result["first"][0]
    (learnt,) = first["learnt"]
    # The row's prefill is a part of its prompt.
    assert first["text"].endswith("<|im_start|>assistant\n<think>" + learnt)
    assert learnt.endswith("<|im_end|>")
    assert result["limits"] == {"text": 20 + 1024}


def test_worked_examples_are_those_that_training_draws(recipe):
    settings = [*FEW, "task.language=brief", "algorithm.name=sft", "task.demonstrations=2"]
    result = inspect(load(recipe, settings), 32)
    assert result["kind"] == "worked examples" and result["train"]["rows"] == 32
    again = inspect(load(recipe, settings), 32)
    assert again == result
    assert inspect(load(recipe, [*settings, "run.seed=1"]), 32)["first"] != result["first"]
    assert result["first"][0]["completion"].endswith("</answer><|im_end|>")


def test_worked_examples_are_those_of_training_where_long_prompts_are_left_out(recipe, nano):
    """For a row that it leaves out, training draws nothing."""
    few = [*FEW, "task.language=brief", "algorithm.name=sft", "task.numbers=[3,4]"]
    few += ["task.demonstrations=2", "sampling.max_new_tokens=128", "sampling.long_prompts=skip"]
    rows = load_task(load(recipe, few)).train
    limit = sorted(len(nano.encode_prompt(row["prompt"])) for row in rows)[len(rows) // 2]
    config = load(recipe, [*few, f"sampling.max_prompt_tokens={limit}"])
    task = load_task(config)
    kept, ids, _ = encode_prompts(task.train, nano, limit, "row", long_prompts="skip")
    assert 0 < len(kept) < len(rows)
    batch = worked_examples(task._replace(train=kept), ids, nano, config.run.seed, 128)
    completions = zip(batch.tokens[:, -batch.mask.shape[1] :], batch.mask, strict=True)
    trained = [nano.decode(tokens[mask].tolist()) for tokens, mask in completions]
    shown = inspect(config, 2 * len(rows))["first"]
    asked = {nano.decode(prompt) for prompt in ids}
    assert [text["completion"] for text in shown if text["prompt"] in asked] == trained


def test_no_weights_are_read_and_nothing_is_compiled(recipe):
    """The folder of `recipe` holds no weights at all."""
    assert not list(recipe.parent.rglob("*.safetensors"))
    with Compilation() as compilation:
        inspect(load(recipe, list(FEW)), 1)
    assert compilation.programs == 0


def test_rows_left_out_are_told_and_a_refused_one_ends_the_command(capsys, recipe, tmp_path):
    file = tmp_path / "rows.jsonl"
    ask = [{"role": "user", "content": "1"}]
    rows = [{"prompt": ask, "chosen": str(i), "rejected": "3"} for i in range(6)]
    rows += [{"prompt": [ask[0] | {"content": "2"}], "chosen": "4", "rejected": "5"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    given = ["--config", str(recipe), "task.name=preference", "algorithm.name=dpo"]
    given += [f"task.file={file}", "task.heldout_size=1"]
    result = shown(capsys, *given)
    assert result["notes"] == ["1 of 7 pairs were left out: chosen and rejected are equal."]
    assert result["train"]["rows"] == 5
    file.write_text(file.read_text() + '\n{"chosen": "1"}\n')
    assert run.main(["data", *given]) == 2
    assert f"{file}:8: expected `chosen` and `rejected`" in capsys.readouterr().err


def test_settings_that_the_command_never_reads_are_refused(capsys):
    for setting in ("optimizer.learning_rate=1", "sampling.temperature=0", "model.dtype=float32"):
        assert run.main(["data", setting]) == 2
        assert "never reads" in capsys.readouterr().err
    assert run.main(["data", "--show", "-1"]) == 2
    given = ["generate", "--input", "x", "--output", "y", "sampling.long_prompts=skip"]
    assert run.main(given) == 2
    assert "never reads sampling.long_prompts" in capsys.readouterr().err


def test_what_the_algorithm_cannot_learn_from_is_refused(capsys, recipe):
    given = ["data", "--config", str(recipe), *FEW, "algorithm.name=dpo"]
    assert run.main(given) == 2
    assert "countdown has no preference pairs" in capsys.readouterr().err


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data are not there")
def test_public_pairs_by_a_tokenizer_alone(capsys, recipe):
    """Qwen3's template opens no think block for a prompt, and writes one before an answer."""
    given = ["--config", str(recipe), f"model.path={SHARED / 'qwen3_tokenizer'}"]
    given += ["task.name=preference", f"task.file={SHARED / 'preference' / 'dpo_en_demo.json'}"]
    result = shown(capsys, *given, "algorithm.name=dpo", "sampling.max_prompt_tokens=64")
    assert result["train"]["rows"] + result["heldout"]["rows"] == 300
    first = result["first"][0]
    assert first["prompt"].endswith("<|im_start|>assistant\n")
    assert first["chosen"].startswith("<think>\n\n</think>\n\n")
    assert result["train"]["tokens"]["prompt"]["over"] > 0
    assert any("training leaves their pairs out" in note for note in result["notes"])


def test_a_person_is_shown_the_same(capsys):
    assert run.main(["data", *FEW, "task.language=brief", "--show", "1"]) == 0
    out = capsys.readouterr().out
    assert "<|im_start|>assistant\n<think>\n" in out
    assert "train prompt" in out and "components of a score: format, correct" in out
    assert "row 1" in out and "row 2" not in out


def test_a_run_tells_what_it_left_out(recipe, tmp_path, capsys):
    changes = ("sampling.long_prompts=skip", "sampling.max_prompt_tokens=41", "loop.steps=1")
    sizes = ("task.heldout_size=40", "eval.final_problems=4")
    assert run.main(arguments(recipe, tmp_path / "run", *changes, *sizes)) == 0
    out = capsys.readouterr().out
    assert "of 64 training rows left out: prompts of more than 41 tokens" in out
    assert "held-out rows left out: prompts of more than 41 tokens" in out
