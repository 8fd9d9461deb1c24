"""Reading rows: forms, encodings, and errors that name the place."""

import csv
import gzip
import json
import sys
import types

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import BadInput
from rlx.tasks.files import find_rows, read_located_rows, read_rows, split_of

ROWS = [{"a": 1, "b": "x"}, {"a": 2, "b": "y\nz"}]


def arrow_folder(folder, parts):
    """As `datasets.Dataset.save_to_disk` writes it, with what the library may cache beside."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(parts):05}.arrow" for i in range(len(parts))]
    for name, rows in zip((*names, "cache-0123.arrow"), (*parts, parts[0]), strict=True):
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


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


def test_a_whole_surrogate_pair_is_a_character(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": "\\ud83d\\ude00"}')
    assert read_rows(file) == [{"a": "\U0001f600"}]


def test_what_is_no_json_number_reads_as_null(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": NaN, "b": -Infinity, "c": 1e999}')
    assert read_rows(file) == [{"a": None, "b": None, "c": None}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a":1}\n{"a":', r"a\.jsonl:2: this is not JSON"),
        ("a.jsonl", b'{"a":1}\n[1]\n', r"a\.jsonl:2: expected a JSON object, got '\[1\]'"),
        ("a.jsonl", b'{"a":1}\n{"a":"\xff"}\n', r"a\.jsonl:2: this is not UTF-8"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: "),
        ("a.jsonl", b'{"a":1,"b":2,"a":3}\n', r"a\.jsonl:1: 'a' stands there twice"),
        ("a.jsonl", b'{"a":1}\n{"a":["x \\uD83D"]}\n', r"a\.jsonl:2: .ud83d is half of a char"),
        ("a.json", b'[{"a":"\\ude00"}]', r"a\.json: .ude00 is half of a character"),
        ("a.jsonl", b"\n\n", r"a\.jsonl holds no rows"),
        ("a.jsonl", b"", r"a\.jsonl holds no rows"),
        ("a.json", b'{"a":1}\n{"a":2}\n', r"a\.json: .*named \.jsonl"),
        ("a.json", b'{"rows":[]}', r'a\.json must hold a list of objects or \{"data"'),
        ("a.json", b'[{"a":1},2]', r"a\.json, row 2: expected a JSON object"),
        ("a.parquet", b"PAR1", r"a\.parquet can't be read as Parquet"),
        ("a.tsv", b"a\n1\n", r"a\.tsv must end in one of \.jsonl, .*\.csv, .*\.parquet"),
        ("a.csv", b"a,b\n1,2\n\n3\n", r"a\.csv:4: expected 2 fields, .*\(a, b\); came 1"),
        ("a.csv", b'a,b\n"1\n2",3\n4,5,6\n', r"a\.csv:4: expected 2 fields, .*; came 3"),
        ("a.csv", b'a\n1\n"2\n', r"a\.csv:3: this is not CSV"),
        ("a.csv", b'a\n1\n"2"3\n', r"a\.csv:3: this is not CSV"),
        ("a.csv", b"a,b,a\n1,2,3\n", r"a\.csv:1: the header has the columns \['a'\] more than"),
        ("a.csv", b"a\n\xff\n", r"a\.csv: this is not UTF-8"),
        ("a.csv", b"a,b\n", r"a\.csv holds no rows"),
        ("a.csv", b"", r"a\.csv holds no rows"),
        ("a.jsonl.gz", b'{"a":1}', r"a\.jsonl\.gz can't be read"),
        ("a.json.gz", gzip.compress(b"[]" * 9, mtime=0)[:-9], r"a\.json\.gz can't be read"),
    ],
)
def test_errors_name_the_place(tmp_path, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_rows(file)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json.gz", "ROWS.JSON"])
def test_compressed_files_are_read(tmp_path, name):
    content = b'\xef\xbb\xbf{"a": 1}\n{"a": 2}' if "jsonl" in name else b'[{"a":1},{"a":2}]'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert read_rows(tmp_path / name) == [{"a": 1}, {"a": 2}]
    assert read_rows(tmp_path) == [{"a": 1}, {"a": 2}]


def test_csv_has_a_header_quotes_and_newlines_within_a_field(tmp_path):
    """A reader that cuts at line ends first finds five broken rows; places are where rows begin."""
    file = tmp_path / "rows.csv"
    content = '\ufeffq,"a, b",c\r\n"one\r\ntwo, ""three""",x\u2028y,\r\n\r\n007,NA,nan\r\n'
    file.write_bytes(content.encode())
    assert read_located_rows(file) == [
        (f"{file}:2", {"q": 'one\r\ntwo, "three"', "a, b": "x\u2028y", "c": ""}),
        # as they stand: no 7, no missing value
        (f"{file}:5", {"q": "007", "a, b": "NA", "c": "nan"}),
    ]


