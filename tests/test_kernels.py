"""Fused attention kernels: on each token that is no padding they compute what `attend` does.

XLA's implementation of the same call stands in for cuDNN's, with NaN where cuDNN may write nothing.
Pallas interprets the TPU's on a CPU.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.attention import WholeRows, attend, causal_mask
from model.device import Device, this_device
from model.errors import BadInput
from model.kernels import (
    first_columns,
    fitting,
    obstacle,
    roll_left,
    segment_attention,
    whole_rows,
)
from model.qwen import Qwen
from rlx.assemble import network
from rlx.config import load

HOPPER, AMPERE, TURING = (Device("cuda", capability) for capability in ((9, 0), (8, 0), (7, 5)))


def positions_of(*rows, width):
    """Rows of texts, each (its first column, its length)."""
    positions = np.full((len(rows), width), -1, np.int32)
    for row, texts in zip(positions, rows, strict=True):
        for start, length in texts:
            row[start : start + length] = np.arange(length)
    return jnp.asarray(positions)


SINGLE = positions_of([(0, 23)], [(11, 12)], [(0, 17)], [(5, 9)], [], width=23)
"""A full row, one padded on its left, on its right, on both sides, and one of padding alone."""
SEVERAL = positions_of(
    [(0, 90), (90, 60)], [(40, 110)], [(3, 20), (30, 1), (31, 70)], [], [(60, 70)], width=150
)
SEVERAL = SEVERAL.at[4, 60:130].add(7)
"""Also several texts a row, one whose positions begin beyond 0, so that only being padding tells
apart what stands before it, and more columns than a block of the TPU kernel has."""


def rolled_attention(query, key, value, positions):
    start = first_columns(positions)
    positions, *parts = (roll_left(x, start) for x in (positions, query, key, value))
    mixed, _ = whole_rows("cudnn", positions).attend(*parts)
    return roll_left(mixed, -start)


def interpreted(query, key, value, positions):
    segments = whole_rows("tpu", positions).segments
    return segment_attention(query, key, value, segments, interpret=True)


def plain(query, key, value, positions):
    return attend(query, key, value, causal_mask(positions))


def values_and_slopes(attention, positions, heads, kv_heads, width, bad=0.0):
    """Of real tokens; the loss reads no other. `bad` stands under padding."""
    rng = np.random.default_rng(2)
    real = np.asarray(positions >= 0)[:, :, None, None]
    parts = [
        jnp.asarray(np.where(real, rng.normal(size=(*positions.shape, n, width)), bad), jnp.float32)
        for n in (heads, kv_heads, kv_heads)
    ]
    wanted = rng.normal(size=(*positions.shape, heads, width))

    @jax.jit
    @jax.value_and_grad
    def loss(parts):
        mixed = jnp.where(real, attention(*parts, positions), 0.0)
        return jnp.sum((mixed - wanted) ** 2)

    value, slopes = loss(parts)
    return np.asarray(value), [np.where(real, slope, 0.0) for slope in slopes], slopes


def assert_same(found, wanted):
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for one, other in zip(found[1], wanted[1], strict=True):
        assert np.abs(other).max() > 0.1
        np.testing.assert_allclose(one, other, atol=2e-5 * np.abs(other).max())
    # A NaN on padding reaches every parameter on the way back, though it's multiplied with 0.
    assert all(bool(jnp.all(jnp.isfinite(slope))) for slope in found[2])


@jax.custom_vjp
def spoil(x, inside):
    """x, with NaN for the slopes outside."""
    return x


def spoiled_slopes(inside, slope):
    return jnp.where(inside, slope, jnp.nan), None


spoil.defvjp(lambda x, inside: (x, inside), spoiled_slopes)


@pytest.fixture
def stand_in(monkeypatch):
    """XLA in the place of cuDNN, and NaN wherever cuDNN may write nothing, on both ways."""
    inner = jax.nn.dot_product_attention

    def call(query, key, value, *, implementation, query_seq_lengths, **fields):
        assert implementation == "cudnn" and fields["is_causal"]
        lengths = query_seq_lengths
        inside = (jnp.arange(query.shape[1]) < lengths[:, None])[:, :, None, None]

        query, key, value = (spoil(part, inside) for part in (query, key, value))
        mixed = inner(query, key, value, implementation="xla", query_seq_lengths=lengths, **fields)
        # A softmax over no key at all is not defined, and spoils the whole row.
        mixed = jnp.where((lengths > 0)[:, None, None, None], mixed, jnp.nan)
        return jnp.where(inside, mixed, jnp.nan)

    monkeypatch.setattr(jax.nn, "dot_product_attention", call)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 3), (4, 1)])
def test_rolled_rows_give_what_plain_attention_does(stand_in, heads, kv_heads):
    """Lengths that begin at column 0 would, on rows padded on their left, be those of others."""
    shape = (SINGLE, heads, kv_heads, 10)
    wanted = values_and_slopes(plain, *shape)
    # Garbage under padding: a kernel that saw it would show it.
    found = values_and_slopes(rolled_attention, *shape, bad=50.0)
    assert_same(found, wanted)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 16), (2, 2, 10)])
def test_the_tpu_kernel_gives_what_plain_attention_does(heads, kv_heads, width):
    shape = (SEVERAL, heads, kv_heads, width)
    assert_same(values_and_slopes(interpreted, *shape, bad=50.0), values_and_slopes(plain, *shape))


def test_cudnn_gets_an_even_number_of_columns_and_no_row_without_a_key(monkeypatch):
    """It refuses to compute the slopes of 23 columns."""
    calls = []
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *a, **fields: calls.append((a, fields)) or a[0]
    )
    part = jnp.ones((5, 23, 2, 8))
    mixed, _ = whole_rows("cudnn", SINGLE).attend(part, part, part)
    ((parts, fields),) = calls
    assert mixed.shape == part.shape and all(x.shape == (5, 24, 2, 8) for x in parts)
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        assert fields[name].tolist() == [23, 12, 17, 9, 1]


def test_rolling_back_undoes_rolling():
    x = jnp.arange(5 * 23 * 2).reshape(5, 23, 2)
    start = first_columns(SINGLE)
    assert start.tolist() == [0, 11, 0, 5, 0]
    rolled = roll_left(SINGLE, start)
    assert rolled[1, :12].tolist() == list(range(12)) and int(rolled[1, 12]) == -1
    np.testing.assert_array_equal(roll_left(roll_left(x, start), -start), x)


def model_slopes(config, params, positions, **fields):
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 25, positions.shape))
    real = (positions >= 0)[..., None]

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        hidden = Qwen(config, **fields).apply({"params": params}, tokens, positions)
        return jnp.sum(jnp.where(real, hidden, 0.0) ** 3)

    return loss(params)


@pytest.mark.parametrize("remat", ["none", "block", "dots"])
def test_a_model_with_rolled_rows_has_the_gradient_of_a_plain_one(
    stand_in, tiny_config, tiny_params, remat
):
    value, slopes = model_slopes(tiny_config, tiny_params, SINGLE, attention="cudnn", remat=remat)
    wanted, others = model_slopes(tiny_config, tiny_params, SINGLE)
    assert float(value) == pytest.approx(float(wanted), rel=1e-4)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(others))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest), slopes, others)


def gradient_text(config, attention, platform, positions, context=None):
    """The gradient's program for a platform that need not be here."""
    params = jax.eval_shape(
        lambda key: Qwen(config).init(key, jnp.zeros((1, 1), int), jnp.zeros((1, 1), int)),
        jax.random.key(0),
    )

    def loss(params, tokens, positions):
        model = Qwen(config, jnp.bfloat16, attention=attention, remat="block")
        return jnp.sum(model.apply(params, tokens, positions, context).astype(jnp.float32))

    traced = jax.jit(jax.grad(loss)).trace(params, jnp.zeros_like(positions), positions)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_the_gradient_for_a_tpu_calls_the_kernel(tiny_config):
    text = gradient_text(tiny_config, "tpu", "tpu", SEVERAL)
    # Forward, forward again for the way back, and the slopes of queries and of keys and values.
    assert text.count("@tpu_custom_call") == 4
    assert "150x150" not in text and "256x256" not in text
    plain_text = gradient_text(tiny_config, "plain", "tpu", SEVERAL)
    assert "tpu_custom_call" not in plain_text and "150x150" in plain_text


