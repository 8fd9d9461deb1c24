"""The command line of rlx.

    python run.py [train] [--config FILE] [key.path=value ...]
    python run.py eval | generate | export | score ...

Exit codes: 0 done, 2 bad input, 1 anything else.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "countdown_dapo_nano.yaml"
COMMANDS = ("train", "eval", "generate", "score", "export")


class BadArguments(ValueError):
    """Raised in place of argparse's exit, so that every bad input ends the same way."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise BadArguments(f"{message}\n{self.format_usage().strip()}")


def parser(command: str) -> Parser:
    """The arguments of one command; `key.path=value` may stand anywhere among them."""
    described = {
        "train": "train a policy",
        "eval": "held-out pass@1, pass@k and maj@k of a checkpoint",
        "generate": "completions for a file of prompts",
        "score": "rewards for a file of completions",
        "export": "a run's checkpoint as a Hugging Face folder",
    }
    p = Parser(
        prog=f"run.py {command}",
        description=described[command],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    if command in ("train", "eval", "generate", "export"):
        p.add_argument("--config", type=Path, help="a recipe (YAML)")
    if command == "train":
        p.add_argument(
            "--print-config", action="store_true", help="the resolved configuration and formula"
        )
    if command in ("eval", "generate"):
        p.add_argument("--model", help="checkpoint folder: short for model.path=DIR")
    if command in ("generate", "score"):
        p.add_argument("--input", type=Path, required=True, help="JSON lines")
        p.add_argument("--output", type=Path, required=True, help="JSON lines")
    if command == "generate":
        p.add_argument("--n", type=int, default=1, help="completions a prompt")
    if command == "score":
        p.add_argument("--task", required=True, help="row of the table of tasks")
    if command == "export":
        p.add_argument("--run", type=Path, required=True, help="run folder")
        p.add_argument("--step", type=int, help="checkpoint (default: the newest)")
        p.add_argument("--output", type=Path, required=True, help="folder to write")
        p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    if command != "score":
        p.add_argument("settings", nargs="*", metavar="key.path=value", help="settings")
    return p


def main(arguments: list[str]) -> int:
    command = arguments[0] if arguments and arguments[0] in COMMANDS else "train"
    rest = arguments[1:] if arguments and arguments[0] == command else arguments
    try:
        p = parser(command)
        if "--help" in rest or "-h" in rest:
            print(p.format_help())
            if command == "train":
                from rlx.config import describe

                print(f"commands: {', '.join(COMMANDS)} (run.py COMMAND --help)\n")
                print(describe())
            return 0
        options = p.parse_intermixed_args(rest)
        result = globals()[command](options)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json and result is not None:
        print(json.dumps(result))
    return 0


def settings_of(options: argparse.Namespace) -> list[str]:
    model = getattr(options, "model", None)
    return [*options.settings, *([f"model.path={model}"] if model else [])]


def train(options: argparse.Namespace) -> dict[str, Any] | None:
    from rlx.config import formula, load_training, resolved_yaml

    # Without a recipe it is the main job that runs, on the bundled model.
    config = load_training(options.config or DEFAULT_CONFIG, settings_of(options))
    if options.print_config:
        if options.json:
            return {"config": config.model_dump(), "formula": formula(config)}
        print(resolved_yaml(config))
        print(formula(config))
        return None
    from rlx.loop import train as run

    return run(config, sys.stderr if options.json else sys.stdout)


def eval(options: argparse.Namespace) -> dict[str, Any]:
    from rlx.commands import evaluate
    from rlx.config import load

    result = evaluate(load(options.config or DEFAULT_CONFIG, settings_of(options)))
    if not options.json:
        for name, value in result.items():
            print(f"{name:20} {value}")
    return result


def generate(options: argparse.Namespace) -> dict[str, Any]:
    from rlx.commands import generate as run
    from rlx.config import load

    config = load(options.config, settings_of(options))
    return told(options, run(config, options.input, options.output, options.n))


def score(options: argparse.Namespace) -> dict[str, Any]:
    from rlx.rewards.scoring import score_file

    return told(options, score_file(options.task, options.input, options.output))


def export(options: argparse.Namespace) -> dict[str, Any]:
    from rlx.commands import export as run

    return told(options, run(options.run, options.step, options.output, options.dtype))


def told(options: argparse.Namespace, result: dict[str, Any]) -> dict[str, Any]:
    if not options.json:
        print("  ".join(f"{name} {value}" for name, value in result.items()))
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
