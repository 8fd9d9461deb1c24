"""PubMedQA: yes, no or maybe in a text, and abstracts read from files."""

import json
import pickle
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.errors import BadInput
from rlx.rewards import RowError, pubmedqa
from rlx.rewards.pubmedqa import LABELS
from rlx.tasks.pubmedqa import load

SHARED = Path(__file__).parents[2] / "shared/data/pubmedqa"


def answered(completion):
    """The answer for which a completion would be right; None without."""
    right = [k for k in LABELS if pubmedqa.score(completion, {"answer": k}).correct]
    return "+".join(right) or None


# ---- the verdict ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        # `yes` anywhere would be yes
        ("No. Yes-sayers claim...", "no"),
        ("<answer>No. Yes-sayers claim...</answer>", "no"),
        # `no` in `know`, and `not`
        ("I do not know yet", None),
        ("<answer>Maybe.</answer>", "maybe"),
        ("<answer>yes and no</answer>", None),
        ("<answer>eyes</answer>", None),
        ("<answer>know</answer>", None),
        ("<answer>notable</answer>", None),
    ],
)
def test_faults_that_others_had(completion, answer):
    assert answered(completion) == answer


YES = ["yes", "YES", "Yes.", "**Yes**", '"yes"', "(yes)", r"\boxed{yes}", "The answer is: yes"]
YES += ["Answer: yes", "the final answer is yes.", "yes, as the trial shows", "Yes! Yes."]
YES += ["_yes_", "Yes - it is", "Yes (with caution)"]
NONE = ["", " ", "not yes", "yes or no", "yes, no or maybe", "Maybe. There is no evidence", "yesno"]
NONE += ["no evidence", "yes-no", "yes's", "It is yes", "ye\u200bs", "ｙｅｓ", "уes", "noé", "n o"]
NONE += ["yes" * 1000, "yes " * 300, "no" + " " * 1000 + "x", "The answer is not yes"]


@pytest.mark.parametrize("text", YES + NONE)
def test_forms_of_an_answer(text):
    wanted = "yes" if text in YES else None
    assert answered(f"<answer>{text}</answer>") == wanted
    assert answered(f"Because.</think>\n<answer>\n{text}\n</answer>") == wanted


def test_only_a_short_reply_does_without_a_block():
    """A thought that begins with `No` is no answer."""
    assert answered("I think.</think>\nYes.") == "yes"
    assert answered("No. " + "The abstract speaks of patients. " * 10) is None
    assert answered("No.</think>") is None
    assert answered("The abstract says yes.") is None


def test_the_last_block_counts():
    assert answered("<answer>yes</answer><answer>no</answer>") == "no"
    assert answered("<answer>yes</answer></think>No.") == "yes"


def test_the_format_earns_its_weight():
    row = {"answer": "Maybe"}
    right = pubmedqa.score("x</think>\n<answer>maybe</answer>", row)
    assert (right.reward, right.correct, right.components) == (
        1.1,
        True,
        {"format": 1.0, "correct": 1.0},
    )
    wrong = pubmedqa.score("x</think>\n<answer>no</answer>", row, format_weight=0.2)
    assert (wrong.reward, wrong.correct, wrong.reason) == (
        0.2,
        False,
        "the answer is no, not maybe",
    )


@pytest.mark.parametrize("bad", [{}, {"answer": "perhaps"}, {"answer": None}, {"answer": True}])
def test_a_row_without_an_answer_is_refused(bad):
    with pytest.raises(RowError, match="must be one of yes, no, maybe"):
        pubmedqa.score("", bad)


def test_a_vote_is_an_answer():
    assert pubmedqa.answer("x</think><answer>Yes.</answer>") == "yes"
    assert pubmedqa.answer("x</think><answer>yes and no</answer>") is None


@given(
    st.lists(st.sampled_from(["yes", "no", "maybe", " ", ".", "<answer>", "</answer>", "-", "é"]))
)
def test_no_text_is_two_answers_or_a_failure(pieces):
    assert answered("".join(pieces)) in (None, *LABELS)


