"""The report's held-out score: before and after, sampled and greedy, with standard errors."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.evaluate import nest_greedy

Row = Mapping[str, Any]


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
    pairs = {
        "Sampled": (before or {}, after or {}),
        "Greedy": ((before or {}).get("greedy") or {}, (after or {}).get("greedy") or {}),
    }
    rows = [_score_row(name, *pair) for name, pair in pairs.items() if any(pair)]
    if not rows:
        return ""
    return (
        '<h2>Held-out score</h2><div class="card scores"><table><thead><tr><th>pass@1</th>'
        f"<th>Before</th><th>{late}</th><th>Change</th>"
        '<th class="key">0 to 100%<span class="before"></span>before'
        '<span class="after"></span>after</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        '<p class="soft">± is one standard error. That of a change takes the two evaluations as '
        "independent.</p>"
    )


def _score_row(name: str, before: Row, after: Row) -> str:
    cells = [_score(before), _score(after)]
    first, last = before.get("pass@1"), after.get("pass@1")
    if first is None or last is None:
        cells.append("–")
    else:
        change = last - first
        error = math.hypot(before.get("stderr") or 0.0, after.get("stderr") or 0.0)
        tone = "up" if change > 0 else "down" if change < 0 else ""
        cells.append(
            f'<span class="{tone}">{100 * change:+.1f}</span> <small>± {100 * error:.1f}</small>'
        )
    marks = "".join(_mark(score, tone) for score, tone in ((before, "before"), (after, "after")))
    shown = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><td>{name}</td>{shown}<td class="scale"><div class="track">{marks}</div></td></tr>'


def _score(score: Row) -> str:
    if score.get("pass@1") is None:
        return "–"
    notes = []
    if score.get("stderr") is not None:
        notes.append(f"± {100 * score['stderr']:.1f}")
    if score.get("n") is not None:
        notes.append(f"n = {score['n']:.0f}")
    return f"{100 * score['pass@1']:.1f}% <small>{', '.join(notes)}</small>"


def _mark(score: Row, tone: str) -> str:
    value, error = score.get("pass@1"), score.get("stderr") or 0.0
    if value is None:
        return ""
    low, high = max(0.0, value - error), min(1.0, value + error)
    return (
        f'<i class="{tone}" style="left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%"></i>'
        f'<b class="{tone}" style="left:{100 * value:.2f}%"></b>'
    )
