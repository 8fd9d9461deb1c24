"""Adapters: what they compute, what is trained, and that PEFT reads and writes the same."""

import dataclasses
import functools
import json
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from toy import CONFIG, batch, headed_params, initial_params, learner
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from model.config import CheckpointError, read_config
from model.errors import BadInput
from model.heads import completion_outputs, last_scores, logits
from model.load import export, load_params
from model.lora import TARGETS, axes, beside, initial, merged, scaled
from model.parameters import cast, head_kernel, initialise
from model.peft_format import load_adapters, save_adapters
from model.qwen import Qwen
from model.sample import sample
from model.score_head import export_scorer
from rlx.config import load_training
from rlx.lora import adapt
from rlx.optimizer import make_optimizer
from rlx.settings import OptimizerSettings
from rlx.update import gradients

RANK, SCALE = 3, 2.5
ALL = tuple(TARGETS)
SOME = ("k_proj", "o_proj", "down_proj")


def noisy(adapters, seed=0):
    """With B away from zero, where the gradient of A would vanish."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: x + jnp.asarray(rng.normal(0, 0.1, x.shape), jnp.float32), adapters
    )


@functools.cache
def toy(targets=ALL):
    """(base, adapters), of the toy policy."""
    base = scaled(initial_params(), targets, SCALE)
    return base, noisy(initial(base, targets, RANK, jax.random.key(3)))


def logits_of(config):
    def run(params, tokens, positions):
        hidden = Qwen(config).apply({"params": params}, tokens, positions)
        return logits(config, head_kernel(config, params), hidden)

    return jax.jit(run)


# ---- what they compute ------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [ALL, SOME])
def test_fresh_adapters_change_no_bit(tiny_config, tiny_params, prompts, targets):
    base = scaled(tiny_params, targets, SCALE)
    fresh = initial(base, targets, RANK, jax.random.key(0))
    run = logits_of(tiny_config)
    before = run(tiny_params, *prompts)
    np.testing.assert_array_equal(run(beside(base, fresh), *prompts), before)
    assert not np.allclose(run(beside(base, noisy(fresh)), *prompts), before, atol=1e-2)


@pytest.mark.parametrize("targets", [ALL, SOME])
def test_merged_equals_unmerged(tiny_config, tiny_params, prompts, targets):
    """Heads and their width are two axes: a transposed B of q_proj, or an A of o_proj that summed
    over heads alone, would differ here."""
    base = scaled(tiny_params, targets, SCALE)
    whole = beside(base, noisy(initial(base, targets, RANK, jax.random.key(0))))
    plain = merged(whole)
    chex.assert_trees_all_equal_structs(plain, tiny_params)
    run = logits_of(tiny_config)
    np.testing.assert_allclose(run(whole, *prompts), run(plain, *prompts), atol=2e-4)
    on_host = merged(jax.device_get(whole))
    assert {type(leaf) for leaf in jax.tree.leaves(on_host)} == {np.ndarray}
    chex.assert_trees_all_close(on_host, plain, atol=1e-6)


@pytest.mark.parametrize("weights, tolerance", [("auto", 2e-5), ("int8", 0.05)])
def test_the_sampler_reads_the_adapters(weights, tolerance):
    """Its log-probabilities are those of training, which reads them unmerged. Without them they
    would be off by more than a nat."""
    whole = beside(*toy())
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(2, 16, (2, 4)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(4), (2, 4))
    keys = jax.random.split(jax.random.key(0), (2, 3))
    drawn = sample(
        CONFIG,
        whole,
        tokens,
        positions,
        keys,
        max_new_tokens=4,
        stop_ids=jnp.array([99]),
        pad_id=0,
        weights=weights,
    )
    rows = jnp.concatenate([jnp.repeat(tokens, 3, 0), drawn.tokens], 1)
    places = jnp.broadcast_to(jnp.arange(8), rows.shape)
    scored = completion_outputs(Qwen(CONFIG), whole, rows, places, 4).logprobs
    np.testing.assert_allclose(drawn.logprobs, scored, atol=tolerance)
    base = completion_outputs(Qwen(CONFIG), toy()[0], rows, places, 4).logprobs
    assert np.abs(np.asarray(base - scored)).max() > 0.2


def test_adapters_begin_as_those_of_peft():
    """A uniform in +-1 / sqrt(inputs): Kaiming with a = 0 would be 2.4 times as wide, and of
    attention's output both heads and width are inputs."""
    torch.manual_seed(0)
    config = CONFIG
    params = initialise(config, jax.random.key(0))
    made = initial(params, ALL, 64, jax.random.key(1))["layers"]
    for target, module in TARGETS.items():
        a, b = made[module][target]["lora_a"], made[module][target]["lora_b"]
        count = np.prod(a.shape[1:-1])
        theirs = torch.nn.Linear(int(count), 64, bias=False)
        torch.nn.init.kaiming_uniform_(theirs.weight, a=5**0.5)
        bound = float(theirs.weight.detach().abs().max())
        assert np.abs(a).max() == pytest.approx(bound, rel=0.03)
        assert np.asarray(a).std() == pytest.approx(float(theirs.weight.detach().std()), rel=0.1)
        assert not b.any()
    again = initial(params, SOME, 64, jax.random.key(1))["layers"]
    chex.assert_trees_all_equal(again["mlp"]["down_proj"], made["mlp"]["down_proj"])
    assert not np.array_equal(
        made["attention"]["k_proj"]["lora_a"], made["attention"]["v_proj"]["lora_a"]
    )


