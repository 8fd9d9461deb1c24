"""The forward pass: what transformers computes, for every family, with every field in use."""

import os
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from model.attention import rotary_phases
from model.config import read_config
from model.heads import logits
from model.load import export, load_params
from model.parameters import head_kernel, initialise
from model.qwen import Qwen
from model.sample import sample
from model.tokenizer import load_tokenizer

MODELS = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-biased": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama": ("llama", {}),
    "llama-tied-biased": ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
}


def forward(config, **fields):
    """(params, tokens, positions) -> logits, compiled."""

    @jax.jit
    def run(params, tokens, positions):
        hidden = Qwen(config, **fields).apply({"params": params}, tokens, positions)
        return logits(config, head_kernel(config, params), hidden)

    return run


def reference_logits(reference, tokens, positions):
    with torch.no_grad():
        out = reference(
            torch.tensor(np.asarray(tokens)),
            attention_mask=torch.tensor(np.asarray(positions) >= 0).long(),
            position_ids=torch.tensor(np.asarray(positions)).clamp(min=0),
        )
    return out.logits.float().numpy()


def relative_gap(found, wanted, real):
    """The largest difference on real tokens, as a share of the largest logit."""
    found, wanted = np.asarray(found)[real], wanted[real]
    return np.abs(found - wanted).max() / np.abs(wanted).max()


@pytest.fixture(scope="module")
def ragged():
    """A full row, one padded on its left, one on its right, one on both sides."""
    positions = np.full((4, 23), -1, np.int32)
    for row, (start, length) in enumerate([(0, 23), (11, 12), (0, 17), (5, 9)]):
        positions[row, start : start + length] = np.arange(length)
    tokens = np.random.default_rng(3).integers(0, 67, positions.shape).astype(np.int32)
    return tokens, positions


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_before_and_after_an_export(
    checkpoint, ragged, tmp_path, name
):
    model_type, fields = MODELS[name]
    made = checkpoint(model_type, **fields)
    run, real = forward(made.config), ragged[1] >= 0
    wanted = reference_logits(made.reference, *ragged)
    assert relative_gap(run(made.params, *ragged), wanted, real) < 1e-4

    # Trained a little, written, read by transformers: another model, and again the same logits.
    trained = jax.tree.map(lambda x: 0.9 * x + 0.02, made.params)
    export(tmp_path / "out", trained, made.config, source=made.folder)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    after = reference_logits(exported.eval(), *ragged)
    assert relative_gap(run(trained, *ragged), after, real) < 1e-4
    assert relative_gap(after, wanted, real) > 0.01

    attention = trained["layers"]["attention"]
    biases = [name for name in ("q_proj", "k_proj", "v_proj") if "bias" in attention[name]]
    assert len(biases) == (3 if made.config.qkv_bias else 0)
    for projection in biases:
        # Without one of its biases Qwen2 still writes fluent-looking text.
        zeroed = jax.tree.map(lambda x: x, made.params)
        zeroed["layers"]["attention"][projection]["bias"] *= 0
        # A key's bias moves all scores of a query alike, but for RoPE.
        assert relative_gap(run(zeroed, *ragged), wanted, real) > 1e-3


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3-tied-biased", "llama"])
def test_greedy_generation_is_that_of_transformers(checkpoint, pad_left, name):
    model_type, fields = MODELS[name]
    made = checkpoint(model_type, **fields)
    rng = np.random.default_rng(5)
    texts = [rng.integers(0, 67, length).tolist() for length in (9, 4, 1)]
    tokens, positions = pad_left(texts, 9)

    @jax.jit
    def greedy(params, stop_ids):
        keys = jax.random.split(jax.random.key(0), (3, 1))
        return sample(
            made.config, params, tokens, positions, keys,
            max_new_tokens=64, stop_ids=stop_ids, pad_id=2, temperature=0.0,
        )  # fmt: skip

    def generate(stop):
        with torch.no_grad():
            out = made.reference.generate(
                torch.tensor(np.asarray(tokens)).long(),
                attention_mask=torch.tensor(np.asarray(positions) >= 0).long(),
                max_new_tokens=64,
                do_sample=False,
                eos_token_id=stop,
                pad_token_id=2,
            )
        out = out[:, 9:].numpy()
        return np.pad(out, ((0, 0), (0, 64 - out.shape[1])), constant_values=2)

    endless = greedy(made.params, jnp.array([-1, -1]))
    np.testing.assert_array_equal(endless.tokens, generate(None))
    # Two stops, so that rows end at different places: what row 0 writes 20th, and row 1 30th.
    stops = [int(endless.tokens[0, 19]), int(endless.tokens[1, 29])]
    stopped = greedy(made.params, jnp.array(stops))
    np.testing.assert_array_equal(stopped.tokens, generate(stops))
    assert int(stopped.mask[0].sum()) <= 20


