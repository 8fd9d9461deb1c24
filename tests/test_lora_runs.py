"""Runs with adapters, from the command line: what moves, what is written, what is refused."""

import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_run_kinds import GIVEN
from toy_run import lines, params_of, start

import run
from model.config import read_config
from model.load import export, load_params
from model.lora import TARGETS, beside, merged, scaled
from model.parameters import initialise
from model.peft_format import load_adapters
from rlx import assemble
from rlx.config import ConfigError, load, load_training
from rlx.policy import load_policy
from rlx.resolve import resolve
from rlx.stepper import online_stepper
from rlx.task_loading import load_task

LORA = ("-model.weights", "lora.rank=2")


@pytest.fixture(scope="module")
def base(tiny_nano, tmp_path_factory):
    """A checkpoint to begin from."""
    folder = tmp_path_factory.mktemp("base") / "model"
    shape = read_config(tiny_nano)
    params = jax.device_get(initialise(shape, jax.random.key(5)))
    export(folder, params, shape, source=tiny_nano)
    return folder


@pytest.fixture
def recipe(base, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(f"model:\n  path: {base}\n")
    return path


def adapters_of(folder):
    shape = read_config(folder / "hf")
    return load_adapters(folder / "adapter", shape)


def whole_of(base, found, dtype=jnp.float32):
    shape = read_config(base)
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), load_params(base, shape))
    return merged(beside(scaled(params, found.targets, found.alpha / found.rank), found.params))


def test_a_run_moves_adapters_and_leaves_the_base(recipe, base, tmp_path, capsys):
    """GRPO with its reference, stopped and resumed; the same from the very beginning."""
    common = (*LORA, "lora.alpha=5", "lora.targets=[q_proj, o_proj, down_proj]")
    common += ("algorithm.name=grpo", "algorithm.beta=0.1", "checkpoint.every=2")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert start(recipe, whole, "loop.steps=4", *common) == 0
    assert start(recipe, stopped, "loop.steps=2", *common) == 0
    assert start(recipe, stopped, "loop.steps=4", *common, "run.resume=true") == 0
    found = adapters_of(whole)
    assert (found.rank, found.alpha, found.targets) == (2, 5.0, ("q_proj", "o_proj", "down_proj"))
    chex.assert_trees_all_equal(found.params, adapters_of(stopped).params)
    chex.assert_trees_all_equal(params_of(whole), params_of(stopped))
    moved = [leaf["lora_b"] for leaf in found.params["layers"]["attention"].values()]
    assert all(np.abs(leaf).max() > 1e-4 for leaf in moved)
    # The exported model is base and adapters, and every other leaf is the base's to the bit.
    before, after = load_params(base, read_config(base)), params_of(whole)
    for target, module in TARGETS.items():
        same = np.array_equal(
            before["layers"][module][target].pop("kernel"),
            after["layers"][module][target].pop("kernel"),
        )
        assert same == (target not in found.targets)
    chex.assert_trees_all_equal(before, after)
    chex.assert_trees_all_close(params_of(whole), whole_of(base, found), atol=1e-6)
    # A checkpoint holds adapters, their moments and no base.
    size = sum(x.size for x in jax.tree.leaves(before))
    stored = sum(f.stat().st_size for f in (whole / "checkpoints" / "4" / "default").rglob("d/*"))
    assert 0 < stored < 4 * size
    first = next(line for line in lines(whole / "metrics.jsonl") if line["kind"] == "train")
    assert abs(first["kl"]) < 1e-3

    # Both are exported anew, and the adapters are read over their base.
    again, merged_again = tmp_path / "again", tmp_path / "merged"
    export_run = ["export", "--run", str(whole), "--output"]
    assert run.main([*export_run, str(again), "--adapter"]) == 0
    assert run.main([*export_run, str(merged_again)]) == 0
    chex.assert_trees_all_equal(load_adapters(again, read_config(base)).params, found.params)
    chex.assert_trees_all_equal(load_params(merged_again, read_config(base)), params_of(whole))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1 2 3"}) + "\n")
    texts = []
    for model, more in ((base, [f"lora.adapter={again}"]), (merged_again, [])):
        out = tmp_path / "out.jsonl"
        named = ["--model", str(model), "--input", str(prompts), "--output", str(out)]
        limit = ["sampling.max_new_tokens=8", "sampling.temperature=0"]
        assert run.main(["generate", *named, *limit, *more]) == 0
        texts.append(json.loads(out.read_text())["token_ids"])
    assert texts[0] == texts[1]

    # And a run goes on from them.
    on = tmp_path / "on"
    change = ("-model.weights", f"lora.adapter={again}", "loop.steps=1", "eval.final_problems=1")
    assert start(recipe, on, *change) == 0
    assert adapters_of(on).alpha == 5.0
    assert not np.array_equal(
        adapters_of(on).params["layers"]["mlp"]["down_proj"]["lora_b"],
        found.params["layers"]["mlp"]["down_proj"]["lora_b"],
    )


