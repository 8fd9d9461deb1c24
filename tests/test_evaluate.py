"""Held-out evaluation: each problem once whatever the batch, and the arithmetic of its metrics."""

import math
from itertools import combinations

import numpy as np
import pytest

from rlx.evaluate import (
    HEADLINES,
    Completion,
    change_told,
    headline_of,
    majority_right,
    nest_greedy,
    pass_at_k,
    score_told,
    summarise,
    summarise_pairs,
    summarise_rewards,
    summarise_texts,
    told,
)
from rlx.rewards.score import Score


def completion(correct, text="", problem=0, failed=False):
    score = None if failed else Score(float(correct), correct, {}, "")
    return Completion(problem, text, length=3, truncated=False, score=score)


def metrics_of(verdicts, group):
    """Of 1 right, 0 wrong, None failed."""
    texts = [completion(bool(v), failed=v is None) for v in verdicts]
    return summarise(texts, group, lambda c: c.text)


def test_the_standard_error_is_over_problems_not_over_samples():
    """Four samples of one problem are no four problems: those would give .19."""
    metrics = metrics_of([1, 1, 1, 1, 0, 0, 0, 0], 4)
    assert metrics["pass@1"] == 0.5 and metrics["n"] == 2
    assert metrics["stderr"] == pytest.approx(0.5)


def test_a_failed_completion_stays_in_the_denominator():
    """108 right, 40 wrong, 24 failed: .6279, not .7297."""
    metrics = metrics_of([1] * 108 + [0] * 40 + [None] * 24, 1)
    assert metrics["pass@1"] == pytest.approx(108 / 172)
    assert metrics["failed"] == 24
    assert metrics["reward/mean"] == pytest.approx(108 / 148)


@pytest.mark.parametrize(("samples", "right"), [(4, 0), (4, 1), (4, 3), (6, 2), (5, 5)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples, right):
    verdicts = [True] * right + [False] * (samples - right)
    for k in range(1, samples + 1):
        subsets = list(combinations(verdicts, k))
        assert pass_at_k(right, samples, k) == pytest.approx(np.mean([any(s) for s in subsets]))


def test_pass_at_k_is_told_for_powers_of_two_and_for_all():
    metrics = metrics_of([1, 0, 0, 0, 0, 0], 6)
    assert metrics["pass@2"] == pytest.approx(2 / 6)
    assert {name for name in metrics if name.startswith("pass@")} == {
        "pass@1",
        "pass@2",
        "pass@4",
        "pass@6",
    }


@pytest.mark.parametrize(
    ("answers", "right"),
    [
        (["a", "b", "b"], True),
        (["a", "a", "b"], False),
        (["a", "b", "c"], False),  # a tie goes to the first
        (["b", "a", "c"], True),
        (["", "", "b"], True),  # no answer is no vote
        (["", "", ""], False),
    ],
)
def test_the_majority_votes_by_answer(answers, right):
    texts = [completion(answer == "b", answer) for answer in answers]
    assert majority_right(texts, lambda c: c.text or None) == right


def test_one_problem_has_no_standard_error():
    assert math.isnan(metrics_of([1], 1)["stderr"])


def test_greedy_metrics_are_nested():
    nested = nest_greedy({"pass@1": 0.5, "reward/mean": 1.0, "greedy/pass@1": 0.6})
    assert nested == {"pass@1": 0.5, "reward/mean": 1.0, "greedy": {"pass@1": 0.6}}


def test_a_reward_is_a_mean_over_problems_of_what_was_scored():
    """A failed completion as a zero would drag a negative reward up, and a positive one down."""
    rewards = [-2.0, -4.0, -1.0, None, None, None]
    texts = [
        Completion(i // 2, "", 3, False, None if r is None else Score(r, None, {}, ""))
        for i, r in enumerate(rewards)
    ]
    metrics = summarise_rewards(texts, 2)
    assert metrics["reward"] == pytest.approx((-3.0 - 1.0) / 2)
    assert metrics["stderr"] == pytest.approx(1.0)
    assert (metrics["n"], metrics["failed"]) == (2, 3)


def test_without_a_single_score_there_is_no_reward():
    metrics = summarise_rewards([Completion(0, "", 3, False, None)], 1)
    assert math.isnan(metrics["reward"]) and metrics["n"] == 0


def test_a_tie_counts_half_and_a_margin_that_is_no_number_counts_nothing():
    margins = np.array([0.5, 0.0, -1.0, 0.0], np.float32)
    metrics = summarise_pairs(margins, np.arange(4))
    met = [1.0, 0.5, 0.0, 0.5]
    error = pytest.approx(np.std(met, ddof=1) / 2)
    assert metrics == {"accuracy": 0.5, "stderr": error, "n": 4}
    broken = summarise_pairs(np.array([0.5, np.nan], np.float32), np.arange(2))
    assert math.isnan(broken["accuracy"])


def test_the_error_of_pairs_is_over_their_prompts():
    """Copies of a prompt's pair say nothing new: taken as 40 pairs they would give .08."""
    margins = np.array([1, -1, 1, 1], np.float32)
    once = summarise_pairs(margins, np.arange(4))
    copies = summarise_pairs(np.repeat(margins, 10), np.repeat(np.arange(4), 10))
    assert copies["stderr"] == pytest.approx(once["stderr"]) == pytest.approx(0.25)
    assert copies["n"] == 40
    assert math.isnan(summarise_pairs(margins, np.zeros(4, int))["stderr"])


def test_a_row_of_text_without_an_error_and_a_loss_beyond_any_exponent():
    metrics = summarise_texts(np.array([2000.0], np.float32), np.array([2]))
    assert metrics["nll"] == 1000.0 and metrics["perplexity"] == math.inf
    assert math.isnan(metrics["stderr"])


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"pass@1": 0.25, "stderr": 0.031}, "25.0% ± 3.1%"),
        ({"accuracy": 0.5, "stderr": math.nan}, "50.0%"),
        ({"pass@1": 0.25, "stderr": None}, "25.0%"),
        ({"reward": -1.23456, "stderr": 0.0567}, "-1.235 ± 0.057"),
        ({"nll": 2.5}, "2.5"),
        ({"nll": None, "stderr": None}, "not finite"),
        ({"reward": math.nan, "stderr": 0.1}, "not finite"),
    ],
)
def test_a_score_is_told_with_the_error_it_has(metrics, words):
    """One problem has no error: NaN, and None once it was read back for a resumed run."""
    assert score_told(metrics, headline_of(metrics)) == words


