"""Held-out evaluation: each problem once whatever the batch, and the arithmetic of its metrics."""

import math
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import CONFIG, initial_params

from rlx.assemble import Policy
from rlx.evaluate import Completion, majority_right, nest_greedy, pass_at_k, summarise
from rlx.generate import Draw, Generator
from rlx.rewards.score import Score


def completion(correct, text="", problem=0, failed=False):
    score = None if failed else Score(float(correct), correct, {}, "")
    return Completion(problem, text, length=3, truncated=False, score=score)


def metrics_of(verdicts, group):
    """Of 1 right, 0 wrong, None failed."""
    texts = [completion(bool(v), failed=v is None) for v in verdicts]
    return summarise(texts, group, lambda text: text)


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
    assert majority_right(texts, lambda text: text or None) == right


def test_one_problem_has_no_standard_error():
    assert math.isnan(metrics_of([1], 1)["stderr"])


def test_greedy_metrics_are_nested():
    nested = nest_greedy({"pass@1": 0.5, "reward/mean": 1.0, "greedy/pass@1": 0.6})
    assert nested == {"pass@1": 0.5, "reward/mean": 1.0, "greedy": {"pass@1": 0.6}}


class Stops:
    stop_ids, pad_id = (1,), 0


@pytest.mark.parametrize("rows", [1, 4, 5, 64])
def test_every_prompt_is_sampled_once_whatever_the_batch(rows):
    """A last batch filled with copies, or cut, would repeat or lose some of the 7."""
    policy = Policy(None, CONFIG, Stops, None, jnp.dtype("float32"))
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, CONFIG.vocab_size, (7, 4)).astype(np.int32)
    positions = np.tile(np.arange(4, dtype=np.int32), (7, 1))
    draw, key = Draw(3, 1.0), jax.random.key(5)

    def sampled(rows):
        generator = Generator(policy, max_new_tokens=5, rows=rows)
        return generator(initial_params(), tokens, positions, draw, key)

    whole, batched = sampled(21), sampled(rows)
    assert whole.tokens.shape == (21, 5)
    np.testing.assert_array_equal(whole.tokens, batched.tokens)
    np.testing.assert_array_equal(whole.mask, batched.mask)
    assert len({tuple(row) for row in whole.tokens[:3]}) > 1
