"""The report's curves: which metrics share a picture, under which heading, and all the others.

A kind of run shows the pictures that its metrics fill; no other is drawn.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from rlx.report.chart import Line, Point, line_chart, number_text

Row = Mapping[str, Any]

COLOURS = 6
"""Lines that one picture can tell apart; the page's style sheet has as many."""


class Chart(NamedTuple):
    """One picture: metrics of one kind and one unit, at most COLOURS of them."""

    title: str
    unit: str
    metrics: Mapping[str, str]
    """Name of the metric -> label in the legend. A `*` stands for any text, and is the label."""
    kind: str = "train"
    fractions: bool = False
    errors: Mapping[str, str] = {}
    """Name of the metric -> name of its standard error."""


def _heldout(title: str, unit: str, metrics: Mapping[str, str], **options: Any) -> Chart:
    return Chart(f"Held-out {title}", unit, metrics, kind="eval", **options)


GROUPS: Mapping[str, Sequence[Chart]] = {
    "Held-out": (
        _heldout(
            "pass@1",
            "pass@1",
            {"pass@1": "sampled", "greedy/pass@1": "greedy"},
            fractions=True,
            errors={"pass@1": "stderr", "greedy/pass@1": "greedy/stderr"},
        ),
        _heldout(
            "reward",
            "reward",
            {"reward": "sampled", "greedy/reward": "greedy"},
            errors={"reward": "stderr", "greedy/reward": "greedy/stderr"},
        ),
        _heldout(
            "accuracy",
            "preferences met",
            {"accuracy": "accuracy"},
            fractions=True,
            errors={"accuracy": "stderr"},
        ),
        _heldout("NLL", "nats a token", {"nll": "NLL"}, errors={"nll": "stderr"}),
        _heldout("perplexity", "perplexity", {"perplexity": "perplexity"}),
        _heldout("loss", "loss", {"loss": "loss"}),
        _heldout("margin", "chosen less rejected", {"margin": "margin"}),
        _heldout(
            "implicit rewards",
            "beta log ratio",
            {"rewards/chosen": "chosen", "rewards/rejected": "rejected"},
        ),
        _heldout("scores", "score", {"score/chosen": "chosen", "score/rejected": "rejected"}),
        _heldout("length", "tokens", {"length/mean": "mean", "length/max": "max"}),
        _heldout(
            "text cut by the length limit",
            "share",
            {"truncated": "sampled", "greedy/truncated": "greedy"},
            fractions=True,
        ),
    ),
    "Reward": (
        Chart("Reward in training", "reward", {"reward/mean": "mean"}),
        Chart("Solve rate in training", "solved", {"solve_rate": "solved"}, fractions=True),
        Chart(
            "Groups with equal rewards",
            "share",
            {
                "groups/all_equal": "equal",
                "groups/all_right": "all right",
                "groups/all_wrong": "all wrong",
            },
            fractions=True,
        ),
        Chart("KL in the reward", "nats a token", {"kl/reward": "KL"}),
        Chart("KL of whole completions", "nats", {"kl/completion": "KL"}),
        Chart("Weight of the KL in the reward", "beta", {"kl/beta": "beta"}),
        Chart("Scale of normalised rewards", "factor", {"reward/scale": "scale"}),
    ),
    "Preferences": (
        Chart(
            "Accuracy in training",
            "preferences met",
            {"accuracy": "accuracy", "*/accuracy": ""},
            fractions=True,
        ),
        Chart("Margin in training", "chosen less rejected", {"margin": "margin", "*/margin": ""}),
        Chart(
            "Implicit rewards in training",
            "beta log ratio",
            {
                "rewards/chosen": "chosen",
                "rewards/rejected": "rejected",
                "*/rewards/chosen": "",
                "*/rewards/rejected": "",
            },
        ),
        Chart(
            "Scores in training", "score", {"score/chosen": "chosen", "score/rejected": "rejected"}
        ),
    ),
    "Policy": (
        Chart("Entropy", "nats a token", {"entropy": "entropy"}),
        Chart("NLL in training", "nats a token", {"nll": "NLL", "*/nll": ""}),
        Chart("KL to the reference", "nats a token", {"kl": "KL", "*/kl": ""}),
        Chart("KL to the policy that sampled", "nats a token", {"kl/old": "KL"}),
        Chart("Clipped tokens", "share", {"clip/low": "low", "clip/high": "high"}, fractions=True),
        Chart("Gradient that the gate lets pass", "share", {"gate": "gate"}, fractions=True),
        Chart("Completion length", "tokens", {"length/mean": "mean", "length/max": "max"}),
        Chart("Cut by the length limit", "share", {"truncated": "truncated"}, fractions=True),
    ),
    "Critic": (
        Chart(
            "Values and returns",
            "reward to come",
            {"value/mean": "values", "return/mean": "returns"},
        ),
        Chart("Returns the critic foresaw", "variance explained", {"explained_variance": "R²"}),
        Chart("Critic's loss", "squared error / 2", {"value/loss": "loss"}),
        Chart("Clipped values", "share", {"value/clip": "clipped"}, fractions=True),
    ),
    "Sampler and trainer": (
        Chart(
            "Gap between sampler and trainer",
            "|delta log-prob|",
            {"sampler_gap/mean": "mean", "sampler_gap/max": "max"},
        ),
        Chart(
            "Effective sample size", "share", {"effective_sample_size": "of tokens"}, fractions=True
        ),
        Chart("Weights of the correction", "ratio", {"correction/ratio": "mean"}),
        Chart("Largest weight of the correction", "ratio", {"correction/ratio_max": "max"}),
        Chart(
            "What the correction changed",
            "share",
            {"correction/truncated": "truncated", "correction/masked": "masked"},
            fractions=True,
        ),
    ),
    "Choice of groups": (
        Chart(
            "Groups worth learning from",
            "share",
            {"probe/informative": "of the probed", "probe/chosen_informative": "of the chosen"},
            fractions=True,
        ),
        Chart("Groups replayed", "share", {"replay/filled": "replayed"}, fractions=True),
        Chart("Age of replayed groups", "steps", {"replay/age": "mean"}),
        Chart("Groups kept for replay", "groups", {"replay/held": "kept"}),
    ),
    "Optimizer": (
        Chart("Loss", "loss", {"loss": "loss"}),
        Chart("Loss of each term, unweighted", "loss", {"loss/*": ""}),
        Chart("Gradient norm", "norm", {"gradient_norm": "gradient"}),
        Chart("Learning rate", "rate", {"learning_rate": "learning rate"}),
        Chart("Time of a step", "seconds", {"seconds": "step"}),
        Chart("Time of its phases", "seconds", {"seconds/*": ""}),
    ),
}


