"""The preference task: the forms of its rows, what is held out, and the bundled Countdown pairs."""

import json
from pathlib import Path

import pytest

from model.tokenizer import load_tokenizer
from rlx.data import preference_pairs
from rlx.rewards import VERIFIERS
from rlx.tasks import TASKS, Pair
from rlx.tasks.countdown import key
from tools import countdown_pairs

load = TASKS["preference"]
ROOT = Path(__file__).parents[1]
FIXTURE = ROOT / "tests/data/preference.json"
PUBLIC = ROOT.parent / "shared/data/preference/dpo_en_demo.json"
BUNDLED = ROOT / "configs/data/countdown_pairs.jsonl"


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
LAST = {"prompt": "last", "chosen": "c", "rejected": "r"}


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_one(tmp_path: Path, row: dict, **settings) -> Pair:
    file = write(tmp_path / "a.jsonl", [row, LAST])
    (pair,) = load(seed=0, file=file, heldout_size=1, **settings).pairs
    return pair


def llama_factory(*turns: tuple[str, str], **more) -> dict:
    conversations = [{"from": role, "value": value} for role, value in turns]
    answers = {"chosen": {"from": "gpt", "value": "c"}, "rejected": {"from": "gpt", "value": "r"}}
    return {"conversations": conversations} | answers | more


TALK = [user("a"), assistant("b"), user("d")]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (llama_factory(("human", "a")), [user("a")]),
        (llama_factory(("human", "a"), ("gpt", "b"), ("human", "d")), TALK),
        (llama_factory(("system", "Be brief."), ("human", "a")), [SYSTEM, user("a")]),
        (llama_factory(("human", "a"), system="Be brief."), [SYSTEM, user("a")]),
        (llama_factory(("human", "a"), system="", tools=""), [user("a")]),
        ({"messages": TALK, "chosen": assistant("c"), "rejected": assistant("r")}, TALK),
        ({"prompt": "a text", "chosen": "c", "rejected": "r"}, "a text"),
        ({"prompt": TALK, "chosen": "c", "rejected": "r"}, TALK),
        ({"prompt": TALK, "chosen": [assistant("c")], "rejected": [assistant("r")]}, TALK),
        ({"prompt": [user("a"), assistant("<th")], "chosen": "c", "rejected": "r"}, None),
        ({"chosen": [*TALK, assistant("c")], "rejected": [*TALK, assistant("r")]}, TALK),
        # UltraFeedback's rows tell the prompt once more beside whole lists
        (
            {"prompt": "a", "chosen": [user("a"), assistant("c")]}
            | {"rejected": [user("a"), assistant("r")], "messages": [user("a"), assistant("c")]},
            [user("a")],
        ),
        # Parquet has a null for each column that a row lacks
        ({"prompt": TALK, "chosen": "c", "rejected": "r", "messages": None, "margin": None}, TALK),
    ],
)
def test_every_form_of_a_row_gives_its_pair(tmp_path, row, prompt):
    assert read_one(tmp_path, row) == Pair(prompt or row["prompt"], "c", "r", 0.0)


