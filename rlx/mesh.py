"""The devices of a run as a mesh: its sizes, chosen or checked, and a run's arrays on it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from model.config import ModelConfig
from model.errors import BadInput
from model.sharding import AXES, ParameterAxes, mesh_sizes, shardings
from rlx.derived import offline, rows, unit
from rlx.hosts import check_same_data, check_same_weights
from rlx.settings import Config

TRAINED_BYTES = 16
"""A parameter's, its gradient's and its two moments', in float32."""
SAMPLED_BYTES = 2
SHARE = 0.4
"""Of a device's memory, at most so much for either; the rest is for what is computed."""


class Hardware(NamedTuple):
    """What a layout is chosen by."""

    devices: int
    hosts: int = 1
    memory: int | None = None
    """Of a device, bytes; None where it doesn't say."""


def this_hardware() -> Hardware:
    stats = jax.local_devices()[0].memory_stats() or {}
    return Hardware(jax.device_count(), jax.process_count(), stats.get("bytes_limit"))


class Sizes(NamedTuple):
    data: int
    fsdp: int
    tensor: int

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    @property
    def shards(self) -> int:
        """Parts of a batch."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        return f"data {self.data} x fsdp {self.fsdp} x tensor {self.tensor}"


def choose(
    config: Config,
    shapes: Sequence[ModelConfig],
    parameters: int,
    hardware: Hardware,
    *,
    training: bool = True,
) -> Sizes:
    """The mesh that `mesh` asks for, its open sizes chosen. Raises BadInput with each reason why it
    can't be.

    Of the legal ones: no more of the tensor axis than sampling needs to hold its weights, then no
    more of fsdp than training needs to hold its state (whole hosts, of several), the rest data.
    Where all is open and one host's devices can't be used together, as many as can.
    """
    fixed = Sizes(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    counts = [hardware.devices]
    if all(fixed):
        if fixed.devices > hardware.devices or (hardware.hosts > 1 and fixed.devices not in counts):
            which = "at most " if hardware.hosts == 1 else ""
            raise BadInput(
                f"mesh: expected sizes whose product is {which}the number of devices, "
                f"{hardware.devices}; came {asked(fixed)} = {fixed.devices}."
            )
        counts = [fixed.devices]
    elif not any(fixed) and hardware.hosts == 1:
        counts = list(range(hardware.devices, 0, -1))
    why: dict[Sizes, list[str]] = {}
    for count in counts:
        for sizes in layouts(count):
            if all(not size or size == own for size, own in zip(fixed, sizes, strict=True)):
                why[sizes] = obstacles(config, shapes, sizes, training)
        if legal := [sizes for sizes, faults in why.items() if not faults]:
            return min(legal, key=lambda sizes: _cost(sizes, parameters, hardware))
    if not why:
        raise BadInput(
            f"mesh: expected sizes whose product is the number of devices, {hardware.devices}; "
            f"came {asked(fixed)}."
        )
    reasons = (f"{sizes}: {'; '.join(faults)}" for sizes, faults in why.items())
    raise BadInput("\n  ".join(["mesh: the run can't be split so.", *reasons]))


def _cost(sizes: Sizes, parameters: int, hardware: Hardware) -> tuple:
    """What is to be small, the first thing first."""
    room = SHARE * hardware.memory if hardware.memory else None
    if room is None:
        crowded = (1.0, 1.0)
    else:
        # Where nothing fits, what is nearest to it.
        crowded = (
            max(1.0, parameters * SAMPLED_BYTES / sizes.tensor / room),
            max(1.0, parameters * TRAINED_BYTES / (sizes.fsdp * sizes.tensor) / room),
        )
    # Gathering a layer's parameters is for a host's own links where it can be.
    each = hardware.devices // hardware.hosts
    across = hardware.hosts > 1 and (sizes.fsdp * sizes.tensor) % each > 0
    return *crowded, sizes.tensor, across, sizes.fsdp if room else sizes.data


def told(sizes: Sizes, hardware: Hardware) -> str:
    """The mesh of a run, for its log."""
    spare = "" if sizes.devices == hardware.devices else f" of {hardware.devices}"
    return f"mesh {sizes} ({sizes.devices}{spare} devices)"


def asked(wanted: Sizes) -> str:
    return " x ".join(f"{axis} {size or 'auto'}" for axis, size in wanted._asdict().items())


def layouts(devices: int) -> Iterator[Sizes]:
    """All meshes of so many devices."""
    for data in range(1, devices + 1):
        for fsdp in range(1, devices // data + 1):
            if devices % (data * fsdp) == 0:
                yield Sizes(data, fsdp, devices // (data * fsdp))


def obstacles(
    config: Config, shapes: Sequence[ModelConfig], sizes: Sizes, training: bool = True
) -> list[str]:
    """Why models of these shapes, or a step's batch, can't be split so; nothing where they can."""
    faults = []

    def divide(what: str, size: int, setting: str, by: int) -> None:
        if size % by:
            fault = f"{setting} = {by} does not divide {what}, {size}"
            faults.extend([] if fault in faults else [fault])

    for shape in shapes:
        parts = {
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "intermediate_size": shape.intermediate_size,
            "vocab_size": shape.vocab_size,
        }
        if shape.num_experts:
            # Experts are not cut: each device has some of them.
            parts.pop("intermediate_size")
            parts["num_experts"] = shape.num_experts
        for name, size in parts.items():
            divide(f"the model's {name}", size, "mesh.tensor", sizes.tensor)
        divide("the model's hidden_size", shape.hidden_size, "mesh.fsdp", sizes.fsdp)
    shards = sizes.shards
    if shards == 1 or not training:
        return faults
    batch, whole = config.batch, unit(config)
    by = f"mesh.data * mesh.fsdp = {sizes.data} * {sizes.fsdp}"
    if not offline(config):
        divide("batch.prompts", batch.prompts, by, shards)
    update = rows(config) // batch.minibatches
    of_pairs = ", in whole pairs" if whole > 1 else ""
    for what, size in (("of an update", update), ("of batch.micro", batch.micro or update)):
        if size % (shards * whole):
            faults.append(
                f"{by} = {shards} does not divide the rows {what}, {size}{of_pairs}: each part of "
                "the mesh computes as many"
            )
    return faults


@contextlib.contextmanager
def on_mesh(sizes: Sizes, devices: Sequence[jax.Device] | None = None) -> Iterator[Mesh | None]:
    """Code in here runs on such a mesh of the first devices; on a single device there is none."""
    if sizes.devices == 1:
        yield None
        return
    devices = jax.devices() if devices is None else devices
    if sizes.devices == len(devices):
        # Along a TPU's links; an axis of its torus may be split between two of the mesh.
        grid = create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    else:
        # Some of a TPU's chips need not be a box.
        grid = np.array(devices[: sizes.devices]).reshape(sizes)
    mesh = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        yield mesh


def current() -> Mesh | None:
    return jax.sharding.get_mesh() if mesh_sizes() else None


def placed(axes: ParameterAxes, tree: PyTree) -> PyTree:
    """Arrays of the host on the devices: each gets its part alone. Without a mesh, on the first.
    What lies on the mesh already moves from device to device."""
    mesh = current()
    if mesh is None:
        return jax.tree.map(jax.numpy.asarray, tree)
    check_same_weights([x for x in jax.tree.leaves(tree) if not _on_mesh(x)])
    return jax.tree.map(_from_host, tree, shardings(mesh, axes, tree))


def everywhere(tree: PyTree) -> PyTree:
    """Arrays of the host, whole on every device of the mesh."""
    mesh = current()
    if mesh is None:
        return jax.tree.map(jax.numpy.asarray, tree)
    sharding = NamedSharding(mesh, PartitionSpec())
    check_same_data(tree)
    return jax.tree.map(lambda x: _from_host(x, sharding), tree)


def _on_mesh(x: np.ndarray | jax.Array) -> bool:
    return isinstance(x, jax.Array) and len(x.sharding.device_set) > 1


def _from_host(x: np.ndarray | jax.Array, sharding: NamedSharding) -> jax.Array:
    if _on_mesh(x):
        return jax.device_put(x, sharding)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = _from_host(np.asarray(jax.random.key_data(x)), sharding)
        return jax.random.wrap_key_data(words)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def abstract(tree: PyTree) -> PyTree:
    """Shapes, types and places of arrays, without their numbers."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
