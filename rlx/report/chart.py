"""Line charts as inline SVG, drawn here so that a report needs nothing from outside.

The page's style sheet gives the colours (classes c0, c1, ...) and its script the hover values,
which it reads from each chart's `data-chart`.
"""

import json
import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 400, 210
LEFT, RIGHT, TOP, BOTTOM = 64, 18, 12, 36
POINTS = 500
"""More points than this on one line are pooled; the screen has no more columns for them."""


class Point(NamedTuple):
    step: int
    value: int | float | None
    """None: it was not finite. The line has a gap there."""
    low: int | float | None = None
    high: int | float | None = None
    """The band around the value; None draws none."""


class Line(NamedTuple):
    label: str
    points: Sequence[Point]


def line_chart(y_label: str, lines: Sequence[Line], *, fractions: bool = False) -> str:
    """The SVG of `lines` over the step; an empty string where no value is finite.

    `fractions` are shown in per cent.
    """
    drawn = [Line(line.label, pool(line.points)) for line in lines]
    finite = [
        number
        for line in drawn
        for point in line.points
        for number in (point.value, point.low, point.high)
        if number is not None
    ]
    if not finite:
        return ""
    steps = [point.step for line in lines for point in line.points]
    first, last = min(steps), max(steps)
    y_ticks = ticks(*_span(float(min(finite)), float(max(finite))), count=4)
    bottom, top = y_ticks[0], y_ticks[-1]

    def x(step: int | float) -> float:
        share = (step - first) / (last - first) if last > first else 0.5
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(value: int | float) -> float:
        return round(HEIGHT - BOTTOM - (value - bottom) / (top - bottom) * _PLOT_HEIGHT, 1)

    parts = []
    texts = [f"{tick * 100:.10g}%" for tick in y_ticks] if fractions else tick_texts(y_ticks)
    for tick, text in zip(y_ticks, texts, strict=True):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" ')
        parts.append(f'y2="{y(tick)}"/><text class="tick" text-anchor="end" x="{LEFT - 6}" ')
        parts.append(f'y="{y(tick) + 3.5}">{text}</text>')
    for tick in _step_ticks(first, last):
        parts.append(f'<text class="tick" text-anchor="middle" x="{x(tick)}" ')
        parts.append(f'y="{HEIGHT - BOTTOM + 15}">{tick}</text>')
    parts.append(f'<text class="axis" text-anchor="middle" x="{(LEFT + WIDTH - RIGHT) / 2}" ')
    parts.append(f'y="{HEIGHT - 4}">step</text>')
    parts.append('<text class="axis" text-anchor="middle" transform="translate(10 ')
    parts.append(f'{TOP + _PLOT_HEIGHT / 2}) rotate(-90)">{escape(y_label)}</text>')
    for index, line in enumerate(drawn):
        for run in _unbroken(line.points):
            band = [point for point in run if point.low is not None and point.high is not None]
            if len(band) == 1:
                ends = [(x(band[0].step), y(end)) for end in (band[0].high, band[0].low)]
                parts.append(f'<path class="line c{index}" d="{_path(ends)}"/>')
            elif band:
                outline = [(x(p.step), y(p.high)) for p in band]
                outline += [(x(p.step), y(p.low)) for p in reversed(band)]
                parts.append(f'<path class="band c{index}" d="{_path(outline)}Z"/>')
        few = len(line.points) <= 30
        for run in _unbroken(line.points):
            place = [(x(point.step), y(point.value)) for point in run]
            parts.append(f'<path class="line c{index}" d="{_path(place)}"/>')
            if few or len(run) == 1:
                parts += [
                    f'<circle class="dot c{index}" cx="{a}" cy="{b}" r="2.5"/>' for a, b in place
                ]
    gaps = {x(p.step) for line in drawn for p in line.points if p.value is None}
    for place in sorted(gaps):
        parts.append(f'<path class="gap" d="M{place} {HEIGHT - BOTTOM}v-7">')
        parts.append("<title>not finite</title></path>")
    data = {
        "first": first,
        "last": last,
        "bottom": bottom,
        "top": top,
        "box": [LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM],
        "percent": fractions,
        "lines": [{"label": line.label, "points": _compact(line.points)} for line in drawn],
    }
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(y_label)} over steps" data-chart="{escape(json.dumps(data))}">'
        + "".join(parts)
        + '<line class="cursor" y1="0" y2="0"/></svg>'
    )


_PLOT_HEIGHT = HEIGHT - TOP - BOTTOM


def pool(points: Sequence[Point]) -> Sequence[Point]:
    """At most POINTS of them: means of neighbours, with their range as the band, so that no spike
    is lost. A value that was not finite stays a gap of its own."""
    if len(points) <= POINTS:
        return points
    size = math.ceil(len(points) / POINTS)
    pooled = []
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        known = [point for point in part if point.value is not None]
        pooled += [point for point in part if point.value is None][:1]
        if known:
            values = [point.value for point in known]
            lows = [point.value if point.low is None else point.low for point in known]
            highs = [point.value if point.high is None else point.high for point in known]
            mean = math.fsum(values) / len(values)
            pooled.append(Point(known[-1].step, mean, min(lows), max(highs)))
    return sorted(pooled, key=lambda point: point.step)


def ticks(low: float, high: float, *, count: int) -> list[float]:
    """About `count` round numbers (1, 2, 2.5 or 5 times a power of ten) that enclose the range."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    begin, end = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [index * size for index in range(begin, end + 1)]


def number_text(number: int | float) -> str:
    """Short, with no more digits than a reader takes in."""
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e6 else f"{number:.4g}"


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """Short where that is exact, else with as many decimals as their distance has."""
    size, largest = ticks[1] - ticks[0], max(map(abs, ticks))
    form = "f" if size > 1e-5 and largest < 1e9 else "e"
    tries = [[number_text(tick) for tick in ticks]]
    tries += [[f"{tick:,.{decimals}{form}}" for tick in ticks] for decimals in range(17)]
    return next(texts for texts in tries if _near(texts, ticks, size))


def _near(texts: Sequence[str], ticks: Sequence[float], size: float) -> bool:
    gaps = (abs(float(a.replace(",", "")) - b) for a, b in zip(texts, ticks, strict=True))
    return max(gaps) < 0.01 * size


def _span(low: float, high: float) -> tuple[float, float]:
    if low >= 0 and low <= 0.6 * high:
        low = 0.0  # a curve that nearly reaches zero is read against zero
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(high) * 0.5 or 1.0
        low, high = (0.0, high + margin) if low >= 0 else (low - margin, high + margin)
    return low, high


def _step_ticks(first: int, last: int) -> list[int]:
    if first == last:
        return [first]
    inner = ticks(float(first), float(last), count=min(5, last - first))
    edge = (last - first) * 0.08
    return [
        first,
        *(round(t) for t in inner if first + edge < t < last - edge and t == round(t)),
        last,
    ]


def _unbroken(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in points:
        if point.value is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if run]


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{a} {b}" for a, b in places)


def _compact(points: Sequence[Point]) -> list[list[float | int | None]]:
    def short(number: int | float | None) -> int | float | None:
        whole = number is None or number == round(number)
        return number if whole else float(f"{number:.5g}")

    return [[p.step, short(p.value), short(p.low), short(p.high)] for p in points]
