"""The report's held-out score: before and after, with standard errors, for what a run reports."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.evaluate import HEADLINES, headline_of, nest_greedy
from rlx.report.chart import tick_texts, ticks

Row = Mapping[str, Any]

OF_WHAT = {"pass@1": "Sampled", "reward": "Sampled", "accuracy": "Pairs", "nll": "Texts"}
"""What the first row of an evaluation is over, by its headline."""

TITLES = {"accuracy": "accuracy (preferences met)", "nll": "NLL (nats a token)"}
"""How a headline is written, where not by its name."""


def score_table(summary: Row, metrics: Sequence[Row]) -> str:
    """The table; an empty string for a run that was never evaluated. Without a summary the first
    and the last evaluation stand in."""
    evaluations = [line for line in metrics if line["kind"] == "eval"]
    before, after = summary.get("before"), summary.get("after")
    late = "After"
    if before is None and evaluations and evaluations[0]["step"] == 0:
        before = nest_greedy(evaluations[0])
    if after is None and len(evaluations) > 1:
        after = nest_greedy(evaluations[-1])
        late = f"Step {evaluations[-1]['step']}"
    before, after = before or {}, after or {}
    headline = headline_of(before) or headline_of(after)
    if headline is None:
        return ""
    pairs = {
        OF_WHAT[headline]: (before, after),
        "Greedy": (before.get("greedy") or {}, after.get("greedy") or {}),
    }
    scores = {
        label: tuple(_Score(score, headline) for score in pair)
        for label, pair in pairs.items()
        if any(pair)
    }
    bounds = _bounds([score for pair in scores.values() for score in pair])
    rows = [_score_row(label, *pair, headline, bounds) for label, pair in scores.items()]
    low, high = tick_texts([100 * x if HEADLINES[headline].rate else x for x in bounds])
    title = TITLES.get(headline, headline)
    better = "" if HEADLINES[headline].higher_is_better else "Lower is better. "
    return (
        f'<h2>Held-out score</h2><div class="card scores"><table><thead><tr><th>{title}</th>'
        f"<th>Before</th><th>{late}</th><th>Change</th>"
        f'<th class="key">{low} to {high}{"%" if HEADLINES[headline].rate else ""}'
        '<span class="before"></span>before<span class="after"></span>after</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        f'<p class="soft">{better}± is one standard error. That of a change takes the two '
        "evaluations as independent.</p>"
    )


class _Score:
    """One evaluation's headline: `value` is None where it is not known."""

    def __init__(self, metrics: Row, headline: str):
        self.rate = HEADLINES[headline].rate
        self.value, self.error, self.n = (metrics.get(name) for name in (headline, "stderr", "n"))

    @property
    def range(self) -> tuple[float, float]:
        error = self.error or 0.0
        low, high = self.value - error, self.value + error
        return (max(0.0, low), min(1.0, high)) if self.rate else (low, high)

    def told(self) -> str:
        if self.value is None:
            return "–"
        notes = [] if self.error is None else [f"± {_number(self.error, self.rate, error=True)}"]
        notes += [] if self.n is None else [f"n = {self.n:.0f}"]
        unit = "%" if self.rate else ""
        return f"{_number(self.value, self.rate)}{unit} <small>{', '.join(notes)}</small>"


def _bounds(scores: Sequence[_Score]) -> tuple[float, float]:
    """The ends of the scale: all of it for a rate, else round numbers around what is shown."""
    known = [end for score in scores if score.value is not None for end in score.range]
    if not known or scores[0].rate:
        return 0.0, 1.0
    low, high = min(known), max(known)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(high) * 0.5 or 1.0
        low, high = low - margin, high + margin
    around = ticks(low, high, count=4)
    return around[0], around[-1]


def _score_row(
    label: str, before: _Score, after: _Score, headline: str, bounds: tuple[float, float]
) -> str:
    cells = [before.told(), after.told()]
    if before.value is None or after.value is None:
        cells.append("–")
    else:
        change = after.value - before.value
        gain = change if HEADLINES[headline].higher_is_better else -change
        tone = "up" if gain > 0 else "down" if gain < 0 else ""
        cell = f'<span class="{tone}">{_number(change, before.rate, sign="+")}</span>'
        if before.error is not None and after.error is not None:
            error = math.hypot(before.error, after.error)
            cell += f" <small>± {_number(error, before.rate, error=True)}</small>"
        cells.append(cell)
    marks = "".join(
        _mark(score, tone, bounds) for score, tone in ((before, "before"), (after, "after"))
    )
    shown = "".join(f"<td>{cell}</td>" for cell in cells)
    return (
        f'<tr><td>{label}</td>{shown}<td class="scale"><div class="track">{marks}</div></td></tr>'
    )


def _number(number: float, rate: bool, *, sign: str = "", error: bool = False) -> str:
    if rate:
        return f"{100 * number:{sign}.1f}"
    return f"{number:{sign}.2g}" if error else f"{number:{sign}.4g}"


def _mark(score: _Score, tone: str, bounds: tuple[float, float]) -> str:
    if score.value is None:
        return ""

    def place(value: float) -> float:
        return 100 * (value - bounds[0]) / (bounds[1] - bounds[0])

    low, high = map(place, score.range)
    return (
        f'<i class="{tone}" style="left:{low:.2f}%;width:{high - low:.2f}%"></i>'
        f'<b class="{tone}" style="left:{place(score.value):.2f}%"></b>'
    )
