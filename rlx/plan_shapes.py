"""What a run holds, of values that are not there: shapes, types, and their places on devices."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import PyTree

from model.config import ModelConfig, read_config, read_json
from model.errors import BadInput
from model.heads import with_value_head
from model.parameters import cast, initialise
from model.product import activations
from model.shapes import names, published
from model.sharding import BATCH, ParameterAxes, shardings, without_mesh
from model.tokenizer import load_tokenizer
from rlx.derived import uses_lora
from rlx.frozen import HOST, frozen_dtype
from rlx.lora import Lora, adapt
from rlx.policy import BUNDLED, Policy
from rlx.settings import Config


class Tokens(NamedTuple):
    """What a program needs of a tokenizer."""

    stop_ids: tuple[int, ...]
    pad_id: int


def model_shape(path: str, setting: str = "model.path") -> tuple[ModelConfig, Path | None]:
    """Of a checkpoint's folder, in which `config.json` suffices, or of a published model."""
    folder = BUNDLED.get(path, Path(path))
    if (folder / "config.json").is_file():
        return read_config(folder), folder
    known = published(path) if path else None
    if known is None:
        raise BadInput(
            f"{setting}: expected a folder with a config.json, or the name of a model whose shape "
            f"is known ({', '.join(names())}); came {path or 'nothing'}."
        )
    return known, None


def abstract_policy(config: Config) -> Policy:
    """`load_policy` without a weight."""
    shape, folder = model_shape(config.model.path)
    tokens = Tokens((shape.vocab_size - 1,), 0)
    if folder is not None and (folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(folder)
        shape = dataclasses.replace(shape, num_tokens=len(tokenizer))
        tokens = Tokens(tokenizer.stop_ids, tokenizer.pad_id)
    elif folder is not None:
        ended = read_json(folder / "config.json").get("eos_token_id")
        tokens = Tokens(tuple(ended) if isinstance(ended, list) else (ended or 0,), 0)
    with without_mesh():
        params = jax.eval_shape(lambda: initialise(shape, jax.random.key(0)))
        adapted = None
        if uses_lora(config):
            params, adapters = jax.eval_shape(lambda x: _adapted(config, shape, x), params)
            adapted = Lora(adapters, 1.0)
    return Policy(folder, shape, tokens, params, jnp.dtype(config.model.dtype), adapted)


def _adapted(config: Config, shape: ModelConfig, params: PyTree) -> tuple[PyTree, PyTree]:
    base, adapted = adapt(config, shape, params, jax.random.key(0))
    return base, adapted.adapters


def frozen_params(config: Config, params: PyTree, compute: Any) -> PyTree:
    """`freeze`, of shapes."""
    dtype = frozen_dtype(config, compute)
    wide = jnp.promote_types(dtype, activations(compute))
    return jax.eval_shape(lambda x: cast(x, dtype, wide), params)


def scorer_params(shape: ModelConfig) -> PyTree:
    """Of a critic or a reward model of this shape."""

    def made():
        params = initialise(shape, jax.random.key(0))
        return with_value_head(shape, {k: x for k, x in params.items() if k != "lm_head"})

    with without_mesh():
        return jax.eval_shape(made)


class Places:
    """Puts shapes on the devices of a mesh, or on a single one."""

    def __init__(self, mesh: Mesh | None, devices: list[Any]):
        self.mesh, self.devices = mesh, devices

    @property
    def shards(self) -> int:
        """Parts of a batch."""
        return math.prod(self.mesh.shape[axis] for axis in BATCH) if self.mesh else 1

    def _put(self, tree: PyTree, place: Callable) -> PyTree:
        def of_leaf(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x))

        return jax.tree.map(of_leaf, tree)

    def whole(self, tree: PyTree) -> PyTree:
        if self.mesh is None:
            return self._put(tree, lambda x: SingleDeviceSharding(self.devices[0]))
        return self._put(tree, lambda x: NamedSharding(self.mesh, PartitionSpec()))

    def rows(self, tree: PyTree, *counts: int) -> PyTree:
        """Arrays whose first axis is one of `counts` lie split over the batch's axes."""
        if self.mesh is None:
            return self.whole(tree)

        def place(x):
            along = x.ndim > 0 and x.shape[0] in counts and x.shape[0] % self.shards == 0
            return NamedSharding(self.mesh, PartitionSpec(BATCH) if along else PartitionSpec())

        return self._put(tree, place)

    def parameters(self, axes: ParameterAxes, tree: PyTree, host: bool = False) -> PyTree:
        """Parameters, and what belongs to them; with `host`, in the memory of the devices' host."""
        if self.mesh is None:
            where = jax.tree.map(lambda x: SingleDeviceSharding(self.devices[0]), tree)
        else:
            where = shardings(self.mesh, axes, tree)

        def put(x, place):
            place = place.with_memory_kind(HOST) if host else place
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

        return jax.tree.map(put, tree, where)


def device_bytes(tree: PyTree) -> int:
    """Of placed shapes, in the memory of each device; one that is held twice counts once."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in {id(x): x for x in jax.tree.leaves(tree)}.values()
        if x.sharding.memory_kind != HOST
    )