def test_every_axis_of_every_adapter_has_a_name():
    shapes = jax.eval_shape(Qwen(CONFIG).init, jax.random.key(0), *[jnp.zeros((1, 1), int)] * 2)
    names = axes(nn.get_partition_spec(shapes)["params"])
    base, adapters = toy()
    leaves = {"layers": adapters["layers"]}
    for target, module in TARGETS.items():
        kernel = base["layers"][module][target]
        for leaf in ("lora_a", "lora_b", "lora_scale"):
            value = (kernel | leaves["layers"][module][target])[leaf]
            assert len(names["layers"][module][target][leaf]) == value.ndim
    assert tuple(names["layers"]["attention"]["o_proj"]["lora_a"]) == (
        *("layers", "heads", "head_dim", "lora"),
    )
    assert tuple(names["layers"]["attention"]["q_proj"]["lora_b"]) == (
        *("layers", "lora", "heads", "head_dim"),
    )


# ---- what is trained --------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_gradients_are_those_through_the_merged_kernels(packing):
    """By the chain rule: of the weighted sum A B the gradients to A and B follow from that of the
    merged kernel, which a whole model has."""
    base, adapters = toy()
    made = learner("grpo", packing=packing, samples=2, hyper={"beta": 0.1})
    rows = batch(4)
    grads, value, _ = jax.jit(lambda a: gradients(made, (a, {}), rows, None, base))(adapters)
    full, expected = jax.jit(lambda p: gradients(made, (p, {}), rows)[:2])(
        merged(beside(base, adapters))
    )
    assert value == pytest.approx(float(expected), abs=1e-5)
    chex.assert_trees_all_equal_structs(grads[0], adapters)

    def through(adapters):
        plain = merged(beside(base, adapters))
        return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, full[0], plain)))

    chex.assert_trees_all_close(grads[0], jax.grad(through)(adapters), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("packing", [False, True])
def test_no_gradient_of_the_base_is_computed(packing, optimised):
    """In the compiled program no product makes what has the size of a kernel, and nothing adds up
    what has that of the head; when all is trained they do."""
    shape = dataclasses.replace(
        CONFIG, hidden_size=72, intermediate_size=136, vocab_size=480, num_layers=1
    )
    params = initialise(shape, jax.random.key(0))
    base = scaled(params, ALL, SCALE)
    adapters = initial(base, ALL, RANK, jax.random.key(1))
    made = learner("grpo", model=Qwen(shape), packing=packing, samples=2)
    rows = batch(4)

    def sizes(function, *operands):
        text = jax.jit(function).lower(*operands).compile().as_text()
        found = re.findall(r"= f32\[([\d,]+)\]\S* (?:dot|custom-call|add|scatter)\(", text)
        return {tuple(sorted(map(int, dims.split(",")))) for dims in found}

    kernels = {(72, 136), (72, 480), (16, 72)}
    full = sizes(lambda p: gradients(made, (p, {}), rows)[0], params)
    ours = sizes(lambda b, a: gradients(made, (a, {}), rows, None, b)[0], base, adapters)
    assert kernels <= full
    assert not ours & {(72, 136), (72, 480)}


def test_the_optimizer_remembers_adapters_alone():
    """Two float32 moments each, and a counter or two."""
    base, adapters = toy()
    settings = OptimizerSettings(weight_decay=0.1)
    optimizer = make_optimizer(settings, optax.constant_schedule(1e-3))
    state = optimizer.init((adapters, {}))
    taken = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(adapters))
    assert 0 <= taken - 2 * 4 * numbers <= 16
    assert numbers < sum(leaf.size for leaf in jax.tree.leaves(base)) / 2
    # And they decay, as matrices do.
    still = jax.tree.map(jnp.zeros_like, adapters)
    moved, _ = optimizer.update((still, {}), state, (adapters, {}))
    chex.assert_trees_all_close(moved[0], jax.tree.map(lambda x: -1e-4 * x, adapters), rtol=1e-5)