def test_a_long_csv_field_is_read_and_the_processs_limit_left_alone(tmp_path):
    file, limit = tmp_path / "rows.csv", csv.field_size_limit()
    file.write_text("a\n" + "x" * 200_000 + "\n")
    assert len(read_rows(file)[0]["a"]) == 200_000  # an error at the library's own 131,072
    assert csv.field_size_limit() == limit


TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)


@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=5))
def test_what_is_written_as_csv_is_read_back(tmp_path_factory, rows):
    file = tmp_path_factory.mktemp("csv") / "rows.csv"
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    assert read_rows(file) == [{"a": a, "b": b} for a, b in rows]


def test_each_bad_row_stands_at_its_place_beside_the_good_ones(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a":1}\n{"a":\n\n[2]\n{"a":3}\n')
    (_, one), (second, broken), (fourth, listed), (_, three) = find_rows(file)
    assert (one, three) == ({"a": 1}, {"a": 3})
    assert (second, fourth) == (f"{file}:2", f"{file}:4")
    assert "not JSON" in str(broken) and "expected a JSON object" in str(listed)
    assert all(isinstance(error, BadInput) for error in (broken, listed))


def test_no_column_comes_from_the_folders_above_a_parquet_file(tmp_path):
    folder = tmp_path / "a=7"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"b": 1}]), folder / "rows.parquet")
    assert read_rows(folder / "rows.parquet") == [{"b": 1}]  # {"b": 1, "a": 7} by read_table


def test_a_datasets_folder_is_read_by_its_own_list(tmp_path):
    """Its cache is no data: read with every *.arrow, the first rows would come twice."""
    arrow_folder(tmp_path / "set", [ROWS[:1], ROWS[1:]])
    assert read_rows(tmp_path / "set") == ROWS
    place = read_located_rows(tmp_path / "set")[1][0]
    assert place == f"{tmp_path / 'set' / 'data-00001-of-00002.arrow'}, row 1"


def test_a_datasets_folder_of_splits_wants_one_named(tmp_path):
    arrow_folder(tmp_path / "set" / "train", [ROWS[:1]])
    arrow_folder(tmp_path / "set" / "test", [ROWS[1:]])
    description = tmp_path / "set" / "dataset_dict.json"
    description.write_text('{"splits": ["train", "test"]}')
    with pytest.raises(BadInput, match=r"several splits \(train, test\); name one.*set/train"):
        read_rows(tmp_path / "set")
    assert read_rows(tmp_path / "set" / "test") == ROWS[1:]
    description.write_text('{"splits": ["train"]}')
    assert read_rows(tmp_path / "set") == ROWS[:1]


def test_what_datasets_itself_saves_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS * 3).filter(lambda row: row["a"] == 2)
    table.save_to_disk(str(tmp_path / "set"), num_shards=2)
    assert read_rows(tmp_path / "set") == ROWS[1:] * 3


