"""report.html: all that a run left, on one page that asks for nothing from outside.

It reads the run folder only, so that it can be written again at any time, for a run that stopped
early as well. Whatever came from a model or a file is escaped; a completion may hold any tag.
"""

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import yaml

from model.errors import BadInput
from rlx.files import write_atomically
from rlx.report.curves import curves
from rlx.report.metrics import read_lines
from rlx.report.progress import clock_time, compilation_told
from rlx.report.samples import sample_browser
from rlx.report.scores import score_table

Row = Mapping[str, Any]


def write_report(run_folder: Path) -> Path:
    """Writes `report.html` into the run folder and gives its path.

    Raises BadInput where the folder is missing or holds no file of a run, and where a file that
    it does hold cannot be read.
    """
    names = ("config.yaml", "metrics.jsonl", "summary.json")
    if not any((run_folder / name).exists() for name in names):
        raise BadInput(
            f"Expected a run folder that holds {', '.join(names)}; found none of them in "
            f"{run_folder}."
        )
    config_text = _text(run_folder / "config.yaml")
    config = _config(config_text)
    metrics = read_lines(run_folder / "metrics.jsonl")
    samples = read_lines(run_folder / "samples.jsonl")
    summary = _summary(run_folder / "summary.json")
    name = _setting(config, "run", "name") or run_folder.resolve().name
    page = Template(files("rlx.report").joinpath("page.html").read_text(encoding="utf-8"))
    html = page.substitute(
        title=escape(f"{name} - rlx"),
        heading=escape(name),
        facts=_facts(config, summary, metrics),
        notice=_notice(summary, metrics),
        scores=score_table(summary, metrics),
        charts=curves(metrics),
        samples=sample_browser(samples),
        config=_config_block(config_text),
    )
    path = run_folder / "report.html"
    write_atomically(path, html)
    return path


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _config(text: str) -> Row:
    """Empty where the text is no YAML mapping: the page then shows it as it is."""
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return config if isinstance(config, dict) else {}


def _setting(config: Row, section: str, key: str) -> str:
    values = config.get(section)
    value = values.get(key) if isinstance(values, dict) else None
    return "" if value is None else str(value)


def _algorithm(config: Row) -> str:
    """Its name, or those of its terms."""
    section = config.get("algorithm")
    terms = section.get("terms") if isinstance(section, dict) else None
    names = [str(term.get("name")) for term in terms or () if isinstance(term, dict)]
    return " + ".join(names) or _setting(config, "algorithm", "name")


def _summary(path: Path) -> Row:
    if not path.exists():
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path}: expected JSON; {error}.") from error
    if not isinstance(summary, dict):
        raise BadInput(f"{path}: expected a JSON object; got {type(summary).__name__}.")
    return summary


def _train_lines(metrics: Sequence[Row]) -> list[Row]:
    return [line for line in metrics if line["kind"] == "train"]


def _facts(config: Row, summary: Row, metrics: Sequence[Row]) -> str:
    train = _train_lines(metrics)
    seconds = summary.get("seconds")
    if seconds is None:
        known = [line["seconds"] for line in train if line.get("seconds") is not None]
        seconds = math.fsum(known) if known else None
    compiled = summary.get("compile_seconds")
    taken = train[-1]["step"] if train else summary.get("steps")
    wanted = _setting(config, "loop", "steps")
    steps = "" if taken is None else f"{taken} of {wanted}" if wanted else str(taken)
    facts = {
        "Task": summary.get("task") or _setting(config, "task", "name"),
        "Model": summary.get("model") or _setting(config, "model", "path"),
        "Algorithm": summary.get("algorithm") or _algorithm(config),
        "Reward model": _setting(config, "reward", "model"),
        "Steps": steps,
        "Duration": "" if seconds is None else clock_time(seconds),
        "Compilation": compilation_told(compiled) if compiled else "",
        "Seed": _setting(config, "run", "seed"),
        "Checkpoint": summary.get("checkpoint"),
        "Final model": summary.get("hf"),
    }
    shown = "".join(
        f"<div><dt>{name}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in facts.items()
        if value not in (None, "")
    )
    return f'<dl class="facts">{shown}</dl>'


def _notice(summary: Row, metrics: Sequence[Row]) -> str:
    if summary:
        return ""
    train = _train_lines(metrics)
    until = f"Its last step is {train[-1]['step']}." if train else "It has not taken a step yet."
    return (
        '<p class="card notice">This run has left no summary: it is still going, or stopped '
        f"early. {until}</p>"
    )


def _config_block(text: str) -> str:
    if not text:
        return ""
    return (
        '<h2>Configuration</h2><details class="card"><summary>config.yaml, as it was resolved'
        f"</summary><pre>{escape(text)}</pre></details>"
    )
