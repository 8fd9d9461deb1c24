"""Sums of one step: what is asked, what counts, and what is held out."""

import pytest

from model.errors import BadInput
from rlx.tasks import sums


def test_problems_are_distinct_and_none_held_out_is_trained_on():
    task, other = sums.load(seed=0), sums.load(seed=1)
    texts = [row["prefill"] for row in task.train + task.heldout]
    assert len(set(texts)) == len(texts) == 512 + 64
    assert task.heldout == other.heldout and task.train != other.train


def test_every_answer_is_the_sum():
    for row in sums.load(seed=0).train:
        a, sign, b, _ = row["prefill"].split()
        assert int(row["answer"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b)) >= 0


@pytest.mark.parametrize(
    ("completion", "right"),
    [(" 13", True), (" 13.", True), (" 8 + 5 = 13", True), (" 13. So 8", False), (" 1 3", False)],
)
def test_the_last_number_counts(completion, right):
    """A model that gives the sum and rambles on to another number has not said it."""
    task = sums.load(seed=0)
    score = task.score(completion, sums.make_row(8, "+", 5))
    assert (score.reward, score.correct) == (float(right), right)
    assert (task.answer(completion) == "13") == right


def test_too_few_problems_are_refused():
    with pytest.raises(BadInput, match=r"155 sums.*576: raise `highest`"):
        sums.load(seed=0, highest=10)
    with pytest.raises(BadInput, match="at least `lowest`, 5, not 4"):
        sums.load(seed=0, lowest=5, highest=4)
