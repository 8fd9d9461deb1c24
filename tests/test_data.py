"""Given text as one batch: what the mask marks, what is cut or left out, and packed rows."""

import copy
import dataclasses
import functools
import itertools
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import read_config
from model.heads import completion_outputs
from model.parameters import initialise
from model.qwen import Qwen
from model.tokenizer import ChatText, Tokenizer, load_tokenizer
from rlx.algorithms import ALGORITHMS
from rlx.data import chat_rows, encode_prompts, first_fit, preference_pairs, worked_examples
from rlx.tasks import TASKS, Pair

ROOT = Path(__file__).parents[1]
NANO = ROOT / "model/assets/nano"
QWEN3 = ROOT.parent / "shared/data/qwen3_tokenizer"
PUBLIC = ROOT.parent / "shared/data/preference/dpo_en_demo.json"
FIXTURE = ROOT / "tests/data/preference.json"


@pytest.fixture(scope="module")
def nano():
    return load_tokenizer(NANO)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def completions(batch) -> list[list[int]]:
    """The ids under each row's mask."""
    tokens, mask = np.asarray(batch.tokens), np.asarray(batch.mask)
    return [row[m].tolist() for row, m in zip(tokens[:, -mask.shape[1] :], mask, strict=True)]


def texts(batch) -> list[list[int]]:
    """Each row's ids that are no padding."""
    tokens, positions = np.asarray(batch.tokens), np.asarray(batch.positions)
    return [row[place >= 0].tolist() for row, place in zip(tokens, positions, strict=True)]


def well_formed(batch) -> None:
    """Shapes agree, widths are multiples of 8, and positions count on from 0 in each row."""
    rows, columns = batch.tokens.shape
    width = batch.mask.shape[1]
    assert columns % 8 == 0 and (width % 8 == 0 or width == columns - 1)
    for name in ("sampler_logprobs", "old_logprobs", "ref_logprobs", "values"):
        assert getattr(batch, name).shape == (rows, width)
        assert not np.any(getattr(batch, name))
    (signal,) = batch.signals
    np.testing.assert_array_equal(signal.mask, batch.mask)
    assert signal.advantages.shape == signal.returns.shape == batch.margins.shape == (rows, 1)
    assert not np.any(np.asarray(batch.mask) & (np.asarray(batch.positions)[:, -width:] < 0))


# --- preference pairs ----------------------------------------------------------------------------


def pairs_of(nano, pairs, prompt_limit=64, limit=64):
    return preference_pairs(pairs, nano, max_prompt_tokens=prompt_limit, max_new_tokens=limit)


def test_a_pair_is_two_rows_of_the_same_prompt_the_chosen_first(nano):
    chat = [user("Write 3")]
    prefilled = [user("Write 4"), assistant("<think>")]
    pairs = [Pair(chat, "3", "2+2", 0.5), Pair("12", "34", "1"), Pair(prefilled, "</think>", "5")]
    batch, notes = pairs_of(nano, pairs)
    well_formed(batch)
    assert notes == ()
    ends = nano.encode("<|im_end|>")
    expected = []
    for pair in pairs:
        for answer in (pair.chosen, pair.rejected):
            expected.append(nano.encode_prompt(pair.prompt) + nano.encode(answer) + ends)
    assert texts(batch) == expected
    assert completions(batch) == [
        nano.encode(text) + ends for pair in pairs for text in (pair.chosen, pair.rejected)
    ]
    np.testing.assert_array_equal(
        np.asarray(batch.signals[0].advantages)[:, 0], [1, -1, 1, -1, 1, -1]
    )
    np.testing.assert_array_equal(np.asarray(batch.margins)[:, 0], [0.5, 0.5, 0, 0, 0, 0])
    # every completion starts in the same column
    first = np.argmax(np.asarray(batch.mask), axis=1)
    np.testing.assert_array_equal(first, 0)


def test_a_completion_that_is_too_long_is_cut_and_then_has_no_end(nano):
    fits, long = "1234567", "12345678"  # 8 tokens with the end, and 9
    assert len(nano.encode(long)) == 8
    batch, notes = pairs_of(nano, [Pair("9", fits, long)], limit=8)
    assert completions(batch) == [[*nano.encode(fits), nano.end_id], nano.encode(long)]
    assert notes == ("1 of 2 completions cut after 8 tokens.",)
    assert batch.mask.shape == (2, 8)


def test_a_pair_that_differs_only_after_the_cut_is_left_out(nano):
    """Kept, its loss would be log 2 for ever, with no gradient."""
    twins = Pair("9", "11112", "11113")
    batch, notes = pairs_of(nano, [twins, Pair("8", "1", "2")], limit=4)
    assert len(texts(batch)) == 2 and texts(batch)[0][0] == nano.encode("8")[0]
    assert notes == ("1 of 2 pairs left out: equal in their first 4 tokens.",)
    # with one token more they differ
    assert pairs_of(nano, [twins], limit=5)[1] == ("2 of 2 completions cut after 5 tokens.",)


