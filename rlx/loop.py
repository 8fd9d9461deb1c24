"""The host's side of a run: chunks of steps, and between them evaluation, files and checkpoints."""

import contextlib
import datetime
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
from jaxtyping import PyTree

from model.load import export
from rlx import assemble, ops
from rlx.checkpoint import Checkpoints
from rlx.config import Config, ConfigError, load, offline, resolved_yaml
from rlx.data import encode_prompts, prompt_pool, worked_examples
from rlx.evaluate import Heldout
from rlx.report.html import write_report
from rlx.report.metrics import MetricsWriter, read_lines
from rlx.report.progress import Progress, Watch, clock_time
from rlx.rewards.host import HostVerifier
from rlx.rollout import Prompts
from rlx.samples import heldout_samples, training_samples
from rlx.tasks import Task
from rlx.train import fused, initial_state, staged
from rlx.train import offline as offline_run

MAY_CHANGE = ("run", "loop", "eval", "checkpoint", "log")
"""Sections that a resumed run may set anew; all others decide what is computed."""


class Stopwatch:
    """Seconds of each phase since they were last taken."""

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[phase] += time.monotonic() - start

    def take(self) -> dict[str, float]:
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


class Stepper(NamedTuple):
    """One way to advance the state by a chunk."""

    run: Callable
    """(state, length) -> (state, stacked metrics, preview or None)."""
    stopwatch: Stopwatch
    verifier: HostVerifier | None


def online_stepper(
    config: Config, policy: assemble.Policy, task: Task, key: jax.Array, reference: PyTree | None
) -> tuple[Stepper, Any]:
    tokenizer = policy.tokenizer
    encoded = encode_prompts(task.train, tokenizer, limit=config.sampling.max_prompt_tokens)
    if len(encoded) < config.batch.prompts:
        raise ValueError(
            f"batch.prompts is {config.batch.prompts}, but the task has only {len(encoded)} "
            "training prompts; a step draws each at most once."
        )
    assemble.check_length(policy.config, encoded, config.sampling.max_new_tokens)
    pool = prompt_pool(encoded, tokenizer.pad_id, key)
    verifier = HostVerifier(task.score, task.train, tokenizer.decode, tokenizer.stop_ids)
    plan = assemble.make_plan(config, policy, verifier.components)
    stopwatch = Stopwatch()
    if assemble.step_mode(config, policy) == "fused":
        step = fused(plan, verifier)
    else:
        step = staged(plan, verifier, stopwatch)

    def run(state, length):
        state, (metrics, preview) = step(state, reference, pool, length=length)
        return state, metrics, preview

    return Stepper(run, stopwatch, verifier), plan.learner


def offline_stepper(
    config: Config, policy: assemble.Policy, task: Task, key: jax.Array
) -> tuple[Stepper, Any]:
    if task.demonstrate is None:
        raise ValueError(f"Task {task.name} has no worked examples to be fine-tuned on.")
    data = worked_examples(
        task.train,
        task.demonstrate,
        policy.tokenizer,
        copies=task.demonstrations,
        seed=config.run.seed,
        max_prompt_tokens=config.sampling.max_prompt_tokens,
        max_new_tokens=config.sampling.max_new_tokens,
    )
    if len(data.mask) < config.batch.prompts:
        raise ValueError(
            f"batch.prompts is {config.batch.prompts}, but there are only {len(data.mask)} worked "
            "examples."
        )
    learner = assemble.make_learner(config, policy)
    step = offline_run(learner, config.batch.prompts)
    pool = Prompts(data.tokens, data.positions, key)

    def run(state, length):
        state, metrics = step(state, pool, data, length=length)
        return state, metrics, None

    return Stepper(run, Stopwatch(), None), learner


def run_folder(config: Config) -> Path:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path(config.run.dir or f"runs/{config.run.name}-{stamp}")


