"""The task of multiple choice: questions read from files, their order, and the gold answers."""

import json
import pickle
from collections import Counter
from pathlib import Path

import pytest

from model.errors import BadInput
from rlx.tasks.choice import load, points_elsewhere, read_problems

SHARED = Path(__file__).parents[2] / "shared/data"


def write(path, *rows):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return str(path)


def question(number, **fields):
    options = [f"it is {number + i}" for i in range(4)]
    return {"question": f"What is {number}?", "options": options, "answer": 0} | fields


def test_the_prompt_holds_the_question_and_its_options(tmp_path):
    task = load(seed=0, file=write(tmp_path / "a.jsonl", *map(question, range(3))), heldout_size=1)
    first = task.train[0]
    system, user, assistant = first["prompt"]
    assert "What is 0?\n\nA. it is 0\nB. it is 1\nC. it is 2\nD. it is 3\n\n" in user["content"]
    assert assistant == {"role": "assistant", "content": "<think>"} and system["content"]
    assert (first["answer"], first["prefill"]) == ("A", "<think>")
    assert task.score("x</think><answer>A</answer>", first).reward == 1.1
    # who repeats the prompt has answered nothing
    assert not task.score(user["content"], first).correct
    pickle.dumps((task.score, task.answer, task.train))


def test_files_with_a_header_and_without(tmp_path):
    without = write(
        tmp_path / "x_test.csv", '"Is it ""so, or so""?",a,b,c,d,B', '"What,\nthen?",e,f,g,h,A'
    )
    problems, _ = read_problems(without, columns={}, bad_rows="refuse")
    assert [p.answer for p in problems] == ["B", "A"]
    assert problems[1].question == "What,\nthen?" and problems[1].options["D"] == "h"
    columns = {"question": "stem", "A": "opa", "B": "opb", "answer": "cop"}
    named = write(tmp_path / "y.csv", "stem,opa,opb,cop", "Why?,one,two,1", "How?,three,four,0")
    problems, _ = read_problems(named, columns=columns, bad_rows="refuse")
    assert [(p.question, p.answer) for p in problems] == [("Why?", "B"), ("How?", "A")]
    letters = write(tmp_path / "z.csv", "answer,question,A,B", "B,Why?,one,two")
    assert read_problems(letters, columns={}, bad_rows="refuse")[0][0].answer == "B"
    both, _ = read_problems(str(tmp_path / "x_*.csv"), columns={}, bad_rows="refuse")
    assert len(both) == 2
    with pytest.raises(BadInput, match="has no header"):
        read_problems(without, columns=columns, bad_rows="refuse")
    with pytest.raises(BadInput, match="No file matches"):
        read_problems(str(tmp_path / "w*"), columns={}, bad_rows="refuse")


def test_a_bad_row_is_named_or_left_out(tmp_path):
    bad = write(
        tmp_path / "x.csv", "What?,a,b,c,d,B", "What?,a,b,c,d,E", "What,a,B", "Why?,a,b,c,d,A"
    )
    with pytest.raises(BadInput, match=r"x\.csv:2: `answer` must be the letter"):
        load(seed=0, file=bad, heldout_size=1)
    task = load(seed=0, file=bad, heldout_size=1, bad_rows="skip")
    assert len(task.train) == len(task.heldout) == 1 and "2 of 4" in task.notes[0]
    rows = write(tmp_path / "y.jsonl", question(1), question(2, answer="none"), question(3))
    with pytest.raises(BadInput, match=r"y\.jsonl:2: "):
        load(seed=0, file=rows, heldout_size=1)


def test_shuffled_options_take_the_answer_along(tmp_path):
    file = write(tmp_path / "a.jsonl", *map(question, range(400)))
    plain = load(seed=0, file=file, heldout_size=100)
    one, two = (load(seed=s, file=file, heldout_size=100, shuffle=True) for s in (1, 2))
    assert {r["answer"] for r in plain.train} == {"A"}
    for task in (one, two):
        rows = task.train + task.heldout
        texts = [r["options"][r["answer"]] for r in rows]
        assert texts == [r["options"]["A"] for r in plain.train + plain.heldout]
        assert min(Counter(r["answer"] for r in rows).values()) > 60
    assert one.train == load(seed=1, file=file, heldout_size=100, shuffle=True).train != two.train
    # whatever the seed, all runs are measured on the same prompts
    assert one.heldout == two.heldout


POINT = ["All of the above.", "Both A and C", "none of these", "Option B", "(b) and (C)", "C"]
POINT_NOWHERE = ["above the clavicle", "Vitamin A", "none", "II and IV"]


@pytest.mark.parametrize("text", POINT + POINT_NOWHERE)
def test_options_that_speak_of_others_keep_their_order(tmp_path, text):
    row = question(0, options=["one", "two", text, "three"])
    problem = read_problems(write(tmp_path / "a.jsonl", row), columns={}, bad_rows="refuse")[0][0]
    assert points_elsewhere(problem) == (text in POINT)


def test_a_held_out_question_is_not_trained_on_in_another_order(tmp_path):
    again = question(
        2, question=" what is 2? ", options=["it is 5", "it is 3", "it is 4", "it is 2"]
    )
    train = write(tmp_path / "a.jsonl", question(1), again)
    task = load(seed=0, file=train, heldout_file=write(tmp_path / "b.jsonl", question(2)))
    assert len(task.train) == 1 and "What is 1?" in task.train[0]["prompt"][1]["content"]


COUNTS = {"medqa/sampled_50.jsonl": 50, "medqa/test_hard.jsonl": 100}
COUNTS |= {"mmlu_medical/*_test.csv": 1099, "mmlu_medical/*_val.csv": 123}


@pytest.mark.skipif(not SHARED.exists(), reason="the optional data folder is not there")
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_gold_answers_are_right_and_all_others_wrong(name, shuffle):
    task = load(seed=3, file=str(SHARED / name), heldout_size=20, shuffle=shuffle)
    rows = task.train + task.heldout
    assert len(rows) == COUNTS[name]
    for r in rows:
        for letter, text in r["options"].items():
            right = letter == r["answer"]
            for form in ("<answer>{}</answer>", "<answer>{}. {}</answer>", "The answer is {}."):
                completion = "x</think>" + form.format(letter, text)
                assert task.score(completion, r).correct == right, completion
        assert not task.score(r["prompt"][1]["content"], r).correct


@pytest.mark.skipif(not SHARED.exists(), reason="the optional data folder is not there")
def test_a_folder_of_several_splits_is_refused():
    with pytest.raises(BadInput, match="several splits"):
        load(seed=0, file=str(SHARED / "mmlu_medical"))
