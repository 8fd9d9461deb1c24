"""Prompts as ids: the limit, and rows that stay beside their prompts when some are left out."""

import jax
import numpy as np
import pytest

import rlx.stepper
from model.errors import BadInput
from model.tokenizer import load_tokenizer
from rlx.assemble import random_keys
from rlx.config import load
from rlx.data import encode_prompts, prompt_pool
from rlx.heldout import Heldout
from rlx.policy import checkpoint_folder, load_policy
from rlx.resolve import resolve
from rlx.rewards.host import HostVerifier
from rlx.rewards.score import Score, Span
from rlx.stepper import online_stepper
from rlx.task_loading import load_task
from rlx.tasks import Task


@pytest.fixture(scope="module")
def nano():
    return load_tokenizer(checkpoint_folder("nano"))


LONG = {"prompt": "5" * 9, "id": 2}
ROWS = [{"prompt": "1", "id": 1}, LONG, {"prompt": "33", "id": 3}, LONG, {"prompt": "4", "id": 5}]


def test_a_prompt_beyond_the_limit_is_refused_with_its_row(nano):
    with pytest.raises(BadInput, match=r"max_prompt_tokens: training row 1 .* more than 8.*skip"):
        encode_prompts(ROWS, nano, 8, "training row")
    assert encode_prompts([*ROWS[:1], *ROWS[2:3]], nano, 8, "training row").notes == ()


def test_rows_whose_prompts_are_left_out_go_with_them(nano):
    """Cut from the ids alone, the verifier would score the third text by the second row."""
    rows, ids, (note,) = encode_prompts(ROWS, nano, 8, "training row", long_prompts="skip")
    assert [row["id"] for row in rows] == [1, 3, 5]
    assert ids == [nano.encode(row["prompt"]) for row in rows]
    assert note == "2 of 5 training rows left out: prompts of more than 8 tokens."


def test_another_row_takes_the_place_of_one_that_is_left_out(nano):
    """An evaluation of 2 of 5 problems would else be one of 1."""
    rows, ids, (note,) = encode_prompts(ROWS, nano, 8, "held-out row", long_prompts="skip", count=2)
    assert [row["id"] for row in rows] == [1, 3] and len(ids) == 2
    assert note.startswith("1 of 3 held-out rows")
    assert len(encode_prompts(ROWS, nano, 9, "held-out row", count=2).rows) == 2


def test_no_prompt_left_and_a_fault_are_told_with_the_rows(nano):
    with pytest.raises(BadInput, match=r"no training row is left; 2 of 2 .* more than 8 tokens"):
        encode_prompts([LONG, LONG], nano, 8, "training row", long_prompts="skip")
    with pytest.raises(BadInput, match="training row 1: The list of chat messages is empty"):
        encode_prompts([*ROWS[:1], {"prompt": []}], nano, 8, "training row")


def online(path, *settings):
    """The training rows of a run, those that its verifier reads, and the prompts of its pool."""
    given = [f"model.path={path}", "model.weights=random", "task.language=brief"]
    given += ["task.train_size=64", "task.heldout_size=8", "batch.prompts=4", "batch.samples=2"]
    given += ["task.highest=10"]
    config = resolve(load(None, [*given, "sampling.max_new_tokens=8", *settings]))
    keys, pools = random_keys(config), []
    with pytest.MonkeyPatch.context() as patch:

        def kept(encoded, *others):
            pools.append(encoded)
            return prompt_pool(encoded, *others)

        patch.setattr(rlx.stepper, "prompt_pool", kept)
        policy = load_policy(config, keys.weights)
        stepper = online_stepper(config, policy, load_task(config), keys, None)
    (pool,) = pools
    return stepper, pool, policy.tokenizer


def test_pool_verifier_and_samples_have_the_same_rows(tiny_nano):
    whole, _, _ = online(tiny_nano)
    stepper, pool, tokenizer = online(
        tiny_nano, "sampling.long_prompts=skip", "sampling.max_prompt_tokens=41"
    )
    assert 0 < len(pool) < len(whole.rows) == 64
    assert pool == [tokenizer.encode_prompt(row["prompt"]) for row in stepper.rows]
    assert stepper.verifier.rows == stepper.rows
    assert stepper.rows == [
        row for row in whole.rows if len(tokenizer.encode_prompt(row["prompt"])) <= 41
    ]
    (note,) = stepper.notes
    assert note.startswith(f"{64 - len(pool)} of 64 training rows left out")


