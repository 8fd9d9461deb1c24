"""The arithmetic of held-out evaluation: pass@1 with its standard error, unbiased pass@k, maj@k."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlx.rewards.score import Score


class Completion(NamedTuple):
    """One sampled text and what it earned."""

    problem: int
    text: str
    length: int
    """Tokens, the stop token included."""
    truncated: bool
    score: Score | None
    """None: the verifier failed on it, or its logits were not finite."""


def pass_at_k(right: int, samples: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), unbiased for k <= n. https://arxiv.org/abs/2107.03374 (eq. 1)"""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def summarise(
    texts: Sequence[Completion], group: int, answer: Callable[[str], str | None]
) -> dict[str, float]:
    """Metrics of `group` completions a problem, in order. A failed one counts as wrong.

    The standard error is over problems, each with the mean of its samples. `answer` reads the
    answer that a text votes for.
    """
    problems = [texts[i : i + group] for i in range(0, len(texts), group)]
    right = np.array([[is_right(c) for c in problem] for problem in problems])
    rewards = [c.score.reward for c in texts if c.score is not None]
    lengths = [c.length for c in texts]
    rates = right.mean(axis=1)
    n = len(problems)
    metrics = {
        "pass@1": float(rates.mean()),
        "stderr": float(rates.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan,
        "n": n,
        "reward/mean": float(np.mean(rewards)) if rewards else math.nan,
        "length/mean": float(np.mean(lengths)),
        "length/max": max(lengths),
        "truncated": float(np.mean([c.truncated for c in texts])),
        "failed": sum(c.score is None for c in texts),
    }
    powers = [2**i for i in range(1, group.bit_length()) if 2**i <= group]
    for k in sorted({*powers, group} - {1}):
        metrics[f"pass@{k}"] = float(np.mean([pass_at_k(int(c), group, k) for c in right.sum(1)]))
    if group > 2:
        metrics[f"maj@{group}"] = float(np.mean([majority_right(p, answer) for p in problems]))
    return metrics


def is_right(completion: Completion) -> bool:
    return completion.score is not None and completion.score.correct


def majority_right(texts: Sequence[Completion], answer: Callable[[str], str | None]) -> bool:
    """Whether the commonest answer is right; of equally common ones the first. Texts without an
    answer don't vote."""
    answers = [answer(c.text) for c in texts]
    votes = Counter(found for found in answers if found)
    if not votes:
        return False
    return is_right(texts[answers.index(votes.most_common(1)[0][0])])


def nest_greedy(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """`greedy/x` becomes `greedy: {x}`: an evaluation as a summary tells it."""
    nested = {name: value for name, value in metrics.items() if not name.startswith("greedy/")}
    greedy = {
        name.removeprefix("greedy/"): value
        for name, value in metrics.items()
        if name.startswith("greedy/")
    }
    return nested | ({"greedy": greedy} if greedy else {})
