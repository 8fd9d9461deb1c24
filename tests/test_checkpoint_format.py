"""Checkpoints: what Hugging Face writes, load_params reads; what we export, transformers loads."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from model.config import CheckpointError, read_config
from model.load import export, load_params, save_params
from model.tensors import tensors

# Every size differs from every other, so that a swapped pair of axes cannot pass.
SHAPE = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 3e-5,
    "max_position_embeddings": 96,
    "rope_parameters": {"rope_theta": 4321.0, "rope_type": "default"},
    "bos_token_id": 3,
    "eos_token_id": 5,
}
MODELS = {
    "qwen2": (Qwen2Config, {}),
    "qwen2-tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {}),
    "qwen3-tied-biased": (Qwen3Config, {"tie_word_embeddings": True, "attention_bias": True}),
    "llama": (LlamaConfig, {}),
    "llama-biased": (LlamaConfig, {"attention_bias": True}),
}


def make(name, dtype=torch.float32, **changes):
    """A random model whose biases and norms are not the zeros and ones of a fresh one."""
    cls, fields = MODELS[name]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(cls(**SHAPE | fields | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    return model.to(dtype)


@pytest.fixture
def saved(tmp_path):
    """Writes a model as transformers does and gives its folder."""

    def save(name, dtype=torch.float32, max_shard_size="5GB", **changes):
        folder = tmp_path / "source"
        make(name, dtype, **changes).save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    return save


def rewrite(folder, change):
    """Changes the tensors of a single-file checkpoint."""
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def state(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 20_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_export_of_a_loaded_checkpoint_is_the_same_model(
    saved, tmp_path, name, dtype, max_shard_bytes
):
    source = saved(name, getattr(torch, dtype))
    config = read_config(source)
    target = tmp_path / "target"
    export(
        target,
        load_params(source, config),
        config,
        source=source,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )
    same(state(source), state(target))
    assert (target / "model.safetensors.index.json").exists() == (max_shard_bytes < 10**9)
    assert read_config(target) == config
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (source, target)
    )
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)
    assert after.config.rope_parameters["rope_theta"] == 4321.0
    assert after.config.eos_token_id == 5 and after.config.bos_token_id == 3


def test_projections_compute_the_stored_linear_maps(saved):
    source = saved("qwen3-tied-biased")
    config = read_config(source)
    attention = load_params(source, config)["layers"]["attention"]
    stored = load_file(source / "model.safetensors")
    x = np.random.default_rng(0).normal(size=(5, 24)).astype(np.float32)
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn"
        q = np.einsum("td,dhk->thk", x, attention["q_proj"]["kernel"][layer])
        q += attention["q_proj"]["bias"][layer]
        linear = torch.nn.functional.linear(
            torch.tensor(x), stored[f"{prefix}.q_proj.weight"], stored[f"{prefix}.q_proj.bias"]
        )
        np.testing.assert_allclose(q, linear.reshape(5, 6, 10), atol=1e-5)
        o = np.einsum("thk,hkd->td", q, attention["o_proj"]["kernel"][layer])
        back = torch.nn.functional.linear(linear, stored[f"{prefix}.o_proj.weight"])
        np.testing.assert_allclose(o, back, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_the_table_names_exactly_the_tensors_of_transformers(saved, name):
    source = saved(name)
    wanted = tensors(read_config(source))
    stored = load_file(source / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in stored.items()} == {
        name: tensor.stored for name, tensor in wanted.items()
    }


def test_parameters_have_the_shapes_that_the_model_reads(saved):
    params = load_params(folder := saved("qwen3-tied-biased"), read_config(folder))
    assert jax.tree.map(np.shape, params) == {
        "embed": {"embedding": (67, 24)},
        "layers": {
            "attention_norm": {"scale": (3, 24)},
            "attention": {
                "q_proj": {"kernel": (3, 24, 6, 10), "bias": (3, 6, 10)},
                "k_proj": {"kernel": (3, 24, 2, 10), "bias": (3, 2, 10)},
                "v_proj": {"kernel": (3, 24, 2, 10), "bias": (3, 2, 10)},
                "o_proj": {"kernel": (3, 6, 10, 24), "bias": (3, 24)},
                "q_norm": {"scale": (3, 10)},
                "k_norm": {"scale": (3, 10)},
            },
            "mlp_norm": {"scale": (3, 24)},
            "mlp": {
                "gate_proj": {"kernel": (3, 24, 40)},
                "up_proj": {"kernel": (3, 24, 40)},
                "down_proj": {"kernel": (3, 40, 24)},
            },
        },
        "norm": {"scale": (24,)},
    }


def test_a_qwen2_checkpoint_has_biases_on_query_key_and_value_only(saved):
    attention = load_params(folder := saved("qwen2"), read_config(folder))["layers"]["attention"]
    assert {name for name in attention if "bias" in attention[name]} == {
        "q_proj",
        "k_proj",
        "v_proj",
    }
    assert np.abs(attention["k_proj"]["bias"]).min() > 0


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_loading_casts_from_any_stored_precision(saved, stored, dtype):
    source = saved("llama", stored)
    params = load_params(source, read_config(source), dtype)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(dtype)}
    expected = load_file(source / "model.safetensors")["model.norm.weight"].float().numpy()
    np.testing.assert_array_equal(params["norm"]["scale"], expected.astype(dtype))


def test_a_sharded_checkpoint_of_transformers_loads_like_the_single_file(saved, tmp_path):
    single = saved("qwen3")
    config = read_config(single)
    expected = load_params(single, config)
    shutil.rmtree(single)
    sharded = saved("qwen3", max_shard_size="20KB")
    assert not (sharded / "model.safetensors").exists()
    jax.tree.map(np.testing.assert_array_equal, load_params(sharded, config), expected)


def test_a_redundant_head_of_a_tied_model_loads_if_it_is_the_embedding(saved):
    source = saved("qwen2-tied")
    config = read_config(source)
    expected = load_params(source, config)
    rewrite(
        source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone() + 0})
    )
    found = load_params(source, config)
    assert "lm_head" not in found
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_redundant_head_that_differs_is_refused(saved):
    source = saved("qwen2-tied")
    rewrite(source, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1e-3}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load_params(source, read_config(source))


def test_an_untied_model_without_a_head_is_refused_and_not_filled_in(saved):
    source = saved("qwen2")
    rewrite(source, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is false, so lm_head\.weight"):
        load_params(source, read_config(source))


def test_all_mismatches_come_in_one_error(saved):
    source = saved("qwen3")

    def spoil(stored):
        del stored["model.layers.0.mlp.up_proj.weight"]
        del stored["model.layers.2.self_attn.q_norm.weight"]
        stored["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(60)
        stored["model.layers.3.input_layernorm.weight"] = torch.zeros(24)
        stored["model.norm.weight"] = torch.zeros(25)
        stored["model.layers.1.mlp.down_proj.weight"] = torch.zeros(24, 40, dtype=torch.int8)

    rewrite(source, spoil)
    with pytest.raises(CheckpointError) as raised:
        load_params(source, read_config(source))
    text = str(raised.value)
    assert (
        "missing (2) model.layers.0.mlp.up_proj.weight, model.layers.2.self_attn.q_norm.weight"
        in text
    )
    assert "unexpected (2)" in text and "model.layers.0.self_attn.q_proj.bias" in text
    assert "model.layers.3.input_layernorm.weight" in text
    assert "model.norm.weight is [25] for [24]" in text
    assert "model.layers.1.mlp.down_proj.weight is I8 for one of F32, F16, BF16" in text
    assert str(source) in text


def test_saved_inverse_frequencies_are_no_unexpected_tensor(saved):
    source = saved("llama")
    rewrite(
        source,
        lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}),
    )
    load_params(source, read_config(source))


def test_an_index_that_names_what_no_file_holds_is_refused(saved):
    source = saved("llama", max_shard_size="20KB")
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"do not hold: \(1\) model\.ghost\.weight"):
        load_params(source, read_config(source))


def test_a_lost_shard_is_named(saved):
    source = saved("llama", max_shard_size="20KB")
    lost = sorted(source.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"names the file {lost.name}, which is not there"):
        load_params(source, read_config(source))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither model.safetensors nor"),
        ({"pytorch_model.bin": b"x"}, r"\.bin files only"),
        ({"model.safetensors": b"version https://git-lfs"}, "not a whole safetensors file"),
        ({"model.safetensors.index.json": b"{}"}, "no weight_map"),
    ],
)
def test_a_folder_without_readable_weights_says_what_it_lacks(saved, tmp_path, files, message):
    config = read_config(saved("llama"))
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_params(folder, config)
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        load_params(tmp_path / "absent", config)


def test_the_index_lists_each_tensor_once_and_where_it_lies(saved, tmp_path):
    source = saved("qwen3")
    config = read_config(source)
    save_params(
        tmp_path / "out",
        load_params(source, config),
        config,
        dtype="bfloat16",
        max_shard_bytes=9000,
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    held, total = {}, 0
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) >= 2
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in list(opened.keys()):
                assert name not in held
                held[name] = file.name
                total += opened.get_tensor(name).nbytes
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == total
    assert held.keys() == load_file(source / "model.safetensors").keys()


def test_a_second_save_leaves_no_stale_weights(saved, tmp_path):
    """transformers prefers model.safetensors: one left behind would hide the new shards."""
    source = saved("llama")
    config = read_config(source)
    params = load_params(source, config)
    save_params(tmp_path / "out", params, config)
    params["norm"]["scale"] = params["norm"]["scale"] + 1
    save_params(tmp_path / "out", params, config, max_shard_bytes=20_000)
    assert torch.equal(
        state(tmp_path / "out")["model.norm.weight"], torch.tensor(params["norm"]["scale"])
    )
    save_params(tmp_path / "out", params, config)
    assert [file.name for file in (tmp_path / "out").glob("model*")] == ["model.safetensors"]


def test_device_arrays_are_written_like_host_arrays(saved, tmp_path):
    source = saved("qwen2-tied")
    config = read_config(source)
    save_params(
        tmp_path / "out", jax.tree.map(jax.numpy.asarray, load_params(source, config)), config
    )
    same(state(source), state(tmp_path / "out"))


def test_parameters_that_do_not_fit_are_not_written(saved, tmp_path):
    source = saved("qwen3")
    config = read_config(source)
    params = load_params(source, config)
    del params["norm"]
    params["layers"]["mlp"]["extra"] = np.zeros(3)
    params["layers"]["attention"]["q_norm"]["scale"] = np.zeros((2, 10))
    with pytest.raises(CheckpointError) as raised:
        save_params(tmp_path / "out", params, config)
    for part in (
        "missing (1) norm/scale",
        "unexpected (1) layers/mlp/extra",
        "layers/attention/q_norm/scale is [2, 10] for [3, 10]",
    ):
        assert part in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_an_export_carries_tokenizer_files_and_settings(saved, tmp_path):
    source = saved("qwen2", torch.bfloat16)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("hello")
    (source / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    config = read_config(source)
    export(tmp_path / "out", load_params(source, config), config, source=source)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "out" / name).read_text() == (source / name).read_text()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    # The source's tensors are bfloat16, the export's are not.
    assert written["dtype"] == written["torch_dtype"] == "float32"
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.float32


def test_an_export_replaces_a_checkpoint_but_no_other_folder_and_leaves_no_remains(saved, tmp_path):
    source = saved("llama")
    config = read_config(source)
    params = load_params(source, config)
    export(tmp_path / "out", params, config, source=source, max_shard_bytes=20_000)
    export(tmp_path / "out", params, config, source=source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert not list((tmp_path / "out").glob("model-*"))
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("all of it")
    with pytest.raises(CheckpointError, match="no checkpoint; it would be lost"):
        export(home, params, config, source=source)
    with pytest.raises(CheckpointError, match="replace its own source"):
        export(source, params, config, source=source)


def test_an_export_to_a_link_goes_where_it_leads(saved, tmp_path):
    source = saved("llama")
    config = read_config(source)
    params = load_params(source, config)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "out")
    for _ in range(2):
        export(link, params, config, source=source)
    assert link.is_symlink() and (tmp_path / "out" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out", "source"]


def test_a_failed_export_leaves_the_earlier_checkpoint_whole(saved, tmp_path):
    source = saved("llama")
    config = read_config(source)
    params = load_params(source, config)
    export(tmp_path / "out", params, config, source=source)
    with pytest.raises(CheckpointError):
        export(tmp_path / "out", {"norm": params["norm"]}, config, source=source)
    same(state(tmp_path / "out"), state(source))


def test_an_export_from_a_source_of_another_shape_is_refused(saved, tmp_path):
    source = saved("llama")
    config = read_config(source)
    params = load_params(source, config)
    other = saved("llama", rms_norm_eps=1e-3)
    with pytest.raises(CheckpointError, match="another shape"):
        export(tmp_path / "out", params, config, source=other)
