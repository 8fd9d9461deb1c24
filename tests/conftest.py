"""Models that several test files share: tiny, random, and with no field at its default."""

import contextlib
import functools
import json
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any, NamedTuple

# Where plugins are installed and their devices are not, JAX would look for them, and tell that
# there are none.
if not list(Path("/dev").glob("nvidia[0-9]*")) and not list(Path("/dev").glob("accel*")):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")

# LLVM's passes are half of compiling programs as small as a test's. Processes of tests inherit it.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Int

from model.config import ModelConfig
from model.parameters import initialise


def scattered(shapes, seed):
    """Random leaves for a tree of shapes: a fresh model's biases are 0 and its norms 1."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        values = rng.normal(size=shape.shape) * 0.3
        return jnp.asarray(values + (path[-1].key == "scale"), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


LONG = ("mesh_runs", "hosts", "mesh", "run_kinds", "lora_runs", "loop", "run", "benchmarks", "plan")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: else one of the two processes is alone with one at the end."""
    places = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """Every size differs from every other, and the last 4 of its 29 ids are no tokens."""
    return ModelConfig(
        family="qwen3",
        vocab_size=29,
        hidden_size=24,
        intermediate_size=40,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        rope_theta=4321.0,
        norm_epsilon=3e-5,
        tie_embeddings=False,
        qkv_bias=True,
        output_bias=True,
        qk_norm=True,
        max_positions=96,
        num_tokens=25,
    )


@pytest.fixture(scope="session")
def tiny_params(tiny_config):
    shapes = jax.eval_shape(lambda key: initialise(tiny_config, key), jax.random.key(0))
    return scattered(shapes, seed=1)


@pytest.fixture(scope="module", autouse=True)
def own_programs():
    """A file's compiled programs go with it. Each holds memory maps, of which Linux lets a process
    have 65,530: without this a worker ends near the close of the suite, in XLA's compiler."""
    yield
    jax.clear_caches()


@pytest.fixture
def optimised():
    """For a test of what the compiler makes of a program."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


class Prompts(NamedTuple):
    tokens: Int[Array, "N P"]
    positions: Int[Array, "N P"]


def left_padded(texts, width, pad_id=0) -> Prompts:
    tokens = np.full((len(texts), width), pad_id, np.int32)
    positions = np.full((len(texts), width), -1, np.int32)
    for row, ids in enumerate(texts):
        tokens[row, width - len(ids) :] = ids
        positions[row, width - len(ids) :] = np.arange(len(ids))
    return Prompts(jnp.asarray(tokens), jnp.asarray(positions))


@pytest.fixture(scope="session")
def pad_left():
    """Texts of ids -> tokens and positions, padded on the left to a width."""
    return left_padded


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    """Three prompts in 6 columns: a full one, one of 3 tokens, one of a single token."""
    return left_padded([[7, 3, 11, 20, 3, 1], [5, 0, 24], [9]], 6)


class Checkpoint(NamedTuple):
    folder: Path
    reference: Any
    """The same model in transformers."""
    config: ModelConfig
    params: Any


SHAPE = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 3e-3,
    "max_position_embeddings": 96,
    "rope_parameters": {"rope_theta": 321.0, "rope_type": "default"},
    "bos_token_id": 3,
    "eos_token_id": 5,
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """(model type, **fields) -> a random checkpoint that transformers wrote, made once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from model.config import read_config
    from model.load import load_params

    @functools.cache
    def make(model_type: str, **fields) -> Checkpoint:
        torch.manual_seed(7)
        config = AutoConfig.for_model(model_type, **SHAPE | fields)
        reference = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.3 + ("norm" in name))
        folder = tmp_path_factory.mktemp(model_type)
        reference.save_pretrained(folder)
        config = read_config(folder)
        params = jax.tree.map(jnp.asarray, load_params(folder, config))
        return Checkpoint(folder, reference, config, params)

    return make


@pytest.fixture(scope="session")
def tiny_nano(tmp_path_factory):
    """The bundled model's tokenizer around a model that compiles in a second."""
    from rlx.policy import checkpoint_folder

    folder = tmp_path_factory.mktemp("tiny")
    for file in checkpoint_folder("nano").iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def recipe(tiny_nano, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(f"model:\n  path: {tiny_nano}\n")
    return path


@pytest.fixture(scope="session")
def sqlite_file(tmp_path_factory):
    """`sqlite_file(script)`: the path of a database that the script made."""

    def made(script: str) -> str:
        path = tmp_path_factory.mktemp("sql") / "music.sqlite"
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.executescript(script)
        return str(path)

    return made
