"""What the speed benchmarks share: flags, sizes, model, prompts, update batch, the line they print.

The flags, the NumPy draws and the keys of the line are those of the programs that measure public
peers in the same way, so that one script can run them in turn.
"""

import argparse
import importlib.metadata
import json
import os
import sys
from pathlib import Path
from statistics import NormalDist

import numpy as np
from timing import process_megabytes

ROOT = Path(__file__).parents[1]
# Run as a program, a file finds its own folder only.
sys.path.insert(0, str(ROOT))

SIZES = {
    "tiny": {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "inter": 688, "vocab": 512},
    "small": {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 2, "inter": 1408, "vocab": 32000},
}
MODELS = Path(os.environ.get("PEER_MODELS", "~/.cache/rlx-peers/models")).expanduser()
PAD = 0
SPECIAL = 3
"""Ids below it are no words: padding, end of text, unknown."""
AT_LIMIT, MEAN_SHARE = 0.05, 0.25
"""Of the long-tailed lengths: share of rows that reach the limit, and mean length in limits."""


def parser(description: str, *, reps: int = 5, warmup: int = 2) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=description.splitlines()[0])
    result.add_argument("--size", default="tiny", choices=list(SIZES))
    for name in SIZES["tiny"]:
        result.add_argument("--" + name.replace("_", "-"), type=int, help="instead of the size's")
    result.add_argument("--model-dir", help="a checkpoint; without one: random weights")
    result.add_argument("--prompts", type=int, default=8)
    result.add_argument("--samples", type=int, default=8)
    result.add_argument("--prompt-len", type=int, default=64)
    result.add_argument("--new-tokens", type=int, default=128)
    result.add_argument("--micro-batch", type=int, default=8, help="rows of a micro-batch")
    result.add_argument("--reps", type=int, default=reps)
    result.add_argument("--warmup", type=int, default=warmup)
    result.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16"],
        help="what is computed in; master parameters are float32 in either case",
    )
    result.add_argument("--threads", type=int, default=2, help="cores to use")
    result.add_argument("--seed", type=int, default=0)
    result.add_argument(
        "--length-distribution",
        default="full",
        choices=["full", "long-tailed"],
        help="of completions; long-tailed: log-normal, mean a quarter of the limit, a twentieth "
        "of the rows at it",
    )
    return result


def settle(options: argparse.Namespace) -> argparse.Namespace:
    """Fills in what the size decides, and keeps to the cores asked for. To be called before JAX
    starts its threads."""
    for name, value in SIZES[options.size].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    shape = {name: getattr(options, name) for name in SIZES["tiny"]}
    options.name = options.size
    if shape != SIZES[options.size]:
        letters = zip("hlnkiv", shape.values(), strict=True)
        options.name = "-".join(f"{letter}{value}" for letter, value in letters)
    if options.model_dir is None and (MODELS / options.name).is_dir():
        options.model_dir = str(MODELS / options.name)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[: options.threads])
    return options


def model_config(options: argparse.Namespace):
    """The shape that the flags describe: Qwen2 with tied embeddings."""
    from model.config import ModelConfig

    return ModelConfig(
        family="qwen2",
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.inter,
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.hidden // options.heads,
        rope_theta=1_000_000.0,
        norm_epsilon=1e-6,
        tie_embeddings=True,
        qkv_bias=True,
        output_bias=False,
        qk_norm=False,
        max_positions=max(2048, options.prompt_len + options.new_tokens),
    )


def load_model(options: argparse.Namespace):
    """Configuration and float32 parameters: the checkpoint's, or random ones."""
    import jax
    import jax.numpy as jnp

    from model.config import read_config
    from model.load import load_params
    from model.parameters import initialise

    if options.model_dir is None:
        config = model_config(options)
        return config, initialise(config, jax.random.key(options.seed))
    config = read_config(Path(options.model_dir))
    # asarray may keep the file's own memory, which a donated buffer must not be.
    return config, jax.tree.map(jnp.array, load_params(options.model_dir, config))


def prompt_ids(options: argparse.Namespace) -> np.ndarray:
    """Prompts x prompt length, none of them special."""
    rng = np.random.default_rng(options.seed + 1)
    return rng.integers(SPECIAL, options.vocab, size=(options.prompts, options.prompt_len))


def update_arrays(options: argparse.Namespace) -> tuple[np.ndarray, ...]:
    """Prompts `[B, P]`, completions `[B, T]`, advantages `[B]` and old log-probabilities `[B, T]`
    of one fixed policy update."""
    rows = options.prompts * options.samples
    rng = np.random.default_rng(options.seed + 2)
    prompts = np.repeat(prompt_ids(options), options.samples, axis=0)
    completions = rng.integers(SPECIAL, options.vocab, size=(rows, options.new_tokens))
    advantages = rng.standard_normal(rows).astype(np.float32)
    noise = rng.standard_normal((rows, options.new_tokens))
    return (
        prompts,
        completions,
        advantages,
        (-np.log(options.vocab) + 0.1 * noise).astype(np.float32),
    )


def lengths(options: argparse.Namespace) -> np.ndarray:
    """Tokens of each row's completion.

    Long-tailed: the quantiles of min(X, 1) times the limit, with X log-normal, in random order.
    """
    rows = options.prompts * options.samples
    if options.length_distribution == "full":
        return np.full(rows, options.new_tokens)
    normal = NormalDist()
    at_limit = normal.inv_cdf(1 - AT_LIMIT)

    def mean(sigma: float) -> float:
        # P(X >= 1) = AT_LIMIT puts the logarithm's mean at -at_limit * sigma.
        below = np.exp(-at_limit * sigma + sigma**2 / 2) * normal.cdf(at_limit - sigma)
        return below + AT_LIMIT

    low, high = 0.01, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) > MEAN_SHARE else (low, middle)
    quantiles = [normal.inv_cdf((i + 0.5) / rows) for i in range(rows)]
    shares = np.minimum(np.exp(low * (np.array(quantiles) - at_limit)), 1.0)
    order = np.random.default_rng(options.seed + 3).permutation(rows)
    return np.clip(np.ceil(shares * options.new_tokens), 1, options.new_tokens).astype(int)[order]


def parameter_count(options: argparse.Namespace) -> int:
    head = options.hidden // options.heads
    projected = (options.heads + 2 * options.kv_heads) * head
    layer = options.hidden * projected + projected + options.heads * head * options.hidden
    layer += 3 * options.hidden * options.inter + 2 * options.hidden
    return options.vocab * options.hidden + options.layers * layer + options.hidden


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}


def report(bench: str, options: argparse.Namespace, **fields) -> None:
    """Prints the one JSON line of a benchmark."""
    line = {
        "bench": bench,
        "impl": "rlx",
        "size": options.name,
        "dtype": options.dtype,
        "params_m": round(parameter_count(options) / 1e6, 3),
        "prompts": options.prompts,
        "samples": options.samples,
        "prompt_len": options.prompt_len,
        "new_tokens": options.new_tokens,
        "micro_batch": options.micro_batch,
        "length_distribution": options.length_distribution,
        "weights": "random" if options.model_dir is None else "checkpoint",
        **fields,
        "versions": versions(),
        "maxrss_process_mb": process_megabytes(),
    }
    print(json.dumps(line), flush=True)
