"""What is known of accelerators that a run can be planned for: memory, speed, and links.

Figures are the vendors' own, of dense bfloat16 products, a direction of a link, a device.
"""

from typing import NamedTuple

GIB = 2**30


class Chip(NamedTuple):
    """A device, and the host that it is found in. None: not known, so no time can be told."""

    platform: str
    """cpu, cuda or tpu."""
    memory: int | None
    """That programs can use, bytes."""
    memory_speed: float | None
    """Bytes a second."""
    flops: float | None
    """A second, of bfloat16 products."""
    link_speed: float | None
    """Bytes a second that a device sends to others of its host (NVLink) or slice (a TPU's ring
    along one axis of the torus, both ways round)."""
    network_speed: float | None
    """Bytes a second that it sends to other hosts, all devices of its host at once."""
    host_devices: int
    """At most so many a host."""
    axes: int = 0
    """Of a TPU's torus."""
    largest: int = 0
    """Chips of the largest slice."""
    target: str = ""
    """A GPU as XLA describes one."""
    capability: tuple[int, int] = (0, 0)


# Google, cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e: memory, bandwidth, FLOP/s, slices.
# Memory is what libtpu's compiler says that it has. Links: 50 GB/s each way (v4, v5e) or 100 GB/s
# (v5p, v6e) of which 45 and 90 are seen, two a ring:
# jax-ml.github.io/scaling-book/tpus, "TPU specs".
TPUS = {
    "v4": Chip("tpu", int(31.75 * GIB), 1.228e12, 275e12, 90e9, None, 4, axes=3, largest=4096),
    "v5e": Chip("tpu", int(15.75 * GIB), 0.819e12, 197e12, 90e9, None, 8, axes=2, largest=256),
    "v5p": Chip("tpu", int(95.74 * GIB), 2.765e12, 459e12, 180e9, None, 4, axes=3, largest=6144),
    "v6e": Chip("tpu", int(31.25 * GIB), 1.638e12, 918e12, 180e9, None, 8, axes=2, largest=256),
}


def _target(
    name: str,
    memory: int,
    speed: float,
    cores: int,
    clock: float,
    cache: int,
    shared: int,
    threads: int,
    lanes: int,
    capability: tuple[int, int],
) -> str:
    """XLA's own text form of `stream_executor::GpuTargetConfig`. `shared`: bytes a core."""
    major, minor = capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared - 1024}
  shared_memory_per_core: {shared} core_count: {cores} fpus_per_core: {lanes}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(speed)} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


def _gpu(
    name: str,
    memory: int,
    speed: float,
    flops: float,
    link: float,
    network: float,
    capability: tuple[int, int],
    *,
    cores: int,
    clock: float,
    cache: int,
    shared: int = 233_472,
    threads: int = 2048,
    lanes: int = 128,
) -> Chip:
    target = _target(name, memory, speed, cores, clock, cache, shared, threads, lanes, capability)
    return Chip(
        "cuda", memory, speed, flops, link, network, 8, target=target, capability=capability
    )


# NVIDIA's data sheets: "H100 Tensor Core GPU" (SXM), "H200", "A100" (SXM), "L40S", "HGX B200";
# cores, caches and clocks from the architectures' white papers and the CUDA programming guide's
# table of compute capabilities. Memory: what the driver tells. Network: a 400 Gb/s adapter a GPU in
# DGX H100, H200 and B200, 200 Gb/s in DGX A100; with L40S two of 200 Gb/s a host.
GPUS = {
    "h100": _gpu(
        *("NVIDIA H100 80GB HBM3", 84_942_979_072, 3.352e12, 989.4e12, 450e9, 50e9, (9, 0)),
        cores=132,
        clock=1.98,
        cache=52_428_800,
    ),
    "h200": _gpu(
        *("NVIDIA H200", 150_109_880_320, 4.8e12, 989.4e12, 450e9, 50e9, (9, 0)),
        cores=132,
        clock=1.98,
        cache=62_914_560,
    ),
    "a100-80": _gpu(
        *("NVIDIA A100-SXM4-80GB", 84_974_239_744, 2.039e12, 312e12, 300e9, 25e9, (8, 0)),
        cores=108,
        clock=1.41,
        cache=41_943_040,
        shared=167_936,
        lanes=64,
    ),
    "a100-40": _gpu(
        *("NVIDIA A100-SXM4-40GB", 42_297_786_368, 1.555e12, 312e12, 300e9, 25e9, (8, 0)),
        cores=108,
        clock=1.41,
        cache=41_943_040,
        shared=167_936,
        lanes=64,
    ),
    "l40s": _gpu(
        *("NVIDIA L40S", 47_697_362_944, 0.864e12, 362e12, 32e9, 6.25e9, (8, 9)),
        cores=142,
        clock=2.52,
        cache=100_663_296,
        shared=102_400,
        threads=1536,
    ),
    "b200": _gpu(
        *("NVIDIA B200", 191_503_138_816, 8.0e12, 2250e12, 900e9, 50e9, (10, 0)),
        cores=148,
        clock=1.965,
        cache=132_644_864,
    ),
}
CPU = Chip("cpu", None, None, None, None, None, 4096)
CHIPS = TPUS | GPUS | {"cpu": CPU}