def test_a_fresh_model_has_the_tensors_of_a_checkpoint(checkpoint):
    for model_type, fields in MODELS.values():
        made = checkpoint(model_type, **fields)
        fresh = jax.eval_shape(lambda c=made.config: initialise(c, jax.random.key(0)))
        assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, made.params)


def test_every_axis_of_every_parameter_has_a_name(tiny_config):
    tokens = jnp.zeros((1, 1), jnp.int32)
    boxed = jax.eval_shape(Qwen(tiny_config).init, jax.random.key(0), tokens, tokens)
    specs, shapes = nn.get_partition_spec(boxed), nn.meta.unbox(boxed)
    for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(shapes), strict=True):
        assert len(spec) == leaf.ndim and None not in spec, (spec, leaf.shape)


@pytest.fixture(scope="module")
def tiny_logits(tiny_config):
    return forward(tiny_config)


def test_padding_changes_nothing_whatever_tokens_lie_under_it(tiny_logits, tiny_params, pad_left):
    text = [7, 3, 11, 20, 3, 1, 0, 5]
    alone = tiny_logits(tiny_params, *pad_left([text, text], 8))
    tokens, positions = pad_left([text, text], 16)
    tokens = tokens.at[0, :8].set(jnp.arange(8))
    # Row 1 lies at the left edge, its padding after it.
    tokens, positions = (
        tokens.at[1].set(jnp.roll(tokens[1], 8)),
        positions.at[1].set(jnp.roll(positions[1], 8)),
    )
    padded = tiny_logits(tiny_params, tokens, positions)
    np.testing.assert_allclose(padded[0, 8:, :25], alone[0, :, :25], atol=1e-5)
    np.testing.assert_allclose(padded[1, :8, :25], alone[1, :, :25], atol=1e-5)


def test_texts_packed_into_one_row_do_not_see_each_other(tiny_logits, tiny_params, pad_left):
    texts = [[7, 3, 11, 20, 3], [1, 0, 5, 9, 9, 24, 2]]
    single = tiny_logits(tiny_params, *pad_left(texts, 16))
    tokens = np.zeros((2, 16), np.int32)
    positions = np.full((2, 16), -1, np.int32)
    # Padding before, between or after: only the positions tell where a text begins.
    for row, starts in enumerate([(0, 5), (2, 9)]):
        for text, start in zip(texts, starts, strict=True):
            tokens[row, start : start + len(text)] = text
            positions[row, start : start + len(text)] = np.arange(len(text))
    packed = tiny_logits(tiny_params, tokens, positions)
    for row, (first, second) in enumerate([(0, 5), (2, 9)]):
        np.testing.assert_allclose(packed[row, first : first + 5], single[0, 11:], atol=1e-5)
        np.testing.assert_allclose(packed[row, second : second + 7], single[1, 9:], atol=1e-5)
    # One text of twelve tokens is another thing.
    joined = tiny_logits(tiny_params, tokens, np.where(positions >= 0, np.arange(16), -1))
    assert float(jnp.abs(joined[0, 5:12] - single[1, 9:])[..., :25].max()) > 0.1


def test_a_prompt_token_that_equals_the_padding_is_seen(tiny_logits, tiny_params, pad_left):
    """A padding mask made from ids would hide it: [0, 5] and [5] would then be one prompt."""
    tokens, positions = pad_left([[0, 5], [5]], 8, pad_id=0)
    np.testing.assert_array_equal(tokens[0], tokens[1])
    found = tiny_logits(tiny_params, tokens, positions)
    assert float(jnp.abs(found[0, -1] - found[1, -1]).max()) > 0.1


