"""What an optimizer state of fewer bits changes: bytes, time, and where AdamW goes.

    python benchmarks/optimizer_state.py [--updates 200] [--seeds 0 1]

Fine-tunes the bundled model's shape, from random weights, on the chats of `configs/tiny_sft.yaml`:
the same rows in the same order for each `optimizer.state_dtype`, and for AdamW whose bfloat16
moments are rounded to the nearest. Prints a line a run and, last, one JSON object: of each, the
bytes a parameter of the moments, the mean loss of the last 20 updates, and how far the parameters
ended from those of float32, as a share of the way that float32 took. The row `other order` is
float32 with the rows in another order: what chance alone does.
"""

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlx import assemble, optimizer_state
from rlx.config import load
from rlx.policy import load_policy
from rlx.resolve import resolve
from rlx.stepper import offline_stepper
from rlx.task_loading import load_task

KINDS = ("float32", "bfloat16", "bfloat16, nearest", "int8", "other order")


@contextlib.contextmanager
def rounding_to_nearest(wanted: bool):
    before = optimizer_state.round_at_random
    if wanted:
        optimizer_state.round_at_random = lambda x, noise: x.astype(jnp.bfloat16)
    yield
    optimizer_state.round_at_random = before


def train(kind: str, seed: int, updates: int):
    dtype = kind.split(",")[0] if kind != "other order" else "float32"
    changes = [
        f"optimizer.state_dtype={dtype}",
        f"run.seed={seed}",
        f"loop.steps={updates}",
        "loop.chunk=1",
        "model.weights=random",
        "optimizer.learning_rate=1e-3",
        "batch.prompts=8",
        "batch.micro=8",
    ]
    config = resolve(load(Path("configs/tiny_sft.yaml"), changes))
    keys = assemble.random_keys(config)
    policy = load_policy(config, keys.weights)
    if kind == "other order":
        keys = keys._replace(order=jax.random.fold_in(keys.order, 1))
    with rounding_to_nearest(kind.endswith("nearest")):
        stepper = offline_stepper(config, policy, load_task(config), keys)
        state, losses = stepper.state, []
        start = jax.device_get(state.params)
        moments = sum(x.nbytes for x in jax.tree.leaves(state.opt_state) if x.ndim)
        state, metrics, _ = stepper.run(state, 1)
        begun = time.monotonic()
        for _ in range(updates - 1):
            state, metrics, _ = stepper.run(state, 1)
            losses.append(float(metrics["loss"].total[0] / metrics["loss"].count[0]))
        seconds = (time.monotonic() - begun) / (updates - 1)
    size = sum(x.size for x in jax.tree.leaves(start))
    return {
        "params": jax.device_get(state.params),
        "start": start,
        "bytes": moments / size,
        "loss": float(np.mean(losses[-20:])),
        "seconds": seconds,
    }


def apart(one, other) -> float:
    return float(optax.global_norm(jax.tree.map(lambda a, b: a - b, one, other)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    found = {kind: [] for kind in KINDS}
    for seed in arguments.seeds:
        base = None
        for kind in KINDS:
            run = train(kind, seed, arguments.updates)
            base = base or run
            line = {
                "bytes_a_parameter": round(run["bytes"], 3),
                "loss": round(run["loss"], 4),
                "apart": round(
                    apart(run["params"], base["params"]) / apart(base["params"], base["start"]), 4
                ),
                "seconds_a_step": round(run["seconds"], 4),
            }
            print(f"seed {seed} {kind}: {line}", file=sys.stderr, flush=True)
            found[kind].append(line)
    means = {
        kind: {name: float(np.mean([line[name] for line in lines])) for name in lines[0]}
        for kind, lines in found.items()
    }
    print(json.dumps({"updates": arguments.updates, "seeds": arguments.seeds, **means}))


if __name__ == "__main__":
    main()
