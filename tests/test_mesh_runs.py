"""Whole runs of all kinds on meshes of 8 virtual devices: the numbers of one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("mesh_cases.py")
KINDS = ("dynamic", "probe", "critic_head", "critic_model", "texts", "pairs", "bfloat16")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    done = subprocess.run(
        [sys.executable, CASES, "runs", tmp_path_factory.mktemp("runs")],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_on_a_mesh_is_the_run_on_one_device(found, kind):
    """Its texts, its metrics, and where its parameters went."""
    got = found[kind]
    assert got["same_texts"]
    assert got["metrics"] == {}
    assert got["size"] > 1e-2
    assert got["movement_gap"] < 1e-3
