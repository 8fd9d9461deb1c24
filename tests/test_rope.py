"""Rotary frequencies for long texts: those of transformers in all spellings, or refused."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from model.attention import rotary_phases
from model.config import CheckpointError, from_hugging_face, read_config, to_hugging_face
from model.heads import logits
from model.load import export, load_params
from model.parameters import head_kernel
from model.qwen import Qwen
from model.rope import Llama3, Yarn, frequencies
from model.sample import sample

QWEN = {"factor": 4.0, "original_max_position_embeddings": 32768}
YARN = {
    "as Qwen states it": QWEN,
    "attention factor": QWEN | {"attention_factor": 0.7},
    "betas": QWEN | {"beta_fast": 20, "beta_slow": 2.5},
    "both mscales": QWEN | {"mscale": 0.707, "mscale_all_dim": 1.3},
    "one mscale": QWEN | {"mscale": 0.707},
    "not truncated": QWEN | {"truncate": False},
    "factor 1": QWEN | {"factor": 1},
    "no original length": {"factor": 2.5},
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
LONG = [0, 1, 257, 4095, 32767, 32768, 65537, 131071]
"""MOD-07's positions among them: bf16 rounds 257 to 256."""


def ours(scaling, kind="yarn", field="rope_scaling", **fields):
    """With a base at which our powers and torch's are the same float32 numbers."""
    config = {"model_type": "qwen2", "rope_theta": 1e6, field: {"rope_type": kind} | scaling}
    return from_hugging_face(SIZES | config | fields)


def theirs(scaling, kind="yarn"):
    parameters = {"rope_type": kind, "rope_theta": 1e6} | scaling
    return Qwen2RotaryEmbedding(Qwen2Config(**SIZES, rope_parameters=parameters))


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [*(("yarn", scaling) for scaling in YARN.values()), ("llama3", LLAMA3), ("default", {})],
    ids=[*YARN, "llama3", "default"],
)
def test_phases_are_those_of_transformers_beyond_32k(kind, scaling):
    config, reference = ours(scaling, kind), theirs(scaling, kind)
    found, scale = frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    np.testing.assert_allclose(found, reference.inv_freq.numpy(), rtol=3e-7)
    assert scale == pytest.approx(reference.attention_scaling, rel=1e-7)
    positions = np.array([LONG], np.int32)
    cosine, sine = reference(torch.zeros(1), torch.tensor(positions))
    phases = rotary_phases(jnp.asarray(positions), 64, 1e6, config.rope_scaling)
    # One unit in the last place of a frequency would be 0.006 here.
    np.testing.assert_allclose(phases.cosine[:, :, 0], cosine, atol=1e-5)
    np.testing.assert_allclose(phases.sine[:, :, 0, 32:], sine[..., 32:], atol=1e-5)
    np.testing.assert_allclose(phases.sine[:, :, 0, :32], -sine[..., :32], atol=1e-5)


def test_a_scaling_changes_what_it_must_and_nothing_else():
    plain, _ = frequencies(64, 1e6, None)
    slowed, scale = frequencies(64, 1e6, ours(QWEN).rope_scaling)
    np.testing.assert_array_equal(slowed[:4], plain[:4])  # they turn more than 32 times
    np.testing.assert_allclose(slowed[-4:], plain[-4:] / 4, rtol=1e-6)
    assert scale == pytest.approx(0.1 * math.log(4) + 1)  # 1 where the factor is forgotten


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_all_spellings_are_read_alike(field, spelling):
    config = SIZES | {"model_type": "qwen2", "rope_theta": 1e6}
    read = from_hugging_face(config | {field: {spelling: "yarn"} | QWEN})
    assert read.rope_scaling == Yarn(4.0, 32768)
    # transformers 5 writes what was not said as null.
    nulls = {"attention_factor": None, "beta_fast": None, "truncate": None, "rope_theta": 1e6}
    assert from_hugging_face(config | {field: {spelling: "yarn"} | QWEN | nulls}) == read
    both = {name: {"rope_type": "yarn"} | QWEN for name in ("rope_scaling", "rope_parameters")}
    assert from_hugging_face(config | both) == read