def curves(metrics: Sequence[Row]) -> str:
    """Each group's pictures under its heading, and every other metric below."""
    # In the order in which they first came.
    logged = dict.fromkeys((line["kind"], name) for line in metrics for name in line)
    shown = {(kind, name) for kind in ("train", "eval") for name in ("step", "kind", "nonfinite")}
    html = ""
    for heading, charts in GROUPS.items():
        cards = []
        for chart in (_filled(given, logged) for given in charts):
            shown |= {(chart.kind, name) for name in (*chart.metrics, *chart.errors.values())}
            cards.append(_card(chart, metrics))
        if any(cards):
            html += f'<h3 class="group">{heading}</h3><div class="grid">{"".join(cards)}</div>'
    html = f"<h2>Curves</h2>{html}" if html else ""
    rest = []
    for kind, name in (other for other in logged if other not in shown):
        title = f"{name} (held-out)" if kind == "eval" else name
        rest.append(_card(Chart(title, name, {name: name}, kind), metrics))
    if any(rest):
        html += (
            '<h2>Further metrics</h2><details class="card"><summary>Every other metric that was '
            f'logged ({sum(map(bool, rest))})</summary><div class="grid">{"".join(rest)}</div>'
            "</details>"
        )
    return html


def _filled(chart: Chart, logged: Mapping[tuple[str, str], None]) -> Chart:
    """The chart with the names that were logged in the place of its patterns."""
    names = [name for kind, name in logged if kind == chart.kind]
    found: dict[str, str] = {}
    for pattern, label in chart.metrics.items():
        for name, rest in _matches(pattern, names):
            found.setdefault(name, label or rest)
    return chart._replace(metrics=dict(list(found.items())[:COLOURS]))


def _matches(pattern: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The names that the pattern stands for, and what its `*` is in each."""
    before, star, after = pattern.partition("*")
    for name in names:
        if not star and name == pattern:
            yield name, name
        elif star and name.startswith(before) and name.endswith(after):
            rest = name[len(before) : len(name) - len(after)]
            if rest:
                yield name, f"{rest} {after.rpartition('/')[2]}" if after.count("/") > 1 else rest


def _card(chart: Chart, metrics: Sequence[Row]) -> str:
    lines = []
    for name, label in chart.metrics.items():
        # By step: an evaluation that was done again counts once, with what it gave last.
        points = {
            line["step"]: _point(line, name, chart.errors.get(name))
            for line in metrics
            if line["kind"] == chart.kind and name in line
        }
        if points:
            lines.append(Line(label, [points[step] for step in sorted(points)]))
    picture = line_chart(chart.unit, lines, fractions=chart.fractions)
    if not picture:
        return ""
    legend = "".join(
        f'<span><i class="c{index}"></i>{escape(line.label)} '
        f"<b>{_value(line.points[-1].value, chart.fractions)}</b></span>"
        for index, line in enumerate(lines)
    )
    return (
        f'<figure class="card"><h4>{escape(chart.title)}</h4>'
        f'<span class="at"></span><div class="legend">{legend}</div>{picture}</figure>'
    )


def _point(line: Row, name: str, error_name: str | None) -> Point:
    value, error = line[name], line.get(error_name) if error_name else None
    if value is None or error is None:
        return Point(line["step"], value)
    return Point(line["step"], value, value - error, value + error)


def _value(value: int | float | None, fractions: bool) -> str:
    if value is None:
        return "not finite"
    return f"{100 * value:.1f}%" if fractions else number_text(value)
