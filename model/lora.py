"""Low-rank adapters beside the kernels of a frozen base. https://arxiv.org/abs/2106.09685 (eq. 3)

    h = x W + (x A) B alpha / r

    base      parameters as ever, with `lora_scale` [L] (alpha / r) beside each adapted kernel
    adapters  `lora_a` [L, *inputs, r] and `lora_b` [L, r, *outputs], at the place of their kernel
    beside(base, adapters)      both as one tree, which the model reads; no array is touched
    merged(that tree)           each adapter added to its kernel: parameters as ever

The scale is a leaf of the base, so that it is where the adapters are read and merged, is not
trained, and no signature has to carry it.
"""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, PyTree

from model.errors import BadInput
from model.product import product

TARGETS = {
    "q_proj": "attention",
    "k_proj": "attention",
    "v_proj": "attention",
    "o_proj": "attention",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
"""The projections that can be adapted, and the module of a layer that each is in."""

LEAVES = ("lora_a", "lora_b", "lora_scale")


def inputs(target: str) -> int:
    """Axes of the kernel that its product sums over: heads and their width, where attention
    ends."""
    return 2 if target == "o_proj" else 1


def kernels(params: PyTree, targets: Sequence[str]) -> dict[str, Array | np.ndarray]:
    """The stacked kernels [L, *inputs, *outputs] of these projections. Raises BadInput where the
    model has none of that name, as a mixture of experts has none in its feed-forward."""
    found, missing = {}, []
    for target in targets:
        module = params["layers"].get(TARGETS[target], {})
        if "kernel" in module.get(target, {}):
            found[target] = module[target]["kernel"]
        else:
            missing.append(target)
    if missing:
        raise BadInput(
            f"lora.targets: expected projections that the model has, one a layer; it has no "
            f"{', '.join(missing)} (kernels of experts can't be adapted)."
        )
    return found


def scaled(params: PyTree, targets: Sequence[str], scale: float) -> PyTree:
    """A base for adapters of these projections: the same arrays, and a `lora_scale` a layer."""
    return beside(
        params,
        _placed(
            {
                target: {"lora_scale": jnp.full(kernel.shape[0], scale, jnp.float32)}
                for target, kernel in kernels(params, targets).items()
            }
        ),
    )


def initial(params: PyTree, targets: Sequence[str], rank: int, key: Key[Array, ""]) -> PyTree:
    """Fresh adapters, float32: A uniform in +-1 / sqrt(inputs), as PEFT draws it (Kaiming with
    a = sqrt(5)), and B zero, so that they change nothing."""

    def one(kernel, target, key):
        split = 1 + inputs(target)
        layers, ins, outs = kernel.shape[0], kernel.shape[1:split], kernel.shape[split:]
        bound = 1 / math.sqrt(math.prod(ins))
        a = jax.random.uniform(key, (layers, *ins, rank), jnp.float32, -bound, bound)
        return {"lora_a": a, "lora_b": jnp.zeros((layers, rank, *outs), jnp.float32)}

    # Of a projection's own place in the table: what one draws does not depend on the others.
    places = {target: place for place, target in enumerate(TARGETS)}
    found = kernels(params, targets)
    return _placed(
        {t: one(kernel, t, jax.random.fold_in(key, places[t])) for t, kernel in found.items()}
    )


def beside(base: PyTree | None, trained: PyTree) -> PyTree:
    """Both as one tree, of which each has leaves of its own. Without a base: what is trained."""
    if base is None:
        return trained
    whole = dict(base)
    for name, part in trained.items():
        nested = isinstance(part, Mapping) and name in base
        whole[name] = beside(base[name], part) if nested else part
    return whole


def low_rank(
    x: Float[Array, "n i"],
    a: Float[Array, "*inputs r"],
    b: Float[Array, " r *outputs"],
    scale: Float[Array, ""],
    dtype: DTypeLike,
) -> Float[Array, "n o"]:
    """(x A) B scale in float32, of factors rounded to `dtype`."""
    rank = b.shape[0]
    low = product(x, a.reshape(-1, rank), dtype)
    return product(low * scale, b.reshape(rank, -1), dtype)


def merged(params: PyTree) -> PyTree:
    """W + A B alpha / r in the place of each adapted kernel, in float32; all else as it is.

    Of numpy arrays it makes numpy arrays, on the host.
    """
    made = {
        name: merged(part) if isinstance(part, Mapping) else part
        for name, part in params.items()
        if name not in LEAVES
    }
    if "lora_a" in params:
        kernel, a, b = (params[name] for name in ("kernel", "lora_a", "lora_b"))
        layers, rank = b.shape[:2]
        # Not with the rounded factors of a GPU's or TPU's float32 product.
        with jax.default_matmul_precision("highest"):
            change = a.reshape(layers, -1, rank) @ b.reshape(layers, rank, -1)
        change = change * params["lora_scale"].reshape(-1, 1, 1)
        made["kernel"] = kernel.astype(np.float32) + change.reshape(kernel.shape)
    return made


def axes(kernel_axes: PyTree) -> PyTree:
    """The logical axes of adapters, of a tree that names those of the base's kernels
    (`nn.get_partition_spec` of an abstract `init`)."""
    made = {}
    for target, module in TARGETS.items():
        names = kernel_axes["layers"].get(module, {}).get(target, {}).get("kernel")
        if names is not None:
            split = 1 + inputs(target)
            a = PartitionSpec(*names[:split], "lora")
            made[target] = {
                "lora_a": a,
                "lora_b": PartitionSpec(names[0], "lora", *names[split:]),
                "lora_scale": PartitionSpec(names[0]),
            }
    return _placed(made)


def _placed(parts: Mapping[str, PyTree]) -> PyTree:
    """What stands under each target's name, at its place in the parameters."""
    layers: dict[str, dict[str, PyTree]] = {}
    for target, part in parts.items():
        layers.setdefault(TARGETS[target], {})[target] = part
    return {"layers": layers}