def test_a_bfloat16_base_leaves_adapters_in_float32(tiny_config, tiny_params, prompts):
    """In bfloat16 a change of B by a thousandth of it would be lost."""
    base = scaled(cast(tiny_params, jnp.bfloat16), ALL, SCALE)
    adapters = noisy(initial(base, ALL, RANK, jax.random.key(0)))
    assert {leaf.dtype for leaf in jax.tree.leaves(adapters)} == {jnp.dtype("float32")}
    run = logits_of(tiny_config)
    whole = beside(base, adapters)
    np.testing.assert_allclose(run(whole, *prompts), run(merged(whole), *prompts), atol=3e-4)
    kernel = merged(whole)["layers"]["mlp"]["up_proj"]["kernel"]
    assert kernel.dtype == jnp.float32


def test_a_base_is_rounded_on_the_host_where_it_was_read(checkpoint):
    """On a mesh a device would else have all of it before it has its part."""
    made = checkpoint("qwen2")
    config = load_training(None, ["lora.rank=2", "lora.base_dtype=bfloat16"])
    read = load_params(made.folder, made.config)
    base, _ = adapt(config, made.config, read, jax.random.key(0))
    kernel = base["layers"]["mlp"]["up_proj"]["kernel"]
    assert isinstance(kernel, np.ndarray) and kernel.dtype == jnp.bfloat16
    assert base["layers"]["mlp"]["up_proj"]["lora_scale"].shape == (made.config.num_layers,)


def test_a_projection_that_the_model_has_not_is_refused():
    params = {"layers": {"attention": initial_params()["layers"]["attention"], "mlp": {}}}
    with pytest.raises(BadInput, match=r"lora.targets: .* has no gate_proj, up_proj"):
        initial(params, ("q_proj", "gate_proj", "up_proj"), RANK, jax.random.key(0))


# ---- PEFT -------------------------------------------------------------------------------------

TOKENS = jnp.asarray(np.random.default_rng(5).integers(0, 60, (2, 7)), jnp.int32)
PLACES = jnp.broadcast_to(jnp.arange(7), TOKENS.shape)


def peft_logits(model):
    with torch.no_grad():
        return model.eval()(torch.tensor(np.asarray(TOKENS)).long()).logits.float().numpy()


def our_logits(config, params):
    return logits_of(config)(params, TOKENS, PLACES)


@pytest.mark.parametrize("family, targets", [("qwen2", ALL), ("qwen3", ALL), ("llama", SOME)])
def test_peft_loads_ours_with_equal_logits(checkpoint, tmp_path, family, targets):
    found = checkpoint(family)
    base = scaled(found.params, targets, 8 / RANK)
    adapters = noisy(initial(base, targets, RANK, jax.random.key(0)))
    folder = tmp_path / "adapter"
    save_adapters(folder, adapters, found.config, alpha=8.0, base=found.folder)
    theirs = AutoModelForCausalLM.from_pretrained(found.folder, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(theirs, folder)
    ours = our_logits(found.config, beside(base, adapters))
    np.testing.assert_allclose(ours, peft_logits(theirs), atol=1e-4, rtol=1e-4)
    assert np.abs(ours - our_logits(found.config, found.params)).max() > 1e-2
    # And what we read back is what we wrote.
    again = load_adapters(folder, found.config)
    assert (again.rank, again.alpha, again.targets) == (RANK, 8.0, targets)
    chex.assert_trees_all_equal(again.params, jax.device_get(adapters))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_we_load_what_peft_saves(checkpoint, tmp_path, family):
    found = checkpoint(family)
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_pretrained(found.folder, dtype=torch.float32)
    settings = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=6, target_modules=list(SOME), lora_dropout=0.1
    )
    theirs = get_peft_model(theirs, settings)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    adapters = load_adapters(tmp_path / "theirs", found.config)
    assert (adapters.rank, adapters.alpha, adapters.targets) == (4, 6.0, SOME)
    base = scaled(found.params, SOME, 6 / 4)
    ours = our_logits(found.config, beside(base, adapters.params))
    np.testing.assert_allclose(ours, peft_logits(theirs), atol=1e-4, rtol=1e-4)


