"""The folder of a run, and what is known of one that goes on."""

import json

import pytest

from model.errors import BadInput
from rlx.config import ConfigError, load, resolved_yaml
from rlx.run_folder import check_resume, run_folder, seconds_so_far


def test_two_runs_of_one_second_have_a_folder_each(tmp_path, monkeypatch):
    """In one they would write over each other's metrics, checkpoints and models."""
    monkeypatch.chdir(tmp_path)
    config = load(None, ["run.name=x"])
    folders = [run_folder(config) for _ in range(5)]
    assert len(set(folders)) == 5 and all(folder.is_dir() for folder in folders)


def test_a_file_is_no_folder(tmp_path):
    file = tmp_path / "x"
    file.touch()
    with pytest.raises(BadInput, match=r"run\.dir: .*x is a file"):
        run_folder(load(None, [f"run.dir={file}"]))


@pytest.mark.parametrize(
    ("told", "seconds"),
    [(None, 7.0), ({"seconds": 60.0, "steps": 2}, 60.0), ({"seconds": 60.0, "steps": 1}, 64.0)],
)
def test_time_goes_on_where_a_run_is_resumed(tmp_path, told, seconds):
    """A summary has evaluations in it; of what a part took that was killed later, steps tell."""
    assert seconds_so_far(tmp_path) == 0.0
    steps = [{"kind": "eval", "step": 0}]
    steps += [{"kind": "train", "step": i, "seconds": s} for i, s in ((1, 3.0), (2, 4.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in steps))
    if told is not None:
        (tmp_path / "summary.json").write_text(json.dumps(told))
    assert seconds_so_far(tmp_path) == seconds


def test_a_folder_of_ones_own(tmp_path, monkeypatch):
    """The shell leaves it as it is behind `run.dir=`; a folder called ~ invites `rm -r ~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_folder(load(None, ["run.dir=~/runs/a"])) == tmp_path / "runs" / "a"


def test_what_other_devices_want_may_change(tmp_path):
    """`batch.micro` goes with the mesh; where each micro-batch has a loss of its own it stays."""

    def of(micro, *settings):
        return load(None, [f"batch.micro={micro}", *settings])

    (tmp_path / "config.yaml").write_text(resolved_yaml(of(8)))
    check_resume(of(16, "model.remat=block", "mesh.fsdp=2"), tmp_path)
    (tmp_path / "config.yaml").write_text(resolved_yaml(of(8, "model.router_aux=0.1")))
    with pytest.raises(ConfigError, match=r"batch\.micro: the run began with 8, not 16"):
        check_resume(of(16, "model.router_aux=0.1"), tmp_path)
