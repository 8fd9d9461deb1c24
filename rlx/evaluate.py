"""The arithmetic of held-out evaluation, and how its result is told.

An evaluation's metrics always hold its headline (the metric that stands for the run), the
headline's standard error `stderr`, and `n`, what that is over.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float32, Int, PyTree

from rlx.rewards.host import HostVerifier
from rlx.rewards.score import Score


class Headline(NamedTuple):
    rate: bool
    """It is shown in per cent."""
    higher_is_better: bool


HEADLINES = {
    "pass@1": Headline(rate=True, higher_is_better=True),
    "reward": Headline(rate=False, higher_is_better=True),
    "accuracy": Headline(rate=True, higher_is_better=True),
    "nll": Headline(rate=False, higher_is_better=False),
}
"""An evaluation has exactly one of these names among its metrics."""


class Completion(NamedTuple):
    """One sampled text and what it earned."""

    problem: int
    text: str
    length: int
    """Tokens, the stop token included."""
    truncated: bool
    score: Score | None
    """None: it could not be scored, or its logits were not finite."""


@runtime_checkable
class Evaluation(Protocol):
    """What a run is measured by: sampled text, preference pairs or given text."""

    headline: str
    higher_is_better: bool
    rows: Sequence[Mapping[str, Any]]
    """What a completion's `problem` counts in."""
    verifier: HostVerifier | None
    notes: tuple[str, ...]
    """What was left out of the rows, a sentence each."""

    def evaluate(
        self, params: PyTree, count: int, *, greedy: bool
    ) -> tuple[dict[str, Any], list[Completion]]: ...


def headline_of(metrics: Mapping[str, Any]) -> str | None:
    """Which metric stands for an evaluation; None where it holds none that does."""
    return next((name for name in HEADLINES if name in metrics), None)


# ---- sampled text -----------------------------------------------------------------------------


def pass_at_k(right: int, samples: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k), unbiased for k <= n. https://arxiv.org/abs/2107.03374 (eq. 1)"""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def summarise(
    texts: Sequence[Completion],
    group: int,
    answer: Callable[[Completion], str | None],
    labels: Sequence[str] | None = None,
) -> dict[str, float]:
    """Metrics of `group` completions a problem, in order. A failed one counts as wrong.

    The standard error is over problems, each with the mean of its samples. `answer` reads the
    answer that a completion votes for. `labels` are the problems' classes, for `class_metrics`.
    """
    problems = _problems(texts, group)
    right = np.array([[is_right(c) for c in problem] for problem in problems])
    rewards = [c.score.reward for c in texts if c.score is not None]
    metrics = {
        **_mean_and_error("pass@1", right.mean(axis=1)),
        "reward/mean": float(np.mean(rewards)) if rewards else math.nan,
        **_text_metrics(texts),
    }
    powers = [2**i for i in range(1, group.bit_length()) if 2**i <= group]
    for k in sorted({*powers, group} - {1}):
        metrics[f"pass@{k}"] = float(np.mean([pass_at_k(int(c), group, k) for c in right.sum(1)]))
    if group > 2:
        metrics[f"maj@{group}"] = float(np.mean([majority_right(p, answer) for p in problems]))
    if labels is not None:
        metrics |= class_metrics(right.mean(axis=1), labels)
    return metrics


def summarise_rewards(texts: Sequence[Completion], group: int) -> dict[str, float]:
    """The same where nothing is right or wrong.

    A failed completion has no reward, and is left out of its problem's mean; a problem without a
    scored completion is left out of `n`.
    """
    scored = [[c.score.reward for c in p if c.score is not None] for p in _problems(texts, group)]
    means = np.array([np.mean(rewards) for rewards in scored if rewards])
    return {**_mean_and_error("reward", means), **_text_metrics(texts)}


def class_metrics(right: Float[np.ndarray, " n"], labels: Sequence[str]) -> dict[str, float]:
    """Of n problems' shares of right samples: `recall/<label>` is the mean over a class, and
    `balanced_accuracy` that over the classes that there are. https://doi.org/10.1109/ICPR.2010.764

    Whoever always gives the commonest answer has a high share of right ones, and a balanced
    accuracy of one over the classes.
    """
    if len(labels) != len(right):
        raise ValueError(f"there are {len(labels)} labels of {len(right)} problems")
    of_class: dict[str, list[float]] = {label: [] for label in sorted(set(labels))}
    for label, share in zip(labels, right.tolist(), strict=True):
        of_class[label].append(share)
    recalls = {f"recall/{label}": float(np.mean(shares)) for label, shares in of_class.items()}
    return {"balanced_accuracy": float(np.mean(list(recalls.values())))} | recalls


def is_right(completion: Completion) -> bool:
    return completion.score is not None and bool(completion.score.correct)


def majority_right(texts: Sequence[Completion], answer: Callable[[Completion], str | None]) -> bool:
    """Whether the commonest answer is right; of equally common ones the first. Texts without an
    answer don't vote."""
    answers = [answer(c) for c in texts]
    votes = Counter(found for found in answers if found)
    if not votes:
        return False
    return is_right(texts[answers.index(votes.most_common(1)[0][0])])