def test_gradients_are_those_of_peft(checkpoint, tmp_path):
    """Of the negative log-likelihood of given tokens; an alpha / r that entered only one of the
    factors' gradients would be off by it."""
    found = checkpoint("qwen3")
    base = scaled(found.params, ALL, 6 / RANK)
    adapters = noisy(initial(base, ALL, RANK, jax.random.key(0)))
    save_adapters(tmp_path / "adapter", adapters, found.config, alpha=6.0, base=found.folder)
    theirs = AutoModelForCausalLM.from_pretrained(found.folder, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(theirs, tmp_path / "adapter", is_trainable=True).eval()
    tokens = torch.tensor(np.asarray(TOKENS)).long()
    theirs(tokens, labels=tokens).loss.backward()

    def nll(adapters):
        model = Qwen(found.config)
        outputs = completion_outputs(model, beside(base, adapters), TOKENS, PLACES, 6)
        return -jnp.mean(outputs.logprobs)

    ours = jax.grad(nll)(adapters)
    save_adapters(tmp_path / "gradients", ours, found.config, alpha=6.0, base=found.folder)
    stored = load_safe(tmp_path / "gradients")
    count = 0
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            count += 1
            mine = stored[name.replace(".default", "")]
            theirs_grad = parameter.grad.numpy()
            np.testing.assert_allclose(mine, theirs_grad, atol=1e-4 * np.abs(theirs_grad).max())
    assert count == 2 * len(ALL) * found.config.num_layers


def load_safe(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_peft_loads_a_reward_models_adapter_with_its_head(checkpoint, tmp_path):
    found = checkpoint("qwen3", pad_token_id=7)
    head = {"kernel": headed_params()["value_head"]["kernel"][:1] * jnp.ones((24, 1))}
    zeros = {"value_head": jax.tree.map(jnp.zeros_like, head)}
    trunk = {name: leaf for name, leaf in found.params.items() if name != "lm_head"}
    export_scorer(tmp_path / "base", trunk | zeros, found.config, source=found.folder)
    base = scaled(trunk, ALL, 2.0)
    adapters = noisy(initial(base, ALL, RANK, jax.random.key(0))) | {"value_head": head}
    folder, place = tmp_path / "adapter", tmp_path / "base"
    save_adapters(folder, adapters, found.config, alpha=2.0 * RANK, base=place, scorer=True)
    theirs = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", dtype=torch.float32
    )
    theirs = PeftModel.from_pretrained(theirs, folder)
    ours = last_scores(Qwen(found.config), beside(base, adapters), TOKENS, PLACES)
    np.testing.assert_allclose(ours, peft_logits(theirs)[:, 0], atol=1e-4)
    with pytest.raises(CheckpointError, match="task_type"):
        load_adapters(folder, found.config)


@pytest.mark.parametrize(
    "change, told",
    [
        ({"use_rslora": True}, "use_rslora is not built"),
        ({"use_dora": True}, "use_dora is not built"),
        ({"bias": "all"}, "bias is not built, and is 'all'"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save is not built"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is not built"),
        ({"layers_to_transform": [1]}, "layers_to_transform is not built"),
        ({"something_new": 1}, "something_new is not built"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules must be a list of some"),
        ({"target_modules": "all-linear"}, "target_modules must be a list of some"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights must leave the base as it is"),
        ({"peft_type": "LOHA"}, "peft_type must be 'LORA'"),
        ({"r": 0}, "r must be a positive whole number, and is 0"),
        ({"lora_alpha": "8"}, "lora_alpha must be a positive number"),
        ({"r": 2}, "misshapen"),
        ({"target_modules": ["q_proj"]}, "unexpected"),
        ({"target_modules": [*SOME, "q_proj"]}, "missing"),
    ],
)
def test_an_adapter_that_asks_for_something_else_is_refused_by_name(tmp_path, change, told):
    adapters = initial(initial_params(), SOME, RANK, jax.random.key(0))
    save_adapters(tmp_path / "a", adapters, CONFIG, alpha=4.0, base="nowhere")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=told):
        load_adapters(tmp_path / "a", CONFIG)


def test_an_adapters_folder_replaces_no_other(tmp_path):
    adapters = initial(initial_params(), SOME, RANK, jax.random.key(0))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    with pytest.raises(CheckpointError, match="holds something that is no adapter"):
        save_adapters(tmp_path / "mine", adapters, CONFIG, alpha=4.0, base="nowhere")
    for _ in range(2):
        save_adapters(tmp_path / "own", adapters, CONFIG, alpha=4.0, base="nowhere")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine", "own"]


def test_an_export_merges(tmp_path, checkpoint):
    """The merged folder in transformers, against the adapters beside their base."""
    found = checkpoint("qwen2")
    base = scaled(found.params, ALL, 2.0)
    whole = beside(base, noisy(initial(base, ALL, RANK, jax.random.key(0))))
    weights = merged(jax.device_get(whole))
    export(tmp_path / "hf", weights, found.config, source=found.folder)
    chex.assert_trees_all_equal(load_params(tmp_path / "hf", read_config(tmp_path / "hf")), weights)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ours = our_logits(found.config, whole)
    np.testing.assert_allclose(ours, peft_logits(theirs), atol=1e-4, rtol=1e-4)
