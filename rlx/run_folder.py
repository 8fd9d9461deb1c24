"""The folder of a run: where it is, whether a run can be resumed in it, and how that one began."""

import contextlib
import datetime
import itertools
import json
import math
import zlib
from pathlib import Path
from typing import Any

from model.errors import BadInput
from rlx import hosts
from rlx.config import ConfigError, load
from rlx.files import write_atomically
from rlx.report.metrics import RESERVED, read_lines
from rlx.settings import Config
from rlx.tasks import Task

MAY_CHANGE = {
    "run.name",
    "run.dir",
    "run.resume",
    "loop.steps",
    "loop.max_seconds",
    "eval.every",
    "eval.problems",
    "eval.batch",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.keep_best",
    "log.samples",
    "log.tensorboard",
    # Another mesh, with what its memory wants, or steps run stage by stage (as on several hosts),
    # round otherwise and compute the same.
    "batch.micro",
    "model.remat",
    "model.frozen_memory",
    "sampling.slots",
    "reward.workers",
    "loop.mode",
    "mesh.data",
    "mesh.fsdp",
    "mesh.tensor",
    "hosts.join",
    "hosts.coordinator",
    "hosts.count",
    "hosts.index",
}
"""Settings that a resumed run may have anew. The others decide what is computed or compared."""


def run_folder(config: Config) -> Path:
    """Where the run's files go. Raises BadInput where they can't: the folder holds another run, or,
    for a resume, none, or one that computed something else."""
    if not config.run.dir:
        return _new_folder(Path("runs"), config.run.name)
    folder = Path(config.run.dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"run.dir: expected a folder, or the name of a new one; {folder} is a file.")
    if config.run.resume:
        check_resume(config, folder)
    elif any((folder / name).exists() for name in ("config.yaml", "checkpoints")):
        raise BadInput(
            f"run.dir: {folder} already holds a run. Give run.resume=true to go on with it, or "
            "another run.dir."
        )
    return folder


def _new_folder(parent: Path, name: str) -> Path:
    """A folder that is made here, so that two runs of one second have one each."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = parent / (f"{name}-{stamp}" if number == 1 else f"{name}-{stamp}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def check_resume(config: Config, folder: Path) -> None:
    if not (folder / "config.yaml").exists():
        raise BadInput(f"run.dir: expected a run to resume in {folder}; it has no config.yaml.")
    before = load(folder / "config.yaml", []).model_dump()
    may_change = MAY_CHANGE
    if config.model.router_aux:
        may_change = may_change - {"batch.micro"}  # a micro-batch has a loss of its own
    follow = getattr(config.task, "follow", "")
    if config.optimizer.schedule != "constant" or follow == "schedule":
        # A decay, or a mixture's weights, end with the last step: another number bends them.
        may_change = may_change - {"loop.steps"}
    changed = [
        f"{section}.{key}: the run began with {before[section].get(key)!r}, not {value!r}"
        for section, settings in config.model_dump().items()
        for key, value in settings.items()
        if f"{section}.{key}" not in may_change and before[section].get(key) != value
    ]
    if changed:
        raise ConfigError(changed)


def rows_checksum(task: Task) -> dict[str, int]:
    """Of the rows that are trained on, and of those held out."""
    kinds = {
        "training": (task.train, task.pairs, task.conversations),
        "held-out": (task.heldout, task.heldout_pairs, task.heldout_conversations),
    }
    return {name: zlib.crc32(repr(rows).encode()) for name, rows in kinds.items()}


def check_same_rows(task: Task) -> None:
    """Raises BadInput where another host has read other rows, or other answers to them."""
    if hosts.several():
        hosts.check_same("rows of task.name", rows_checksum(task))


def check_data(folder: Path, task: Task, *, resume: bool) -> None:
    """Writes down what data a run begins with. Raises BadInput where it is resumed with others:
    prompts would come again or never, and what was trained on might be held out."""
    found = rows_checksum(task)
    path = folder / "data.json"
    if resume and path.exists():
        begun = json.loads(path.read_text())
        if changed := [name for name in found if begun.get(name) != found[name]]:
            raise BadInput(
                f"task: expected the data that the run in {folder} began with; the "
                f"{' and the '.join(changed)} rows are others now."
            )
    else:
        write_atomically(path, json.dumps(found) + "\n")


def seconds_so_far(folder: Path) -> float:
    """What a run took before it is resumed: as its last orderly end told it, and what the lines of
    its steps since then add up to, where one was killed since."""
    told, until = 0.0, 0
    if (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
        told, until = summary["seconds"], summary["steps"]
    lines = read_lines(folder / "metrics.jsonl")
    since = (line for line in lines if line["kind"] == "train" and line["step"] > until)
    return told + math.fsum(line.get("seconds") or 0.0 for line in since)


def first_evaluation(folder: Path) -> dict[str, Any] | None:
    """The evaluation at step 0, as an interrupted run left it."""
    if not (folder / "metrics.jsonl").exists():
        return None
    lines = read_lines(folder / "metrics.jsonl")
    found = [line for line in lines if line["kind"] == "eval" and line["step"] == 0]
    return {k: v for k, v in found[-1].items() if k not in RESERVED} if found else None