def test_heldout_rows_stay_beside_their_prompts(tiny_nano):
    """And as many are measured as were asked for."""
    given = [f"model.path={tiny_nano}", "model.weights=random", "task.language=brief"]
    given += [
        "task.highest=10",
        "task.train_size=8",
        "task.heldout_size=64",
        "sampling.max_prompt_tokens=41",
    ]
    config = resolve(
        load(None, [*given, "sampling.max_new_tokens=8", "sampling.long_prompts=skip"])
    )
    keys, task = random_keys(config), load_task(config)
    policy = load_policy(config, keys.weights)

    def heldout(count):
        return Heldout(config, policy, task, jax.random.key(0), {"eval.final_problems": count})

    found = heldout(9)
    encode = policy.tokenizer.encode_prompt
    fitting = [row for row in task.heldout if len(encode(row["prompt"])) <= 41]
    assert 9 < len(fitting) < 64 and task.heldout[:9] != fitting[:9]
    assert found.rows == found.verifier.rows == fitting[:9]
    assert found.prompts == [encode(row["prompt"]) for row in fitting[:9]]
    (note,) = found.notes
    assert "held-out rows left out" in note
    message = rf"expected at most the task's {len(fitting)} held-out .* came 64\. .* of 64 held-out"
    with pytest.raises(BadInput, match=message):
        heldout(64)


@pytest.mark.parametrize("rows", [4, 8])
def test_every_heldout_problem_is_scored_once_whatever_the_batch(tiny_nano, rows):
    """Filled up with copies or cut to whole batches, 1 of 21 would be 1 of 24 or 20, or 2 of 24."""
    given = [f"model.path={tiny_nano}", "model.weights=random", "sampling.max_new_tokens=4"]
    config = resolve(load(None, [*given, f"eval.batch={rows}", "reward.workers=0"]))
    keys = random_keys(config)
    problems = [{"prompt": f"{i} + 1 =", "id": i} for i in range(21)]
    scored = []

    def score(text, row):
        scored.append(row["id"])
        return Score(float(row["id"] == 0), row["id"] == 0, {"correct": 0.0}, "")

    task = Task(name="trial", train=problems, heldout=problems, score=score)
    policy = load_policy(config, keys.weights)
    heldout = Heldout(config, policy, task, keys.evaluation, {"eval.final_problems": 21})
    scored.clear()
    metrics, texts = heldout.evaluate(policy.params, 21, greedy=False)
    assert metrics["n"] == 21 and metrics["pass@1"] == pytest.approx(1 / 21)
    assert sorted(scored) == list(range(21)) and len(texts) == 21


def test_sampled_ids_are_never_encoded_again(nano):
    """Two ids that spell what is one token: encoded anew, the text would be a token shorter, and
    what it earns would stand at another one's place."""
    one = next(
        id
        for id in range(len(nano))
        if len(text := nano.decode([id])) == 2
        and nano.encode(text) == [id]
        and len(nano.encode(text[0])) == len(nano.encode(text[1])) == 1
    )
    text = nano.decode([one])
    two = [*nano.encode(text[0]), *nano.encode(text[1])]
    assert len(two) == 2 and nano.encode(nano.decode(two)) == [one]

    def score(completion, row):
        spans = (Span(1, 2, 0.5),) if completion else ()
        return Score(0.5 * len(spans), None, {"line": 0.5}, completion, spans)

    verifier = HostVerifier(score, [{}], nano.decode, nano.stop_ids)
    tokens = np.array([[[*two, nano.end_id, nano.pad_id]]])
    rewards, _, _, token_scores = verifier(np.array([0]), tokens, np.array([[3]]))
    assert rewards.tolist() == [[0.5]]
    assert token_scores.tolist() == [[[0.0, 0.5, 0.0, 0.0]]]
    # a worked completion too: the ids that are learnt are those that the text is encoded to
    assert nano.encode_answer("1", text) == [one, nano.end_id]
