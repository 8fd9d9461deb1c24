"""ModelConfig: every field of a config.json is used, refused by name, or known to be inert."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from model.config import (
    CheckpointError,
    ModelConfig,
    from_hugging_face,
    read_config,
    to_hugging_face,
)
from model.config_fields import FAMILIES, INERT

# As Qwen publishes them.
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000,
    "rope_interleaved": False,
    "is_llama_config": True,
    "pretraining_tp": 1,
    "mlp_bias": False,
    "attention_bias": False,
}
QWEN3_30B_A3B = QWEN3_06B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
PUBLISHED = {
    "qwen2": QWEN25_05B,
    "qwen3": QWEN3_06B,
    "qwen3_moe": QWEN3_30B_A3B,
    "llama": LLAMA,
}
CLASSES = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "llama": LlamaConfig,
}


def refuses(config, match):
    with pytest.raises(CheckpointError, match=match):
        from_hugging_face(config)


def test_qwen25_reads_as_published():
    assert from_hugging_face(QWEN25_05B) == ModelConfig(
        family="qwen2",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        rope_theta=1e6,
        norm_epsilon=1e-6,
        tie_embeddings=True,
        qkv_bias=True,
        output_bias=False,
        qk_norm=False,
        max_positions=32768,
    )


def test_qwen3_heads_have_the_width_that_the_file_states():
    config = from_hugging_face(QWEN3_06B)
    assert config.head_dim == 128  # hidden_size / heads would be 64
    assert config.qk_norm and not config.qkv_bias and not config.output_bias
    large = QWEN3_06B | {"hidden_size": 2560, "num_attention_heads": 32}
    assert from_hugging_face(large).head_dim == 128  # not 80


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family):
    """A field that the file leaves out means what it means there, RoPE's base among them."""
    sizes = {
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = from_hugging_face({"model_type": family} | sizes)
    reference = CLASSES[family](**sizes)
    assert config.tie_embeddings == reference.tie_word_embeddings
    assert config.rope_theta == reference.rope_parameters["rope_theta"]
    assert config.norm_epsilon == reference.rms_norm_eps
    assert config.max_positions == reference.max_position_embeddings
    assert config.head_dim == getattr(reference, "head_dim", 64 // 4)
    assert config.qkv_bias == getattr(reference, "attention_bias", family == "qwen2")
    if family == "qwen3_moe":
        assert config.num_experts == reference.num_experts
        assert config.experts_per_token == reference.num_experts_per_tok
        assert config.expert_size == reference.moe_intermediate_size
        assert config.renormalise_experts == reference.norm_topk_prob
        assert config.router_aux_coefficient == reference.router_aux_loss_coef


@pytest.mark.parametrize("family", FAMILIES)
def test_all_that_transformers_writes_is_accounted_for(family):
    whole = CLASSES[family](num_key_value_heads=4, num_hidden_layers=2).to_dict()
    whole["architectures"] = [FAMILIES[family]]
    from_hugging_face(json.loads(json.dumps(whole)))


def test_attention_bias_gives_biases_to_the_output_projection_too():
    for published in (QWEN3_06B, LLAMA):
        config = from_hugging_face(published | {"attention_bias": True})
        assert config.qkv_bias and config.output_bias
    refuses(QWEN25_05B | {"attention_bias": False}, "unknown fields.*attention_bias")


def test_both_spellings_of_the_rope_base_are_read_and_a_contradiction_refused():
    base = {k: v for k, v in QWEN3_06B.items() if k not in ("rope_theta", "rope_scaling")}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert from_hugging_face(base | new).rope_theta == 5e5
    assert from_hugging_face(base | new | {"rope_theta": 500000}).rope_theta == 5e5
    refuses(base | new | {"rope_theta": 1e4}, "stated twice and differs: rope_theta 10000.0")


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2.0},
        {"type": "dynamic", "factor": 2.0},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ],
)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_scaled_rope_is_refused_by_name(scaling, field):
    kind = scaling.get("rope_type", scaling.get("type"))
    refuses(LLAMA | {field: scaling}, f"{field} asks for .*{kind}")


