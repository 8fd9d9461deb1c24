"""Checkpoints of a training state, by orbax: saved in the background, the last and best kept."""

import math
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import PyTree
from orbax.checkpoint import checkpoint_managers

from rlx.types import TrainState


class Checkpoints:
    """A context manager over `folder`. Closing it waits for the last save; errors are raised.

    `headline` names the held-out metric by which the best one is known.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_best: bool,
        headline: str = "pass@1",
        higher_is_better: bool = True,
    ):
        policies = [checkpoint_managers.LatestN(keep)]
        best = {}
        if keep_best:
            # Only then does orbax write scores to disk, where a resumed run finds them.
            best = {
                "best_fn": lambda metrics: metrics[headline],
                "best_mode": "max" if higher_is_better else "min",
            }
            policies.append(
                checkpoint_managers.BestN(
                    get_metric_fn=lambda metrics: metrics[headline],
                    reverse=not higher_is_better,
                    n=1,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self.folder, self.headline = folder, headline
        self.manager = ocp.CheckpointManager(
            folder.absolute(),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
                **best,
                enable_async_checkpointing=True,
                # A folder that can't be made is an error at once; in the background it would be
                # one that orbax' threads wait for, the process with them, for five minutes.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # Closing waits for the other processes, which an error here keeps from coming.
        if error is None or jax.process_count() == 1:
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
        """`score` is the held-out headline of this very state, None where it was not evaluated. One
        that is not finite is none.

        Raises RuntimeError where orbax declines, and the error of an earlier background save.
        """
        self.manager.check_for_errors()
        step = int(state.step)
        evaluated = score is not None and math.isfinite(score)
        metrics = {self.headline: score} if evaluated else None
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
        """The checkpoint of `step` (default: the newest), of the shapes, types and places of
        `like`, which may be abstract; on whatever devices it was written."""
        restored = self.manager.restore(
            self.latest if step is None else step,
            args=ocp.args.StandardRestore(_plain_shapes(like)),
        )
        return restored._replace(key=jax.random.wrap_key_data(restored.key))

    def restore_params(self, like: PyTree, step: int | None = None) -> PyTree:
        """The policy's parameters alone, of the shapes and types of `like`, as arrays of numpy: no
        device need have room for all of them. Nothing else of the state is read."""
        step = self.latest if step is None else step
        wanted = {"params": like}
        as_numpy = jax.tree.map(
            lambda x: ocp.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype), wanted
        )
        with ocp.PyTreeCheckpointer() as reader:
            restored = reader.restore(
                self.folder.absolute() / str(step) / "default",
                args=ocp.args.PyTreeRestore(wanted, restore_args=as_numpy, partial_restore=True),
            )
        return restored["params"]


def _plain_shapes(like: TrainState) -> TrainState:
    """Those of `_plain`, each with its place where it has one."""
    words = jax.eval_shape(_plain, like)
    return jax.tree.map(
        lambda to, own: jax.ShapeDtypeStruct(
            to.shape, to.dtype, sharding=getattr(own, "sharding", None)
        ),
        words,
        like,
    )


def _plain(state: TrainState) -> TrainState:
    """A random key is stored as its words."""
    return state._replace(key=jax.random.key_data(state.key))