def test_a_prompt_that_is_too_long_leaves_its_pair_out(nano):
    pairs = [Pair("1" * 9, "1", "2"), Pair("1" * 8, "3", "4")]
    batch, notes = pairs_of(nano, pairs, prompt_limit=8)
    assert completions(batch)[0][:1] == nano.encode("3") and len(batch.tokens) == 2
    assert notes == ("1 of 2 pairs left out: prompts of more than 8 tokens.",)
    with pytest.raises(ValueError, match="no preference pair is left; 1 of 1 pairs left out"):
        pairs_of(nano, pairs[:1], prompt_limit=8)


def test_a_fault_names_its_pair(nano):
    with pytest.raises(ValueError, match=r"preference pair 1: .*comes to no tokens"):
        pairs_of(nano, [Pair("1", "1", "2"), Pair("", "1", "2")])


@pytest.mark.skipif(
    not (PUBLIC.exists() and QWEN3.is_dir()), reason="the optional data folder is not there"
)
def test_all_300_public_pairs_come_to_rows_with_qwens_tokenizer():
    task = TASKS["preference"](seed=0, file=str(PUBLIC), heldout_size=50)
    qwen3 = load_tokenizer(QWEN3)
    pairs = task.pairs + task.heldout_pairs
    batch, notes = preference_pairs(pairs, qwen3, max_prompt_tokens=4096, max_new_tokens=2048)
    assert len(batch.tokens) == 600 and notes == ()
    well_formed(batch)
    for row in (0, 1, 598, 599):
        answer = (pairs[row // 2].chosen, pairs[row // 2].rejected)[row % 2]
        text = qwen3.decode(completions(batch)[row])
        # Qwen3's template puts an empty think block before an answer without one
        assert text == f"<think>\n\n</think>\n\n{answer.lstrip(chr(10))}<|im_end|>"


def test_an_end_that_is_the_pad_too_stays_under_the_mask(nano):
    """Masked by its id, the stop token would never be learnt."""
    both = copy.copy(nano)
    both.pad_id = both.end_id
    pair = Pair("1" + both.decode([both.end_id]), "2", "345")
    batch = pairs_of(both, [pair])[0]
    assert completions(batch) == [both.encode_answer(pair.prompt, a) for a in ("2", "345")]
    assert all(ids[-1] == both.pad_id for ids in completions(batch))
    # and one within the prompt is attended to
    assert texts(batch)[0][:2] == both.encode(pair.prompt)


# --- worked examples -----------------------------------------------------------------------------


def test_worked_examples_end_with_the_stop_token_and_are_to_be_imitated(nano):
    task = TASKS["countdown"](seed=0, train_size=6, heldout_size=1, numbers=(3,), highest=10)
    prompts = encode_prompts(task.train, nano, 1000, "training row").ids
    batch = worked_examples(task, prompts, nano, 5, 200)
    well_formed(batch)
    rng = random.Random(5)
    assert completions(batch) == [
        [*nano.encode(task.demonstrate(row, rng)), nano.end_id] for row in task.train
    ]
    np.testing.assert_array_equal(np.asarray(batch.signals[0].advantages), 1)
    with pytest.raises(ValueError, match=r"max_new_tokens: none .* into 3 tokens"):
        worked_examples(task, prompts, nano, 5, 3)


# --- whole conversations -------------------------------------------------------------------------

TALKS = [
    [user("1"), assistant("2"), user("3"), assistant("45")],
    [{"role": "system", "content": "Use"}, user("7"), assistant("8")],
    [user("9"), assistant("1*2"), user("not answered")],
    [user("5"), assistant("5 5 5 5 5 5 5 5 5")],
    [user("6"), assistant("中文")],
]


def test_the_mask_is_on_the_assistants_tokens_and_the_ends_of_its_turns(nano):
    batch, notes = chat_rows(TALKS, nano, width=256, packing=False)
    well_formed(batch)
    assert notes == () and batch.mask.shape[1] == batch.tokens.shape[1] - 1
    assert [nano.decode(ids) for ids in completions(batch)] == [
        "2<|im_end|>45<|im_end|>",
        "8<|im_end|>",
        "1*2<|im_end|>",
        "5 5 5 5 5 5 5 5 5<|im_end|>",
        "中文<|im_end|>",
    ]
    assert nano.decode(texts(batch)[0]) == (
        "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n45<|im_end|>"
    )
    np.testing.assert_array_equal(np.asarray(batch.signals[0].advantages), 1)


def test_conversations_that_are_too_long_are_left_out_and_counted(nano):
    lengths = [len(nano.encode_chat(talk)[0].ids) for talk in TALKS]
    width = sorted(lengths)[1]
    batch, notes = chat_rows(TALKS, nano, width=width, packing=False)
    assert list(map(len, texts(batch))) == [n for n in lengths if n <= width]
    assert notes == (f"3 of 5 texts left out: more than {width} tokens.",)
    with pytest.raises(ValueError, match="None of the 5 conversations fits into 3 tokens"):
        chat_rows(TALKS, nano, width=3, packing=True)
    with pytest.raises(ValueError, match=r"conversation 1: .*no message of the assistant's"):
        chat_rows([TALKS[0], TALKS[0][:1]], nano, width=256, packing=False)


def test_packed_rows_hold_each_conversation_once_from_position_0(nano):
    alone, _ = chat_rows(TALKS, nano, width=64, packing=False)
    packed, notes = chat_rows(TALKS, nano, width=64, packing=True)
    well_formed(packed)
    assert notes == () and 1 < len(packed.tokens) < len(TALKS)
    positions = np.asarray(packed.positions)
    found = []
    for row in range(len(positions)):
        starts = np.flatnonzero(positions[row] == 0).tolist()
        end = int(np.sum(positions[row] >= 0))
        assert end <= 64
        for start, stop in zip(starts, [*starts[1:], end], strict=True):
            np.testing.assert_array_equal(positions[row, start:stop], np.arange(stop - start))
            found.append(np.asarray(packed.tokens)[row, start:stop].tolist())
            # column 0 of the row is not in the mask at all
            assert start == 0 or not packed.mask[row, start - 1]
    assert sorted(found) == sorted(texts(alone))
    marked, expected = (sorted(itertools.chain(*completions(b))) for b in (packed, alone))
    assert marked == expected


def test_the_first_token_of_a_packed_text_is_never_predicted(nano, monkeypatch):
    """The column before it belongs to a neighbour, whose last token would predict it."""
    template = ChatText([7, 8, 9], [True, True, True])  # one that writes nothing before an answer
    monkeypatch.setattr(Tokenizer, "encode_chat", lambda self, messages: [template])
    batch, _ = chat_rows(TALKS[:2], nano, width=6, packing=True)
    assert texts(batch) == [[7, 8, 9, 7, 8, 9]]
    assert completions(batch) == [[8, 9, 8, 9]]


def test_packed_and_single_rows_give_the_same_logprobs_and_loss(nano):
    """A text that saw its neighbour, or positions that ran on, would change them."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "head_dim": 8}
    config = dataclasses.replace(read_config(NANO), num_heads=2, num_kv_heads=1, **sizes)
    params = initialise(config, jax.random.key(0))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), params)
    outputs = jax.jit(functools.partial(completion_outputs, Qwen(config)), static_argnums=3)
    results = []
    for packing in (False, True):
        batch, _ = chat_rows(TALKS, nano, width=64, packing=packing)
        found = outputs(params, batch.tokens, batch.positions, batch.mask.shape[1])
        logprobs = np.asarray(found.logprobs)
        loss = ALGORITHMS["sft"].scalar(
            found.logprobs,
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.signals[0].advantages,
            batch.mask,
        )
        mask = np.asarray(batch.mask)
        results.append((np.sort(logprobs[mask]), float(loss), -np.mean(logprobs[mask])))
    (alone, loss, mean), (packed, packed_loss, _) = results
    np.testing.assert_allclose(packed, alone, atol=1e-5)
    assert np.std(alone) > 0.1
    assert loss == pytest.approx(packed_loss, abs=1e-5) == pytest.approx(mean, abs=1e-5)


def test_a_rewritten_history_gives_a_row_for_each_answer():
    if not QWEN3.is_dir():
        pytest.skip("Qwen3's tokenizer is not beside the repository")
    qwen3 = load_tokenizer(QWEN3)
    batch, notes = chat_rows(TALKS[:2], qwen3, width=256, packing=False)
    assert notes == ("1 of 2 conversations come to several texts: the template rewrites history.",)
    empty = "<think>\n\n</think>\n\n"
    assert [qwen3.decode(ids) for ids in completions(batch)] == [
        f"{empty}{answer}<|im_end|>" for answer in ("2", "45", "8")
    ]


def test_first_fit_takes_the_longest_first():
    # in the order they come, 3 and 7 would fill a row and the two sixes one each: four rows
    assert first_fit([3, 6, 6, 4, 10], 10) == [[4], [1, 3], [2, 0]]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(20, 40))
@settings(max_examples=100)
def test_first_fit_overfills_no_row_and_loses_nothing(lengths, width):
    rows = first_fit(lengths, width)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    fills = [sum(lengths[i] for i in row) for row in rows]
    assert max(fills) <= width
    # at most one row is half empty, since what it holds would have gone into another
    assert sum(2 * fill <= width for fill in fills) <= 1


def test_the_public_rows_serve_every_builder(nano):
    chats = TASKS["chat"](seed=0, file=str(FIXTURE), heldout_size=1)
    batch, _ = chat_rows(chats.conversations, nano, width=2048, packing=True)
    well_formed(batch)
    pairs = TASKS["preference"](seed=0, file=str(FIXTURE), heldout_size=1)
    batch, _ = pairs_of(nano, pairs.pairs, prompt_limit=2048, limit=2048)
    well_formed(batch)
    assert nano.decode(completions(batch)[0]) == f"{pairs.pairs[0].chosen}<|im_end|>"
