"""The folder of a run, and what is known of one that goes on."""

import json

import pytest

from model.errors import BadInput
from rlx.config import load
from rlx.run_folder import run_folder, seconds_so_far


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


@pytest.mark.parametrize(("told", "seconds"), [(None, 7.0), (60.0, 60.0), (5.0, 7.0)])
def test_time_goes_on_where_a_run_is_resumed(tmp_path, told, seconds):
    """A summary of 60 s has evaluations in it; one of 5 s is older than the steps."""
    assert seconds_so_far(tmp_path) == 0.0
    steps = [{"kind": "eval", "step": 0}]
    steps += [{"kind": "train", "step": 1, "seconds": s} for s in (3.0, 4.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in steps))
    if told is not None:
        (tmp_path / "summary.json").write_text(json.dumps({"seconds": told}))
    assert seconds_so_far(tmp_path) == seconds