def test_the_gradient_for_an_nvidia_gpu_calls_the_kernel(tiny_config):
    config = dataclasses.replace(tiny_config, head_dim=16)
    try:
        text = gradient_text(config, "cudnn", "cuda", SINGLE)
    except RuntimeError as error:
        # Without the CUDA plugin it is not detected, with it and no library not found.
        if not re.search("cuDNN (is not detected|not found)", str(error)):
            raise
        pytest.skip("lowering asks cuDNN for its version, and there is no cuDNN here")
    assert "__cudnn$fmhaSoftmax" in text and "__cudnn$fmhaSoftmaxBackward" in text
    assert "x23x23" not in text and "x24x24" not in text


def test_a_context_that_is_given_is_the_one_that_counts(tiny_config):
    context = WholeRows(causal_mask(SEVERAL))
    assert "tpu_custom_call" not in gradient_text(tiny_config, "tpu", "tpu", SEVERAL, context)


@pytest.mark.parametrize(
    ("device", "width", "dtype", "packed", "wanted"),
    [
        (Device("cpu"), 64, "bfloat16", False, "plain"),
        (Device("rocm"), 64, "bfloat16", False, "plain"),
        (Device("tpu"), 64, "bfloat16", True, "tpu"),
        (Device("tpu"), 10, "float32", False, "tpu"),
        (HOPPER, 64, "bfloat16", False, "cudnn"),
        (HOPPER, 256, "bfloat16", False, "cudnn"),
        (AMPERE, 128, "bfloat16", False, "cudnn"),
        (AMPERE, 256, "bfloat16", False, "plain"),
        (HOPPER, 60, "bfloat16", False, "plain"),
        (HOPPER, 64, "float32", False, "plain"),
        (HOPPER, 64, "bfloat16", True, "plain"),
        (TURING, 64, "bfloat16", False, "plain"),
    ],
)
def test_auto_takes_the_kernel_of_the_device_where_it_fits(
    tiny_config, device, width, dtype, packed, wanted
):
    config = dataclasses.replace(tiny_config, head_dim=width)
    assert fitting(config, jnp.dtype(dtype), packed, device) == wanted


