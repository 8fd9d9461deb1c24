"""Shapes of published models, for benchmarks with random weights, and a tiny one for a CPU."""

import dataclasses

from model.config import ModelConfig
from model.shapes import published


def _nano() -> ModelConfig:
    narrow = {"hidden_size": 128, "intermediate_size": 384, "num_layers": 1, "vocab_size": 512}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    return dataclasses.replace(published("qwen2.5-0.5b"), **narrow, **heads)


SHAPES = {
    "nano": _nano(),
    "0.5b": published("qwen2.5-0.5b"),
    "3b": published("qwen2.5-3b"),
}
