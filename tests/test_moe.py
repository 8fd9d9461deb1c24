"""Qwen3-MoE: what transformers computes, on one device and on several; and its router's load."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from toy import batch, learner
from toy_run import lines, start
from transformers import AutoModelForCausalLM

from model.config import CheckpointError, from_hugging_face, read_config
from model.expert_products import expert_product
from model.experts import collect, dispatch, lay_out
from model.heads import completion_outputs, logits
from model.load import export, load_params
from model.moe import LOADS, balance_loss, route
from model.parameters import head_kernel
from model.qwen import Qwen
from model.sample import sample
from rlx.cost import forward_flops, rollout_bytes
from rlx.router import load_metrics
from rlx.update import gradients

ROOT = Path(__file__).parents[1]
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}


@pytest.fixture(scope="module")
def moe(checkpoint):
    """(renormalise) -> a random checkpoint of transformers."""

    def make(renormalise=True):
        return checkpoint("qwen3_moe", norm_topk_prob=renormalise, **EXPERTS)

    return make


@pytest.fixture(scope="module")
def ragged():
    """A full row, one padded on its left, one on both sides."""
    positions = np.full((3, 11), -1, np.int32)
    for row, (first, length) in enumerate([(0, 11), (6, 5), (2, 7)]):
        positions[row, first : first + length] = np.arange(length)
    tokens = np.random.default_rng(3).integers(0, 67, positions.shape).astype(np.int32)
    return tokens, positions


def forward(config):
    """(params, tokens, positions) -> logits and the routers' load, compiled."""

    @jax.jit
    def run(params, tokens, positions):
        where = {"params": params}, tokens, positions
        hidden, left = Qwen(config).apply(*where, mutable=[LOADS])
        return logits(config, head_kernel(config, params), hidden), left[LOADS]["layers"]["mlp"]

    return run


def of_transformers(reference, tokens, positions):
    return reference(
        torch.tensor(tokens).long(),
        attention_mask=torch.tensor(positions >= 0).long(),
        position_ids=torch.tensor(positions).clamp(min=0).long(),
        output_router_logits=True,
    )