def test_a_margin_is_read(tmp_path):
    assert read_one(tmp_path, {"prompt": "a", "chosen": "c", "rejected": "r", "margin": 2}) == Pair(
        "a", "c", "r", 2.0
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "c"}, "expected `chosen` and `rejected`.*'chosen', 'prompt'"),
        ({"chosen": "c", "rejected": "r"}, "expected the prompt in"),
        ({"prompt": "", "chosen": "c", "rejected": "r"}, "`prompt` is empty"),
        ({"prompt": 3, "chosen": "c", "rejected": "r"}, "`prompt` must be a list"),
        ({"prompt": [], "chosen": "c", "rejected": "r"}, "`prompt` must be a list"),
        ({"prompt": "a", "chosen": "", "rejected": "r"}, "`chosen` is empty"),
        ({"prompt": "a", "chosen": "c", "rejected": " \n"}, "`rejected` is empty"),
        ({"prompt": "a", "chosen": 3, "rejected": "r"}, "chosen: expected the texts"),
        ({"prompt": "a", "chosen": user("c"), "rejected": "r"}, "`chosen` .* is the user's"),
        (llama_factory(("human", "a"), ("gpt", "b")), "the user's .* there is the assistant's"),
        (llama_factory(("system", "a")), "there is the system's"),
        (llama_factory(("observation", "a")), "message 1: expected one of the roles.*'observation"),
        (llama_factory(("human", "a"), tools="[{}]"), "`tools` of a row"),
        ({"prompt": [assistant("x")], "chosen": "c", "rejected": "r"}, "there is no message"),
        ({"prompt": [{"role": "user"}], "chosen": "c", "rejected": "r"}, "message 1: expected"),
        (
            {"prompt": [user("a") | {"weight": 0}], "chosen": "c", "rejected": "r"},
            "`weight` of a message",
        ),
        (
            {"chosen": [user("a"), assistant("c")], "rejected": [user("b"), assistant("r")]},
            r"after 0 .* \['user', 'assistant'\] and \['user', 'assistant'\]",
        ),
        (
            {"chosen": [*TALK, assistant("c")], "rejected": [user("a"), assistant("b")]},
            "after 1 .*",
        ),
        (
            {"chosen": [*TALK[:2], assistant("c")], "rejected": [*TALK[:2], assistant("r")]},
            "there is the assistant's",
        ),
        ({"prompt": "a", "chosen": "c", "rejected": "r", "margin": "2"}, "`margin` .*'2'"),
        ({"prompt": "a", "chosen": "c", "rejected": "r", "margin": True}, "`margin`"),
        ({"prompt": "a", "chosen": "c", "rejected": "r", "margin": 10**400}, "`margin`"),
    ],
)
def test_a_malformed_row_is_refused_with_file_and_line(tmp_path, row, message):
    file = write(tmp_path / "a.jsonl", [LAST, row])
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{message}"):
        load(seed=0, file=file)


def test_equal_answers_are_left_out_and_counted(tmp_path):
    rows = [{"prompt": f"p{i}", "chosen": "c", "rejected": "cr"[i % 2]} for i in range(6)]
    task = load(seed=0, file=write(tmp_path / "a.jsonl", rows), heldout_size=2)
    assert [pair.prompt for pair in task.pairs] == ["p1", "p3"]
    assert [pair.prompt for pair in task.heldout_pairs] == ["p5"]
    assert task.notes == ("3 of 6 pairs were left out: chosen and rejected are equal.",)
    # the held-out prompts are the same as the chat task's, which has a use for that answer
    assert [row["prompt"] for row in task.heldout] == ["p4", "p5"]
    with pytest.raises(ValueError, match="left to train"):
        load(seed=0, file=write(tmp_path / "b.jsonl", rows[::2]), heldout_size=1)


def test_the_last_prompts_are_held_out_with_all_of_their_pairs(tmp_path):
    rows = [{"prompt": p, "chosen": f"c{i}", "rejected": "r"} for i, p in enumerate("abcabdd")]
    task = load(seed=0, file=write(tmp_path / "a.jsonl", rows), heldout_size=2)
    # distinct prompts in order: a b c d
    assert [pair.chosen for pair in task.heldout_pairs] == ["c2", "c5", "c6"]
    assert [pair.chosen for pair in task.pairs] == ["c0", "c1", "c3", "c4"]
    assert [row["prompt"] for row in task.train] == ["a", "b"]  # a prompt once
    assert [row["prompt"] for row in task.heldout] == ["c", "d"]
    assert (task.score, task.verdicts, task.conversations) == (None, False, None)
    assert load(seed=9, file=str(tmp_path / "a.jsonl"), heldout_size=2) == task
    short = load(seed=0, file=str(tmp_path / "a.jsonl"), heldout_size=2, train_size=1)
    assert [pair.chosen for pair in short.pairs] == ["c0"]
    assert [row["prompt"] for row in short.train] == ["a"]


def test_prompts_of_a_heldout_file_are_not_trained_on(tmp_path):
    rows = [{"prompt": p, "chosen": "c", "rejected": "r"} for p in "abc"]
    file = write(tmp_path / "a.jsonl", rows)
    other = write(tmp_path / "b.jsonl", [row | {"chosen": "x"} for row in (rows[2], rows[1])])
    task = load(seed=0, file=file, heldout_file=other, heldout_size=1)
    # b stands beyond the held-out size, yet in the held-out file
    assert [pair.prompt for pair in task.pairs] == ["a"]
    assert task.heldout_pairs == [Pair("c", "x", "r")]
    assert "2 of 3 pairs" in task.notes[0]
    with pytest.raises(ValueError, match="left to train"):
        load(seed=0, file=other, heldout_file=file)


