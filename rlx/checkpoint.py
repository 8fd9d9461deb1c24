"""Checkpoints of a training state, by orbax: saved in the background, the last and best kept."""

from pathlib import Path

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from rlx.types import TrainState

SCORE = "pass@1"


class Checkpoints:
    """A context manager over `folder`. Closing it waits for the last save; errors are raised."""

    def __init__(self, folder: Path, *, keep: int, keep_best: bool):
        policies = [checkpoint_managers.LatestN(keep)]
        if keep_best:
            policies.append(
                checkpoint_managers.BestN(
                    get_metric_fn=lambda metrics: metrics[SCORE],
                    n=1,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self.folder = folder
        self.manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
                enable_async_checkpointing=True,
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    @property
    def latest(self) -> int | None:
        """The newest whole checkpoint's step; an unfinished save is none."""
        return self.manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """Of the whole checkpoints, in order."""
        return sorted(self.manager.all_steps())

    def save(self, state: TrainState, score: float | None) -> None:
        """`score` is the held-out pass@1 of this very state, None where it was not evaluated.

        Raises RuntimeError where orbax declines, and the error of an earlier background save.
        """
        self.manager.check_for_errors()
        step = int(state.step)
        metrics = None if score is None else {SCORE: score}
        saved = self.manager.save(step, metrics=metrics, args=ocp.args.StandardSave(_plain(state)))
        if not saved:
            raise RuntimeError(
                f"Checkpoint {step} was not written: {self.folder} holds step {self.latest}."
            )

    def wait(self) -> None:
        """Until the last save is on disk. Raises its error."""
        self.manager.wait_until_finished()
        self.manager.check_for_errors()

    def restore(self, like: TrainState, step: int | None = None) -> TrainState:
        """The checkpoint of `step` (default: the newest), of the shapes and types of `like`, which
        may be abstract."""
        restored = self.manager.restore(
            self.latest if step is None else step,
            args=ocp.args.StandardRestore(jax.eval_shape(_plain, like)),
        )
        return restored._replace(key=jax.random.wrap_key_data(restored.key))


def _plain(state: TrainState) -> TrainState:
    """A random key is stored as its words."""
    return state._replace(key=jax.random.key_data(state.key))
