"""The host callback's body: what it decodes, and that no failure passes for a reward of zero."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlx.rewards import VERIFIERS, Score
from rlx.rewards.host import HostVerifier

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


RIGHT, WRONG = "x</think><answer>2+3</answer>", "x</think><answer>2*3</answer>"


def test_rewards_verdicts_and_components_stand_at_their_places():
    tokens, lengths = rollout([[RIGHT, WRONG, "x"], [RIGHT, WRONG, "x"]])
    host = verifier()
    rewards, correct, components = host(np.array([0, 1]), tokens, lengths)
    assert host.components == ("format", "correct")
    np.testing.assert_allclose(rewards, [[1.1, 0.1, 0], [0.1, 1.1, 0]], atol=1e-6)
    np.testing.assert_array_equal(correct, [[1, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(components[..., 0], [[1, 1, 0], [1, 1, 0]])
    np.testing.assert_array_equal(components[..., 1], correct)
    assert {rewards.dtype, correct.dtype, components.dtype} == {np.dtype(np.float32)}
    assert host.failures == 0


def test_row_ids_choose_the_row_not_the_place():
    tokens, lengths = rollout([[RIGHT], [RIGHT], [RIGHT]])
    _, correct, _ = verifier()(np.array([1, 0, 0]), tokens, lengths)
    np.testing.assert_array_equal(correct, [[0], [1], [1]])  # the same prompt twice is two groups


def test_jax_arrays_are_read():
    tokens, lengths = rollout([[RIGHT]])
    rewards, _, _ = verifier()(jnp.array([0]), jnp.asarray(tokens), jnp.asarray(lengths))
    assert isinstance(rewards, np.ndarray)
    np.testing.assert_allclose(rewards, [[1.1]], atol=1e-6)


def test_what_stands_after_the_stop_token_is_not_scored():
    # the junk after EOS holds the answer of row 1, which the whole buffer would be right with
    tokens, lengths = rollout([[RIGHT]])
    assert "2*3" in decode(tokens[0, 0].tolist())
    _, correct, _ = verifier()(np.array([1]), tokens, lengths)
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
    rewards, correct, components = host(np.array([0]), tokens, lengths)
    assert np.isnan(rewards[0, 1]) and np.isnan(correct[0, 1]) and np.isnan(components[0, 1]).all()
    assert rewards[0, 0] == pytest.approx(1.1)  # its sibling is scored all the same
    assert host.failures == 1
    assert host.last_failure == "row 0, sample 1: RuntimeError: no luck"


@pytest.mark.parametrize("row_id", [-1, 2])
def test_an_unknown_row_is_a_failure(row_id):
    tokens, lengths = rollout([[RIGHT]])
    host = verifier()
    rewards, _, _ = host(np.array([row_id]), tokens, lengths)
    assert np.isnan(rewards).all()  # row -1 would be scored as the last row
    assert f"row {row_id}" in host.last_failure


def test_a_text_that_cannot_be_decoded_or_a_length_that_cannot_be_is_a_failure():
    host = verifier()
    rewards, _, _ = host(np.array([0]), np.array([[[-5, 65], [65, 66]]]), np.array([[2, 3]]))
    assert np.isnan(rewards).all()
    assert host.failures == 2


@pytest.mark.parametrize(
    "result",
    [
        Score(float("nan"), False, {"format": 0.0, "correct": 0.0}, ""),
        Score(float("inf"), False, {"format": 0.0, "correct": 0.0}, ""),
        Score(0.0, False, {"format": 0.0}, ""),
        None,
    ],
)
def test_a_verifier_that_breaks_its_word_has_failed(result):
    host = verifier(lambda text, row: result if text else VERIFIERS["countdown"](text, row))
    tokens, lengths = rollout([[RIGHT]])
    rewards, correct, components = host(np.array([0]), tokens, lengths)
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
