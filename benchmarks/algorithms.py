"""Learning curves of all on-line algorithms on the bundled model, on the same budget.

    pip install -e '.[benchmarks]'
    python benchmarks/algorithms.py [--steps 14] [--seeds 0] [--only grpo dapo]

Each `configs/tiny_<name>.yaml` runs for the same number of steps, each of the same number of
trained rows, from the same start. It is evaluated on the same 512 held-out problems before and
after, and on the first 256 of them in between. Draws `docs/figures/algorithms.svg`, prints a line a
run and, last, one JSON object.
"""

import argparse
import json
import statistics
import sys
import tempfile

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from recipes import ROOT, curve, run

NAMES = (
    *("ppo", "ppo_dual_clip", "grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "rloo"),
    *("reinforce_pp", "reinforce_pp_baseline", "cispo", "gmpo", "sapo", "components"),
    *("composed", "groups"),
)
FIGURE = ROOT / "docs" / "figures" / "algorithms.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    options = parser.parse_args()
    every = max(1, options.steps // 7)
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            curves, summaries = [], []
            for seed in options.seeds:
                where = f"{folder}/{name}-{seed}"
                summary = run(
                    f"tiny_{name}.yaml",
                    *(f"run.seed={seed}", f"run.dir={where}", f"loop.steps={options.steps}"),
                    *(f"eval.every={every}", "eval.problems=256"),
                )
                summaries.append(summary)
                curves.append(curve(where, "eval", "pass@1"))
                print(
                    f"{name} seed {seed}: {summary['before']['pass@1']:.1%} -> "
                    f"{summary['after']['pass@1']:.1%}, {summary['seconds']:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
            found[name] = {
                "steps": [step for step, _ in curves[0]],
                "pass@1": [
                    round(statistics.mean(value for _, value in points), 4)
                    for points in zip(*curves, strict=True)
                ],
                "stderr_of_problems": round(summaries[0]["after"]["stderr"], 4),
                "seconds": round(statistics.mean(s["seconds"] for s in summaries), 1),
            }
    draw(found)
    print(json.dumps({"seeds": options.seeds, "runs": found}))


def draw(found: dict[str, dict]) -> None:
    """One small picture an algorithm, all others behind it in grey."""
    columns = 4
    rows = -(-len(found) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(11, 2.1 * rows), sharex=True, sharey=True, squeeze=False
    )
    for empty in axes.flat[len(found) :]:
        empty.set_visible(False)
    for axis, shown in zip(axes.flat, found, strict=False):
        for name, runs in found.items():
            mine = name == shown
            colour, order = ("tab:blue", 2) if mine else ("0.85", 1)
            scores = [100 * value for value in runs["pass@1"]]
            # Before and after are of more problems than the others, so that no line joins them.
            inner = slice(1, -1)
            axis.plot(
                runs["steps"][inner],
                scores[inner],
                color=colour,
                linewidth=1.8 if mine else 0.8,
                zorder=order,
            )
            axis.scatter(
                runs["steps"][:: len(scores) - 1],
                scores[:: len(scores) - 1],
                9,
                colour,
                zorder=order,
            )
        axis.set_title(shown, fontsize=9)
        axis.tick_params(labelsize=8)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("held-out pass@1, %", fontsize=9)
    figure.tight_layout()
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