def _problems(texts: Sequence[Completion], group: int) -> list[Sequence[Completion]]:
    return [texts[i : i + group] for i in range(0, len(texts), group)]


def _mean_and_error(name: str, values: Float[np.ndarray, " n"]) -> dict[str, float]:
    n = len(values)
    return {
        name: float(values.mean()) if n else math.nan,
        "stderr": float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan,
        "n": n,
    }


def _text_metrics(texts: Sequence[Completion]) -> dict[str, float]:
    lengths = [c.length for c in texts]
    return {
        "length/mean": float(np.mean(lengths)),
        "length/max": max(lengths),
        "truncated": float(np.mean([c.truncated for c in texts])),
        "failed": sum(c.score is None for c in texts),
    }


# ---- given text -------------------------------------------------------------------------------


def summarise_pairs(
    margins: Float32[np.ndarray, " n"], prompts: Int[np.ndarray, " n"]
) -> dict[str, float]:
    """How many preferences are met, of the margins of n pairs, each of a prompt.

    A tie counts half: a policy that equals its reference, and a fresh reward model, prefer
    neither. The standard error is clustered by prompt, since pairs of one are not independent.
    Liang and Zeger, https://doi.org/10.1093/biomet/73.1.13
    """
    n, clusters = len(margins), len(np.unique(prompts))
    met = np.where(np.isnan(margins), np.nan, 0.5 * (np.sign(margins) + 1.0))
    accuracy = float(met.mean())
    error = math.nan
    if clusters > 1:
        of_prompts = np.bincount(prompts, weights=met - accuracy)
        error = math.sqrt(clusters / (clusters - 1) * float(np.sum(of_prompts**2))) / n
    return {"accuracy": accuracy, "stderr": error, "n": n}


def summarise_texts(
    losses: Float32[np.ndarray, " n"], lengths: Int[np.ndarray, " n"]
) -> dict[str, float]:
    """Of n rows' summed negative log-probabilities and their tokens: the mean over tokens.

    Its standard error is that of a ratio of two sums over rows, by linearisation: the tokens of a
    row are not independent. Cochran, Sampling Techniques (3rd edition, eq. 6.13)
    """
    n, losses = len(losses), losses.astype(np.float64)
    nll = float(losses.sum() / lengths.sum())
    spread = math.sqrt(n / max(n - 1, 1) * float(np.sum((losses - nll * lengths) ** 2)))
    return {
        "nll": nll,
        "stderr": spread / float(lengths.sum()) if n > 1 else math.nan,
        "n": n,
        # exp(709.8) is the largest double
        "perplexity": math.exp(nll) if nll < 709 else math.inf,
        "tokens": int(lengths.sum()),
    }


# ---- the result, for people -------------------------------------------------------------------


def nest_greedy(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """`greedy/x` becomes `greedy: {x}`: an evaluation as a summary tells it."""
    nested = {name: value for name, value in metrics.items() if not name.startswith("greedy/")}
    greedy = {
        name.removeprefix("greedy/"): value
        for name, value in metrics.items()
        if name.startswith("greedy/")
    }
    return nested | ({"greedy": greedy} if greedy else {})


def told(metrics: Mapping[str, Any], headline: str) -> str:
    """An evaluation in a line."""
    parts = [f"{headline} {score_told(metrics, headline)} (n={metrics['n']:.0f})"]
    nested = nest_greedy(metrics)
    if "greedy" in nested:
        parts.append(f"greedy {score_told(nested['greedy'], headline)}")
    if _known(metrics.get("balanced_accuracy")):
        recalls = ", ".join(
            f"{name.removeprefix('recall/')} {value:.1%}"
            for name, value in metrics.items()
            if name.startswith("recall/") and _known(value)
        )
        parts.append(f"balanced {metrics['balanced_accuracy']:.1%} ({recalls})")
    for name in ("loss", "margin", "perplexity"):
        if _known(metrics.get(name)):
            parts.append(f"{name} {metrics[name]:.4g}")
    if _known(metrics.get("length/mean")):
        parts.append(f"length {metrics['length/mean']:.0f}")
    if metrics.get("truncated"):
        parts.append(f"truncated {metrics['truncated']:.1%}")
    if metrics.get("failed"):
        parts.append(f"failed {metrics['failed']:.0f}")
    return ", ".join(parts)


def change_told(before: Mapping[str, Any], after: Mapping[str, Any], headline: str) -> str:
    """What a run did to its headline."""
    return f"held-out {headline} {score_told(before, headline)} -> {score_told(after, headline)}"


def score_told(metrics: Mapping[str, Any], headline: str) -> str:
    """The headline with its standard error, where it has one: one problem has none, and what was
    read back from a file holds None for NaN."""
    value, error = metrics.get(headline), metrics.get("stderr")
    if not _known(value):
        return "not finite"
    rate = HEADLINES[headline].rate
    text = f"{value:.1%}" if rate else f"{value:.4g}"
    if not _known(error):
        return text
    return f"{text} ± {error:.1%}" if rate else f"{text} ± {error:.2g}"


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