def test_a_window_is_inert_while_its_flag_is_false():
    """The mere number 4 must neither be refused nor shorten the attention."""
    with_number = QWEN25_05B | {"sliding_window": 4, "use_sliding_window": False}
    assert from_hugging_face(with_number) == from_hugging_face(QWEN25_05B)
    refuses(with_number | {"use_sliding_window": True}, "use_sliding_window is supported at False")
    mixed = ["full_attention"] * 23 + ["sliding_attention"]
    refuses(QWEN25_05B | {"layer_types": mixed}, "layer_types must be 24 times 'full_attention'")
    from_hugging_face(QWEN25_05B | {"layer_types": ["full_attention"] * 24})


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"attention_dropout": 0.1},
        {"pretraining_tp": 2},
        {"mlp_bias": True},
        {"quantization_config": {"quant_method": "awq"}},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"rope_interleaved": True},
        {"tie_word_embeddings": "yes"},
        {"rms_norm_eps": 0},
        {"vocab_size": None},
        {"hidden_size": 576.0},
        {"num_hidden_layers": 0},
        {"num_key_value_heads": 2},
        {"head_dim": 63},
        {"rope_theta": -1.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_the_model_does_not_do_is_refused_by_name(change):
    refuses(LLAMA | change, next(iter(change)))


def test_qwen3_coder_reads_as_published():
    """Its file states what its family does anyway."""
    coder = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
    assert from_hugging_face(QWEN3_30B_A3B | coder) == from_hugging_face(QWEN3_30B_A3B)
    for change in ({"qkv_bias": True}, {"use_qk_norm": False}):
        refuses(QWEN3_30B_A3B | coder | change, next(iter(change)))
    refuses(LLAMA | {"use_qk_norm": True}, "use_qk_norm")


def test_other_families_are_refused_with_the_list():
    for family in ("qwen3_next", "mistral", None):
        refuses(LLAMA | {"model_type": family}, f"{family!r}.*qwen2, qwen3, qwen3_moe, llama")


def test_all_faults_come_in_one_error():
    spoilt = LLAMA | {"logit_scale": 2.0, "alibi": True, "hidden_act": "gelu", "vocab_size": -1}
    with pytest.raises(CheckpointError) as raised:
        from_hugging_face(spoilt)
    for part in ("unknown fields", "alibi, logit_scale", "hidden_act", "vocab_size"):
        assert part in str(raised.value)


def test_no_inert_field_changes_the_model():
    for name, values in INERT.items():
        for value in values if isinstance(values, tuple) else (17, "x"):
            assert from_hugging_face(LLAMA | {name: value}) == from_hugging_face(LLAMA), name


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_what_is_written_reads_back(family, data):
    count = st.integers(1, 64)
    groups, kv_heads = data.draw(count), data.draw(count)
    bias = data.draw(st.booleans())
    config = ModelConfig(
        family=family,
        vocab_size=data.draw(count),
        hidden_size=data.draw(count),
        intermediate_size=data.draw(count),
        num_layers=data.draw(count),
        num_heads=groups * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=2 * data.draw(count),
        rope_theta=data.draw(st.floats(1, 1e8)),
        norm_epsilon=data.draw(st.floats(1e-12, 1e-2)),
        tie_embeddings=data.draw(st.booleans()),
        qkv_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        max_positions=data.draw(count),
    )
    if family == "qwen3_moe":
        chosen = data.draw(count)
        config = dataclasses.replace(
            config,
            num_experts=chosen + data.draw(count),
            experts_per_token=chosen,
            expert_size=data.draw(count),
            renormalise_experts=data.draw(st.booleans()),
            router_aux_coefficient=data.draw(st.floats(0, 1)),
        )
    written = json.loads(json.dumps(to_hugging_face(config, dtype="bfloat16")))
    assert from_hugging_face(written) == config


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_is_written(family, tmp_path):
    config = from_hugging_face(PUBLISHED[family] | {"rope_theta": 7.5e5})
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(config)))
    reference = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(reference, CLASSES[family])
    assert reference.rope_parameters == {"rope_theta": 7.5e5, "rope_type": "default"}
    assert reference.head_dim == config.head_dim
    assert reference.tie_word_embeddings == config.tie_embeddings
    assert getattr(reference, "sliding_window", None) is None
    assert str(reference.dtype) == "torch.float32"
    assert read_config(tmp_path) == config


def test_a_shape_that_the_family_cannot_spell_is_not_written():
    qwen2 = from_hugging_face(QWEN25_05B)
    for change in ({"qkv_bias": False}, {"output_bias": True}, {"qk_norm": True}):
        with pytest.raises(CheckpointError, match=f"cannot express {next(iter(change))}"):
            to_hugging_face(dataclasses.replace(qwen2, **change))
    with pytest.raises(CheckpointError, match="'float16' was asked for"):
        to_hugging_face(qwen2, dtype="float16")


def test_a_missing_or_broken_file_is_said_so(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        read_config(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        read_config(tmp_path)