def gap(found, wanted, real):
    found, wanted = np.asarray(found)[real], wanted.detach().numpy()[real]
    return np.abs(found - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize("renormalise", [True, False])
def test_logits_are_those_of_transformers_before_and_after_an_export(
    moe, ragged, tmp_path, renormalise
):
    made, real = moe(renormalise), ragged[1] >= 0
    run = forward(made.config)
    wanted = of_transformers(made.reference, *ragged).logits
    assert gap(run(made.params, *ragged)[0], wanted, real) < 1e-4

    other = forward(dataclasses.replace(made.config, renormalise_experts=not renormalise))
    assert gap(other(made.params, *ragged)[0], wanted, real) > 1e-2

    trained = jax.tree.map(lambda x: 0.9 * x + 0.02, made.params)
    export(tmp_path / "out", trained, made.config, source=made.folder)
    assert read_config(tmp_path / "out") == made.config
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    after = of_transformers(exported, *ragged).logits
    assert gap(run(trained, *ragged)[0], after, real) < 1e-4


def test_texts_of_one_row_are_computed_as_if_each_had_its_own(moe, ragged):
    made, run = moe(), forward(moe().config)
    tokens, positions = ragged
    together = np.concatenate([tokens[1:2, 6:], tokens[2:, 2:9]], axis=1)
    places = np.concatenate([positions[1:2, 6:], positions[2:, 2:9]], axis=1)
    apart = np.asarray(run(made.params, *ragged)[0])
    wanted = np.concatenate([apart[1, 6:], apart[2, 2:9]])
    found = np.asarray(run(made.params, together, places)[0])[0]
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_greedy_text_is_that_of_transformers(moe, pad_left, weights):
    made = moe()
    texts = [np.random.default_rng(5).integers(0, 67, n).tolist() for n in (6, 3)]
    tokens, positions = pad_left(texts, 6)
    found = jax.jit(
        lambda params: sample(
            made.config, params, tokens, positions, jax.random.split(jax.random.key(0), (2, 1)),
            max_new_tokens=12, stop_ids=jnp.array([66]), pad_id=2, temperature=0.0, weights=weights,
        )
    )(made.params)  # fmt: skip
    with torch.no_grad():
        out = made.reference.generate(
            torch.tensor(np.asarray(tokens)).long(),
            attention_mask=torch.tensor(np.asarray(positions) >= 0).long(),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=66,
            pad_token_id=2,
        )
    wanted, mask = out[:, 6:].numpy(), np.asarray(found.mask)
    assert mask.sum() > 12
    tokens = np.asarray(found.tokens)[:, : wanted.shape[1]]
    if weights == "auto":
        np.testing.assert_array_equal(tokens, wanted)
    else:
        # Rounded, the text may turn off somewhere; a wrong scale would lose the first token.
        np.testing.assert_array_equal(tokens[:, 0], wanted[:, 0])


def test_the_balance_loss_and_its_gradient_are_those_of_transformers_without_padding(moe, ragged):
    made = moe()
    made.reference.zero_grad()
    wanted = of_transformers(made.reference, *ragged).aux_loss
    wanted.backward()
    run = forward(made.config)

    def loss(params):
        return balance_loss(run(params, *ragged)[1]["load"])

    found, slopes = jax.value_and_grad(loss)(made.params)
    assert found == pytest.approx(float(wanted.detach()), rel=1e-5)
    for layer, block in enumerate(made.reference.model.layers):
        slope = slopes["layers"]["mlp"]["router"]["kernel"][layer].T
        assert np.abs(slope).max() > 1e-4, "the loss must reach the router"
        assert gap(slope, block.mlp.gate.weight.grad, slice(None)) < 1e-3

    load = run(made.params, *ragged)[1]["load"]
    real = (ragged[1] >= 0).sum()
    np.testing.assert_array_equal(load.tokens, [real, real])
    np.testing.assert_array_equal(load.sent.sum(1), [2 * real] * 2)


def test_the_balance_loss_is_added_with_its_weight_and_each_micro_batch_by_its_rows(moe):
    """Of the second micro-batch one row has no part. Logged and not added, the balance would
    change no gradient."""
    config, params, rows = moe().config, moe().params, batch(4)
    mask = rows.mask.at[3].set(False)
    rows = rows._replace(mask=mask, signals=tuple(s._replace(mask=mask) for s in rows.signals))

    def of_weight(weight, params):
        made = learner("dapo", model=Qwen(config), micro=2, router_aux=weight)
        (grads, _), loss, metrics = gradients(made, (params, {}), rows)
        return grads, loss, metrics["router/aux"]

    def balances(params):
        pieces = [(rows.tokens[i : i + 2], rows.positions[i : i + 2]) for i in (0, 2)]
        outputs = [completion_outputs(Qwen(config), params, *p, mask.shape[1]) for p in pieces]
        first, second = (balance_loss(o.load) for o in outputs)
        return (2 * first + second) / 3, (first + second) / 2

    @jax.jit
    def run(params):
        slopes = jax.value_and_grad(balances, has_aux=True)(params)
        return of_weight(0.0, params), of_weight(0.1, params), slopes

    (without, loss_0, _), (grads, loss, logged), ((balance, plain), slopes) = run(params)
    assert loss - loss_0 == pytest.approx(0.1 * float(balance), rel=1e-4)
    assert logged.total / logged.count == pytest.approx(float(plain), rel=1e-5)
    assert abs(float(balance - plain)) > 1e-3
    assert jnp.abs(slopes["layers"]["mlp"]["router"]["kernel"]).max() > 1e-2

    def added(after, before, slope):
        atol = 1e-5 * float(jnp.max(jnp.abs(before))) + 1e-7
        np.testing.assert_allclose(after - before, 0.1 * slope, rtol=1e-3, atol=atol)

    jax.tree.map(added, grads, without, slopes)


def test_a_token_of_equal_probabilities_goes_to_the_first_experts():
    routing = route(jnp.zeros((1, 4)), 2, renormalise=False)
    np.testing.assert_array_equal(routing.experts, [[0, 1]])
    np.testing.assert_allclose(routing.weights, [[0.25, 0.25]])


@pytest.fixture(params=["blocks", "one round", "rounds"])
def way(request, monkeypatch):
    """How products are computed: as on this CPU, or as on a GPU, with the rows of an expert in one
    round or in several."""
    if request.param != "blocks":

        def chosen(*operands, default, **_):
            return default(*operands)

        monkeypatch.setattr(jax.lax, "platform_dependent", chosen)
        monkeypatch.setattr("model.experts.LEAST_ROUND", 8 if request.param == "rounds" else 256)
    return request.param


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("first", [0, 2], ids=["all-here", "some-elsewhere"])
def test_no_token_is_dropped_and_gradients_are_those_of_plain_products(way, crowded, first):
    """A capacity would lose most of what goes to a crowded expert, and so would a first round."""
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((90, 12)), axis=1)[:, :2]
    if crowded:
        experts[:80] = [3, 4]
    x, kernels = rng.normal(size=(90, 7)), rng.normal(size=(12, 7, 5))
    x, kernels = jnp.asarray(x, jnp.float32), jnp.asarray(kernels, jnp.float32)
    here = jnp.asarray((experts >= first) & (experts < first + 4))
    here = here if first else jnp.ones_like(here)

    def ours(x, kernels):
        held = kernels[first : first + 4] if first else kernels
        layout = lay_out(jnp.asarray(experts - first), len(held), 12 // len(held))
        # The 80 rows of a crowded expert take four rounds, or one.
        assert layout.round == (24 if way == "rounds" else 96)
        return collect(expert_product(dispatch(x, layout), held, layout, jnp.float32), layout)

    def plain(x, kernels):
        return here[..., None] * jnp.einsum("td,tkdf->tkf", x, kernels[experts])

    for function in (lambda f: f, lambda f: jax.grad(lambda *a: jnp.sum(f(*a) ** 2), (0, 1))):
        found, wanted = (jax.jit(function(f))(x, kernels) for f in (ours, plain))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), found, wanted
        )


