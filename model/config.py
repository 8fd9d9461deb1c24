"""The shape of a model, read from a Hugging Face `config.json`."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from model.config_fields import FAMILIES, refused
from model.errors import BadInput
from model.rope import Rope, Scaling, longest, read_rope, write_rope


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Qwen kind: Qwen2 and Qwen2.5, Qwen3, Qwen3-MoE, and Llama."""

    family: str
    """One of FAMILIES: the `model_type` that an export carries."""
    vocab_size: int
    """Rows of the embedding, padding rows included."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_epsilon: float
    tie_embeddings: bool
    qkv_bias: bool
    """Biases on the query, key and value projections."""
    output_bias: bool
    """A bias on the attention's output projection."""
    qk_norm: bool
    """RMS norms over each head's query and key, before RoPE."""
    max_positions: int
    """Longest sequence that the checkpoint was made for, in tokens."""
    num_tokens: int | None = None
    """Ids from here on are padding of the vocabulary: never sampled, no share of the softmax.

    Sampler and log-probabilities mask them alike. None: every id is a token."""
    num_experts: int = 0
    """Feed-forward networks a layer, of which the router chooses; 0: the layers are dense."""
    experts_per_token: int = 0
    expert_size: int = 0
    """Width of an expert, as `intermediate_size` is a dense layer's."""
    renormalise_experts: bool = False
    """The weights of a token's chosen experts add up to 1, not to their share of the softmax."""
    router_aux_coefficient: float = 0.0
    """What the checkpoint states for its own training; kept for the export, read by nothing here
    (`model.router_aux` is this trainer's)."""
    rope_scaling: Scaling | None = None
    """How RoPE's frequencies are scaled to texts longer than those of pretraining."""


class CheckpointError(BadInput):
    """A checkpoint, or a tensor tree to be written as one, that is not what it must be."""


DTYPES = ("float32", "bfloat16")
"""What a checkpoint may be written in."""


