"""The host's side of a training run: chunks of steps, and between them evaluation and files.

What is written of a chunk is written while the next one runs. All of it is on disk before anything
that stands on it: an evaluation, a checkpoint, the end. Checkpoints are written in the background
too.
"""

import contextlib
import math
import signal
import time
from io import TextIOBase
from pathlib import Path
from typing import Any

import jax

from model.load import export
from model.lora import merged
from model.peft_format import save_adapters
from model.score_head import export_scorer, padding
from rlx import assemble, hosts
from rlx.background import Background
from rlx.checkpoint import Checkpoints
from rlx.compilation import Compilation
from rlx.config import resolved_yaml
from rlx.derived import offline, terms, trains_scorer
from rlx.evaluate import change_told, nest_greedy
from rlx.files import write_atomically
from rlx.measure import make_evaluation
from rlx.mesh import Sizes, abstract, on_mesh, this_hardware, told
from rlx.policy import load_policy
from rlx.record import Record
from rlx.report.html import write_report
from rlx.report.metrics import MetricsWriter, Unwritten
from rlx.report.progress import Progress, clock_time
from rlx.resolve import mesh_sizes, resolve, with_mesh
from rlx.room import check_state
from rlx.run_folder import (
    check_data,
    check_same_rows,
    first_evaluation,
    run_folder,
    seconds_so_far,
)
from rlx.scorers import load_reward_model
from rlx.settings import Config, HostSettings
from rlx.stepper import offline_stepper, online_stepper
from rlx.task_loading import load_task


class Interrupt:
    """Turns SIGTERM and SIGINT into a wish that the loop reads between chunks; a second one ends
    the process as ever."""

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


def train(config: Config, stream: TextIOBase) -> dict[str, Any]:
    """A whole run; returns what summary.json holds. Progress goes to `stream`."""
    config = resolve(config)
    hosts.check_same_settings(config)
    # Devices of one kind may differ a little in their memory.
    sizes = hosts.from_first(lambda: mesh_sizes(config))
    with on_mesh(sizes), Compilation() as compilation:
        config = with_mesh(config, sizes)
        check_state(config)
        folder = hosts.from_first(lambda: run_folder(config))
        try:
            hosts.check_shared(folder)
            return _train(config, folder, stream, compilation)
        finally:
            if hosts.first() and not config.run.dir:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # that of a run that ended before it wrote anything