def test_int8_kernels_are_multiplied_as_they_are(way):
    rng = np.random.default_rng(1)
    experts = np.argsort(rng.random((90, 6)), axis=1)[:, :2]
    experts[:80] = [3, 4]
    x = jnp.asarray(rng.integers(-8, 8, (90, 7)), jnp.bfloat16)
    kernels = jnp.asarray(rng.integers(-127, 128, (6, 7, 5)), jnp.int8)

    @jax.jit
    def ours(x, kernels):
        layout = lay_out(jnp.asarray(experts), 6)
        return collect(expert_product(dispatch(x, layout), kernels, layout, jnp.bfloat16), layout)

    # Whole numbers below 2^24: any rounding would show.
    wanted = np.einsum("td,tkdf->tkf", np.asarray(x, np.float64), np.asarray(kernels)[experts])
    np.testing.assert_array_equal(ours(x, kernels), wanted)


@pytest.mark.parametrize("tokens, experts, parts", [(128, 32, 4), (10240, 32, 4), (4096, 128, 1)])
def test_an_even_router_needs_one_round_with_few_empty_rows(tokens, experts, parts):
    """A row a token would be 16 times too many; rounds of 256 would read each kernel 3 times."""
    chosen = np.argsort(np.random.default_rng(2).random((tokens, experts * parts)), axis=1)[:, :8]
    layout = lay_out(jnp.asarray(chosen, jnp.int32), experts, parts)
    assert layout.sizes.max() <= layout.round
    assert layout.round <= max(1.5 * 8 * tokens / (experts * parts), 256)
    # Where one expert can't have more, there is no loop.
    assert (layout.round == layout.largest) == (tokens <= 256)


@pytest.fixture(scope="module")
def tiny_moe(tiny_nano, tmp_path_factory):
    """The nano tokenizer's folder with a `config.json` of a tiny Qwen3-MoE, and no weights."""
    folder = tmp_path_factory.mktemp("moe") / "model"
    shutil.copytree(tiny_nano, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_experts_on_several_devices_give_what_one_gives(tiny_moe):
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/expert_parallel.py"), str(tiny_moe)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    gaps = json.loads(done.stdout.splitlines()[-1])
    assert gaps["mixture"] < 1e-5
    assert gaps["gradient"] < 1e-4
    assert gaps["other_tokens"] == 0


def test_experts_that_share_a_tensor_are_read_too(moe, tmp_path):
    made = moe()
    folder = tmp_path / "fused"
    shutil.copytree(made.folder, folder)
    (folder / "model.safetensors").unlink()
    fused = {name: x.detach().numpy() for name, x in made.reference.state_dict().items()}
    assert fused["model.layers.0.mlp.experts.gate_up_proj"].shape == (5, 40, 24)
    save_file(fused, folder / "model.safetensors", metadata={"format": "pt"})
    found = load_params(folder, made.config)
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(np.asarray, made.params))


