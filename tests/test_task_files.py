"""Reading rows: forms, encodings, and errors that name the place."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from rlx.tasks.files import read_located_rows, read_rows


def test_blank_lines_are_passed_over(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"a":1}\n\n{"a":2}\r\n  \n')
    assert read_located_rows(file) == [(f"{file}:1", {"a": 1}), (f"{file}:3", {"a": 2})]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_byte_order_mark_is_passed_over(tmp_path, name):
    file = tmp_path / name
    content = b'{"a":1}' if name.endswith("l") else b'[{"a":1}]'
    file.write_bytes(b"\xef\xbb\xbf" + content)
    assert read_rows(file) == [{"a": 1}]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x7f"])
def test_lines_end_at_newlines_alone(tmp_path, separator):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(json.dumps({"a": f"x{separator}y"}, ensure_ascii=False).encode() + b"\n")
    assert read_rows(str(file)) == [{"a": f"x{separator}y"}]  # two broken lines by splitlines


@pytest.mark.parametrize("content", [[{"a": 1}, {"a": 2}], {"data": [{"a": 1}, {"a": 2}], "v": 3}])
def test_json_holds_a_list_or_data(tmp_path, content):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(content))
    assert read_rows(file) == [{"a": 1}, {"a": 2}]


def test_parquet_gives_lists_and_integers(tmp_path):
    file = tmp_path / "rows.parquet"
    rows = [{"nums": [1, 2], "target": 3}, {"nums": [4, 5, 6], "target": 7}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    assert read_rows(file) == rows


def test_a_folder_is_read_file_by_file_in_order_of_names(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "dataset_info.json").write_text('{"features": {}}')
    (tmp_path / "data" / "train-00001.jsonl").write_text('{"a":2}')
    (tmp_path / "data" / "train-00000.json").write_text('[{"a":1}]')
    assert read_rows(tmp_path) == [{"a": 1}, {"a": 2}]


def test_a_folder_of_several_splits_is_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"a":1}')
    (tmp_path / "test.jsonl").write_text('{"a":2}')
    with pytest.raises(ValueError, match=r"several splits \(test.jsonl, train.jsonl\)"):
        read_rows(tmp_path)  # read together, the test split would be trained on
    assert read_rows(tmp_path / "train.jsonl") == [{"a": 1}]


def test_what_is_no_json_number_reads_as_null(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": NaN, "b": -Infinity}')
    assert read_rows(file) == [{"a": None, "b": None}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a":1}\n{"a":', r"a\.jsonl:2: this is not JSON"),
        ("a.jsonl", b'{"a":1}\n[1]\n', r"a\.jsonl:2: expected a JSON object, got '\[1\]'"),
        ("a.jsonl", b'{"a":1}\n{"a":"\xff"}\n', r"a\.jsonl:2: this is not UTF-8"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: "),
        ("a.jsonl", b"\n\n", r"a\.jsonl holds no rows"),
        ("a.jsonl", b"", r"a\.jsonl holds no rows"),
        ("a.json", b'{"a":1}\n{"a":2}\n', r"a\.json: .*named \.jsonl"),
        ("a.json", b'{"rows":[]}', r'a\.json must hold a list of objects or \{"data"'),
        ("a.json", b'[{"a":1},2]', r"a\.json, row 2: expected a JSON object"),
        ("a.parquet", b"PAR1", r"a\.parquet can't be read as Parquet"),
        ("a.csv", b"a\n1\n", r"a\.csv must end in one of \.jsonl, \.json, \.parquet"),
    ],
)
def test_errors_name_the_place(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_rows(file)


def test_a_missing_file_and_an_empty_folder_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no file or folder .*none\.jsonl"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"holds no \.jsonl"):
        read_rows(tmp_path)
