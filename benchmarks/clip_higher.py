"""Does DAPO's wider upper clip keep the policy's entropy up?

    pip install -e '.[benchmarks]'
    python benchmarks/clip_higher.py [--steps 16] [--seeds 0 1]

The same DAPO on the bundled model with clip_high .28 and with .2, four mini-batches and two epochs
a rollout, so that ratios reach the clip; nothing else differs. Draws
`docs/figures/clip_higher.svg`, prints a line a run and, last, one JSON object.
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

FIGURE = ROOT / "docs" / "figures" / "clip_higher.svg"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for clip in (0.2, 0.28):
            entropies, scores = [], []
            for seed in options.seeds:
                where = f"{folder}/{clip}-{seed}"
                summary = run(
                    "tiny_dapo.yaml",
                    *(f"run.seed={seed}", f"run.dir={where}", f"loop.steps={options.steps}"),
                    *("rollout.dynamic_sampling=false", "rollout.max_rounds=4"),
                    *("batch.minibatches=4", "batch.epochs=2", f"algorithm.clip_high={clip}"),
                )
                entropies.append(curve(where, "train", "entropy"))
                scores.append(summary["after"]["pass@1"])
                high = statistics.mean(value for _, value in curve(where, "train", "clip/high"))
                print(
                    f"clip_high {clip} seed {seed}: entropy {entropies[-1][0][1]:.3f} -> "
                    f"{entropies[-1][-1][1]:.3f}, clipped above {high:.2%}, "
                    f"pass@1 {scores[-1]:.1%}",
                    file=sys.stderr,
                    flush=True,
                )
            found[str(clip)] = {
                "steps": [step for step, _ in entropies[0]],
                "entropy": [
                    [round(value, 4) for _, value in points]
                    for points in zip(*entropies, strict=True)
                ],
                "pass@1": [round(score, 4) for score in scores],
            }
    draw(found)
    print(json.dumps({"seeds": options.seeds, "clip_high": found}))


def draw(found: dict[str, dict]) -> None:
    figure, axis = plt.subplots(figsize=(6, 3.2))
    for (clip, runs), colour in zip(found.items(), ("tab:orange", "tab:blue"), strict=True):
        for one in zip(*runs["entropy"], strict=True):
            axis.plot(runs["steps"], one, color=colour, linewidth=0.7, alpha=0.4)
        mean = [statistics.mean(values) for values in runs["entropy"]]
        axis.plot(runs["steps"], mean, color=colour, linewidth=2, label=f"clip_high {clip}")
    axis.set_xlabel("step")
    axis.set_ylabel("entropy of the policy, nats a token")
    axis.legend()
    figure.tight_layout()
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