def _train(
    config: Config, folder: Path, stream: TextIOBase, compilation: Compilation
) -> dict[str, Any]:
    begun = time.monotonic()

    # ---- the parts -------------------------------------------------------------------------
    keys = assemble.random_keys(config)
    task = load_task(config)
    check_same_rows(task)
    policy = load_policy(config, keys.weights)
    counts = {"eval.final_problems": config.eval.final_problems}
    if config.eval.every:
        counts["eval.problems"] = config.eval.problems
    reward_model = load_reward_model(config, policy)
    if offline(config):
        stepper = offline_stepper(config, policy, task, keys)
    else:
        stepper = online_stepper(config, policy, task, keys, reward_model)
    heldout = make_evaluation(
        config, policy, task, keys.evaluation, counts, stepper.learner, reward_model
    )
    if trains_scorer(config):
        padding(policy.folder)  # it says before the run that its end would fail
    if stepper.critic is not None:
        padding(stepper.critic.folder)
    state = stepper.state
    stepper = stepper._replace(state=None)
    policy = policy._replace(params=None)

    # ---- the folder ------------------------------------------------------------------------
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(
            Checkpoints(
                folder / "checkpoints",
                keep=config.checkpoint.keep,
                keep_best=config.checkpoint.keep_best,
                headline=heldout.headline,
                higher_is_better=heldout.higher_is_better,
            )
        )
        step = 0
        if config.run.resume:
            hosts.check_same("newest checkpoint in run.dir", checkpoints.latest)
        if config.run.resume and checkpoints.latest is not None:
            # Only its shapes are kept, so that two states are never in memory at once.
            shapes = abstract(state)
            del state
            state = checkpoints.restore(shapes)
            step = int(state.step)
        hosts.from_first(lambda: check_data(folder, task, resume=config.run.resume))
        before = hosts.from_first(lambda: first_evaluation(folder))
        earlier = hosts.from_first(lambda: seconds_so_far(folder))
        if hosts.first():
            # How this process found the others is nothing that a resumed one could use.
            kept = config.model_copy(update={"hosts": HostSettings()})
            write_atomically(folder / "config.yaml", resolved_yaml(kept))
            writer = stack.enter_context(
                MetricsWriter(
                    folder,
                    tensorboard=config.log.tensorboard,
                    resume_step=step if config.run.resume else None,
                    evaluated_again=step >= config.loop.steps,
                )
            )
        else:
            writer = Unwritten()
        interrupt = stack.enter_context(Interrupt())
        chunk = config.loop.chunk
        deadline = begun + config.loop.max_seconds if config.loop.max_seconds else math.inf
        progress = stack.enter_context(
            Progress(config.loop.steps, stream=stream, start=step, chunk=chunk, deadline=deadline)
        )
        record = Record(config, heldout, stepper, policy.tokenizer, writer, progress, compilation)
        background = stack.enter_context(Background())
        if (hardware := this_hardware()).devices > 1:
            progress.note(told(Sizes(**config.mesh.model_dump()), hardware))
        for note in (*stepper.notes, *heldout.notes):
            progress.note(note)

        # ---- before ------------------------------------------------------------------------
        final, greedy = config.eval.final_problems, config.eval.greedy
        if before is None:
            progress.note(f"{folder}: evaluating on at most {final} held-out problems")
            before = record.evaluate(step, stepper.whole(state), None, final, greedy=greedy)

        # ---- chunks ------------------------------------------------------------------------
        preview, saved, score = None, step, None
        finished = step >= config.loop.steps
        while not finished and not hosts.anywhere(interrupt.wanted):
            record.begin()
            length = chunk - step % chunk
            state, stacked, preview = stepper.run(state, length)
            background.run(record.write, record.end(step, length, jax.device_get(stacked)))
            step += length
            late = config.loop.max_seconds and hosts.anywhere(time.monotonic() >= deadline)
            finished = step >= config.loop.steps or late
            score = None
            if not finished and config.eval.every and step % config.eval.every == 0:
                problems = config.eval.problems
                background.join()
                metrics = record.evaluate(
                    step, stepper.whole(state), preview, problems, greedy=False
                )
                score = metrics[heldout.headline]
            if not finished and config.checkpoint.every and step % config.checkpoint.every == 0:
                background.join()
                checkpoints.save(state, score)
                saved = step

        # ---- after -------------------------------------------------------------------------
        background.join()
        if saved != step or checkpoints.latest is None:
            checkpoints.save(state, score)
        after = None
        if finished:
            after = record.evaluate(step, stepper.whole(state), preview, final, greedy=greedy)
            weights = hosts.to_first(stepper.whole(state))
            adapters = None if policy.lora is None else hosts.to_first(state.params)
            scorer = trains_scorer(config)
            if hosts.first():
                write = export_scorer if scorer else export
                write(folder / "hf", merged(weights), policy.config, source=policy.folder)
            if hosts.first() and adapters is not None:
                save_adapters(
                    folder / "adapter",
                    adapters,
                    policy.config,
                    alpha=policy.lora.alpha,
                    base=policy.folder,
                    scorer=scorer,
                )
            if stepper.critic is not None:
                weights = hosts.to_first(state.critic)
                shape, source = stepper.critic.config, stepper.critic.folder
                if hosts.first():
                    export_scorer(folder / "critic", weights, shape, source=source)
        else:
            progress.note(
                f"stopped at step {step}; python run.py run.resume=true run.dir={folder} goes on"
            )
        checkpoints.wait()
        summary = {
            "task": config.task.name,
            "model": config.model.path,
            "algorithm": " + ".join(term.name for term in terms(config)),
            "headline": heldout.headline,
            "steps": step,
            "before": nest_greedy(before),
            "after": nest_greedy(after) if after else None,
            "seconds": round(earlier + time.monotonic() - begun, 1),
            "compile_seconds": compilation.seconds(),
            "checkpoint": str(folder / "checkpoints" / str(step)),
            "hf": str(folder / "hf") if finished else None,
            **({"adapter": str(folder / "adapter")} if finished and policy.lora else {}),
            "run": str(folder),
        }
        writer.write_summary(summary)
    if hosts.first():
        print(closing(summary, write_report(folder)), file=stream)
    return summary


def closing(summary: dict[str, Any], report: Path) -> str:
    """The last lines that a person reads."""
    lines = [f"report {report}"]
    if summary["after"]:
        change = change_told(summary["before"], summary["after"], summary["headline"])
        lines.insert(0, f"{change} in {clock_time(summary['seconds'])}")
        lines.append(f"model  {summary['hf']}")
    return "\n".join(lines)
