"""Does DAPO teach the bundled model more than further supervised fine-tuning in the same minutes?

    python benchmarks/nano_learning.py [--seeds 0 1 2]

Runs `configs/countdown_dapo_nano.yaml` once a seed, then `configs/countdown_sft_control_nano.yaml`
once a seed for as many seconds as that seed's run took. These hold its last evaluation and its
export; the control's own come on top of its limit, so that `control_seconds` are the more. Prints a
line a run and, last, one JSON object with the means and their standard errors over seeds.
"""

import argparse
import json
import statistics
import sys
import tempfile

from recipes import run


def over_seeds(values: list[float]) -> dict[str, float]:
    spread = statistics.stdev(values) / len(values) ** 0.5
    return {"mean": round(statistics.mean(values), 4), "stderr": round(spread, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    if len(set(seeds)) < max(2, len(seeds)):
        parser.error("--seeds: expected two seeds or more, all different, for a standard error")
    found: dict[str, list[dict]] = {"dapo": [], "control": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            where = f"run.dir={folder}/dapo-{seed}"
            dapo = run("countdown_dapo_nano.yaml", f"run.seed={seed}", where)
            where = f"run.dir={folder}/control-{seed}"
            limit = f"loop.max_seconds={dapo['seconds']}"
            control = run("countdown_sft_control_nano.yaml", f"run.seed={seed}", where, limit)
            for name, result in (("dapo", dapo), ("control", control)):
                found[name].append(result)
                print(
                    f"seed {seed} {name}: {result['before']['pass@1']:.1%} -> "
                    f"{result['after']['pass@1']:.1%} sampled, "
                    f"{result['before']['greedy']['pass@1']:.1%} -> "
                    f"{result['after']['greedy']['pass@1']:.1%} greedy, "
                    f"{result['steps']} steps, {result['seconds']:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    print(
        json.dumps(
            {
                "seeds": seeds,
                "n": found["dapo"][0]["after"]["n"],
                "before": over_seeds([r["before"]["pass@1"] for r in found["dapo"]]),
                **{
                    f"{name}_after": over_seeds([r["after"]["pass@1"] for r in results])
                    for name, results in found.items()
                },
                **{
                    f"{name}_after_greedy": over_seeds(
                        [r["after"]["greedy"]["pass@1"] for r in results]
                    )
                    for name, results in found.items()
                },
                "seconds": over_seeds([r["seconds"] for r in found["dapo"]]),
                "control_seconds": over_seeds([r["seconds"] for r in found["control"]]),
            }
        )
    )


if __name__ == "__main__":
    main()
