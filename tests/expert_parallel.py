"""Run by test_moe.py in a process of its own with 4 CPU devices: experts split over them give what
one device gives, alone in `shard_map` and as a whole model on a mesh. Prints the largest gaps."""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from model.config import read_config
from model.moe import Kernel, Kernels, balance_loss, mixture
from model.parameters import initialise
from model.qwen import Qwen
from model.sample import sample
from model.sharding import AXES


def gap(found, wanted):
    gaps = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)), found, wanted)
    return float(max(jax.tree.leaves(gaps)))


def of_mixture() -> float:
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    kernels = Kernels((Kernel(normal(8, 6, 5)), Kernel(normal(8, 6, 5))), Kernel(normal(8, 5, 6)))
    ranks = rng.random((30, 8))
    # Nobody goes to expert 5, everybody to expert 1.
    ranks[:, 5], ranks[:, 1] = 2, -1
    experts = jnp.asarray(np.argsort(ranks, axis=1)[:, :3], jnp.int32)
    operands = normal(30, 6), normal(30, 3), kernels

    def total(x, weights, kernels, part):
        return jnp.sum(part(x, experts, weights, kernels) ** 2)

    alone = functools.partial(mixture, dtype=jnp.float32)
    mesh = Mesh(np.array(jax.devices()), ("experts",))
    whole, split = PartitionSpec(), PartitionSpec("experts")
    parallel = jax.shard_map(
        functools.partial(alone, axis="experts"),
        mesh=mesh,
        in_specs=(whole, whole, whole, split),
        out_specs=whole,
        check_vma=False,
    )
    value = jax.jit(jax.value_and_grad(total, (0, 1, 2)), static_argnums=3)
    return gap(value(*operands, parallel), value(*operands, alone))


def of_model(folder: str) -> dict[str, float]:
    config = read_config(folder)
    params = jax.tree.map(lambda x: 10 * x, initialise(config, jax.random.key(0)))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 400, (4, 6)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(6), (4, 6)).at[1].add(-2)
    positions = jnp.maximum(positions, -1)

    @jax.jit
    def trained(params):
        hidden, left = Qwen(config).apply({"params": params}, tokens, positions, mutable=["router"])
        load = left["router"]["layers"]["mlp"]["load"]
        seen = jnp.where(positions[..., None] >= 0, hidden, 0)
        return jnp.sum(jnp.sin(seen)) + balance_loss(load)

    def sampled(params):
        keys = jax.random.split(jax.random.key(3), (4, 2))
        return jax.jit(
            lambda params: sample(
                config, params, tokens, positions, keys,
                max_new_tokens=4, stop_ids=jnp.array([2]), pad_id=0,
            )
        )(params)  # fmt: skip

    def both():
        return jax.device_get((jax.value_and_grad(trained)(params), sampled(params)))

    wanted, samples = both()
    mesh = jax.make_mesh((1, 2, 2), AXES, (AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        found, on_mesh = both()
    same = np.array_equal(samples.tokens, on_mesh.tokens)
    return {"gradient": gap(found, wanted), "other_tokens": float(not same)}


if __name__ == "__main__":
    print(json.dumps({"mixture": of_mixture()} | of_model(sys.argv[1])))
