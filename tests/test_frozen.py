"""Models that never change: their type, their memory, and that the reference is the policy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_run
from toy import CONFIG, PAD, initial_params

import run
from model.errors import BadInput
from model.heads import completion_outputs
from model.product import activations
from model.qwen import Qwen
from rlx import frozen
from rlx.config import load
from rlx.frozen import HOST, freeze, freeze_reference, on_device

KL = ("algorithm.name=grpo", "algorithm.beta=0.1")


def settings(*changes):
    return load(None, ["algorithm.name=grpo", "algorithm.beta=0.1", *changes])


def bytes_of(params):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(("tied", "between"), [(True, jnp.float32), (False, jnp.bfloat16)])
def test_a_bfloat16_reference_is_the_policy_to_the_bit(tied, between, monkeypatch):
    """Else every KL begins above 0, and a pair whose two sides are equal does not tie. Activations
    are float32 on CPU, and on an accelerator of the kernels' type."""
    monkeypatch.setattr(frozen, "activations", lambda dtype: jnp.dtype(between))
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params = dict(initial_params())
    if not tied:
        noise = np.random.default_rng(3).normal(0, 0.2, (16, 16))
        params["lm_head"] = {"kernel": jnp.asarray(noise, jnp.float32)}
    reference = freeze_reference(settings("model.dtype=bfloat16"), params, jnp.bfloat16)
    assert reference["layers"]["mlp"]["up_proj"]["kernel"].dtype == jnp.bfloat16
    assert reference["embed"]["embedding"].dtype == between
    assert reference["norm"]["scale"].dtype == jnp.float32
    model = Qwen(config, jnp.bfloat16, activations=between)
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, 16, (3, 9)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(9), (3, 9))
    score = jax.jit(lambda params: completion_outputs(model, params, tokens, positions, 6))
    np.testing.assert_array_equal(score(reference).logprobs, score(params).logprobs)
    # Scales in bfloat16, as a plain cast would have them, are another model.
    rough = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert np.any(np.asarray(score(rough).logprobs) != np.asarray(score(params).logprobs))


def test_it_takes_half_the_memory():
    params = initial_params()
    half = freeze_reference(settings("model.dtype=bfloat16"), params, jnp.bfloat16)
    kept = sum(
        leaf.nbytes
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if path[-1].key not in ("kernel",)
    )
    # On CPU what is no kernel stays as wide as activations are.
    assert activations(jnp.bfloat16) == jnp.float32
    assert bytes_of(half) == kept + (bytes_of(params) - kept) // 2
    whole = settings("model.dtype=bfloat16", "model.frozen_dtype=float32")
    assert bytes_of(freeze_reference(whole, params, jnp.bfloat16)) == bytes_of(params)


def test_a_reference_coarser_than_the_policy_is_refused_and_a_reward_model_is_not():
    config = settings("model.dtype=float32", "model.frozen_dtype=bfloat16")
    with pytest.raises(BadInput, match=r"model.frozen_dtype: expected auto or float32.*policy as"):
        freeze_reference(config, initial_params(), jnp.float32)
    assert freeze(config, initial_params(), jnp.float32)["embed"]["embedding"].dtype == jnp.float32
    kernel = freeze(config, initial_params(), jnp.float32)["layers"]["mlp"]["up_proj"]["kernel"]
    assert kernel.dtype == jnp.bfloat16


def test_host_memory_is_left_for_the_device_inside_the_program_only():
    params = initial_params()
    hosted = freeze(settings("model.frozen_memory=host"), params, jnp.float32)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(hosted)}
    assert kinds == {HOST}
    spaces = []

    def score(params):
        spaces.extend(jax.typeof(leaf).memory_space for leaf in jax.tree.leaves(params))
        params = on_device(params)
        spaces.extend(jax.typeof(leaf).memory_space for leaf in jax.tree.leaves(params))
        tokens = jnp.full((2, 5), PAD + 2)
        positions = jnp.broadcast_to(jnp.arange(5), (2, 5))
        return completion_outputs(Qwen(CONFIG), params, tokens, positions, 3).logprobs

    found = jax.jit(score)(hosted)
    half = len(spaces) // 2
    assert set(spaces[:half]) == {jax.memory.Space.Host}
    assert set(spaces[half:]) == {jax.memory.Space.Device}
    np.testing.assert_array_equal(found, jax.jit(score)(params))
    # What is on the device already is not touched.
    leaves = jax.tree.leaves(jax.eval_shape(on_device, params))
    assert len(leaves) == len(jax.tree.leaves(params))


def test_a_device_without_host_memory_is_refused(monkeypatch):
    monkeypatch.setattr(frozen, "HOST", "a memory that no device has")
    with pytest.raises(BadInput, match=r"model.frozen_memory: expected device, since the cpu dev"):
        freeze(settings("model.frozen_memory=host"), initial_params(), jnp.float32)


@pytest.mark.parametrize("setting", ["model.frozen_dtype=float32", "model.frozen_memory=host"])
def test_a_run_that_freezes_nothing_refuses_the_settings(recipe, tmp_path, capsys, setting):
    assert toy_run.start(recipe, tmp_path / "run", "algorithm.name=dapo", setting) == 2
    assert "the run has neither a reference nor a reward model" in capsys.readouterr().err


def test_host_memory_needs_stages(recipe, tmp_path, capsys):
    changes = (*KL, "model.frozen_memory=host", "loop.mode=fused")
    assert toy_run.start(recipe, tmp_path / "run", *changes) == 2
    assert "model.frozen_memory: expected device, since in one program" in capsys.readouterr().err


def trained(folder):
    rows = toy_run.lines(folder / "metrics.jsonl")
    return [line for line in rows if line["kind"] == "train"]


def test_a_bfloat16_run_begins_at_no_divergence(recipe, tmp_path):
    """Through the command line, the reference in host memory: one update a batch, so that the first
    is made at the start. Two programs differ by rounding; another model's KL is above 1e-7."""
    folder = tmp_path / "run"
    changes = ("model.dtype=bfloat16", "batch.minibatches=1", "loop.steps=2")
    assert toy_run.start(recipe, folder, *KL, *changes, "model.frozen_memory=host") == 0
    first, second = trained(folder)
    assert first["kl"] < 1e-12 < second["kl"]


def test_preferences_begin_as_ties_against_a_host_reference(tmp_path, tiny_nano):
    folder = tmp_path / "run"
    code = run.main(
        [
            *("--config", "configs/tiny_dpo.yaml", f"run.dir={folder}", f"model.path={tiny_nano}"),
            *("model.weights=random", "model.dtype=bfloat16", "model.frozen_memory=host"),
            *("loop.steps=2", "optimizer.warmup_steps=0", "eval.final_problems=4"),
            *("batch.prompts=4", "batch.micro=8", "log.tensorboard=false"),
        ]
    )
    assert code == 0
    first, second = trained(folder)
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-7)
    assert second["loss"] != first["loss"]
