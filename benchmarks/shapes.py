"""Shapes of published models, for benchmarks with random weights."""

SHAPES = {
    "nano": {"hidden": 128, "layers": 1, "heads": 4, "kv_heads": 2, "inter": 384, "vocab": 512},
    "0.5b": {
        "hidden": 896,
        "layers": 24,
        "heads": 14,
        "kv_heads": 2,
        "inter": 4864,
        "vocab": 151_936,
    },
    "3b": {
        "hidden": 2048,
        "layers": 36,
        "heads": 16,
        "kv_heads": 2,
        "inter": 11_008,
        "vocab": 151_936,
    },
}
"""Qwen2.5-0.5B and 3B, and one that a CPU runs at once."""


def qwen_config(name: str):
    """All of them tie their embeddings, and bias query, key and value."""
    from model.config import ModelConfig

    shape = SHAPES[name]
    return ModelConfig(
        family="qwen2",
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["inter"],
        num_layers=shape["layers"],
        num_heads=shape["heads"],
        num_kv_heads=shape["kv_heads"],
        head_dim=shape["hidden"] // shape["heads"],
        rope_theta=1_000_000.0,
        norm_epsilon=1e-6,
        tie_embeddings=True,
        qkv_bias=True,
        output_bias=False,
        qk_norm=False,
        max_positions=32_768,
    )