def check_resume(config: Config, folder: Path) -> None:
    """Refuses to mix runs: settings that decide what is computed must be those of the folder."""
    if not (folder / "config.yaml").exists():
        raise ValueError(f"run.resume: expected a run in {folder}; there is no config.yaml in it.")
    before = load(folder / "config.yaml", []).model_dump()
    now = config.model_dump()
    changed = [
        f"{section}.{key}: the run began with {before[section].get(key)!r}, not {value!r}"
        for section, settings in now.items()
        if section not in MAY_CHANGE
        for key, value in settings.items()
        if before[section].get(key) != value
    ]
    if before["run"]["seed"] != now["run"]["seed"]:
        changed.append(f"run.seed: the run began with {before['run']['seed']}")
    if changed:
        raise ConfigError(changed)


def first_and_last(metrics: dict[str, Any]) -> dict[str, Any]:
    """An evaluation as the summary tells it: greedy nested."""
    nested = {name: value for name, value in metrics.items() if "/" not in name}
    greedy = {
        name.removeprefix("greedy/"): value
        for name, value in metrics.items()
        if name.startswith("greedy/")
    }
    return nested | ({"greedy": greedy} if greedy else {})


class Interrupt:
    """Turns SIGTERM and SIGINT into a wish that the loop reads at the end of a chunk; a second
    one ends the process as ever."""

    def __init__(self):
        self.wanted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        self.wanted = True
        signal.signal(number, self._before[number])


def train(config: Config, stream: TextIO) -> dict[str, Any]:
    """A whole run; returns what summary.json holds. Progress goes to `stream`."""
    begun = time.monotonic()

    # ---- the parts -------------------------------------------------------------------------
    policy = assemble.load_policy(config)
    task = assemble.load_task(config)
    heldout = Heldout(config, policy, task)
    order_key, state_key = jax.random.split(jax.random.key(config.run.seed))
    # A reference is the policy where it began; it is kept only where the loss reads it.
    reference = policy.params if assemble.bound_algorithm(config).uses_reference() else None
    if offline(config):
        reference = None
        stepper, learner = offline_stepper(config, policy, task, order_key)
    else:
        stepper, learner = online_stepper(config, policy, task, order_key, reference)
    state = initial_state(policy.params, learner, state_key)
    policy = policy._replace(params=None)

    # ---- the folder ------------------------------------------------------------------------
    folder = run_folder(config)
    if config.run.resume:
        check_resume(config, folder)
    elif (folder / "config.yaml").exists():
        raise ValueError(
            f"run.dir: {folder} already holds a run. Give run.resume=true to go on with it, or "
            "another run.dir."
        )
    folder.mkdir(parents=True, exist_ok=True)

    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(
            Checkpoints(
                folder / "checkpoints",
                keep=config.checkpoint.keep,
                keep_best=config.checkpoint.keep_best,
            )
        )
        start = 0
        if config.run.resume and checkpoints.latest is not None:
            state = checkpoints.restore(state)
            start = int(state.step)
        (folder / "config.yaml").write_text(resolved_yaml(config))
        writer = stack.enter_context(
            MetricsWriter(
                folder,
                tensorboard=config.log.tensorboard,
                resume_step=start if config.run.resume else None,
            )
        )
        interrupt = stack.enter_context(Interrupt())
        chunk = config.loop.chunk
        progress = stack.enter_context(
            Progress(config.loop.steps, stream=stream, start=start, chunk=chunk)
        )
        watch = Watch(progress.note)

        preview = None

        def evaluate(step: int, problems: int, *, greedy: bool) -> dict[str, Any]:
            metrics, texts = heldout.evaluate(state.params, problems, greedy=greedy)
            writer.write(step, metrics, kind="eval")
            rows = heldout_samples(texts, heldout.rows, policy.tokenizer, config.log.samples)
            if preview is not None:
                rows += training_samples(
                    preview, stepper.verifier, policy.tokenizer, config.log.samples
                )
            if rows:
                writer.write_samples(step, rows)
            progress.note(f"held-out at step {step}: {told(metrics)}")
            return metrics

        # ---- before ------------------------------------------------------------------------
        final = config.eval.final_problems
        before = first_evaluation(folder) if start else None
        if before is None:
            before = evaluate(start, final, greedy=config.eval.greedy)

        # ---- chunks ------------------------------------------------------------------------
        step, after, saved = start, None, start
        while step < config.loop.steps:
            chunk_begun = time.monotonic()
            length = chunk - step % chunk
            state, stacked, preview = stepper.run(state, length)
            stacked = jax.device_get(stacked)
            seconds = (time.monotonic() - chunk_begun) / length
            phases = {
                f"seconds/{phase}": value / length
                for phase, value in stepper.stopwatch.take().items()
            }
            for i in range(length):
                values = ops.values(jax.tree.map(lambda leaf, i=i: leaf[i], stacked))
                values |= {"seconds": seconds, **phases}
                values["tokens_per_second"] = values["tokens"] / seconds
                writer.write(step + i + 1, values)
                watch.update(step + i + 1, values)
                progress.update(step + i + 1, values)
            step += length
            last = step >= config.loop.steps or interrupt.wanted
            if config.loop.max_seconds and time.monotonic() - begun > config.loop.max_seconds:
                last = True
            score = None
            if last and not interrupt.wanted:
                after = evaluate(step, final, greedy=config.eval.greedy)
                score = after["pass@1"]
            elif config.eval.every and step % config.eval.every == 0:
                score = evaluate(step, config.eval.problems, greedy=False)["pass@1"]
            if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
                checkpoints.save(state, score)
                saved = step
            if last:
                break

        # ---- after -------------------------------------------------------------------------
        if after is None and not interrupt.wanted:
            after = evaluate(step, final, greedy=config.eval.greedy)
        checkpoints.wait()
        summary = {
            "task": config.task.name,
            "model": config.model.path,
            "algorithm": config.algorithm.name,
            "steps": step,
            "before": first_and_last(before),
            "after": first_and_last(after) if after else None,
            "seconds": round(time.monotonic() - begun, 1),
            "checkpoint": str(folder / "checkpoints" / str(saved)),
            "hf": None,
            "run": str(folder),
        }
        if interrupt.wanted:
            progress.note(f"stopped at step {step}; run.resume=true run.dir={folder} goes on.")
        else:
            export(folder / "hf", jax.device_get(state.params), policy.config, source=policy.folder)
            summary["hf"] = str(folder / "hf")
        summary["seconds"] = round(time.monotonic() - begun, 1)
        writer.write_summary(summary)
    report = write_report(folder)
    print(closing(summary, report), file=stream)
    return summary


