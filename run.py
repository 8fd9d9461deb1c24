"""The command line of rlx.

    python run.py [train] [--config FILE] [key.path=value ...]
    python run.py eval | generate | score | export | plan ...

Exit codes: 0 done, 2 bad input, 1 anything else.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from model.errors import BadInput

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "countdown_dapo_nano.yaml"


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise BadInput(f"{message}\n{self.format_usage().strip()}")


def parser(command: str) -> Parser:
    """The arguments of one command; `key.path=value` may stand anywhere among them."""
    p = Parser(prog=f"run.py {command}", description=COMMANDS[command][1])
    p.add_argument("--json", action="store_true", help="print one JSON object, and nothing else")
    if command in ("train", "eval", "generate", "data", "plan"):
        p.add_argument("--config", type=Path, help="a recipe (YAML)")
        p.add_argument("settings", nargs="*", metavar="key.path=value", help="settings")
    if command == "train":
        p.add_argument(
            "--print-config", action="store_true", help="the resolved configuration and formula"
        )
    if command in ("eval", "generate", "data"):
        p.add_argument("--model", help="checkpoint folder; short for model.path=DIR")
    if command in ("generate", "score"):
        p.add_argument("--input", type=Path, required=True, help="JSON lines")
        p.add_argument("--output", type=Path, required=True, help="JSON lines")
    if command == "generate":
        p.add_argument("--n", type=int, default=1, help="completions a prompt")
    if command == "data":
        p.add_argument("--show", type=int, default=3, help="training rows to show")
    if command == "score":
        p.add_argument("--task", required=True, help="row of the table of verifiers")
        p.add_argument(
            "settings", nargs="*", metavar="task.key=value", help="settings of the verifier"
        )
    if command == "plan":
        p.add_argument("--topology", required=True, help="v5e:4x4, v5p:2x2x2, h100:8, cpu:8, ...")
        p.add_argument("--fit", action="store_true", help="the most rows that fit")
        p.add_argument("--compare", action="store_true", help="all meshes, the fastest first")
        p.add_argument("--price", type=float, help="dollars a device and hour")
    if command == "export":
        p.add_argument("--run", type=Path, required=True, help="run folder")
        p.add_argument("--step", type=int, help="checkpoint (default: the newest)")
        p.add_argument("--output", type=Path, required=True, help="folder to write")
        p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
        p.add_argument(
            "--adapter", action="store_true", help="the run's adapters alone, in PEFT's format"
        )
    return p


VERIFYING = tuple(
    f"reward.{key}"
    for key in ("source", "model", "verifiers", "combine", "workers", "row_seconds", "worker_mib")
)
"""Settings of what scores a completion."""

ADAPTER = ("lora.adapter", "lora.base_dtype")
"""Settings of adapters that a checkpoint is read with."""

# Each command imports what it needs: `score` and `--help` start without JAX.


def train(options: argparse.Namespace) -> dict[str, Any] | None:
    from rlx.config import load_training, resolved_yaml
    from rlx.config_text import formula

    # Without a recipe it is the main job that runs, on the bundled model; or the run that goes on.
    recipe = options.config or resumed(options.settings) or DEFAULT_CONFIG
    config = load_training(recipe, options.settings)
    if options.print_config:
        from rlx.resolve import resolve

        config = resolve(config)
        if not options.json:
            print(resolved_yaml(config), formula(config), sep="\n")
        return {"config": config.model_dump(), "formula": formula(config)}
    from rlx.cluster import joined
    from rlx.hosts import heard
    from rlx.loop import train as run

    with joined(config.hosts):
        return run(config, heard(sys.stderr if options.json else sys.stdout))


def resumed(settings: list[str]) -> Path | None:
    """The settings that a run began with, where these ask that it go on."""
    given = dict(setting.partition("=")[::2] for setting in settings)
    if given.get("run.resume") != "true" or not given.get("run.dir"):
        return None
    began = Path(given["run.dir"]).expanduser() / "config.yaml"
    return began if began.is_file() else None


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    from rlx.cluster import joined
    from rlx.commands import evaluate as run
    from rlx.config import load

    unread = ("eval.every", "eval.problems")  # of evaluation in the course of a run
    known = ("run.seed", "model", *ADAPTER, "task", "sampling", *VERIFYING, "eval", "mesh", "hosts")
    config = load(options.config or DEFAULT_CONFIG, given(options, *known, unread=unread))
    with joined(config.hosts):
        result = run(config)
    if not options.json:
        for name, value in result.items():
            print(f"{name:14} {value}")
    return result


def generate(options: argparse.Namespace) -> dict[str, Any]:
    from rlx.cluster import joined
    from rlx.commands import generate as run
    from rlx.config import load

    unread = ("sampling.long_prompts",)  # a prompt that is too long is always refused
    known = ("run.seed", "model", *ADAPTER, "sampling", "mesh", "hosts")
    config = load(options.config, given(options, *known, unread=unread))
    with joined(config.hosts):
        result = run(config, options.input, options.output, options.n)
    return told(options, result)


def score(options: argparse.Namespace) -> dict[str, Any]:
    from rlx.score_file import score_file

    return told(options, score_file(options.task, options.input, options.output, options.settings))


def export(options: argparse.Namespace) -> dict[str, Any]:
    from rlx.commands import export as run

    wanted = (options.step, options.output, options.dtype, options.adapter)
    return told(options, run(options.run, *wanted))


def data(options: argparse.Namespace) -> dict[str, Any]:
    from rlx.config import load
    from rlx.data_command import inspect, told

    limits = [f"sampling.{key}" for key in ("max_prompt_tokens", "max_new_tokens", "long_prompts")]
    settings = given(
        options,
        *(
            "run.seed",
            "model.path",
            "model.chat_template_kwargs",
            "task",
            *limits,
            "algorithm.name",
            "algorithm.terms",
        ),
        *VERIFYING,
    )
    result = inspect(load(options.config or DEFAULT_CONFIG, settings), options.show)
    if not options.json:
        print(told(result))
    return result


def plan(options: argparse.Namespace) -> dict[str, Any]:
    from rlx.topology import parse, set_environment

    topology = parse(options.topology)
    # Before JAX starts.
    set_environment(topology.devices if topology.chip.platform == "cpu" else 0)
    from rlx.config import load_training
    from rlx.plan_report import plan as run
    from rlx.plan_report import table

    config = load_training(options.config or DEFAULT_CONFIG, options.settings)
    result = run(
        config,
        topology,
        fitting=options.fit,
        comparing=options.compare,
        price=options.price,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if not options.json:
        print(table(result))
    return result


COMMANDS = {
    "train": (train, "train a policy"),
    "eval": (evaluate, "held-out pass@1, pass@k and maj@k, or reward, of a checkpoint"),
    "generate": (generate, "completions for a file of prompts"),
    "score": (score, "rewards for a file of completions"),
    "data": (data, "the first prompts as the model sees them, token counts, rows left out"),
    "plan": (plan, "memory, time and cost of a run on devices that are not there"),
    "export": (export, "a run's checkpoint as a Hugging Face folder"),
}


def given(options: argparse.Namespace, *known: str, unread: tuple[str, ...] = ()) -> list[str]:
    """The settings of the command line. Refuses one that the command never reads, by its section
    or its path; a recipe may hold them, since it is written for training."""
    for setting in options.settings:
        path = setting.partition("=")[0]
        section = path.partition(".")[0]
        rollouts = ("sampling.weights", "sampling.cache")  # of training alone: exact otherwise
        if path in (*rollouts, *unread) or not {path, section}.intersection(known):
            raise BadInput(
                f"{setting}: expected a setting that this command reads, of "
                f"{', '.join(known)}; it never reads {path}."
            )
    return [*options.settings, *([f"model.path={options.model}"] if options.model else [])]


def check_printed(options: argparse.Namespace) -> None:
    """Raises BadInput where `--json` would print its object behind other output."""
    from rlx.files import standard_stream

    output = getattr(options, "output", None)
    if options.json and output and standard_stream(output) is sys.stdout:
        raise BadInput("--output: expected a file, since --json prints its one object there.")


def told(options: argparse.Namespace, result: dict[str, Any]) -> dict[str, Any]:
    from rlx.files import standard_stream

    if not options.json:
        taken = standard_stream(options.output) is sys.stdout
        line = "  ".join(f"{name} {value}" for name, value in result.items())
        print(line, file=sys.stderr if taken else sys.stdout)
    return result


def main(arguments: list[str]) -> int:
    named = bool(arguments) and arguments[0] in COMMANDS
    command, rest = (arguments[0], arguments[1:]) if named else ("train", arguments)
    try:
        p = parser(command)
        if "--help" in rest or "-h" in rest:
            print(p.format_help())
            if command == "train":
                from rlx.config_text import describe

                print("commands:", ", ".join(COMMANDS), "(run.py COMMAND --help)\n")
                print(describe())
            return 0
        options = p.parse_intermixed_args(rest)
        check_printed(options)
        result = COMMANDS[command][0](options)
    # A path that can't be used is bad input; a full disk or a broken library is not.
    except (
        BadInput,
        FileExistsError,
        FileNotFoundError,
        IsADirectoryError,
        NotADirectoryError,
        PermissionError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        from rlx.report.metrics import json_safe

        print(json.dumps(json_safe(result), allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
