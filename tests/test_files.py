"""Where `--output` goes: whole or not at all, and never in the place of what is no file."""

import json
import os
import threading
from pathlib import Path

import pytest

import run
from model.errors import BadInput
from rlx.files import check_output, write_atomically
from rlx.tasks.files import read_json_lines


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    """As root, a file renamed to /dev/null would take its place for the whole machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_output(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_atomically(pipe, "a\n")
    reader.join(10)
    assert read == ["a\n"] and pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_standard_output_is_this_processs_own(capsys):
    check_output(Path("/dev/stdout"))
    write_atomically(Path("/dev/stdout"), "a\n")
    assert capsys.readouterr().out == "a\n"


def test_an_object_of_json_stands_alone(tmp_path, capsys):
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"completion": "3", "answer": "3"}\n')
    given = ["score", "--task", "maths", "--input", str(rows), "--output", "/dev/stdout"]
    assert run.main([*given, "--json"]) == 2
    assert "--json prints its one object there" in capsys.readouterr().err
    assert run.main(given) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["correct"] and "solve_rate 1.0" in told.err


def test_a_link_stays_a_link(tmp_path):
    file, link = tmp_path / "deep" / "file", tmp_path / "link"
    link.symlink_to(file)
    check_output(link)
    write_atomically(link, "a")
    assert link.is_symlink() and file.read_text() == "a"


def test_a_compressed_name_is_compressed(tmp_path):
    """What is written is what `--input` reads by the same name."""
    path = tmp_path / "rows.jsonl.gz"
    write_atomically(path, '{"a": "中文"}\n')
    assert read_json_lines(path) == [(f"{path}:1", {"a": "中文"})]


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(BadInput, match="is a folder"):
        check_output(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="can't be written"):
        check_output(tmp_path / "file" / "out")
