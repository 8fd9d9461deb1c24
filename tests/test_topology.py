"""Names of devices that are not there: which exist, and what is suggested for one that doesn't."""

import math
import os

import pytest

from model.errors import BadInput
from rlx.chips import CHIPS, GPUS, TPUS
from rlx.topology import (
    MEMORY_FRACTION,
    abstract_devices,
    parse,
    plugin_installed,
    set_environment,
    slices,
)


@pytest.mark.parametrize(
    ("name", "devices", "hosts"),
    [
        ("v5e:1x1", 1, 1),
        ("v5e:2x4", 8, 1),
        ("v5e:4x4", 16, 4),
        ("v5p:2x2x1", 4, 1),
        ("v5p:2x2x2", 8, 2),
        ("v6e:16x16", 256, 64),
        ("h100:8", 8, 1),
        ("h100:4x8", 32, 4),
        ("a100-80:1", 1, 1),
        ("cpu:8", 8, 1),
    ],
)
def test_a_name_says_how_many_devices_on_how_many_hosts(name, devices, hosts):
    topology = parse(name)
    assert (topology.devices, topology.hosts) == (devices, hosts)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("v5e:3x5", "v5e:4x4"),
        ("v5e:4x2", "v5e:2x4"),
        ("v5p:2x2x3", "v5p:2x2x4"),
        ("v5p:8x4x4", "v5p:4x4x8"),
        ("v6e:32x32", "v6e:16x16"),
        ("h100:16", "h100:2x8"),
        ("h100:4x9", "h100:5x8"),
        ("cpu:2x4", "cpu:8"),
        ("a100:8", "a100-80:8"),
    ],
)
def test_for_a_wrong_topology_the_nearest_is_named(name, nearest):
    with pytest.raises(BadInput, match=rf"nearest is {nearest}\b"):
        parse(name)
    assert parse(nearest).devices


@pytest.mark.parametrize("name", ["", "v5e", "v5e:", "v5e:0x4", "v5e:4y4", "h100:-1", "v5e:4x4x"])
def test_what_is_no_topology_is_refused_by_what_was_expected(name):
    with pytest.raises(BadInput, match="--topology: expected"):
        parse(name)


def test_large_slices_are_built_of_cubes_and_end_at_the_largest():
    found = list(slices("v5p"))
    assert found[:6] == ["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8"]
    counts = [math.prod(map(int, text.split("x"))) for text in found]
    assert max(counts) == TPUS["v5p"].largest and counts == sorted(counts)


def test_a_gpu_gives_jax_the_share_of_its_memory_that_the_environment_says(monkeypatch):
    monkeypatch.delenv(MEMORY_FRACTION, raising=False)
    usual = parse("h100:8").memory
    monkeypatch.setenv(MEMORY_FRACTION, "0.9")
    assert usual == int(0.75 * GPUS["h100"].memory)
    assert parse("h100:8").memory == int(0.9 * GPUS["h100"].memory)


def test_the_environment_asks_for_virtual_devices_once(monkeypatch):
    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=2")
    set_environment(8)
    # Of two of them XLA would take the last, and a person would see the first.
    assert os.environ["XLA_FLAGS"] == "--xla_a=1 --xla_force_host_platform_device_count=8"
    assert os.environ["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_devices_that_nothing_here_knows_are_an_error_that_says_what_to_install(
    monkeypatch, platform
):
    from jax.experimental import topologies

    def missing(**_):
        raise RuntimeError("Unable to find the plugin")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    monkeypatch.setattr("rlx.topology.plugin_installed", lambda platform: False)
    name, extra = {"tpu": ("v5e:2x2", "rlx[tpu]"), "cuda": ("h100:8", "rlx[cuda-plan]")}[platform]
    with pytest.raises(BadInput, match="pip install") as told:
        abstract_devices(parse(name))
    assert extra in str(told.value)


@pytest.mark.parametrize("name", ["v5e:1x1", "v5e:2x4", "v5p:2x2x2", "v4:2x2x1", "v6e:4x4"])
def test_the_tpu_compiler_knows_each_slice_by_as_many_devices_and_hosts(name):
    if not plugin_installed("tpu"):
        pytest.skip("libtpu is not installed")
    topology = parse(name)
    devices = abstract_devices(topology)
    # Both cores of a v4 would be 8 devices for its 4 chips.
    assert len(devices) == topology.devices
    assert len({device.process_index for device in devices}) == topology.hosts


@pytest.mark.parametrize("name", [f"{kind}:2" for kind in GPUS] + ["h100:4x8"])
def test_the_gpu_compiler_takes_each_description(name):
    if not plugin_installed("cuda"):
        pytest.skip("the CUDA plugin is not installed")
    topology = parse(name)
    devices = abstract_devices(topology)
    assert len(devices) == topology.devices
    assert len({device.process_index for device in devices}) == topology.hosts


def test_every_accelerator_has_the_figures_that_a_roofline_needs():
    for name, chip in CHIPS.items():
        if name != "cpu":
            assert min(chip.memory, chip.memory_speed, chip.flops, chip.link_speed) > 0
            # Products of 100 to 1,000 FLOPs a byte: anything else is a unit gone wrong.
            assert 100 < chip.flops / chip.memory_speed < 1000, name
