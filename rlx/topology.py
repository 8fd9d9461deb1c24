"""Devices that are not there, by name: `v5e:4x4`, `h100:2x8`, `cpu:8`. Starts without JAX."""

import difflib
import math
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from model.errors import BadInput
from rlx.chips import CHIPS, TPUS, Chip

EXTRAS = {"tpu": ("libtpu", "rlx[tpu]"), "cuda": ("the CUDA plugin", "rlx[cuda-plan]")}
SMALL_SLICES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
"""Of a three-dimensional torus; the larger ones are built of cubes of 4x4x4."""
FLAT_SLICES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
VIRTUAL_DEVICES = "--xla_force_host_platform_device_count"
MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


class Topology(NamedTuple):
    name: str
    chip: Chip
    shape: tuple[int, ...]
    """A slice of a torus; hosts and devices a host of GPUs; devices of a CPU."""
    hosts: int

    @property
    def devices(self) -> int:
        return math.prod(self.shape)

    @property
    def memory(self) -> int | None:
        """Bytes of a device that JAX gives to programs: of a GPU it takes a share, 0.75 if the
        environment doesn't say another. Virtual devices of a CPU share what the machine has."""
        if self.chip.platform == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.devices
        if self.chip.platform == "cuda":
            return int(self.chip.memory * float(os.environ.get(MEMORY_FRACTION, "0.75")))
        return self.chip.memory


def parse(name: str) -> Topology:
    """Raises BadInput that names the nearest topology that exists."""
    kind, _, size = name.strip().lower().partition(":")
    if kind not in CHIPS:
        close = [x for x in CHIPS if kind and x.startswith(kind)]
        close = close or difflib.get_close_matches(kind, CHIPS, 1, cutoff=0.4)
        nearest = f" The nearest is {close[0]}:{size or _example(close[0])}." if close else ""
        raise BadInput(
            f"--topology: expected a device and its number, like v5e:4x4 or h100:8, of "
            f"{', '.join(CHIPS)}; came {name or 'nothing'}.{nearest}"
        )
    chip = CHIPS[kind]
    if not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){0,2}", size):
        raise BadInput(
            f"--topology: expected a number of {kind} like {kind}:{_example(kind)}; came "
            f"{name.strip()}."
        )
    shape = tuple(map(int, size.split("x")))
    if chip.platform == "tpu":
        existing = list(slices(kind))
        if size not in existing:
            raise BadInput(_no_slice(kind, size, existing))
        # A slice of up to eight chips of a flat torus is one host's; of others a host has four.
        alone = chip.axes == 2 and math.prod(shape) <= chip.host_devices
        hosts = 1 if alone else max(1, math.prod(shape) // 4)
        return Topology(f"{kind}:{size}", chip, shape, hosts)
    if len(shape) > (1 if kind == "cpu" else 2) or shape[-1] > chip.host_devices:
        hosts = math.ceil(math.prod(shape) / chip.host_devices)
        nearest = f"{kind}:{hosts}x{chip.host_devices}" if hosts > 1 else f"{kind}:{shape[-1]}"
        nearest = f"cpu:{math.prod(shape)}" if kind == "cpu" else nearest
        form = "cpu:DEVICES" if kind == "cpu" else f"{kind}:DEVICES or {kind}:HOSTSxDEVICES"
        raise BadInput(
            f"--topology: expected {form} with at most {chip.host_devices} devices a host; came "
            f"{name.strip()}. The nearest is {nearest}."
        )
    hosts = shape[0] if len(shape) == 2 else 1
    return Topology(f"{kind}:{size}", chip, shape, hosts)


def slices(kind: str) -> Iterator[str]:
    """The slices of a TPU that Google lends, the smallest first."""
    chip = TPUS[kind]
    if chip.axes == 2:
        yield from FLAT_SLICES
        return
    yield from SMALL_SLICES
    sides = range(4, 25, 4)
    cubes = [(a, b, c) for a in sides for b in sides for c in sides if a <= b <= c]
    cubes = [sides for sides in cubes if math.prod(sides) <= chip.largest]
    for sides in sorted(cubes, key=math.prod):
        yield "x".join(map(str, sides))


def _example(kind: str) -> str:
    axes = CHIPS[kind].axes
    return {0: "8", 2: "4x4", 3: "2x2x2"}[axes]


def _no_slice(kind: str, size: str, existing: list[str]) -> str:
    def count(text):
        return math.prod(map(int, text.split("x")))

    def distance(text):
        same = sorted(text.split("x")) != sorted(size.split("x"))
        return same, abs(math.log(count(text) / count(size)))

    near = sorted(existing, key=distance)
    told = existing if len(existing) <= 10 else sorted(near[:6], key=count)
    return (
        f"--topology: there is no slice {kind}:{size}. The nearest is {kind}:{near[0]}; "
        f"{'there are' if len(existing) <= 10 else 'others are'} "
        f"{', '.join(f'{kind}:{text}' for text in told)}."
    )


def set_environment(virtual: int = 0) -> None:
    """What must be set before JAX starts: it computes on the CPU, of which it sees `virtual`
    devices (0: as the environment says), and looks for no other device."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Without it libtpu asks a metadata server that is only there on Google's machines.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    # No chip is taken, so several processes can compile at a time.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "true")
    # Plugins tell that they found no driver, which is why they are here.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if virtual:
        flags = os.environ.get("XLA_FLAGS", "").split()
        flags = [x for x in flags if not x.startswith(VIRTUAL_DEVICES)]
        os.environ["XLA_FLAGS"] = " ".join([*flags, f"{VIRTUAL_DEVICES}={virtual}"])


def abstract_devices(topology: Topology) -> list[Any]:
    """The topology's devices, to compile for and not to compute on; of a CPU, real ones.

    Raises BadInput where the plugin that knows them is not installed.
    """
    import jax
    from jax.experimental import topologies

    chip, shape = topology.chip, topology.shape
    kind = topology.name.partition(":")[0]
    if chip.platform == "cpu":
        devices = jax.devices("cpu")
        if len(devices) < topology.devices:
            raise BadInput(
                f"--topology: this process has {len(devices)} CPU devices, fewer than "
                f"{topology.name} asks for; expected XLA_FLAGS="
                f"{VIRTUAL_DEVICES}={topology.devices}."
            )
        return devices[: topology.devices]
    if chip.platform == "tpu":
        bounds = (*shape, 1)[:3] if topology.hosts == 1 else (2, 2, 1)
        options = {"chips_per_host_bounds": bounds}
        if kind == "v4":
            # Its two cores are one device, as on a TPU VM.
            options["chip_config_name"] = "megacore"
        request = {"platform": "tpu", "topology_name": topology.name, **options}
    else:
        grid = f"{topology.hosts}x1x{shape[-1]}"
        target = {"target_config": chip.target, "topology": grid}
        request = {"platform": "cuda", "topology_name": kind, **target}
    try:
        return list(topologies.get_topology_desc(**request).devices)
    except (RuntimeError, ValueError, ImportError, NotImplementedError) as error:
        what, extra = EXTRAS[chip.platform]
        if plugin_installed(chip.platform):
            raise
        raise BadInput(
            f"--topology: {topology.name} needs {what}, which is not installed: "
            f"pip install '{extra}'."
        ) from error


def plugin_installed(platform: str) -> bool:
    from importlib.util import find_spec

    if platform == "tpu":
        return find_spec("libtpu") is not None
    names = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
    return find_spec("jax_plugins") is not None and any(map(_found, names))


def _found(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None