def from_hugging_face(config: Mapping[str, Any]) -> ModelConfig:
    """The shape that a parsed `config.json` describes, with every field accounted for.

    An absent field means what `transformers` takes it to mean for that family. Raises
    `CheckpointError` with all faults at once: a field that is missing, unknown, or asks for
    something that the model does not do.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(
            f"model_type is {family!r}; the families that can be read are {', '.join(FAMILIES)}."
        )
    faults = refused(config, family)

    def size(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            faults.append(f"{name} must be a positive whole number, and is {value!r}")
            return 1
        return value

    heads = size("num_attention_heads")
    width = size("hidden_size")
    # Qwen3's heads have a width of their own: hidden_size / heads would be 64 instead of 128 in
    # the 0.6B model.
    if config.get("head_dim") is None and family != "qwen3" and width % heads:
        faults.append(f"hidden_size {width} is no multiple of num_attention_heads {heads}")
    head_dim = size("head_dim", 128 if family == "qwen3" else max(width // heads, 1))
    kv_heads = size("num_key_value_heads", heads if family == "llama" else None)
    if heads % kv_heads:
        faults.append(
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2:
        faults.append(f"head_dim {head_dim} is odd, and RoPE turns pairs")
    layers = size("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is not None and list(kinds) != ["full_attention"] * layers:
        faults.append(
            f"layer_types must be {layers} times 'full_attention', and is {kinds!r}: sliding "
            f"windows and other kinds of attention are not built"
        )
    epsilon = config.get("rms_norm_eps", 1e-6)
    if not _is_number(epsilon) or epsilon <= 0:
        faults.append(f"rms_norm_eps must be a positive number, and is {epsilon!r}")
        epsilon = 1.0
    tie = config.get("tie_word_embeddings", False)
    bias = config.get("attention_bias", False)
    for name, value in (("tie_word_embeddings", tie), ("attention_bias", bias)):
        if not isinstance(value, bool):
            faults.append(f"{name} must be true or false, and is {value!r}")
    positions = size("max_position_embeddings", 2048 if family == "llama" else 32768)
    rope = read_rope(config, positions, faults)
    result = ModelConfig(
        family=family,
        vocab_size=size("vocab_size"),
        hidden_size=width,
        intermediate_size=size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=rope.theta,
        norm_epsilon=float(epsilon),
        tie_embeddings=tie is True,
        # Qwen2 has no field for its biases: query, key and value always have them.
        qkv_bias=family == "qwen2" or bias is True,
        output_bias=family != "qwen2" and bias is True,
        qk_norm=family in ("qwen3", "qwen3_moe"),
        max_positions=longest(rope.scaling, positions),
        rope_scaling=rope.scaling,
        **(_experts(config, size, faults) if family == "qwen3_moe" else {}),
    )
    if faults:
        raise CheckpointError(
            f"This {family} configuration cannot be read: " + "; ".join(faults) + "."
        )
    return result


def to_hugging_face(config: ModelConfig, *, dtype: str = "float32") -> dict[str, Any]:
    """The `config.json` from which transformers builds the same model.

    `dtype` is what the tensors are stored in. Raises `CheckpointError` where the family has no
    spelling for the shape (a Qwen2 without biases, say).
    """
    if dtype not in DTYPES:
        raise CheckpointError(
            f"A checkpoint is written in {' or '.join(DTYPES)}, and {dtype!r} was asked for."
        )
    result = {
        "architectures": [FAMILIES.get(config.family)],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        # transformers 4 reads one spelling of each pair, transformers 5 the other.
        **write_rope(Rope(config.rope_theta, config.rope_scaling)),
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if config.family != "qwen2":
        result["attention_bias"] = config.qkv_bias
    if config.num_experts:
        result |= {
            # transformers 5 also reads this older spelling; it writes `num_local_experts`.
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.expert_size,
            "norm_topk_prob": config.renormalise_experts,
            "router_aux_loss_coef": config.router_aux_coefficient,
            "output_router_logits": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if config.family != "llama":
        # Some releases honoured a window's size although its flag was false.
        result |= {"use_sliding_window": False, "sliding_window": None}
    read = from_hugging_face(result)
    wanted = dataclasses.replace(config, num_tokens=None)
    if read != wanted:
        differing = [
            f"{field.name} {getattr(wanted, field.name)!r}"
            for field in dataclasses.fields(ModelConfig)
            if getattr(read, field.name) != getattr(wanted, field.name)
        ]
        raise CheckpointError(
            f"A {config.family} configuration cannot express {', '.join(differing)}."
        )
    return result


def read_config(folder: str | Path) -> ModelConfig:
    """The shape of the model in a checkpoint folder."""
    return from_hugging_face(read_json(Path(folder) / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """A checkpoint's JSON object; a missing or broken file is a `CheckpointError`."""
    if not path.parent.is_dir():
        raise CheckpointError(f"There is no checkpoint folder {path.parent}.")
    if not path.is_file():
        raise CheckpointError(f"The checkpoint folder {path.parent} has no {path.name}.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, and holds {type(value).__name__}.")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _experts(
    config: Mapping[str, Any], size: Callable[..., int], faults: list[str]
) -> dict[str, Any]:
    """The fields of the experts, by their names in `ModelConfig`."""
    # Two spellings of one field: the checkpoints' own, and that of transformers 5.
    spelled = [n for n in ("num_experts", "num_local_experts") if config.get(n) is not None]
    count = size(spelled[0] if spelled else "num_experts", 128)
    if len(spelled) == 2 and config["num_experts"] != config["num_local_experts"]:
        faults.append(
            f"the number of experts is stated twice and differs: num_experts "
            f"{config['num_experts']!r}, num_local_experts {config['num_local_experts']!r}"
        )
    chosen = size("num_experts_per_tok", 8)
    if chosen > count:
        faults.append(f"num_experts_per_tok {chosen} is more than the experts, {count}")
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers")
    if step != 1:
        faults.append(
            f"decoder_sparse_step must be 1, and is {step!r}: every layer has experts, as all "
            f"layers are computed by one scan"
        )
    if dense not in (None, []):
        faults.append(
            f"mlp_only_layers must be empty, and is {dense!r}: every layer has experts, as all "
            f"layers are computed by one scan"
        )
    for name in ("norm_topk_prob", "output_router_logits"):
        if not isinstance(config.get(name, False), bool):
            faults.append(f"{name} must be true or false, and is {config[name]!r}")
    coefficient = config.get("router_aux_loss_coef", 0.001)
    if not _is_number(coefficient) or coefficient < 0:
        faults.append(f"router_aux_loss_coef must be a number, 0 or more, and is {coefficient!r}")
        coefficient = 0.0
    return {
        "num_experts": count,
        "experts_per_token": chosen,
        "expert_size": size("moe_intermediate_size", 768),
        "renormalise_experts": config.get("norm_topk_prob", False) is True,
        "router_aux_coefficient": float(coefficient),
    }
