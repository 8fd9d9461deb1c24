"""The table of names: which stored tensor each leaf of the parameters is, and in what layout."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from model.config import ModelConfig


class Row(NamedTuple):
    """A leaf of the parameters, and the tensor that stores it.

    Axes are letters: V vocabulary, D model width, H heads, K key-value heads, d head width, F
    feed-forward width, E experts, f an expert's width; 1 is the score. A bracket is one axis of
    the stored tensor: `(H d) D` is a matrix [H * d, D], and the leaf `D H d` is its transpose,
    unfolded.
    A name with `{expert}` stands for a tensor of each expert, stacked in the leaf.
    """

    path: str
    axes: str
    name: str
    stored: str
    present: Callable[[ModelConfig], bool] = lambda config: True


SCORE = "score.weight"
"""The one tensor that a reward model has and a policy has not."""

OUTER = (
    Row("embed/embedding", "V D", "model.embed_tokens.weight", "V D"),
    Row("norm/scale", "D", "model.norm.weight", "D"),
)
LM_HEAD = Row("lm_head/kernel", "D V", "lm_head.weight", "V D", lambda c: not c.tie_embeddings)
SCORE_HEAD = Row("value_head/kernel", "D 1", SCORE, "1 D")
# Paths under `layers/`, where each leaf has the layers stacked on a leading axis; names under
# `model.layers.{layer}.`.
LAYER = (
    Row("attention_norm/scale", "D", "input_layernorm.weight", "D"),
    Row("attention/q_proj/kernel", "D H d", "self_attn.q_proj.weight", "(H d) D"),
    Row("attention/q_proj/bias", "H d", "self_attn.q_proj.bias", "(H d)", lambda c: c.qkv_bias),
    Row("attention/k_proj/kernel", "D K d", "self_attn.k_proj.weight", "(K d) D"),
    Row("attention/k_proj/bias", "K d", "self_attn.k_proj.bias", "(K d)", lambda c: c.qkv_bias),
    Row("attention/v_proj/kernel", "D K d", "self_attn.v_proj.weight", "(K d) D"),
    Row("attention/v_proj/bias", "K d", "self_attn.v_proj.bias", "(K d)", lambda c: c.qkv_bias),
    Row("attention/o_proj/kernel", "H d D", "self_attn.o_proj.weight", "D (H d)"),
    Row("attention/o_proj/bias", "D", "self_attn.o_proj.bias", "D", lambda c: c.output_bias),
    Row("attention/q_norm/scale", "d", "self_attn.q_norm.weight", "d", lambda c: c.qk_norm),
    Row("attention/k_norm/scale", "d", "self_attn.k_norm.weight", "d", lambda c: c.qk_norm),
    Row("mlp_norm/scale", "D", "post_attention_layernorm.weight", "D"),
    Row("mlp/gate_proj/kernel", "D F", "mlp.gate_proj.weight", "F D", lambda c: not c.num_experts),
    Row("mlp/up_proj/kernel", "D F", "mlp.up_proj.weight", "F D", lambda c: not c.num_experts),
    Row("mlp/down_proj/kernel", "F D", "mlp.down_proj.weight", "D F", lambda c: not c.num_experts),
    Row("mlp/router/kernel", "D E", "mlp.gate.weight", "E D", lambda c: c.num_experts > 0),
    *(
        Row(
            f"mlp/experts/{name}/kernel",
            axes,
            f"mlp.experts.{{expert}}.{name}.weight",
            stored,
            lambda c: c.num_experts > 0,
        )
        for name, axes, stored in (
            ("gate_proj", "D f", "f D"),
            ("up_proj", "D f", "f D"),
            ("down_proj", "f D", "D f"),
        )
    ),
)


class Tensor(NamedTuple):
    """One stored tensor of one model, and its place in the parameters."""

    path: str
    layer: int | None
    expert: int | None
    leaf: tuple[int, ...]
    """The leaf's shape, without the axes of layers and of experts."""
    stored: tuple[int, ...]
    unfolded: tuple[int, ...]
    order: tuple[int, ...]
    """Where each axis of the leaf is among the unfolded axes of the stored tensor."""

    @property
    def place(self) -> tuple[int, ...]:
        """Where it is in the stacked leaf: its layer, and its expert."""
        return tuple(x for x in (self.layer, self.expert) if x is not None)

    def stacked(self, config: ModelConfig) -> tuple[int, ...]:
        """The shape of the whole leaf."""
        return (config.num_layers, config.num_experts)[: len(self.place)] + self.leaf

    def to_leaf(self, tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(self.unfolded).transpose(self.order)

    def to_stored(self, leaf: np.ndarray) -> np.ndarray:
        return leaf.transpose(np.argsort(self.order)).reshape(self.stored)


def tensors(config: ModelConfig) -> dict[str, Tensor]:
    """The tensors that a checkpoint of this model as a policy holds, by name."""
    return _tensors(config, (*OUTER, LM_HEAD))


def scorer_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """The tensors that a checkpoint of this model as a reward model holds, by name."""
    return _tensors(config, (*OUTER, SCORE_HEAD))


def _tensors(config: ModelConfig, outer: tuple[Row, ...]) -> dict[str, Tensor]:
    sizes = {
        "1": 1,
        "V": config.vocab_size,
        "D": config.hidden_size,
        "H": config.num_heads,
        "K": config.num_kv_heads,
        "d": config.head_dim,
        "F": config.intermediate_size,
        "E": config.num_experts,
        "f": config.expert_size,
    }

    def tensor(row: Row, path: str, layer: int | None, expert: int | None = None) -> Tensor:
        unfolded = row.stored.replace("(", "").replace(")", "").split()
        folded = row.stored.replace("(H d)", "Hd").replace("(K d)", "Kd").split()
        return Tensor(
            path=path,
            layer=layer,
            expert=expert,
            leaf=tuple(sizes[axis] for axis in row.axes.split()),
            stored=tuple(math.prod(sizes[axis] for axis in axes) for axes in folded),
            unfolded=tuple(sizes[axis] for axis in unfolded),
            order=tuple(unfolded.index(axis) for axis in row.axes.split()),
        )

    result = {row.name: tensor(row, row.path, None) for row in outer if row.present(config)}
    for layer in range(config.num_layers):
        for row in LAYER:
            if not row.present(config):
                continue
            name, path = f"model.layers.{layer}.{row.name}", f"layers/{row.path}"
            if "{expert}" not in name:
                result[name] = tensor(row, path, layer)
                continue
            for expert in range(config.num_experts):
                result[name.format(expert=expert)] = tensor(row, path, layer, expert)
    return result
