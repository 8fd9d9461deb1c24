"""Whole runs of all kinds on meshes of 8 virtual devices: the numbers of one device."""

import pytest
from toy_run import on_eight_devices

KINDS = ("dynamic", "probe", "critic_head", "critic_model", "texts", "pairs", "bfloat16")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return on_eight_devices("runs", tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_a_mesh_is_the_run_on_one_device(found, kind):
    """Its texts, its metrics, and where its parameters went."""
    got = found[kind]
    assert got["same_texts"]
    assert got["metrics"] == {}
    assert got["size"] > 1e-2
    # Numbers of bfloat16 are 2^-8 apart.
    assert got["movement_gap"] < (1e-2 if kind == "bfloat16" else 1e-3)
