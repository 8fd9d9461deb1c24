"""The host callback's body: what it decodes, and that no failure passes for a reward of zero."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.tokenizer import load_tokenizer
from rlx.rewards import VERIFIERS, Score
from rlx.rewards.host import HostVerifier
from rlx.rewards.score import RowError, Span

EOS = 0
ROWS = [{"nums": [2, 3], "target": 5}, {"nums": [2, 3], "target": 6}]


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def verifier(score=VERIFIERS["countdown"], rows=ROWS) -> HostVerifier:
    return HostVerifier(score, rows, decode, {EOS})


def rollout(groups: list[list[str]], width: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [N, G, T] and lengths [N, G]: each text, EOS, and after it an answer as junk."""
    junk = encode("<answer>2*3</answer>") * 4
    ids = [[[*encode(text), EOS] for text in group] for group in groups]
    tokens = np.array([[(row + junk)[:width] for row in group] for group in ids], np.int32)
    lengths = np.array([[min(len(row), width) for row in group] for group in ids], np.int32)
    return tokens, lengths


PARTS = {"format": 0.0, "correct": 0.0}
RIGHT, WRONG = "x</think><answer>2+3</answer>", "x</think><answer>2*3</answer>"


def test_rewards_verdicts_and_components_stand_at_their_places():
    tokens, lengths = rollout([[RIGHT, WRONG, "x"], [RIGHT, WRONG, "x"]])
    host = verifier()
    rewards, correct, components, _ = host(np.array([0, 1]), tokens, lengths)
    assert host.components == {"format": 0.1, "correct": 1.0}
    np.testing.assert_allclose(rewards, [[1.1, 0.1, 0], [0.1, 1.1, 0]], atol=1e-6)
    np.testing.assert_array_equal(correct, [[1, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(components[..., 0], [[1, 1, 0], [1, 1, 0]])
    np.testing.assert_array_equal(components[..., 1], correct)
    assert {rewards.dtype, correct.dtype, components.dtype} == {np.dtype(np.float32)}
    assert host.failures == 0


def test_row_ids_choose_the_row_not_the_place():
    tokens, lengths = rollout([[RIGHT], [RIGHT], [RIGHT]])
    _, correct, *_ = verifier()(np.array([1, 0, 0]), tokens, lengths)
    np.testing.assert_array_equal(correct, [[0], [1], [1]])  # the same prompt twice is two groups


def test_jax_arrays_are_read():
    tokens, lengths = rollout([[RIGHT]])
    rewards, *_ = verifier()(jnp.array([0]), jnp.asarray(tokens), jnp.asarray(lengths))
    assert isinstance(rewards, np.ndarray)
    np.testing.assert_allclose(rewards, [[1.1]], atol=1e-6)


def test_what_stands_after_the_stop_token_is_not_scored():
    # the junk after EOS holds the answer of row 1, which the whole buffer would be right with
    tokens, lengths = rollout([[RIGHT]])
    assert "2*3" in decode(tokens[0, 0].tolist())
    _, correct, *_ = verifier()(np.array([1]), tokens, lengths)
    assert correct[0, 0] == 0


def test_only_a_final_stop_token_is_taken_off():
    texts = []
    score = VERIFIERS["countdown"]
    host = verifier(lambda text, row: texts.append(text) or score(text, row))
    tokens = np.array([[[65, EOS, 66], [65, 66, 67], [EOS, 65, 66]]])
    host(np.array([0]), tokens, np.array([[2, 3, 1]]))
    assert texts[1:] == ["A", "ABC", ""]  # the first call asks for the components
    assert host.text(tokens[0, 0], 0) == ""


def test_a_failure_is_nan_in_everything_counted_and_told():
    def score(text, row):
        if text == "bad":
            raise RuntimeError("no luck")
        return VERIFIERS["countdown"](text, row)

    host = verifier(score)
    tokens, lengths = rollout([[RIGHT, "bad"]])
    rewards, correct, components, places = host(np.array([0]), tokens, lengths)
    assert np.isnan(rewards[0, 1]) and np.isnan(correct[0, 1]) and np.isnan(components[0, 1]).all()
    assert np.isnan(places[0, 1]).all() and not places[0, 0].any()
    assert rewards[0, 0] == pytest.approx(1.1)  # its sibling is scored all the same
    assert host.failures == 1
    assert host.last_failure == "row 0, sample 1: RuntimeError: no luck"


@pytest.mark.parametrize("row_id", [-1, 2])
def test_an_unknown_row_is_a_failure(row_id):
    tokens, lengths = rollout([[RIGHT]])
    host = verifier()
    rewards, *_ = host(np.array([row_id]), tokens, lengths)
    assert np.isnan(rewards).all()  # row -1 would be scored as the last row
    assert f"row {row_id}" in host.last_failure


def test_a_text_that_cannot_be_decoded_or_a_length_that_cannot_be_is_a_failure():
    host = verifier()
    rewards, *_ = host(np.array([0]), np.array([[[-5, 65], [65, 66]]]), np.array([[2, 3]]))
    assert np.isnan(rewards).all()
    assert host.failures == 2


@pytest.mark.parametrize(
    "result",
    [
        Score(float("nan"), False, {"format": 0.0, "correct": 0.0}, ""),
        Score(float("inf"), False, {"format": 0.0, "correct": 0.0}, ""),
        Score(0.0, False, {"format": 0.0}, ""),
        Score(0.0, False, PARTS, "", (Span(-1, 2, 0.1),)),
        Score(0.0, False, PARTS, "", (Span(2, 2, 0.1),)),
        Score(0.0, False, PARTS, "", (Span(0, len(RIGHT) + 1, 0.1),)),
        Score(0.0, False, PARTS, "", (Span(0, 2, float("nan")),)),
        None,
    ],
)
def test_a_verifier_that_breaks_its_word_has_failed(result):
    host = verifier(lambda text, row: result if text else VERIFIERS["countdown"](text, row))
    tokens, lengths = rollout([[RIGHT]])
    rewards, correct, components, places = host(np.array([0]), tokens, lengths)
    assert np.isnan(places).all()
    assert np.isnan(rewards).all() and np.isnan(correct).all() and np.isnan(components).all()
    assert host.failures == 1
    assert host.score_text(RIGHT, ROWS[0], place="heldout row 7") is None
    assert host.failures == 2
    assert host.last_failure.startswith("heldout row 7: ")


def test_a_text_scores_as_its_tokens_do():
    host = verifier()
    assert host.score_text(RIGHT, ROWS[0]) == VERIFIERS["countdown"](RIGHT, ROWS[0])


def test_no_rows_and_a_bad_first_row_are_told_at_once():
    with pytest.raises(ValueError, match="at least one row"):
        verifier(rows=[])
    with pytest.raises(ValueError, match="`nums`"):
        verifier(rows=[{"target": 3}])


def spans_of(*spans: Span):
    """A verifier that gives these spans, whatever it reads."""
    return lambda text, row: Score(0.0, False, {}, "", spans if text else ())


def test_a_span_counts_at_the_token_of_its_last_character():
    tokens, lengths = rollout([["abcdef", "abcdef"]], width=12)
    host = verifier(spans_of(Span(0, 3, 0.5), Span(1, 3, 0.25), Span(5, 6, -1.0)))
    _, _, _, places = host(np.array([0]), tokens, lengths)
    # at `end` instead of `end - 1`, the last one would stand on the stop token
    expected = [0, 0, 0.75, 0, 0, -1, 0, 0, 0, 0, 0, 0]
    np.testing.assert_array_equal(places, [[expected, expected]])
    assert places.dtype == np.float32


@pytest.mark.parametrize("text", ["先算二十四减九😀等于十五。ok", "a😀b", "éß"])
def test_a_character_of_several_tokens_ends_with_the_last_of_them(text):
    tokenizer = load_tokenizer(Path(__file__).parents[1] / "model/assets/nano")
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)  # the bundled tokenizer has no token for these characters
    ends = [Span(i, i + 1, float(i + 1)) for i in range(len(text))]
    host = HostVerifier(spans_of(*ends), [{}], tokenizer.decode, tokenizer.stop_ids)
    tokens = np.array([[[*ids, tokenizer.end_id, *ids]]], np.int32)
    _, _, _, places = host(np.array([0]), tokens, np.array([[len(ids) + 1]]))
    assert host.failures == 0
    expected = np.zeros(tokens.shape[2])
    for i in range(len(text)):
        # one replacement character for a part of it would end it a token or two too early
        expected[len(tokenizer.encode(text[: i + 1])) - 1] += i + 1
    np.testing.assert_array_equal(places[0, 0], expected)


def test_countdown_pays_each_line_where_it_ends():
    rows = [{"nums": [3, 5, 9], "target": 24}]
    text = "24-3=21 no\n24-9=15 5*3\n</think><answer>5*3+9</answer>"
    host = verifier(partial(VERIFIERS["countdown"], line_weight=0.2), rows)
    assert host.components == {"format": 0.1, "correct": 1.0, "lines": 0.2}
    tokens, lengths = rollout([[text]])
    rewards, _, components, places = host(np.array([0]), tokens, lengths)
    np.testing.assert_allclose(rewards, [[1.3]], atol=1e-6)
    np.testing.assert_array_equal(components, [[[1, 1, 1]]])
    assert {i: round(float(p), 6) for i, p in enumerate(places[0, 0]) if p} == {
        text.index("\n") - 1: 0.1,
        text.index("\n</think>") - 1: 0.1,
    }


def test_nothing_is_decoded_again_without_spans():
    calls = []
    host = HostVerifier(
        VERIFIERS["countdown"], ROWS, lambda ids: calls.append(ids) or decode(ids), {EOS}
    )
    tokens, lengths = rollout([[RIGHT, WRONG]])
    host(np.array([0]), tokens, lengths)
    assert len(calls) == 2


def test_workers_score_as_the_process_itself_does():
    host = HostVerifier(VERIFIERS["countdown"], ROWS, decode, {EOS}, workers=2)
    tokens, lengths = rollout([[RIGHT, WRONG, "x"], [RIGHT, WRONG, "x"]])
    here, there = (
        verifier()(np.array([0, 1]), tokens, lengths),
        host(np.array([0, 1]), tokens, lengths),
    )
    host.close()
    assert host.components == {"format": 0.1, "correct": 1.0}
    for mine, theirs in zip(here, there, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_workers_tell_a_bad_first_row_at_once():
    with pytest.raises(RowError, match="`nums`"):
        HostVerifier(VERIFIERS["countdown"], [{"target": 3}], decode, {EOS}, workers=1)


def test_texts_score_together_as_one_by_one():
    host = verifier()
    scores = host.score_texts([RIGHT, RIGHT, WRONG], [0, 1, 1])
    assert scores == [
        VERIFIERS["countdown"](text, ROWS[i]) for text, i in ((RIGHT, 0), (RIGHT, 1), (WRONG, 1))
    ]
    host = verifier(lambda text, row: VERIFIERS["countdown"](text, row if text else ROWS[0]), [{}])
    assert host.score_texts([RIGHT], [0], place="held-out row") == [None]
    assert host.last_failure.startswith("held-out row 0: A countdown row needs")
    with pytest.raises(IndexError):
        host.score_texts([RIGHT], [1])


def test_a_verifier_that_names_its_components_is_not_asked_for_them():
    calls = []

    def score(text, row):
        calls.append(text)
        return Score(1.0, None, {"b": 1.0, "a": 0.0}, "")

    score.components = ("a", "b")
    host = verifier(score)
    assert host.components == {"a": 0.0, "b": 0.0} and not calls
    tokens, lengths = rollout([["x"]])
    _, _, components, _ = host(np.array([0]), tokens, lengths)
    np.testing.assert_array_equal(components, [[[0, 1]]])  # by name, not in the order they came


def test_a_verifier_that_scores_many_gets_a_rollout_at_once():
    batches = []

    def score(text, row):
        return Score(0.0, None, {}, "")

    def many(pairs):
        batches.append(pairs)
        return [Score(float(len(text)), None, {}, "") for text, _ in pairs]

    score.many = many
    host = verifier(score)
    tokens, lengths = rollout([["a", "bb"], ["ccc", "dddd"]])
    rewards, *_ = host(np.array([0, 1]), tokens, lengths)
    np.testing.assert_array_equal(rewards, [[1, 2], [3, 4]])
    assert [row for _, row in batches[-1]] == [ROWS[0], ROWS[0], ROWS[1], ROWS[1]]


def test_a_jitted_step_scores_in_workers():
    host = HostVerifier(VERIFIERS["countdown"], ROWS, decode, {EOS}, workers=1)
    tokens, lengths = rollout([[RIGHT, WRONG]])
    shape = jax.ShapeDtypeStruct((1, 2), np.float32)
    score = jax.jit(lambda *xs: jax.pure_callback(lambda *a: host(*a)[1], shape, *xs))
    for _ in range(3):
        np.testing.assert_array_equal(score(jnp.array([0]), tokens, lengths), [[1, 0]])
    host.close()
