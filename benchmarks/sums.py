"""Does a real language model learn on a CPU? GRPO on sums of one step with a 135 M model.

    pip install -e '.[benchmarks]'
    python benchmarks/sums.py DIR [--seed 0]        # DIR: SmolLM2-135M-Instruct

Runs `configs/sums_grpo_smollm2.yaml`, draws `docs/figures/sums_smollm2.svg` and prints one JSON
object: the mean reward of the first and last five steps with the standard error of their difference
(over steps), and the held-out scores before and after.
"""

import argparse
import json
import statistics
import tempfile

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from recipes import ROOT, curve, run

FIGURE = ROOT / "docs" / "figures" / "sums_smollm2.svg"
ENDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = f"{folder}/run"
        summary = run(
            "sums_grpo_smollm2.yaml",
            *(f"model.path={options.model}", f"run.dir={where}", f"run.seed={options.seed}"),
        )
        points = curve(where, "train", "reward/mean")
    rewards = [reward for _, reward in points]
    first, last = rewards[:ENDS], rewards[-ENDS:]
    variance = (statistics.variance(first) + statistics.variance(last)) / ENDS
    draw(points, summary)
    print(
        json.dumps(
            {
                "seed": options.seed,
                "first": round(statistics.mean(first), 4),
                "last": round(statistics.mean(last), 4),
                "stderr": round(variance**0.5, 4),
                "before": summary["before"],
                "after": summary["after"],
                "seconds": summary["seconds"],
                "rewards": [round(reward, 4) for reward in rewards],
            }
        )
    )


def draw(points: list[tuple[int, float]], summary: dict) -> None:
    figure, axis = plt.subplots(figsize=(6, 3.2))
    steps, rewards = zip(*points, strict=True)
    axis.plot(steps, rewards, linewidth=1, label="reward of a step's 64 samples")
    held = [summary[when] for when in ("before", "after")]
    axis.errorbar(
        (0, steps[-1]),
        [score["pass@1"] for score in held],
        yerr=[score["stderr"] for score in held],
        fmt="o",
        capsize=3,
        label="held-out pass@1",
    )
    axis.set_xlabel("step")
    axis.set_ylim(0, 1)
    axis.legend()
    figure.tight_layout()
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