@pytest.mark.parametrize(
    ("kernel", "device", "width", "dtype", "packed", "words"),
    [
        ("cudnn", Device("cpu"), 64, "bfloat16", False, "cuda's .* computes on cpu"),
        ("tpu", HOPPER, 64, "bfloat16", False, "tpu's .* computes on cuda"),
        ("cudnn", TURING, 64, "bfloat16", False, r"8\.0, and this GPU has 7\.5"),
        ("cudnn", HOPPER, 64, "float32", False, "bfloat16, and the model in float32"),
        ("cudnn", AMPERE, 256, "bfloat16", False, "up to 128 on this GPU, and the model's is 256"),
        ("cudnn", HOPPER, 64, "bfloat16", True, "one text a row"),
    ],
)
def test_a_kernel_that_cannot_compute_the_model_is_refused_by_name(
    tmp_path, monkeypatch, tiny_config, kernel, device, width, dtype, packed, words
):
    config = dataclasses.replace(tiny_config, head_dim=width)
    monkeypatch.setattr("rlx.assemble.this_device", lambda: device)
    task = "{task: {name: chat, file: chats.jsonl}, algorithm: {name: sft}, batch: {packing: %s}}"
    file = tmp_path / "run.yaml"
    file.write_text(task % str(packed).lower())

    def made(chosen):
        settings = load(file, [f"model.attention={chosen}"])
        return network(settings, config, jnp.dtype(dtype)).attention

    assert obstacle(kernel, config, jnp.dtype(dtype), packed, device)
    with pytest.raises(BadInput, match=rf"model\.attention: .*{words}.*; came {kernel}\."):
        made(kernel)
    assert made("plain") == "plain"
    assert made("auto") in ("plain", "tpu", "cudnn") and made("auto") != kernel


def test_the_device_of_this_machine_is_told_by_its_platform():
    assert this_device().platform in ("cpu", "cuda", "rocm", "tpu")