def test_the_system_message_stands_where_there_is_none(tmp_path):
    row = {"prompt": TALK, "chosen": "c", "rejected": "r"}
    other = {"role": "system", "content": "Other."}
    last = row | {"prompt": [user("last")]}
    file = write(tmp_path / "a.jsonl", [row, row | {"prompt": [other, *TALK]}, last])
    task = load(seed=0, file=file, heldout_size=1, system="Be brief.")
    assert [pair.prompt for pair in task.pairs] == [[SYSTEM, *TALK], [other, *TALK]]
    with pytest.raises(ValueError, match=r"a\.jsonl:2: the prompt is text.*`system`"):
        read_one(tmp_path, row, system="Be brief.")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"file": ""}, "`file`"),
        ({"train_size": -1}, "`train_size`"),
        ({"heldout_size": 0}, "`heldout_size`"),
        ({"heldout_size": 4}, "holds 4 distinct prompts; .*`heldout_size` = 4"),
        ({"file": "none.json"}, "none.json"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        load(seed=0, **{"file": str(FIXTURE)} | settings)


def test_public_rows_are_read():
    task = load(seed=0, file=str(FIXTURE), heldout_size=1)
    plain, system, talk = task.pairs
    assert plain.chosen == "6778576 - 84834150134 = -84827371558"
    assert [message["role"] for message in system.prompt] == ["system", "user"]
    assert [message["role"] for message in talk.prompt] == ["user", "assistant"] * 2 + ["user"]


@pytest.mark.skipif(not PUBLIC.exists(), reason="the optional data folder is not there")
def test_all_300_public_pairs_are_read():
    task = load(seed=0, file=str(PUBLIC), heldout_size=50)
    assert len(task.pairs) + len(task.heldout_pairs) == 300
    assert len(task.train) + len(task.heldout) == 295 and len(task.heldout) == 50
    trained = [pair.prompt for pair in task.pairs]
    assert not any(row["prompt"] in trained for row in task.heldout)


def stated(row: dict) -> dict:
    """The problem that a bundled row's prompt asks, as the verifier reads it."""
    asked, target = row["prompt"][1]["content"].removesuffix(".").split(" to make ")
    nums = [int(number) for number in asked.split(" for ")[1].split()]
    return {"nums": nums, "target": int(target), "prefill": "<think>"}


def test_the_bundled_pairs_are_right_wrong_distinct_and_of_like_length():
    rows = [json.loads(line) for line in BUNDLED.read_text().splitlines()]
    assert len(rows) == 1500 and BUNDLED.stat().st_size < 600_000
    problems = {key((p["nums"], p["target"])) for p in map(stated, rows)}
    assert len(problems) == 1500
    countdown = TASKS["countdown"](
        seed=3, train_size=1, heldout_size=1024, numbers=(3,), highest=10, language="brief"
    )
    assert not problems & {key((row["nums"], row["target"])) for row in countdown.heldout}
    assert rows[0]["prompt"][0] == countdown.train[0]["prompt"][0]
    score = VERIFIERS["countdown"]
    longer = {"chosen": 0, "rejected": 0}
    for row in rows:
        problem = stated(row)
        right, wrong = score(row["chosen"], problem), score(row["rejected"], problem)
        assert right.correct and not wrong.correct
        assert right.components["format"] == wrong.components["format"] == 1
        lines = [row[side].count("\n") for side in longer]
        if lines[0] != lines[1]:
            longer["chosen" if lines[0] > lines[1] else "rejected"] += 1
    gave_up = sum(" no\n</think>" in row["rejected"] for row in rows)
    assert 0.4 < gave_up / 1500 < 0.6  # the others claim what is not so
    assert max(longer.values()) < 0.25 * 1500
    task = load(seed=0, file=str(BUNDLED))
    assert (len(task.pairs), len(task.heldout_pairs), task.notes) == (1436, 64, ())
    nano = load_tokenizer(ROOT / "model/assets/nano")
    _, notes = preference_pairs(task.pairs, nano, max_prompt_tokens=64, max_new_tokens=48)
    assert notes == ()  # nothing cut, nothing left out


def test_the_bundled_pairs_are_what_their_tool_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(countdown_pairs, "PAIRS", 12)
    countdown_pairs.make(tmp_path / "pairs.jsonl")
    assert (tmp_path / "pairs.jsonl").read_text().splitlines() == (
        BUNDLED.read_text().splitlines()[:12]
    )