def test_a_damaged_datasets_folder_is_named(tmp_path):
    arrow_folder(tmp_path / "set", [ROWS])
    (tmp_path / "set" / "data-00000-of-00001.arrow").write_bytes(b"ARROW1")
    with pytest.raises(BadInput, match=r"data-00000-of-00001\.arrow can't be read as Arrow"):
        read_rows(tmp_path / "set")
    (tmp_path / "set" / "state.json").write_text("{}")
    with pytest.raises(BadInput, match=r"state\.json must hold a list `_data_files`"):
        read_rows(tmp_path / "set")


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("test.csv", "test"),
        ("anatomy_test.csv", "test"),
        ("train-00000-of-00002.parquet", "train"),
        ("test/00000.json.gz", "test"),
        ("data/dev.jsonl.gz", "dev"),
        ("testimony.csv", ""),
        ("latest/rows.csv", ""),
    ],
)
def test_a_split_is_known_by_a_name(tmp_path, name, split):
    file = tmp_path / name
    assert split_of(file.relative_to(tmp_path)) == split


@pytest.mark.parametrize("names", [("train/0.csv", "test/0.csv"), ("a_train.csv", "a_test.csv")])
def test_splits_in_folders_and_at_the_end_of_a_name_are_kept_apart_too(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a\n1\n")
    with pytest.raises(BadInput, match="several splits"):
        read_rows(tmp_path)


# ---- a hub --------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for the package, with one data set of two splits, and one of one."""
    sets = {
        ("org/two", None): {"train": ROWS, "test": ROWS[:1]},
        ("org/two", "main"): {"train": ROWS[1:], "test": ROWS},
        ("org/one", None): {"test": ROWS},
    }

    def load_dataset(path, name=None, *, split=None):
        if (path, name) not in sets:
            raise ConnectionError("no network")
        found = sets[path, name]
        return found if split is None else found[split]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.chdir(tmp_path)


def test_a_hubs_name_gives_its_rows(hub):
    assert read_rows("org/one") == ROWS
    assert read_located_rows("org/two:test") == [("org/two:test, row 1", ROWS[0])]
    assert read_rows("org/two:main:train") == ROWS[1:]


def test_a_hubs_splits_are_not_read_together(hub):
    with pytest.raises(BadInput, match=r"several splits \(train, test\); .* org/two:train\."):
        read_rows("org/two")


def test_a_name_that_no_hub_gives_is_told_with_the_reason(hub):
    with pytest.raises(BadInput, match=r"no file or folder org/none, .* ConnectionError: no net"):
        read_rows("org/none")
    with pytest.raises(BadInput, match="cannot be loaded: KeyError"):
        read_rows("org/two:nosplit")


def test_a_folder_here_comes_before_a_hubs_name(hub, tmp_path):
    (tmp_path / "org" / "one").mkdir(parents=True)
    (tmp_path / "org" / "one" / "rows.csv").write_text("here\n1\n")
    assert read_rows("org/one") == [{"here": "1"}]


def test_what_can_only_be_a_path_is_not_asked_of_a_hub(hub, tmp_path):
    """Without a network, the library tries for half a minute."""
    with pytest.raises(BadInput, match=r"no file or folder data/rows\.jsonl\.$"):
        read_rows("data/rows.jsonl")
    (tmp_path / "org").mkdir()
    with pytest.raises(BadInput, match=r"no file or folder org/one\.$"):
        read_rows("org/one")
    assert read_rows("org/one:test") == ROWS


def test_without_the_package_a_hubs_name_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match="pip install datasets"):
        read_rows("org/one")


def test_an_empty_name_is_not_the_current_folder(monkeypatch, tmp_path):
    (tmp_path / "rows.csv").write_text("a\n1\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="`file` must name the rows"):
        read_rows("")


def test_a_missing_file_and_an_empty_folder_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no file or folder .*none\.jsonl"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"holds no \.jsonl"):
        read_rows(tmp_path)