@pytest.mark.parametrize("packing", ["true", "false"])
def test_fused_and_staged_runs_are_one(recipe, tmp_path, packing):
    """XLA may round differently across a jit boundary, and no more."""
    found = {}
    for mode in ("fused", "staged"):
        folder = tmp_path / mode
        change = (*LORA, "loop.steps=2", f"loop.mode={mode}", f"batch.packing={packing}")
        assert start(recipe, folder, *change, "rollout.dynamic_sampling=true") == 0
        found[mode] = adapters_of(folder).params
    chex.assert_trees_all_close(found["fused"], found["staged"], atol=1e-6)


def test_the_reference_is_no_second_copy(recipe, base):
    """Base, reference and sampler's weights are the very same arrays, and one of each kernel is
    alive; a run that trains all of its parameters holds two."""
    shape = read_config(base)
    changes = ["task.highest=10", "task.train_size=64", "task.heldout_size=8"]
    changes += ["batch.prompts=4", "batch.samples=4", "algorithm.name=grpo", "algorithm.beta=0.1"]

    def alive(*more):
        config = resolve(load_training(recipe, [*changes, *more]))
        keys = assemble.random_keys(config)
        embedding = (shape.vocab_size, shape.hidden_size)
        before = sum(x.shape == embedding for x in jax.live_arrays())
        policy = load_policy(config, keys.weights)
        stepper = online_stepper(config, policy, load_task(config), keys, None)
        assert assemble.uses_reference(config)
        policy = policy._replace(params=None)
        held = sum(x.shape == embedding for x in jax.live_arrays()) - before
        return held, sum(x.nbytes for x in jax.tree.leaves(stepper.state.opt_state))

    copies, moments = alive("lora.rank=2")
    copies_of_all, moments_of_all = alive()
    assert (copies, copies_of_all) == (1, 4)  # with its two moments
    assert moments < moments_of_all / 5


KINDS = {
    "sft": ("task.name=chat", "algorithm.name=sft", "batch.packing=true"),
    "dpo": ("task.name=preference", "algorithm.name=dpo"),
    "reward_model": ("task.name=preference", "algorithm.name=reward_model"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_given_text_is_learnt_by_adapters(recipe, base, tmp_path, kind):
    folder = tmp_path / kind
    assert start(recipe, folder, *GIVEN, *LORA, "optimizer.learning_rate=1e-2", *KINDS[kind]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    before, after = summary["before"], summary["after"]
    measure = "nll" if kind == "sft" else "loss"
    assert after[measure] != before[measure]
    if kind == "dpo":
        # By the very program that the policy passes through, a reference ties with it.
        assert before["accuracy"] == 0.5 and before["margin"] == 0.0
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert settings["task_type"] == ("SEQ_CLS" if kind == "reward_model" else "CAUSAL_LM")


@pytest.mark.parametrize("critic", ["head", "model"])
def test_a_critic_is_trained_beside_adapters(recipe, base, tmp_path, critic):
    """A head with the adapters; a model of its own whole, and in float32, whatever the base is."""
    folder = tmp_path / critic
    change = ("algorithm.name=ppo", f"critic.kind={critic}", "loop.steps=2")
    assert start(recipe, folder, *LORA, *change, "lora.base_dtype=bfloat16") == 0
    train = [line for line in lines(folder / "metrics.jsonl") if line["kind"] == "train"]
    assert train[1]["value/mean"] != 0.0
    found = adapters_of(folder)
    assert np.abs(found.params["layers"]["mlp"]["up_proj"]["lora_b"]).max() > 1e-4
    rounded = jnp.asarray(load_params(base, read_config(base))["embed"]["embedding"], jnp.bfloat16)
    after = params_of(folder)["embed"]["embedding"]
    np.testing.assert_array_equal(after, np.asarray(rounded, np.float32))


@pytest.mark.parametrize(
    "override, told",
    [
        (("lora.rank=-1",), "lora.rank (command line): expected a whole number, at least 0"),
        (("lora.rank=4", "lora.targets=[q_proj, embed]"), "lora.targets (command line): expected"),
        (("lora.rank=4", "lora.targets=[]"), "lora.targets (command line): expected"),
        (
            ("lora.rank=4", "lora.targets=[q_proj, q_proj]"),
            "lora.targets: expected each projection",
        ),
        (("lora.alpha=8",), "lora.alpha: expected unset, since lora.rank is 0"),
        (("lora.base_dtype=bfloat16",), "lora.base_dtype: expected unset, since lora.rank is 0"),
        (("lora.adapter=x", "lora.rank=4"), "lora.rank: expected unset, since the adapter in"),
        (("lora.rank=4", "lora.dropout=0.1"), "there is no such setting"),
    ],
)
def test_settings_that_mean_nothing_are_refused(override, told):
    with pytest.raises(ConfigError) as caught:
        load_training(None, override)
    assert told in str(caught.value)


def test_bad_adapters_are_bad_input(recipe, tmp_path, capsys):
    assert start(recipe, tmp_path / "a", "-model.weights", f"lora.adapter={tmp_path / 'none'}") == 2
    assert "There is no checkpoint folder" in capsys.readouterr().err
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.yaml").write_text(recipe.read_text())
    arguments = ["export", "--run", str(plain), "--output", str(tmp_path / "x"), "--adapter"]
    assert run.main(arguments) == 2
    assert "trained no adapter" in capsys.readouterr().err


def test_the_recipe_is_right():
    path = Path(run.__file__).parent / "configs" / "tiny_lora.yaml"
    assert load(path, []).lora.rank
    load_training(path, [])
