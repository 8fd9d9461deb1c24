"""From a file's rows to a task's: columns, rows that cannot be used, rows held apart."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import BadInput
from rlx.tasks.rows import parsed_rows, renamed, set_apart


def parse(row):
    if not isinstance(row.get("answer"), str):
        raise BadInput(f"expected a text `answer`; came {row.get('answer')!r}.")
    return row["answer"]


@pytest.fixture
def written(tmp_path):
    def write(*lines):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
        return str(file)

    return write


BAD = ({"answer": "a"}, {"answer": 1}, '{"answer":\n', {"answer": "b"}, "[3]\n")


def test_a_bad_row_is_refused_with_file_line_reason_and_how_many_there_are(written):
    file = written(*BAD)
    with pytest.raises(BadInput) as caught:
        parsed_rows(file, parse)
    assert str(caught.value) == (
        f"{file}:2: expected a text `answer`; came 1. 3 of 5 rows of {file} cannot be used. "
        "bad_rows=skip leaves such rows out."
    )


def test_bad_rows_are_left_out_and_counted_if_asked(written):
    """Those too that are no JSON: a reader that stops at the first says nothing of the others."""
    file = written(*BAD)
    rows, (note,) = parsed_rows(file, parse, bad_rows="skip")
    assert rows == ["a", "b"]
    assert note.startswith(f"3 of 5 rows of {file} left out: {file}:2: expected a text")
    assert f"{file}:3: this is not JSON" in note
    assert f"{file}:5: expected a JSON object" in note


def test_only_the_first_of_many_are_named(written):
    file = written(*[{"answer": 1}] * 9, {"answer": "a"})
    _, (note,) = parsed_rows(file, parse, bad_rows="skip")
    assert "9 of 10" in note and f"{file}:5:" in note
    assert f"{file}:6:" not in note and note.endswith("| ...")


def test_sound_rows_leave_no_note(written):
    assert parsed_rows(written({"answer": "a"}), parse, bad_rows="skip") == (["a"], ())


def test_a_file_without_a_single_usable_row_is_refused_either_way(written):
    with pytest.raises(BadInput, match=r"None of the 2 rows .*rows\.jsonl:1: expected a text"):
        parsed_rows(written({"answer": 1}, "3\n"), parse, bad_rows="skip")


def test_a_fault_of_the_parser_is_no_bad_row(written):
    """Skipped like one, a broken task would train on what happens to be left."""
    with pytest.raises(ZeroDivisionError):
        parsed_rows(written({"answer": "a"}), lambda row: 1 / 0, bad_rows="skip")


# ---- columns ------------------------------------------------------------------------------------


def test_columns_give_fields_their_names(written):
    file = written({"solution": "a", "id": 1})
    assert parsed_rows(file, parse, columns={"answer": "solution"}) == (["a"], ())
    columns = {"answer": "solution"}
    assert renamed({"solution": "a", "id": 1}, columns) == {"answer": "a", "solution": "a", "id": 1}


def test_columns_may_change_places():
    row = {"question": "4", "answer": "2+2"}
    columns = {"question": "answer", "answer": "question"}
    assert renamed(row, columns) == {"question": "2+2", "answer": "4"}


def test_a_row_without_the_column_is_not_read_from_another(written):
    """Its own `answer` is something else than what `solution` holds."""
    file = written({"solution": "a", "answer": "x"}, {"answer": "y"})
    with pytest.raises(BadInput, match=r"rows\.jsonl:2: expected a text `answer`; came None"):
        parsed_rows(file, parse, columns={"answer": "solution"})
    rows, _ = parsed_rows(file, parse, columns={"answer": "solution"}, bad_rows="skip")
    assert rows == ["a"]


def test_a_column_that_no_row_has_is_named_with_those_that_there_are(written):
    file = written({"b": "a"}, {"a": 1}, "[]\n")
    with pytest.raises(BadInput, match=r"columns\.answer: expected .* which has a, b; came c"):
        parsed_rows(file, parse, columns={"answer": "c"}, bad_rows="skip")


def test_a_column_for_a_field_that_the_task_does_not_have_is_refused(written):
    file = written({"answer": "a", "s": "b"})
    with pytest.raises(BadInput, match="which are question, answer; came anwser"):
        parsed_rows(file, parse, columns={"anwser": "s"}, fields=("question", "answer"))


# ---- held apart ---------------------------------------------------------------------------------


def apart(rows, heldout=None, train_size=0, heldout_size=2):
    def problem(row):
        return row[0]

    return set_apart(
        rows,
        heldout,
        key=problem,
        train_size=train_size,
        heldout_size=heldout_size,
        file="f.csv",
    )


def test_the_last_distinct_problems_are_held_out_with_all_that_pose_them():
    rows = ["a1", "c1", "b1", "a2", "c2", "d1"]
    # in order of where a problem first comes: a, c, b, d
    assert apart([*rows, "b2"]) == (["a1", "c1", "a2", "c2"], ["b1", "d1"])


def test_no_problem_of_a_heldout_file_is_trained_on_not_even_one_beyond_its_size():
    """With the first two alone, c would be trained on, and asked by the next evaluation of 3."""
    train, heldout = apart(["a1", "b1", "c1", "d1"], ["a9", "b9", "c9"])
    assert (train, heldout) == (["d1"], ["a9", "b9"])


def test_the_size_counts_what_is_left_to_train():
    assert apart(["a1", "b1", "c1", "d1", "e1"], ["a9"], train_size=2) == (["b1", "c1"], ["a9"])


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (["a1", "b1", "a2"], {}, r"f\.csv holds 2 distinct problems; heldout_size = 2"),
        (["a1", "b1"], {"heldout": ["a1", "b1"]}, r"All problems of f\.csv are held-out"),
        (["a1", "b1"], {"heldout_size": 0}, "`heldout_size` must be at least 1"),
        (["a1", "b1"], {"heldout_size": 1, "train_size": -1}, "`train_size` must be at least 0"),
    ],
)
def test_what_leaves_nothing_is_refused(rows, settings, message):
    with pytest.raises(BadInput, match=message):
        apart(rows, **settings)


@given(
    st.lists(st.sampled_from(["a1", "a2", "b1", "c1", "d1", "d2", "e1"]), min_size=1, max_size=20),
    st.none() | st.lists(st.sampled_from(["a9", "b9", "z9"]), min_size=1, max_size=5),
    st.integers(1, 3),
)
def test_no_problem_stands_on_both_sides(rows, heldout, size):
    try:
        train, held = apart(rows, heldout, heldout_size=size)
    except BadInput:
        return
    assert train and held and len(held) <= size
    assert not {row[0] for row in train} & {row[0] for row in [*held, *(heldout or ())]}
    # What is trained on keeps its order, and nothing else is lost.
    away = {row[0] for row in (heldout or held)}
    assert train == [row for row in rows if row[0] not in away]
