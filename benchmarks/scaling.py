"""How the cost of a rollout and of an update grows, beside what the count predicts.

    pip install -e '.[benchmarks]'
    python benchmarks/scaling.py [--axes rows vocab] [--largest 512] [--output scaling.jsonl]

Tokens a second at the widths of the `tiny` size while one thing grows: rows, prompt length, new
tokens, samples a prompt at fixed rows, vocabulary. A point is timed once, after one untimed call.
Each is written with the FLOPs and bytes that the model must spend, the FLOPs and bytes of the
compiled update, and the speed that these and the machine's measured ceilings allow. Appends a JSON
line a point to the output, draws `docs/figures/scaling.svg`, and prints one JSON line.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from ceilings import ceilings
from learner import make_learner
from rollout import sampler
from update import make_batch
from workload import ROOT, model_config, parser, prompt_ids, settle

FIGURE = ROOT / "docs" / "figures" / "scaling.svg"
AXES = {
    # Short of what two cores do in a second or ten; micro-batches so that attention fits.
    "rows": (8, 32, 128, 512),
    "prompt": (64, 256, 1024, 2048),
    "new": (128, 512, 2048),
    "group": (2, 8, 32),
    "vocab": (512, 4096, 32_000, 151_936),
}
NAMES = {
    "rows": "rows",
    "prompt": "prompt tokens (16 rows)",
    "new": "new tokens (16 rows)",
    "group": "samples a prompt (64 rows)",
    "vocab": "vocabulary (64 rows)",
}


def flags_of(axis: str, value: int) -> dict[str, int]:
    """Prompts, samples, lengths and the rest of a point."""
    base = {"prompts": 8, "samples": 8, "prompt-len": 64, "new-tokens": 64, "micro-batch": 8}
    return (
        base
        | {
            "rows": {"prompts": value // 8},
            "prompt": {"samples": 2, "micro-batch": 2, "prompt-len": value},
            "new": {"samples": 2, "micro-batch": 2, "new-tokens": value},
            "group": {"prompts": 64 // value, "samples": value, "micro-batch": max(8, value)},
            "vocab": {"vocab": value},
        }[axis]
    )


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    flags.add_argument("--largest", type=int, default=10**9, help="leave out values above")
    flags.add_argument("--layers", type=int, default=4)
    flags.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    flags.add_argument("--copy-mib", type=int, default=512)
    flags.add_argument("--output", type=Path, default=Path("scaling.jsonl"))
    flags.add_argument("--figure", type=Path, default=FIGURE)
    chosen = flags.parse_args()
    started = time.perf_counter()
    limits = ceilings(2048, chosen.copy_mib * 2**20, reps=5)
    points = []
    for axis in chosen.axes:
        for value in (v for v in AXES[axis] if v <= chosen.largest):
            point = {"axis": axis, "value": value} | measure_point(axis, value, chosen, limits)
            points.append(point)
            with chosen.output.open("a") as file:
                file.write(json.dumps(point) + "\n")
            print(table_row(point), file=sys.stderr, flush=True)
    draw(points, chosen.figure)
    seconds = round(time.perf_counter() - started, 1)
    print(
        json.dumps({"bench": "scaling", "seconds": seconds, "ceilings": limits, "points": points})
    )


def measure_point(axis: str, value: int, chosen: argparse.Namespace, limits: dict) -> dict:
    import jax
    import jax.numpy as jnp

    from model.parameters import initialise
    from rlx.cost import cost, forward_flops, rollout_bytes, update_flops
    from rlx.state import initial_state
    from rlx.update import update

    arguments = [f"--{name}={number}" for name, number in flags_of(axis, value).items()]
    arguments += [f"--layers={chosen.layers}", f"--dtype={chosen.dtype}"]
    options = settle(parser("A point").parse_args(arguments))
    options.slots, options.remat, options.share_prompts, options.packing = None, "none", 1, 1
    config = model_config(options)
    params = initialise(config, jax.random.key(0))
    shape = (options.prompts, options.samples)
    rows = math.prod(shape)
    counted = {
        "rows": rows,
        "prompt": options.prompt_len,
        "completion": options.new_tokens,
        "samples": options.samples,
    }
    rate = limits["fp32_gflops_median" if options.dtype == "float32" else "bf16_fp32_gflops_median"]

    tokens = jnp.asarray(prompt_ids(options), jnp.int32)
    keys = jax.random.split(jax.random.key(1), shape)
    rollout = jax.jit(sampler(options, config)).lower(params, tokens, keys, None).compile()
    rollout_s = once(lambda: rollout(params, tokens, keys, None))

    learner = make_learner(options, config, on_policy=False)
    state, batch = initial_state(params, learner, jax.random.key(0)), make_batch(options)
    step = jax.jit(lambda state, batch, key: update(learner, state, batch, key))
    step = step.lower(state, batch, keys[0, 0]).compile()
    update_s = once(lambda: step(state, batch, keys[0, 0]))

    # Rows of full length fill a stream by the micro-batch: so often turns the loop over streams.
    compiled = cost(step.as_text(), {"while": rows // options.micro_batch})
    forward = forward_flops(config, **counted)
    needed = update_flops(forward, chunked=False)
    itemsize = 4 if options.dtype == "float32" else 2
    moved = rollout_bytes(config, itemsize=itemsize, **counted)
    sampled, trained = rows * options.new_tokens, rows * (options.prompt_len + options.new_tokens)
    copied = limits["copy_gbs_median"] * 1e9
    return {
        "rollout_s": round(rollout_s, 4),
        "rollout_tokens_per_s": round(sampled / rollout_s, 1),
        "rollout_gflops": round(forward.total / 1e9, 3),
        "rollout_gb": round(moved / 1e9, 3),
        "rollout_bound_tokens_per_s": round(
            sampled / max(forward.total / rate / 1e9, moved / copied), 1
        ),
        "update_s": round(update_s, 4),
        "update_tokens_per_s": round(trained / update_s, 1),
        "update_gflops": round(needed / 1e9, 3),
        "update_compiled_gflops": round(compiled.flops / 1e9, 3),
        "update_compiled_gb": round(compiled.bytes / 1e9, 3),
        "update_bound_tokens_per_s": round(trained / (needed / rate / 1e9), 1),
    }


def once(call) -> float:
    """Seconds of the second call: the first meets untouched memory."""
    import jax

    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds = time.perf_counter() - start
    return seconds


def table_row(point: dict) -> str:
    """Of the Markdown table in docs/performance.md."""
    return (
        f"| {NAMES[point['axis']]} | {point['value']:,} | {point['rollout_tokens_per_s']:,.0f} "
        f"| {point['rollout_bound_tokens_per_s']:,.0f} | {point['rollout_gflops']:,.1f} "
        f"| {point['rollout_gb']:,.1f} | {point['update_tokens_per_s']:,.0f} "
        f"| {point['update_bound_tokens_per_s']:,.0f} | {point['update_gflops']:,.1f} "
        f"| {point['update_compiled_gflops']:,.1f} | {point['update_compiled_gb']:,.1f} |"
    )


def draw(points: list[dict], path: Path) -> None:
    """Rollout above, update below; measured against what the count and the ceilings allow."""
    axes = list(dict.fromkeys(point["axis"] for point in points))
    figure, grid = plt.subplots(2, len(axes), figsize=(2.4 * len(axes) + 1, 4.6), squeeze=False)
    for column, name in enumerate(axes):
        mine = [point for point in points if point["axis"] == name]
        values = [point["value"] for point in mine]
        for row, what in enumerate(("rollout", "update")):
            axis = grid[row, column]
            bound = [point[f"{what}_bound_tokens_per_s"] for point in mine]
            measured = [point[f"{what}_tokens_per_s"] for point in mine]
            axis.loglog(values, bound, color="0.6", linewidth=1, label="bound by the count")
            axis.loglog(values, measured, "o-", color="tab:blue", markersize=3, label="measured")
            axis.tick_params(labelsize=7)
            axis.minorticks_off()
            axis.set_xticks(values, [f"{value:,}" for value in values], rotation=45)
            if column == 0:
                axis.set_ylabel(f"{what}, tokens/s", fontsize=8)
        grid[1, column].set_xlabel(NAMES[name], fontsize=8)
    grid[0, 0].legend(fontsize=6)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