def first_evaluation(folder: Path) -> dict[str, Any] | None:
    """The evaluation at step 0, as an interrupted run left it."""
    lines = read_lines(folder / "metrics.jsonl")
    found = [line for line in lines if line["kind"] == "eval" and line["step"] == 0]
    return {k: v for k, v in found[-1].items() if k not in ("step", "kind")} if found else None


def told(metrics: dict[str, Any]) -> str:
    """An evaluation in a line."""
    parts = [f"pass@1 {metrics['pass@1']:.1%} ± {metrics['stderr']:.1%} (n={metrics['n']:.0f})"]
    if "greedy/pass@1" in metrics:
        parts.append(f"greedy {metrics['greedy/pass@1']:.1%} ± {metrics['greedy/stderr']:.1%}")
    parts.append(f"length {metrics['length/mean']:.0f}")
    if metrics["truncated"]:
        parts.append(f"truncated {metrics['truncated']:.1%}")
    if metrics["failed"]:
        parts.append(f"failed {metrics['failed']:.0f}")
    return ", ".join(parts)


def closing(summary: dict[str, Any], report: Path) -> str:
    lines = []
    if summary["after"]:
        first, last = summary["before"]["pass@1"], summary["after"]["pass@1"]
        lines.append(
            f"held-out pass@1 {first:.1%} -> {last:.1%} in {clock_time(summary['seconds'])}"
        )
    lines += (
        [f"report {report}", f"model  {summary['hf']}"] if summary["hf"] else [f"report {report}"]
    )
    return "\n".join(lines)
