"""The chat task: every form of a conversation, and the same prompts held out as with pairs."""

import json
from pathlib import Path

import pytest

from rlx.tasks import TASKS
from rlx.tasks.task import Answered

load = TASKS["chat"]
ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "tests/data/preference.json"
BUNDLED = ROOT / "configs/data/countdown_pairs.jsonl"


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [user("a"), assistant("b"), user("d"), assistant("c")]
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}[message["role"]], "value": message["content"]}
    for message in TALK
]
LAST = {"messages": [user("last"), assistant("c")]}


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_one(tmp_path: Path, row: dict, **settings):
    task = load(seed=0, file=write(tmp_path / "a.jsonl", [row, LAST]), heldout_size=1, **settings)
    (conversation,) = task.conversations
    (asked,) = task.train
    return asked["prompt"], conversation


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK},
        {"conversations": TALK},
        {"conversations": SHAREGPT},
        {"prompt": "a", "messages": TALK},  # UltraChat's rows tell the first prompt once more
    ],
)
def test_every_form_of_a_conversation_is_read(tmp_path, row):
    assert read_one(tmp_path, row) == (TALK[:3], TALK)
    prompt, conversation = read_one(tmp_path, row, system="Be brief.")
    assert (prompt, conversation) == ([SYSTEM, *TALK[:3]], [SYSTEM, *TALK])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": TALK[:3], "completion": "c"},
        {"prompt": TALK[:3], "completion": [assistant("c")]},
        {"prompt": TALK[:3], "chosen": "c", "rejected": "r"},
        {"conversations": TALK[:3], "chosen": assistant("c"), "rejected": assistant("r")},
        {"chosen": TALK, "rejected": [*TALK[:3], assistant("r")]},
    ],
)
def test_an_answer_that_is_given_apart_is_imitated_alone(tmp_path, row):
    """And no earlier turn of its prompt."""
    assert read_one(tmp_path, row) == (TALK[:3], Answered(TALK[:3], "c"))
    prompt, answered = read_one(tmp_path, row, system="Be brief.")
    assert answered == Answered(prompt, "c") and prompt == [SYSTEM, *TALK[:3]]


def test_a_text_prompt_is_the_users_turn(tmp_path):
    row = {"prompt": "a", "completion": "c"}
    assert read_one(tmp_path, row) == ([user("a")], Answered([user("a")], "c"))


def test_an_answer_goes_on_from_its_prefill(tmp_path):
    prompt = [user("a"), assistant("<think>")]
    for row in ({"completion": "x</think>c"}, {"chosen": "x</think>c", "rejected": "r"}):
        answered = Answered(prompt, "x</think>c")
        assert read_one(tmp_path, row | {"prompt": prompt}) == (prompt, answered)


def test_what_stands_after_the_last_answer_stays(tmp_path):
    assert read_one(tmp_path, {"messages": [*TALK, user("e")]}) == (TALK[:3], [*TALK, user("e")])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, r"expected `messages` .*\['text'\]"),
        ({"prompt": "a"}, "expected `messages` .*"),
        ({"messages": [user("a")]}, "`messages` holds no message of the assistant's"),
        ({"messages": [assistant("a")]}, "message 1 does not"),
        ({"messages": [*TALK, assistant("a")]}, "message 5 does not"),
        ({"messages": [user("a"), assistant(" ")]}, "message 2, the assistant's, is empty"),
        ({"messages": []}, "`messages` must be a list"),
        ({"messages": [{"role": "tool", "content": ""}]}, "expected one of the roles.*'tool'"),
        ({"prompt": "a", "completion": ""}, "`completion` is empty"),
        ({"prompt": TALK, "completion": user("x")}, "`completion` .* is the user's"),
        ({"prompt": "a", "chosen": "c", "rejected": "r"}, "the prompt is text"),
        ({"prompt": TALK[:3], "chosen": "", "rejected": "r"}, "`chosen` is empty"),
        ({"messages": TALK, "system": 3}, "`system` must be text"),
    ],
)
def test_a_malformed_row_is_refused_with_file_and_line(tmp_path, row, message):
    file = write(tmp_path / "a.jsonl", [LAST, row])
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{message}"):
        load(seed=0, file=file)


def test_no_heldout_prompt_is_trained_on_not_even_in_an_earlier_turn(tmp_path):
    rows = [
        {"messages": [user("x"), assistant("1"), user("y"), assistant("2")]},
        {"messages": [user("z"), assistant("3")]},
        {"messages": [user("x"), assistant("4")]},  # the prompt of the first row's first answer
    ]
    task = load(seed=0, file=write(tmp_path / "a.jsonl", rows), heldout_size=1)
    assert task.conversations == [rows[1]["messages"]]
    assert task.heldout_conversations == [rows[2]["messages"]]
    assert task.heldout == [{"prompt": [user("x")]}]
    assert task.notes and "1 of 3 conversations" in task.notes[0]
    assert (task.score, task.verdicts, task.pairs) == (None, False, None)


def test_no_answer_of_a_heldout_conversation_is_trained_on(tmp_path):
    """All its turns are measured: its first would be known by heart."""
    rows = [
        {"messages": [user("x"), assistant("1")]},
        {"messages": [user("z"), assistant("3")]},
        {"messages": [user("x"), assistant("1"), user("y"), assistant("2")]},
    ]
    task = load(seed=0, file=write(tmp_path / "a.jsonl", rows), heldout_size=1)
    assert task.heldout_conversations == [rows[2]["messages"]]
    assert task.conversations == [rows[1]["messages"]]


def test_a_heldout_file_and_the_sizes(tmp_path):
    rows = [{"prompt": p, "completion": f"{p}!"} for p in "abcde"]
    file = write(tmp_path / "a.jsonl", rows)
    other = write(tmp_path / "b.jsonl", [rows[4], rows[3]])
    task = load(seed=0, file=file, heldout_file=other, heldout_size=1, train_size=2)
    assert [chat.answer for chat in task.conversations] == ["a!", "b!"]
    assert [chat.answer for chat in task.heldout_conversations] == ["e!"]
    assert "2 of 5" in task.notes[0]
    with pytest.raises(ValueError, match="none is left to train"):
        load(seed=0, file=other, heldout_file=file)
    with pytest.raises(ValueError, match="`heldout_size` = 5"):
        load(seed=0, file=file, heldout_size=5)


@pytest.mark.parametrize("file", [FIXTURE, BUNDLED])
def test_one_file_serves_both_tasks_with_the_same_prompts_held_out(file):
    pairs = TASKS["preference"](seed=0, file=str(file), heldout_size=2)
    chats = load(seed=0, file=str(file), heldout_size=2)
    assert (chats.train, chats.heldout) == (pairs.train, pairs.heldout)
    for pair, chat in zip(pairs.pairs, chats.conversations, strict=True):
        assert chat == Answered(pair.prompt, pair.chosen)