def test_a_missing_expert_is_told_by_its_name(moe, tmp_path):
    made = moe()
    with pytest.raises(CheckpointError, match=r"mlp\.experts\.5\.gate_proj\.weight"):
        load_params(made.folder, dataclasses.replace(made.config, num_experts=6))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"mlp_only_layers": [0]}, "mlp_only_layers must be empty"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step must be 1"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok 6 is more than the experts, 5"),
        ({"num_local_experts": 7}, "stated twice and differs"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ],
)
def test_what_is_not_built_is_refused_by_name(moe, fields, message):
    config = json.loads((moe().folder / "config.json").read_text())
    # transformers 5 writes the number of experts under another name than the checkpoints have.
    assert "num_experts" not in config
    assert from_hugging_face(config).num_experts == 5
    with pytest.raises(CheckpointError, match=message):
        from_hugging_face(config | {"num_experts": 5} | fields)


def test_load_metrics_of_a_known_load():
    sent = jnp.array([[4.0, 0.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]])
    found = {name: float(m.total / m.count) for name, m in load_metrics(sent).items()}
    assert found == pytest.approx(
        {
            "router/load_max": (0.5 + 0.25) / 2,
            "router/load_min": 0.125,
            "router/unused": 0.5,
            "router/entropy": (1.5 + 2) / 2 * np.log(2),
            **{f"router/expert_{i}": n for i, n in enumerate([6, 2, 4, 4])},
        }
    )
    many = load_metrics(jnp.ones((1, 17)))
    assert "router/entropy" in many
    assert "router/expert_0" not in many


def test_gspo_trains_experts_and_logs_their_counts(tiny_moe, tmp_path):
    recipe = tmp_path / "moe.yaml"
    recipe.write_text(f"model:\n  path: {tiny_moe}\n")
    changes = ["algorithm.name=gspo", "loop.steps=2", "model.router_aux=0.01", "batch.micro=4"]
    assert start(recipe, tmp_path / "run", *changes) == 0
    steps = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if "router/aux" in line]
    assert len(steps) == 2
    for line in steps:
        counts = [line[f"router/expert_{i}"] for i in range(4)]
        # One layer, two experts a token: at least one each for every sampled token.
        assert sum(counts) > 2 * 16 * 2
        assert sum(counts) % 2 == 0
        assert max(counts) / sum(counts) == pytest.approx(line["router/load_max"])
        assert line["router/aux"] == pytest.approx(2, abs=0.5)
        assert line["sampler_gap/max"] < 1e-4
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf")
    assert type(exported).__name__ == "Qwen3MoeForCausalLM"


def test_the_balance_loss_is_refused_for_a_dense_model(recipe, tmp_path, capsys):
    assert start(recipe, tmp_path / "run", "model.router_aux=0.01") == 2
    assert "has no experts" in capsys.readouterr().err


def test_only_the_experts_of_a_token_are_counted(moe):
    config = moe().config
    sizes = {"rows": 4, "prompt": 8, "completion": 8}
    one, all_five = (
        forward_flops(dataclasses.replace(config, experts_per_token=k), **sizes) for k in (1, 5)
    )
    router = 2 * 2 * 64 * 24 * 5
    assert all_five.feed_forward - router == pytest.approx(5 * (one.feed_forward - router))
    assert one.feed_forward - router == 2 * 2 * 64 * 3 * 24 * 20
    # With many rows every expert is read, with one row a token's own.
    few, many = (
        rollout_bytes(config, rows=rows, prompt=0, completion=1) - 8.0 * 2 * 2 * 10 * rows
        for rows in (1, 1000)
    )
    assert many - few == pytest.approx(4 * 2 * 3 * (3 * 24 * 20), rel=1e-6)