def test_the_longest_text_is_that_of_the_stretched_model():
    """Qwen's own advice adds `rope_scaling` alone: 32768 positions would refuse what it is for."""
    assert ours(QWEN, max_position_embeddings=32768).max_positions == 131072
    assert ours(QWEN, max_position_embeddings=40960).max_positions == 131072
    assert ours(QWEN, max_position_embeddings=200000).max_positions == 200000
    unstated = ours({"factor": 2.5}, max_position_embeddings=1000)
    assert unstated.max_positions == 2500
    assert unstated.rope_scaling.original_max_position_embeddings == 1000
    assert ours(LLAMA3, "llama3", max_position_embeddings=131072).max_positions == 131072


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "linear", "factor": 2.0},
            "asks for .*'linear'.*only RoPE of type 'default'",
        ),
        ({"type": "dynamic", "factor": 2.0}, "asks for .*'dynamic'"),
        ({"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}, "asks for .*longrope"),
        ({"rope_type": "proportional"}, "asks for .*proportional"),
        ({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "asks for .*linear"),
        ({"rope_type": "yarn"}, "rope_scaling of type 'yarn' must state factor"),
        ({"rope_type": "yarn", "factor": None}, "must state factor"),
        ({"rope_type": "yarn", "factor": 0.5}, "factor must be a number of at least 1, and is 0.5"),
        ({"rope_type": "yarn", "factor": "4"}, "factor must be a number of at least 1"),
        ({"rope_type": "yarn", "factor": float("nan")}, "factor must be a number of at least 1"),
        ({"rope_type": "yarn"} | QWEN | {"original_max_position_embeddings": 3.5}, "whole number"),
        ({"rope_type": "yarn"} | QWEN | {"attention_factor": -1.0}, "attention_factor must be a p"),
        (
            {"rope_type": "yarn"} | QWEN | {"beta_fast": 1, "beta_slow": 2},
            "must be below beta_fast",
        ),
        ({"rope_type": "yarn"} | QWEN | {"truncate": "no"}, "truncate must be true or false"),
        ({"rope_type": "yarn"} | QWEN | {"partial_rotary_factor": 0.5}, "on whole heads"),
        ({"rope_type": "yarn"} | QWEN | {"finetuned": True}, "'yarn' there is no finetuned"),
        ({"rope_type": "llama3"} | QWEN, "'llama3' must state low_freq_factor"),
        ({"rope_type": "llama3"} | LLAMA3 | {"high_freq_factor": 1}, "must be below high_freq"),
    ],
)
def test_what_is_not_built_is_refused_by_name(scaling, message):
    config = SIZES | {"model_type": "llama", "rope_theta": 1e6, "rope_scaling": scaling}
    with pytest.raises(CheckpointError, match=message):
        from_hugging_face(config)


def test_two_scalings_that_differ_are_refused():
    other = {"rope_type": "yarn"} | QWEN | {"factor": 2.0}
    config = SIZES | {"model_type": "qwen2", "rope_scaling": {"rope_type": "yarn"} | QWEN}
    with pytest.raises(CheckpointError, match="scaling is stated twice and differs"):
        from_hugging_face(config | {"rope_parameters": other})


def test_a_checkpoint_that_is_stretched_by_hand():
    """What transformers 5 has saved holds `rope_parameters` already, without a scaling."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    config = SIZES | {"model_type": "qwen2", "rope_parameters": plain}
    stretched = from_hugging_face(config | {"rope_scaling": {"rope_type": "yarn"} | QWEN})
    assert stretched.rope_scaling == Yarn(4.0, 32768) and stretched.rope_theta == 1e4
    yarn = {"rope_type": "yarn", "rope_theta": 1e4} | QWEN
    with pytest.raises(CheckpointError, match="scaling is stated twice and differs"):
        from_hugging_face(config | {"rope_parameters": yarn, "rope_scaling": {"type": "default"}})


@pytest.mark.parametrize(
    "scaling",
    [Yarn(4.0, 32768), Yarn(2.0, 512, 0.7, 20.0, 2.0, truncate=False), Llama3(8.0, 8192, 1.0, 4.0)],
    ids=["yarn", "yarn, all fields", "llama3"],
)
def test_what_is_written_reads_back_here_and_in_transformers(scaling, tmp_path):
    config = dataclasses.replace(
        from_hugging_face(SIZES | {"model_type": "qwen2", "rope_theta": 1e6}),
        rope_scaling=scaling,
        max_positions=131072,
    )
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(config)))
    assert read_config(tmp_path) == config
    reference = AutoConfig.from_pretrained(tmp_path)
    embedding = Qwen2RotaryEmbedding(reference)
    found, scale = frequencies(64, 1e6, scaling)
    np.testing.assert_allclose(found, embedding.inv_freq.numpy(), rtol=3e-7)
    assert scale == pytest.approx(embedding.attention_scaling)
    assert reference.max_position_embeddings == 131072


@pytest.fixture(scope="module")
def stretched(tmp_path_factory):
    """A random model that transformers wrote, stretched by YaRN: its folder and itself."""
    torch.manual_seed(3)
    parameters = {"rope_type": "yarn", "rope_theta": 1e6} | QWEN
    config = AutoConfig.for_model(
        "qwen3", **SIZES, rope_parameters=parameters, max_position_embeddings=131072
    )
    reference = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + ("norm" in name))
    folder = tmp_path_factory.mktemp("stretched")
    reference.save_pretrained(folder)
    return folder, reference


def forward(config, params, tokens, positions):
    hidden = Qwen(config).apply({"params": params}, jnp.asarray(tokens), jnp.asarray(positions))
    return logits(config, head_kernel(config, params), hidden)


@pytest.mark.parametrize("first", [0, 32768, 100_000])
def test_logits_are_those_of_transformers(stretched, first):
    """Positions do not begin at 0 in a text whose beginning is cut off; distances are the same, so
    that a wrong frequency shows at the far end only."""
    folder, reference = stretched
    config = read_config(folder)
    params = jax.tree.map(jnp.asarray, load_params(folder, config))
    tokens = np.random.default_rng(0).integers(0, 67, (1, 24))
    # Gaps, so that some pairs of tokens are far apart.
    positions = np.sort(np.random.default_rng(1).integers(first, first + 30_000, (1, 24)))
    with torch.no_grad():
        expected = reference(
            torch.tensor(tokens),
            position_ids=torch.tensor(positions),
            attention_mask=torch.ones(1, 24, dtype=torch.long),
        ).logits.numpy()
    ours = forward(config, params, tokens, positions.astype(np.int32))
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    # Without the attention factor, and without any scaling, they are others.
    for scaling in (dataclasses.replace(config.rope_scaling, attention_factor=1.0), None):
        wrong = dataclasses.replace(config, rope_scaling=scaling)
        other = forward(wrong, params, tokens, positions.astype(np.int32))
        assert np.max(np.abs(other - expected)) > 1e-2


def test_an_export_is_the_same_model_there(stretched, tmp_path):
    folder, reference = stretched
    config = read_config(folder)
    export(tmp_path / "hf", load_params(folder, config), config, source=folder)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.tensor(np.random.default_rng(2).integers(0, 67, (2, 16)))
    with torch.no_grad():
        np.testing.assert_array_equal(again(tokens).logits, reference(tokens).logits)


def test_the_sampler_turns_as_the_trainer_does(stretched):
    folder, _ = stretched
    config = read_config(folder)
    params = jax.tree.map(jnp.asarray, load_params(folder, config))
    prompt = jnp.asarray(np.random.default_rng(4).integers(6, 67, (1, 8)), jnp.int32)
    positions = jnp.arange(8)[None]
    samples = sample(
        config,
        params,
        prompt,
        positions,
        jax.random.split(jax.random.key(0), (1, 1)),
        max_new_tokens=6,
        temperature=1.0,
        stop_ids=jnp.array([5]),
        pad_id=0,
    )
    length = int(jnp.sum(samples.mask))
    whole = jnp.concatenate([prompt, samples.tokens[:, :length]], 1)
    scores = forward(config, params, whole, jnp.arange(whole.shape[1])[None])
    logprobs = jax.nn.log_softmax(scores)[0, 7:-1]
    expected = jnp.take_along_axis(logprobs, samples.tokens[0, :length, None], 1)[:, 0]
    np.testing.assert_allclose(samples.logprobs[0, :length], expected, atol=1e-4)