def test_remat_and_unrolling_change_no_gradient(tiny_config, tiny_params, prompts):
    def gradient(**fields):
        qwen = Qwen(tiny_config, **fields)

        def of(params):
            hidden = qwen.apply({"params": params}, *prompts)
            return jnp.sum(jnp.where((prompts.positions >= 0)[..., None], hidden, 0.0) ** 3)

        return jax.jit(jax.grad(of))(tiny_params)

    plain = gradient()
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(plain))
    assert largest > 1.0 and all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(plain))
    for fields in ({"remat": "block"}, {"remat": "dots"}, {"unroll": 2}):
        found = gradient(**fields)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest), found, plain
        )


def test_rotary_phases_are_float32_ones():
    """In bfloat16 position 257 is 256, whose cosine is -0.0398."""
    positions = np.array([[257, 4095, 15962]])
    cosine, sine = rotary_phases(jnp.asarray(positions), 10, 4321.0)
    assert cosine.dtype == sine.dtype == jnp.float32
    assert float(cosine[0, 0, 0, 0]) == pytest.approx(0.8193, abs=1e-4)
    angles = positions[..., None] / 4321.0 ** (np.arange(0, 10, 2) / 10)
    np.testing.assert_allclose(cosine[0, :, 0], np.tile(np.cos(angles[0]), 2), atol=1e-3)
    signed = np.concatenate([-np.sin(angles[0]), np.sin(angles[0])], axis=-1)
    np.testing.assert_allclose(sine[0, :, 0], signed, atol=1e-3)


def test_a_bfloat16_model_sees_distances_far_from_position_zero(tiny_config, tiny_params):
    """Attention depends on distances alone, so a text may stand anywhere. Positions in bfloat16
    are multiples of 64 from 8192 on, and all distances below would be 0."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 25, (2, 12)), jnp.int32)
    near = jnp.tile(jnp.arange(1, 13), (2, 1))
    run = forward(tiny_config, dtype=jnp.bfloat16)
    here, there = run(tiny_params, tokens, near), run(tiny_params, tokens, near + 9000)
    still = run(tiny_params, tokens, jnp.full_like(near, 9024))
    moved = float(jnp.abs(here - there)[..., :25].mean())
    assert moved < 0.1 * float(jnp.abs(here - still)[..., :25].mean())
    exact = forward(tiny_config)(tiny_params, tokens, near)
    assert here.dtype == jnp.float32
    assert relative_gap(here[..., :25], np.asarray(exact[..., :25]), np.asarray(near) > 0) < 0.05


TEXTS = [
    "The old bridge over the river was built in 1874, and since then it has carried carts, "
    "trams and, for the last sixty years, motor traffic between the two halves of the town.",
    "To bake bread you need flour, water, salt and",
    "def mean(values):\n    return",
]


@pytest.mark.skipif(
    "RLX_SMOLLM2" not in os.environ,
    reason="RLX_SMOLLM2 must name a folder with SmolLM2-135M in Hugging Face format",
)
def test_smollm2_computes_and_writes_what_transformers_does(pad_left):
    folder = Path(os.environ["RLX_SMOLLM2"])
    config, tokenizer = read_config(folder), load_tokenizer(folder)
    params = jax.tree.map(jnp.asarray, load_params(folder, config))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = [tokenizer.encode_prompt(text) for text in TEXTS]
    width = max(map(len, texts))
    tokens, positions = pad_left(texts, width)
    real = np.asarray(positions) >= 0
    wanted = reference_logits(reference, tokens, positions)
    gap = relative_gap(forward(config)(params, tokens, positions), wanted, real)
    assert gap < 1e-4

    @jax.jit
    def greedy(params):
        return sample(
            config, params, tokens, positions, jax.random.split(jax.random.key(0), (3, 1)),
            max_new_tokens=64, stop_ids=jnp.asarray(tokenizer.stop_ids), pad_id=tokenizer.pad_id,
            temperature=0.0,
        )  # fmt: skip

    found = greedy(params)
    with torch.no_grad():
        out = reference.generate(
            torch.tensor(np.asarray(tokens)).long(),
            attention_mask=torch.tensor(real).long(),
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=list(tokenizer.stop_ids),
            pad_token_id=tokenizer.pad_id,
        )[:, width:].numpy()
    written = found.tokens[:, : out.shape[1]]
    np.testing.assert_array_equal(written, out)
    print(f"largest logit difference: {gap:.2e} of the largest logit")
    for row, text in enumerate(TEXTS):
        print(repr(text), "->", repr(tokenizer.decode_completion(written[row].tolist())))