@pytest.mark.parametrize("piece", ["yes ", "(", "answer: ", "<answer>", "yes-", "\n"])
def test_a_megabyte_takes_a_moment(piece):
    text = piece * (1_000_000 // len(piece))
    start = time.process_time()
    for completion in (text, f"<answer>{text}</answer>", f"<answer>{text[:1000]}</answer>"):
        pubmedqa.score(completion, {"answer": "yes"})
    assert time.process_time() - start < 2.0


# ---- files ------------------------------------------------------------------------------------


def record(number, answer="yes", **fields):
    return {
        "QUESTION": f"Does {number} help?",
        "CONTEXTS": [f"We gave {number}.", "Patients were asked."],
        "final_decision": answer,
    } | fields


def write(path, content):
    rows = "\n".join(map(json.dumps, content)) if isinstance(content, list) else json.dumps(content)
    path.write_text(rows)
    return str(path)


def test_the_prompt_holds_contexts_and_question(tmp_path):
    file = write(tmp_path / "a.json", {str(i): record(i, "no") for i in range(3)})
    task = load(seed=0, file=file, heldout_size=1)
    _, user, assistant = task.train[0]["prompt"]
    assert user["content"].startswith(
        "We gave 0.\n\nPatients were asked.\n\nQuestion: Does 0 help?\n\n"
    )
    assert assistant == {"role": "assistant", "content": "<think>"}
    assert task.train[0]["answer"] == "no" == task.label(task.train[0])
    assert not task.score(user["content"], task.train[0]).correct
    pickle.dumps((task.score, task.answer, task.label, task.train))


def test_contexts_are_cut_at_a_space(tmp_path):
    file = write(tmp_path / "a.json", {str(i): record(i) for i in range(3)})
    for limit, text in (
        (8, "We gave ..."),
        (9, "We gave ..."),
        (10, "We gave 0. ..."),
        (1, "W ..."),
    ):
        task = load(seed=0, file=file, heldout_size=1, context_characters=limit)
        assert task.train[0]["prompt"][1]["content"].startswith(text + "\n\nQuestion: Does 0")
    whole = load(seed=0, file=file, heldout_size=1, context_characters=1000)
    assert "asked.\n\nQuestion" in whole.train[0]["prompt"][1]["content"]
    with pytest.raises(BadInput, match="context_characters"):
        load(seed=0, file=file, context_characters=-1)


def test_a_file_of_ids_names_the_held_out_ones(tmp_path):
    """Beyond `heldout_size` too, they are not trained on."""
    file = write(tmp_path / "a.json", {str(i): record(i) for i in range(6)})
    ids = write(tmp_path / "ids.json", {"4": "yes", "1": "yes", "2": "yes"})
    task = load(seed=0, file=file, heldout_file=ids, heldout_size=2)

    def asked(rows):
        return [row["prompt"][1]["content"].partition("We gave ")[2][0] for row in rows]

    assert asked(task.heldout) == ["4", "1"] and asked(task.train) == ["0", "3", "5"]
    with pytest.raises(BadInput, match=r"names 1 of 2 ids that no row of .* has, such as 9"):
        load(seed=0, file=file, heldout_file=write(tmp_path / "b.json", {"1": "yes", "9": "no"}))
    with pytest.raises(BadInput, match=r"the answer to 1 is 'no', and in .* it is 'yes'"):
        load(seed=0, file=file, heldout_file=write(tmp_path / "c.json", {"1": "no"}))


def test_rows_that_are_counted_in_each_file_are_no_same_problems(tmp_path):
    """Their numbers say nothing of the other file; the question does."""
    rows = [record(i, id=i) for i in range(4)]
    other = [record(9, id=0), record(3, id=1)]
    file, held = write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", other)
    assert len(load(seed=0, file=file, heldout_file=held, heldout_size=2).train) == 3


def test_rows_by_other_names(tmp_path):
    """As the hub has them, with one text for all contexts, and with columns mapped."""
    hub = [
        {"pubid": i, "question": f"Q{i}?", "context": {"contexts": ["c"]}, "final_decision": "no"}
        for i in range(3)
    ]
    assert (
        load(seed=0, file=write(tmp_path / "a.jsonl", hub), heldout_size=1).train[0]["answer"]
        == "no"
    )
    plain = [{"q": f"Q{i}?", "contexts": "all", "answer": "Maybe"} for i in range(3)]
    file = write(tmp_path / "b.jsonl", plain)
    task = load(seed=0, file=file, heldout_size=1, columns={"question": "q"})
    assert task.train[0]["answer"] == "maybe"


def test_a_bad_row_is_named_or_left_out(tmp_path):
    records = {str(i): record(i) for i in range(4)}
    records["2"]["final_decision"] = "perhaps"
    file = write(tmp_path / "a.json", records)
    with pytest.raises(BadInput, match=r"a\.json, record 2: `answer` must be one of yes"):
        load(seed=0, file=file, heldout_size=1)
    task = load(seed=0, file=file, heldout_size=1, bad_rows="skip")
    assert len(task.train) == 2 and "1 of 4" in task.notes[0]
    for fields, message in (({"CONTEXTS": []}, "contexts"), ({"QUESTION": " "}, "question")):
        rows = [record(1), record(2, **fields)]
        with pytest.raises(BadInput, match=rf"b\.jsonl:2: `{message}`"):
            load(seed=0, file=write(tmp_path / "b.jsonl", rows), heldout_size=1)


@pytest.mark.skipif(not SHARED.exists(), reason="the optional data folder is not there")
def test_gold_answers_are_right_and_all_others_wrong():
    task = load(
        seed=0,
        file=str(SHARED / "ori_pqal.json"),
        heldout_file=str(SHARED / "test_ground_truth.json"),
    )
    assert Counter(map(task.label, task.heldout)) == {"yes": 276, "no": 169, "maybe": 55}
    assert len(task.train) == 500
    for row in task.train + task.heldout:
        for label in LABELS:
            score = task.score(f"x</think>\n<answer>{label.title()}.</answer>", row)
            assert score.reward == (1.1 if label == row["answer"] else 0.1)
