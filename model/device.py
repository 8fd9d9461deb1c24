"""The device that programs are made for: this machine's, or one that is not there.

with made_for(Device("tpu")):
    ...     # what is traced in here is what a TPU would run
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.extend


class Device(NamedTuple):
    """What programs depend on."""

    platform: str
    """cpu, cuda, rocm or tpu."""
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability."""


_absent: ContextVar[Device | None] = ContextVar("absent", default=None)


@contextlib.contextmanager
def made_for(device: Device) -> Iterator[None]:
    token = _absent.set(device)
    try:
        yield
    finally:
        _absent.reset(token)


def this_device() -> Device:
    """The one that computes, or the one that `made_for` names."""
    absent = _absent.get()
    if absent is not None:
        return absent
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return Device(device.platform)
    if "cuda" not in jax.extend.backend.get_backend().platform_version:
        return Device("rocm")
    major, minor = device.compute_capability.split(".")
    return Device("cuda", (int(major), int(minor)))
