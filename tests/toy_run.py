"""What tests of whole runs share: the command line, called in this process on a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import run
from model.config import read_config
from model.load import load_params

SMALL = {
    "model.weights": "random",
    "task.highest": "10",
    "task.language": "brief",
    "task.train_size": "64",
    "task.heldout_size": "8",
    "sampling.max_new_tokens": "24",
    "sampling.max_prompt_tokens": "64",
    "batch.prompts": "4",
    "batch.samples": "4",
    "batch.minibatches": "2",
    # A random model solves nothing: what differs between its rewards is the length.
    "rollout.overlong_buffer": "20",
    "optimizer.learning_rate": "1e-3",
    "eval.every": "0",
    "eval.final_problems": "8",
    "eval.greedy": "false",
    "checkpoint.every": "0",
    "log.tensorboard": "false",
}


def arguments(recipe, folder, *changes):
    """SMALL with changes: `key=value`, or `-key` for the default. Flags pass."""
    settings = SMALL | {"run.dir": str(folder)}
    flags = []
    for change in changes:
        if change.startswith("--"):
            flags.append(change)
        elif change.startswith("-"):
            del settings[change[1:]]
        else:
            key, _, value = change.partition("=")
            settings[key] = value
    pairs = [f"{key}={value}" for key, value in settings.items()]
    return ["--config", str(recipe), *flags, *pairs]


def start(recipe, folder, *changes):
    return run.main(arguments(recipe, folder, *changes))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def params_of(folder):
    return load_params(folder / "hf", read_config(folder / "hf"))


def on_eight_devices(what, folder):
    """What tests/mesh_cases.py prints. A device count is fixed when JAX starts, so it is another
    process that has eight."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("mesh_cases.py"), what, folder],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
