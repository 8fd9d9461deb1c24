"""What is written of a training run as it goes: lines for machines, lines for a person."""

import time
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from model.tokenizer import Tokenizer
from rlx import hosts, ops
from rlx.compilation import Compilation, give_back_memory
from rlx.derived import terms
from rlx.evaluate import Evaluation, told
from rlx.prepare import Preview
from rlx.report.metrics import MetricsWriter, Unwritten
from rlx.report.progress import Progress, Watch, compilation_told
from rlx.rewards.host import HostVerifier
from rlx.samples import heldout_samples, training_samples
from rlx.settings import Config
from rlx.stepper import Stepper
from rlx.term_rules import compares

NONFINITE_STEPS = 5
"""So many successive steps without a finite gradient end the run."""


class Chunk(NamedTuple):
    """What some steps leave on the host; the next steps change nothing of it."""

    step: int
    """After which they came."""
    length: int
    metrics: ops.Metrics
    """Stacked over the steps."""
    seconds: float
    """All of them together, and so below."""
    phases: dict[str, float]
    """Seconds of each stage, where stages are run one by one; as rlx/train.py tells them."""
    compile_seconds: float
    """Of the same seconds: a stage's first time holds the making of its program."""
    compiled: dict[str, float]
    """Seconds by program, since the run began."""
    failure: str
    """The verifier's latest, if any."""


class Record:
    """Writes the metrics of steps, and evaluations with their samples.

    `begin` and `end` enclose a chunk of steps and take down what must be read at once; `write` may
    run beside the next chunk.
    """

    def __init__(
        self,
        config: Config,
        heldout: Evaluation,
        stepper: Stepper,
        tokenizer: Tokenizer,
        writer: MetricsWriter | Unwritten,
        progress: Progress,
        compilation: Compilation,
    ):
        self.config, self.heldout, self.stepper = config, heldout, stepper
        self.tokenizer, self.writer, self.progress = tokenizer, writer, progress
        self.compilation = compilation
        # A penalty to the reference differs within every group.
        groups = compares(terms(config)[0]) and config.reward.kl == "none"
        self.watch = Watch(progress.note, groups=groups)
        self.nonfinite_steps = 0
        self._told_failure = self._told_compilation = False
        self._begun = self._compiled_before = 0.0

    def evaluate(
        self, step: int, params: PyTree, preview: Preview | None, problems: int, *, greedy: bool
    ) -> dict[str, Any]:
        """Evaluates, and writes the metrics and some samples, of training too where there are."""
        heldout, stepper = self.heldout, self.stepper
        metrics, texts = heldout.evaluate(params, problems, greedy=greedy)
        self.writer.write(step, metrics, kind="eval")
        count = self.config.log.samples
        rows = heldout_samples(texts, heldout.rows, self.tokenizer, count)
        if preview is not None:
            rows += training_samples(
                preview, stepper.rows, stepper.components, self.tokenizer, count
            )
        if rows:
            self.writer.write_samples(step, rows)
        self.progress.note(f"held-out at step {step}: {told(metrics, heldout.headline)}")
        self._tell_failure(_failure(heldout.verifier))
        return metrics

    def begin(self) -> None:
        self._begun, self._compiled_before = time.monotonic(), self.compilation.total_seconds

    def end(self, step: int, length: int, metrics: ops.Metrics) -> Chunk:
        """Of the `length` steps after `step`, whose `metrics` have come to the host."""
        return Chunk(
            step,
            length,
            metrics,
            seconds=time.monotonic() - self._begun,
            phases=self.stepper.stopwatch.take(),
            compile_seconds=self.compilation.total_seconds - self._compiled_before,
            compiled=self.compilation.seconds(),
            failure=_failure(self.stepper.verifier),
        )

    def write(self, chunk: Chunk) -> None:
        """Raises FloatingPointError where the gradients have not been finite for long."""
        step, length = chunk.step, chunk.length
        if not self._told_compilation:
            self.progress.note(f"compiled in {compilation_told(chunk.compiled)}")
            self._told_compilation = True
            give_back_memory()
        for i in range(length):
            values = ops.values(jax.tree.map(lambda leaf, i=i: leaf[i], chunk.metrics))
            values["seconds"] = chunk.seconds / length
            values["seconds/compile"] = chunk.compile_seconds / length
            values["tokens_per_second"] = values["tokens"] * length / chunk.seconds
            for phase, share in chunk.phases.items():
                # Of what a step draws, only what it trains on is scored and learnt from.
                drawn = phase not in ("score", "update") or "trained_tokens" not in values
                tokens = values["tokens" if drawn else "trained_tokens"]
                values[f"seconds/{phase}"] = share / length
                values[f"tokens_per_second/{phase}"] = tokens * length / share
            self.writer.write(step + i + 1, values)
            self.watch.update(step + i + 1, values)
            self.progress.update(step + i + 1, values)
            broken = values["skipped/nonfinite"] == 1.0
            self.nonfinite_steps = self.nonfinite_steps + 1 if broken else 0
            if self.nonfinite_steps == NONFINITE_STEPS:
                raise FloatingPointError(
                    f"No gradient was finite in the last {NONFINITE_STEPS} steps, up to step "
                    f"{step + i + 1}; nothing was learnt in them. A lower optimizer.learning_rate "
                    "or model.dtype=float32 may help."
                )
        self._tell_failure(chunk.failure)

    def _tell_failure(self, failure: str) -> None:
        if failure and not self._told_failure:
            self.progress.note(f"WARNING: the verifier failed: {failure}")
            self._told_failure = True


def _failure(verifier: HostVerifier | None) -> str:
    """On whichever process."""
    if verifier is None:
        return ""
    own = verifier.last_failure if verifier.failures else ""
    return next(filter(None, hosts.gathered(own)), "")
