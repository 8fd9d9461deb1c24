"""The report's browser of samples: a table whose rows the page's script filters."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rlx.report.chart import number_text

SHOWN = 1000
"""Rows on the page; a browser grows slow with more of them."""

TONES = {"correct": "up", "wrong": "down", "scored": "soft", "unscored": "soft"}
"""Verdict -> how it looks."""

# Control characters have no place in HTML; their pictures (U+2400 and on) show that they came.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}


def sample_browser(samples: Sequence[Mapping[str, Any]]) -> str:
    """The table with its filters; an empty string without samples."""
    if not samples:
        return ""
    shown = thin(samples)
    steps = sorted({sample["step"] for sample in shown})
    options = "".join(f'<option value="{step}">{step}</option>' for step in steps)
    came = {verdict(sample) for sample in shown}
    verdicts = "".join(f'<option value="{w}">{w}</option>' for w in TONES if w in came)
    left_out = ""
    if len(shown) < len(samples):
        left_out = (
            f'<p class="soft">{len(shown)} of {len(samples)} samples, of evenly spread steps; '
            "samples.jsonl has them all.</p>"
        )
    return (
        "<h2>Samples</h2>"
        '<form class="filters" onsubmit="return false">'
        f'<label>Step<select name="step"><option value="">all</option>{options}</select></label>'
        f'<label>Verdict<select name="verdict"><option value="">all</option>{verdicts}</select>'
        '</label><label>Text<input name="words" type="search"></label>'
        f'<output class="soft">{len(shown)}</output></form>{left_out}'
        '<div class="card samples"><table><thead><tr><th>Step</th><th>Prompt</th>'
        "<th>Completion</th><th>Reward</th><th>Verdict</th><th>Advantage</th></tr></thead>"
        f"<tbody>{''.join(_row(sample) for sample in shown)}</tbody></table></div>"
    )


def verdict(sample: Mapping[str, Any]) -> str:
    """What a task without right and wrong, or a reward model, gave a reward is `scored`."""
    if sample.get("correct") is not None:
        return "correct" if sample["correct"] else "wrong"
    return "unscored" if sample.get("reward") is None else "scored"


def thin(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All rows of as many evenly spread steps as SHOWN has room for, the last step among them."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_step.setdefault(sample["step"], []).append(sample)
    steps = sorted(by_step)
    stride = 1
    while sum(len(by_step[step]) for step in steps[::-stride]) > SHOWN and stride < len(steps):
        stride += 1
    kept = [sample for step in sorted(steps[::-stride]) for sample in by_step[step]]
    return kept[:SHOWN]


def _row(sample: Mapping[str, Any]) -> str:
    word = verdict(sample)
    components = sample.get("components")
    parts = "<br>".join(
        f"{_text(name)} {_number(value)}"
        for name, value in (components.items() if isinstance(components, Mapping) else ())
    )
    length = sample.get("length")
    notes = "" if length is None else f"{_number(length)} tokens"
    if sample.get("truncated"):
        notes += '<br><span class="down">truncated</span>'
    return (
        f'<tr data-step="{sample["step"]}" data-verdict="{word}"><td>{sample["step"]}</td>'
        f'<td class="prompt"><pre>{_text(sample.get("prompt"))}</pre></td>'
        f'<td class="completion"><pre>{_text(sample.get("completion"))}</pre></td>'
        f'<td>{_number(sample.get("reward"))}<div class="parts">{parts}</div></td>'
        f'<td><span class="mark {TONES[word]}">{word}</span><div class="parts">{notes}</div></td>'
        f"<td>{_number(sample.get('advantage'))}</td></tr>"
    )


def _text(value: Any) -> str:
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
    return escape(text.translate(PICTURES))


def _number(value: Any) -> str:
    if value is None:
        return "–"
    # An advantage may be given a token; what is no number is shown as it stands.
    return number_text(value) if isinstance(value, int | float) else _text(value)
