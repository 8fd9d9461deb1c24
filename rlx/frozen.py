"""Models that never change, a reference or a reward model: in what type, and in whose memory.

frozen = freeze(config, policy.params, policy.dtype)    # once
score(model, on_device(frozen), ...)                    # in the program that reads them
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from model.errors import BadInput
from model.parameters import cast
from model.product import activations
from rlx.settings import Config

HOST = "pinned_host"
"""The memory that a device copies from without the processor's help."""


def frozen_dtype(config: Config, compute: DTypeLike) -> jnp.dtype:
    """Of kernels and embeddings; `auto` is the compute type, in which they are multiplied."""
    chosen = config.model.frozen_dtype
    return jnp.dtype(compute if chosen == "auto" else chosen)


def freeze(config: Config, params: PyTree, compute: DTypeLike) -> PyTree:
    """The parameters as a run keeps them. Raises BadInput where there is no host memory."""
    dtype = frozen_dtype(config, compute)
    # Where activations are wider than kernels (on CPU), embeddings and biases are read as wide.
    params = cast(params, dtype, jnp.promote_types(dtype, activations(compute)))
    if config.model.frozen_memory == "host":
        params = jax.tree.map(on_host, params)
    return params


def freeze_reference(config: Config, params: PyTree, compute: DTypeLike) -> PyTree:
    """`freeze` of what the policy is held to.

    Raises BadInput too where it would be another model than the policy is at the start. A kernel
    is rounded to the compute type before every product in any case, so that in that type the two
    are equal to the bit; in a coarser one every KL begins above 0, and no pair ties.
    """
    dtype = frozen_dtype(config, compute)
    if dtype.itemsize < jnp.dtype(compute).itemsize:
        raise BadInput(
            f"model.frozen_dtype: expected auto or {jnp.dtype(compute)}, since the reference must "
            f"be the policy as it began, which computes in {jnp.dtype(compute)} here "
            f"(model.dtype); came {dtype}."
        )
    return freeze(config, params, compute)


def on_host(leaf: jax.Array) -> jax.Array:
    """The same array, split over devices as it was, in the memory of their hosts."""
    kinds = {memory.kind for device in leaf.devices() for memory in device.addressable_memories()}
    if HOST not in kinds:
        raise BadInput(
            f"model.frozen_memory: expected device, since the {jax.default_backend()} devices here "
            f"reach {', '.join(sorted(kinds)) or 'no other memory'} and no {HOST}; came host."
        )
    return jax.device_put(leaf, leaf.sharding.with_memory_kind(HOST))


def on_device(params: PyTree) -> PyTree:
    """Inside a program: what lies in host memory, brought to the device for as long as the program
    reads it. Other leaves are as they are."""

    def leaf(value):
        if jax.typeof(value).memory_space == jax.memory.Space.Host:
            return jax.device_put(value, jax.memory.Space.Device)
        return value

    return jax.tree.map(leaf, params)
