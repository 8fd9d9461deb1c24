"""From the sections `task` and `reward` to the task: its data read, its verifier made."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from model.errors import BadInput
from model.tokenizer import Tokenizer
from rlx.algorithms.record import hyper_parameters
from rlx.config_problems import came, is_set
from rlx.config_text import expected
from rlx.rewards import VERIFIERS
from rlx.rewards.batch import BatchScorer
from rlx.rewards.build import build
from rlx.rewards.host import HostVerifier
from rlx.rewards.pool import WorkerPool
from rlx.settings import Config
from rlx.signatures import TaskSettings, hyper, model_of
from rlx.tasks import TASKS, Task


def load_task(config: Config) -> Task:
    """The task, with `reward.verifiers` in the place of its own where there are any.

    Raises BadInput where a setting is wrong, or the data.
    """
    try:
        task = _load(config.task.name, hyper(config.task), config.run.seed)
    except BadInput as error:
        raise BadInput(f"task: {error}") from error
    if not config.reward.verifiers:
        return task
    try:
        score = build(config.reward.verifiers, config.reward.combine, VERIFIERS, task.score)
    except BadInput as error:
        raise BadInput(f"reward.{error}") from error
    if not task.train:
        raise BadInput(f"reward.verifiers: the task {task.name} has no prompts to be sampled.")
    # One row of each task, where there are several.
    first = {row.get("task"): row for row in reversed(task.train)}
    try:
        scores = [score("", row) for row in first.values()]
    except Exception as error:
        raise BadInput(
            f"reward.verifiers: an empty completion of the first row could not be scored: {error}"
        ) from error
    return task._replace(score=score, verdicts=all(s.correct is not None for s in scores))


def make_verifier(
    config: Config, task: Task, rows: Sequence[Mapping], tokenizer: Tokenizer
) -> HostVerifier:
    """What scores completions of these rows, in worker processes where they are called for.

    Raises BadInput for limits that nothing would keep.
    """
    reward = config.reward
    verifier = HostVerifier(
        task.score,
        rows,
        tokenizer.decode,
        tokenizer.stop_ids,
        workers=reward.workers,
        seconds=reward.row_seconds,
        memory_bytes=reward.worker_mib * 2**20,
    )
    limits = [name for name in ("reward.row_seconds", "reward.worker_mib") if is_set(config, name)]
    if limits and not _in_workers(verifier.scorer):
        raise BadInput(
            f"{' and '.join(limits)}: expected unset, since what scores {task.name} keeps to limits"
            " of its own and runs in this process; with reward.workers=1 or more, rules get some."
        )
    return verifier


def _in_workers(scorer: BatchScorer) -> bool:
    parts = (getattr(scorer, "parts", None) or {}).values()
    return isinstance(scorer, WorkerPool) or any(map(_in_workers, parts))


def _load(name: str, settings: dict[str, Any], seed: int) -> Task:
    load = TASKS[name]
    if "load_task" in hyper_parameters(load):
        settings = settings | {"load_task": functools.partial(_load_part, seed)}
    return load(seed=seed, **settings)


def _load_part(seed: int, name: str, settings: dict[str, Any], where: str) -> Task:
    """One task of several. `where` stands before what is said of its settings."""
    if name not in TASKS:
        raise BadInput(f"{where}.name: expected one of {', '.join(TASKS)}; came {name}.")
    kind = model_of(TaskSettings, name)
    try:
        section = kind.model_validate(_frozen({"name": name} | settings))
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        raise BadInput(f"{where}.{_complaint(kind, settings, wrong)}") from error
    try:
        return _load(name, hyper(section), seed)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from error


def _complaint(kind: type, settings: dict[str, Any], wrong: Mapping[str, Any]) -> str:
    key, properties = str(wrong["loc"][0]), kind.model_json_schema()["properties"]
    if wrong["type"] == "extra_forbidden":
        return (
            f"{key}: no such setting; there are {', '.join(k for k in properties if k != 'name')}."
        )
    value = "nothing" if wrong["type"] == "missing" else came(settings[key], properties[key])
    return f"{key}: expected {expected(properties[key])}; came {value}."


def _frozen(value: Any) -> Any:
    """With tuples for lists, as settings have them: a list in a list of YAML is still one."""
    if isinstance(value, Mapping):
        return {key: _frozen(inner) for key, inner in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