def test_every_kind_of_evaluation_is_told_in_a_line():
    sampled = summarise([completion(1), completion(0)], 1, lambda c: c.text)
    sampled |= {"greedy/pass@1": 1.0, "greedy/stderr": math.nan}
    pairs = summarise_pairs(np.array([1.0, -1.0], np.float32), np.arange(2))
    pairs |= {"loss": 0.75, "margin": 0.0}
    texts = summarise_texts(np.array([2.0, 4.0], np.float32), np.array([2, 4]))
    lines = [told(m, headline_of(m)) for m in (sampled, pairs, texts)]
    assert lines == [
        "pass@1 50.0% ± 50.0% (n=2), greedy 100.0%, length 3",
        "accuracy 50.0% ± 50.0% (n=2), loss 0.75, margin 0",
        "nll 1 ± 0 (n=2), perplexity 2.718",
    ]


def test_a_resumed_run_with_one_problem_tells_its_change():
    before = {"pass@1": 0.0, "stderr": None, "n": 1.0}
    after = summarise([completion(1)], 1, lambda c: c.text)
    assert change_told(before, after, "pass@1") == "held-out pass@1 0.0% -> 100.0%"


def test_each_summary_has_its_own_headline_alone():
    sampled, rewarded = metrics_of([1, 0], 1), summarise_rewards([completion(1)], 1)
    pairs = summarise_pairs(np.ones(2, np.float32), np.arange(2))
    texts = summarise_texts(np.ones(2, np.float32), np.ones(2, int))
    for name, metrics in zip(HEADLINES, (sampled, rewarded, pairs, texts), strict=True):
        assert headline_of(metrics) == name
        assert HEADLINES.keys() & metrics.keys() == {name}
        assert {"stderr", "n"} <= metrics.keys()
    assert headline_of({"reward/mean": 1.0}) is None


def test_always_the_commonest_answer_has_a_balanced_accuracy_of_one_over_the_classes():
    """The share of right ones would say 60%."""
    labels = ["yes"] * 6 + ["no"] * 3 + ["maybe"]
    texts = [completion(label == "yes") for label in labels]
    metrics = summarise(texts, 1, lambda c: c.text, labels)
    assert metrics["pass@1"] == 0.6
    assert metrics["balanced_accuracy"] == pytest.approx(1 / 3)
    recalls = {"recall/yes": 1.0, "recall/no": 0.0, "recall/maybe": 0.0}
    assert {name: value for name, value in metrics.items() if "recall" in name} == recalls


def test_recalls_are_over_problems_with_all_their_samples_and_failures():
    """Two samples of each problem: labels read by sample, not by problem, would mix the classes."""
    texts = [completion(right) for right in (1, 1, 1, 0)] + [completion(0, failed=True)] * 2
    metrics = summarise(texts, 2, lambda c: c.text, ["yes", "no", "no"])
    assert (metrics["recall/yes"], metrics["recall/no"]) == (1.0, 0.25)
    assert metrics["balanced_accuracy"] == 0.625
    with pytest.raises(ValueError, match="2 labels of 3 problems"):
        summarise(texts, 2, lambda c: c.text, ["yes", "no"])


def test_a_class_that_no_problem_has_is_no_zero():
    """Of the first problems of a data set, a rare class may have none."""
    metrics = summarise([completion(1), completion(0)], 1, lambda c: c.text, ["yes", "no"])
    assert metrics["balanced_accuracy"] == 0.5 and "recall/maybe" not in metrics
    assert "balanced_accuracy" not in summarise([completion(1)], 1, lambda c: c.text)


def test_classes_are_told_in_the_line():
    metrics = summarise([completion(1), completion(0)], 1, lambda c: c.text, ["yes", "no"])
    line = "pass@1 50.0% ± 50.0% (n=2), balanced 50.0% (no 0.0%, yes 100.0%), length 3"
    assert told(metrics, "pass@1") == line
