"""Meshes of 8 virtual devices against one device: tests/mesh_cases.py trains, these read."""

import numpy as np
import pytest
from safetensors.numpy import load_file
from toy_run import on_eight_devices

import run

MESHES = ("8x1x1", "1x8x1", "2x2x2", "1x2x4", "1x1x2")
ONE = "1x1x1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mesh")


@pytest.fixture(scope="module")
def found(folder):
    return on_eight_devices("steps", folder)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_gives_the_loss_gradients_tokens_and_steps_of_one_device(found, mesh):
    """The rows' lengths differ, so that a mean of the devices' means would be another loss; a
    gradient that is summed twice over `tensor`, or not at all, is off by a factor."""
    got = found[mesh]
    assert got["same_tokens"]
    np.testing.assert_allclose(got["losses"], found[ONE]["losses"], rtol=1e-4, atol=1e-6)
    assert got["gradient_gap"] < 1e-4
    assert got["leaf_gap"] < 1e-3
    assert got["movement_gap"] < 1e-3


@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_and_moments_stay_where_they_belong(found, mesh):
    """What a step leaves lies as the rules say; XLA would choose to have some of it everywhere."""
    assert found[mesh]["astray"] == []


@pytest.mark.parametrize(
    ("mesh", "parts"), [("8x1x1", 1), ("1x8x1", 8), ("2x2x2", 4), ("1x2x4", 8), ("1x1x2", 2)]
)
def test_a_device_holds_its_part_of_the_state(found, mesh, parts):
    """Over fsdp 8 about an eighth: norms and the biases of no head are whole on each device."""
    for held in found[mesh]["share"].values():
        assert 1 / parts <= held < 1.1 / parts


@pytest.mark.parametrize("mesh", (ONE, *MESHES))
def test_a_run_on_a_mesh_compiles_its_step_once(found, mesh):
    """A state that came back in another place than it went in would compile it again."""
    first, *later = found[mesh]["compiled"]
    assert later == [first, first]


@pytest.mark.parametrize("reader", (ONE, *MESHES))
def test_a_checkpoint_of_any_mesh_restores_on_any_other(found, reader):
    """With the very numbers, and in the reader's own places."""
    for writer, got in found[reader]["restored"].items():
        assert got == {"same": True, "astray": []}, writer


@pytest.mark.parametrize("mesh", MESHES)
def test_an_export_of_a_sharded_state_has_the_bytes_of_the_whole_ones(found, folder, mesh):
    whole, sharded = (folder / name / "model.safetensors" for name in (f"{ONE}/hf", f"hf-{mesh}"))
    assert whole.read_bytes() == sharded.read_bytes()


@pytest.mark.parametrize("mesh", MESHES)
def test_a_machine_of_one_device_exports_a_run_of_eight(found, folder, tmp_path, mesh):
    """A checkpoint names the devices that it was written from; here are others."""
    assert run.main(["export", "--run", str(folder / mesh), "--output", str(tmp_path / "hf")]) == 0
    written = (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert written == (folder / mesh / "hf" / "model.safetensors").read_bytes()
    # And it is not the start of the run.
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert any(np.any(before[name] != after[name]) for name in before)


def test_a_fused_kernel_gives_what_plain_attention_does_on_every_mesh(folder):
    """XLA refuses to divide one: each device calls it for its rows and heads."""
    found = on_eight_devices("kernel", folder)
    assert found.keys() == set(MESHES)
    assert max(found.values()) < 1e-6


def test_filters_and_greedy_text_are_those_of_one_device(folder):
    """Each looks at all of the vocabulary, of which a device has a part."""
    found = on_eight_devices("generated", folder)
    assert len(found) == 6
    for name, got in found.items():
        assert got["same_ids"], name
        assert got["gap"] < 1e-4, name
        assert got["ids"] > 100, name
