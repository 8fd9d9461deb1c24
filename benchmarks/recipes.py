"""What the learning benchmarks share: a run of a recipe, and its curves."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(config: str, *settings: str) -> dict:
    """The summary of `python run.py --config configs/CONFIG`. Raises CalledProcessError."""
    command = [sys.executable, "run.py", "--json", "--config", f"configs/{config}", *settings]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def curve(folder: str, kind: str, metric: str) -> list[tuple[int, float]]:
    """(step, value) of one metric; `kind` is `train` or `eval`."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == kind]
    return [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
