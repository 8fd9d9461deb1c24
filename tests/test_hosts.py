"""Runs of several real processes: the numbers of one, each row verified once, and no process that
waits for a dead one."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import chex
import jax
import numpy as np
import pytest
from toy_run import SMALL, lines, params_of

from model.errors import BadInput
from model.shards import SINGLE
from rlx import cluster, hosts
from rlx.run_folder import check_same_rows
from rlx.settings import HostSettings
from rlx.tasks import Task

ROOT = Path(__file__).parents[1]
NANO = ROOT / "model" / "assets" / "nano"
DEVICES = 4
STEPS, ROWS, HELDOUT = 2, 8, 4
DEADLINE_SECONDS = 600
SMALLER = SMALL | {
    "sampling.max_new_tokens": "8",
    "rollout.overlong_buffer": "7",
    "task.train_size": "16",
    "task.heldout_size": str(HELDOUT),
    "eval.final_problems": str(HELDOUT),
    "batch.prompts": "4",
    "batch.samples": str(ROWS // 4),
    "batch.minibatches": "1",
    "loop.steps": str(STEPS),
    "checkpoint.every": "1",
    "reward.workers": "0",
}
VERIFIER = '''
import os, signal, sys
from pathlib import Path
from rlx.rewards.score import Score

def verify(completion, row):
    """Counts its calls, and ends its process at the one that `die` names."""
    calls = Path(os.environ["CALLS"])
    with calls.open("a") as file:
        file.write("x")
    if str(calls.stat().st_size) == os.environ.get("DIE"):
        os.kill(os.getpid(), signal.SIGKILL)
    return Score(len(completion) % 7 / 7, None, {"length": 1.0}, "")
'''


class Ended(NamedTuple):
    codes: list[int]
    output: list[str]
    seconds: list[float]
    """From the first end to that of each."""
    verified: list[int]
    """Texts, by the process."""


def free_port():
    """Of those that JAX uses under Slurm: 61440 + the job's number modulo 4096."""
    for port in range(61440 + os.getpid() % 2048, 65536):
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


class Machine:
    """Starts the command line in so many processes, with as many devices together as ever."""

    def __init__(self, folder: Path, model: Path):
        self.folder, self.model = folder, model
        self.recipe = folder / "tiny.yaml"
        self.recipe.write_text(f"model:\n  path: {model}\n")
        (folder / "count.py").write_text(VERIFIER)

    def start(self, name, count, *changes, devices=DEVICES, die=(), own=(), slurm=False):
        """`die`: a process and the number of the call of its verifier at which it dies; `own`:
        settings of the last process; `slurm`: its variables alone say who belongs together."""
        settings = SMALLER | {
            "run.dir": str(self.folder / name.partition("+")[0]),
            "reward.verifiers": f"[{{name: {self.folder}/count.py:verify}}]",
        }
        settings |= dict(change.split("=", 1) for change in changes)
        command = ("--config", str(self.recipe))
        return self.launch(
            name, count, command, settings, devices=devices, die=die, own=own, slurm=slurm
        )

    def launch(
        self, name, count, command, settings, *, devices=DEVICES, die=(), own=(), slurm=False
    ):
        calls = [self.folder / f"calls-{name}-{index}" for index in range(count)]
        port = free_port()
        if count > 1 and not slurm:
            settings = settings | {
                "hosts.coordinator": f"127.0.0.1:{port}",
                "hosts.count": str(count),
            }
        elif count == 1:
            settings = settings | {"hosts.join": "never"}
        command = [sys.executable, str(ROOT / "run.py"), *command]
        processes, outputs = [], []
        for index in range(count):
            environment = os.environ | {
                "RLX_HOST_INDEX": str(index),
                "CALLS": str(calls[index]),
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices // count}",
                "JAX_COMPILATION_CACHE_DIR": os.environ.get(
                    "JAX_COMPILATION_CACHE_DIR", str(self.folder / "programs")
                ),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "PYTHONPATH": str(ROOT),
            }
            if slurm:
                environment |= {
                    "SLURM_JOB_ID": str(port),  # JAX takes the port from it
                    "SLURM_STEP_NODELIST": "127.0.0.1",
                    "SLURM_NTASKS": str(count),
                    "SLURM_STEP_NUM_TASKS": str(count),
                    "SLURM_PROCID": str(index),
                    "SLURM_LOCALID": str(index),
                }
            if die and die[0] == index:
                environment["DIE"] = str(die[1])
            outputs.append(self.folder / f"output-{name}-{index}")
            with outputs[-1].open("w") as file:
                more = dict(change.split("=", 1) for change in own) if index == count - 1 else {}
                given = [f"{key}={value}" for key, value in (settings | more).items()]
                processes.append(
                    subprocess.Popen(
                        [*command, *given], env=environment, stdout=file, stderr=subprocess.STDOUT
                    )
                )
        ends = self._wait(processes)
        return Ended(
            [process.returncode for process in processes],
            [path.read_text() for path in outputs],
            [end - min(ends) for end in ends],
            [path.stat().st_size if path.exists() else 0 for path in calls],
        )

    def _wait(self, processes):
        ends, deadline = {}, time.monotonic() + DEADLINE_SECONDS
        try:
            while len(ends) < len(processes) and time.monotonic() < deadline:
                for process in processes:
                    if process not in ends and process.poll() is not None:
                        ends[process] = time.monotonic()
                time.sleep(0.05)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.wait()
        assert len(ends) == len(processes), "a process went on for ever"
        return [ends[process] for process in processes]

    def run(self, name, count, *changes, **more):
        ended = self.start(name, count, *changes, **more)
        assert ended.codes == [0] * count, "\n".join(ended.output)
        return ended


def at_start(alone):
    """Texts that each process verifies to know what its verifier gives."""
    return alone.verified[0] - 2 * HELDOUT - STEPS * ROWS


MESH = ("mesh.data=1", "mesh.fsdp=2", "mesh.tensor=2")


@pytest.fixture(scope="module")
def machine(tmp_path_factory, tiny_nano):
    folder = tmp_path_factory.mktemp("hosts")
    model = folder / "model"
    shutil.copytree(tiny_nano, model)
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(
        config.replace('"num_key_value_heads": 1', '"num_key_value_heads": 2')
    )
    return Machine(folder, model)


@pytest.fixture(scope="module")
def alone(machine):
    """One process, one device: what all others are to equal."""
    return machine.run("alone", 1, devices=1)


@pytest.fixture(scope="module")
def two(machine):
    return machine.run("two", 2, *MESH)


def movement(machine, name):
    """What a run changed of the parameters, and how far its changes are from those of `alone`."""
    start = machine.folder / "start"
    if not start.exists():
        machine.run("start", 1, "optimizer.learning_rate=1e-30", "loop.steps=1", devices=1)
    begun, alone, now = (params_of(machine.folder / x) for x in ("start", "alone", name))
    moved = [
        np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (alone, begun)), strict=True)
    ]
    off = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (alone, now)), strict=True)]
    return max(moved), max(off)


def training(machine, name):
    """The numbers of a run, line by line, without what the clock says."""
    return [
        {k: v for k, v in line.items() if "second" not in k and k not in ("kind", "nonfinite")}
        for line in lines(machine.folder / name / "metrics.jsonl")
    ]


def test_two_processes_compute_what_one_device_does(machine, alone, two):
    moved, off = movement(machine, "two")
    assert moved > 1e-4
    assert off < 1e-3 * moved
    for one, other in zip(training(machine, "alone"), training(machine, "two"), strict=True):
        for name in {"reward/mean", "length/mean", "entropy", "gradient_norm"}.intersection(one):
            np.testing.assert_allclose(one[name], other[name], rtol=2e-4, err_msg=name)


def test_two_processes_compute_what_one_with_the_same_mesh_does(machine, alone, two):
    machine.run("one", 1, *MESH)
    moved, off = movement(machine, "one")
    assert off < 1e-3 * moved
    for one, other in zip(training(machine, "one"), training(machine, "two"), strict=True):
        chex.assert_trees_all_close(one, other, rtol=2e-4, atol=1e-5)


def test_four_processes_do_too_and_verify_each_row_once(machine, alone):
    """The tensor axis crosses processes here: two hold each row."""
    ended = machine.run("four", 4, *MESH)
    moved, off = movement(machine, "four")
    assert off < 1e-3 * moved
    rows = [n - at_start(alone) - 2 * HELDOUT // 4 for n in ended.verified]
    assert rows == [STEPS * ROWS // 2, 0, STEPS * ROWS // 2, 0]


def test_the_first_process_alone_speaks_and_writes(machine, two):
    first, second = two.output
    assert "step 2/2" in first and "report " in first
    assert "step" not in second and "held-out" not in second
    steps = [(x["step"], x["kind"]) for x in lines(machine.folder / "two" / "metrics.jsonl")]
    assert steps == [(0, "eval"), (1, "train"), (2, "train"), (2, "eval")]


@pytest.fixture(scope="module")
def killed(machine, alone):
    """The second process died in the second step."""
    last = at_start(alone) + HELDOUT // 2 + ROWS // 2 + 1
    return machine.start("killed", 2, *MESH, die=(1, last))


def test_a_process_that_dies_ends_the_others(killed):
    assert killed.codes[1] == -9
    assert killed.codes[0] not in (0, 2)
    assert max(killed.seconds) < 60
    said = killed.output[0]
    assert "another process of the run has ended" in said or "another task died" in said


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(machine, two, killed):
    """Bit for bit, in as many processes; elsewhere to rounding."""
    elsewhere = machine.folder / "elsewhere"
    shutil.copytree(machine.folder / "killed", elsewhere)
    before = training(machine, "killed")
    assert before[-1]["step"] == 1
    machine.run("killed+resumed", 2, *MESH, "run.resume=true")
    assert training(machine, "killed") == training(machine, "two")
    ours, theirs = (machine.folder / x / "hf" / SINGLE for x in ("killed", "two"))
    assert ours.read_bytes() == theirs.read_bytes()
    machine.run("elsewhere+resumed", 1, "run.resume=true", devices=1)
    moved, off = movement(machine, "elsewhere")
    assert off < 1e-3 * moved


def test_given_texts_are_learnt_by_two_processes_as_by_one(machine):
    names = (
        "model.weights",
        "task.train_size",
        "task.heldout_size",
        "eval.final_problems",
        "task.highest",
    )
    settings = {name: SMALLER[name] for name in (*names, "task.language", "log.tensorboard")}
    settings |= {
        "algorithm.name": "sft",
        "task.give_up": "0.5",
        "task.demonstrations": "8",
        "sampling.max_new_tokens": "48",
        "sampling.max_prompt_tokens": "64",
        "batch.prompts": "8",
        "batch.micro": "4",
        "loop.steps": "2",
        "eval.every": "0",
        "checkpoint.every": "0",
        "optimizer.learning_rate": "1e-3",
    }
    for name, count, devices in (("given", 2, DEVICES), ("given-alone", 1, 1)):
        own = settings | {"run.dir": str(machine.folder / name)}
        ended = machine.launch(name, count, ("--config", str(machine.recipe)), own, devices=devices)
        assert ended.codes == [0] * count, "\n".join(ended.output)
    losses = [
        [line["loss"] for line in training(machine, name) if "loss" in line]
        for name in ("given", "given-alone")
    ]
    assert len(losses[1]) == 2 and min(losses[1]) > 0.1
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_two_processes_write_the_completions_of_one(machine):
    prompts = machine.folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"make {n}"}) + "\n" for n in range(5)))
    written = {}
    for count in (2, 1):
        output = machine.folder / f"completions-{count}.jsonl"
        command = ["generate", "--model", str(NANO), "--input", str(prompts)]
        command += ["--output", str(output)]
        settings = {"sampling.max_new_tokens": "8", "sampling.top_p": "0.9"}
        ended = machine.launch(
            f"generate-{count}", count, command, settings, devices=DEVICES if count > 1 else 1
        )
        assert ended.codes == [0] * count, "\n".join(ended.output)
        written[count] = lines(output)
    assert len(written[1]) == 5
    for name in ("prompt", "completion", "token_ids", "finish_reason"):
        assert [x[name] for x in written[2]] == [x[name] for x in written[1]]


def test_slurm_is_asked_and_processes_with_other_settings_are_refused(machine):
    ended = machine.start("other", 2, *MESH, own=("optimizer.learning_rate=0.5",), slurm=True)
    assert ended.codes == [2, 2]
    assert "optimizer.learning_rate=0.5 on process 1, 0.001 on process 0" in ended.output[0]


# ---- which processes belong together ----------------------------------------------------------

GIVEN = {"coordinator": "10.0.0.1:1234", "count": 2}


def test_the_coordinator_the_count_and_the_index_come_together():
    wanted = {"coordinator_address": "10.0.0.1:1234", "num_processes": 2, "process_id": 1}
    assert cluster.given(HostSettings(**GIVEN, index=1), {}) == wanted
    assert cluster.given(HostSettings(**GIVEN), {"RLX_HOST_INDEX": "1"}) == wanted
    assert cluster.given(HostSettings(**GIVEN, index=1), {"RLX_HOST_INDEX": "0"}) == wanted
    assert cluster.given(HostSettings(), {"RLX_HOST_INDEX": "1"}) == {}


@pytest.mark.parametrize(
    "settings, environment, said",
    [
        (GIVEN, {}, "hosts.index or RLX_HOST_INDEX is missing"),
        ({"coordinator": "10.0.0.1:1234", "index": 0}, {}, "hosts.count is missing"),
        ({"index": 0}, {}, "hosts.coordinator and hosts.count is missing"),
        (GIVEN | {"index": 2}, {}, "hosts.index: expected 0 to 1"),
        (GIVEN, {"RLX_HOST_INDEX": "2"}, "RLX_HOST_INDEX: expected 0 to 1"),
        (GIVEN, {"RLX_HOST_INDEX": "-1"}, "RLX_HOST_INDEX: expected a whole number; came '-1'"),
        (GIVEN | {"index": 0, "coordinator": "10.0.0.1"}, {}, "expected host:port"),
        (GIVEN | {"index": 0, "join": "never"}, {}, "hosts.join: expected auto"),
    ],
)
def test_what_contradicts_itself_is_refused(settings, environment, said):
    with pytest.raises(BadInput, match=said):
        cluster.given(HostSettings(**settings), environment)


@pytest.mark.parametrize(
    "environment, tpu, name",
    [
        ({}, False, ""),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, False, ""),  # a batch script's own shell
        ({"SLURM_STEP_NUM_TASKS": "1"}, False, ""),
        ({"SLURM_STEP_NUM_TASKS": "2"}, False, "Slurm"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, False, "Open MPI"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False, ""),  # any pod
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"},
            False,
            "Kubernetes",
        ),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True, "Cloud TPU"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, True, ""),
        ({}, True, "Cloud TPU"),
    ],
    ids=str,
)
def test_a_cluster_is_known_by_its_variables(environment, tpu, name):
    assert cluster.cluster(environment, tpu=tpu) == name


def test_hosts_that_read_other_weights_or_rows_are_told(monkeypatch):
    """Of one shape and size: else each would train its own, and the mean of their gradients."""
    own = {"kernel": np.ones((40, 70), np.float32), "bias": np.zeros(3, np.float16)}
    task = Task(name="x", train=[{"question": "1 + 1", "answer": "2"}], heldout=[])
    monkeypatch.setattr(hosts, "several", lambda: True)
    for check, here, there in (
        (hosts.check_same_weights, own, own | {"kernel": own["kernel"] * 2}),
        (hosts.check_same_weights, own, own | {"bias": np.float16([0, 0, 1])}),
        (check_same_rows, task, task._replace(train=[task.train[0] | {"answer": "3"}])),
    ):
        given = []

        def gathered(value, given=given):
            given.append(value)
            return [given[0], value]  # of the first process, and of this one

        monkeypatch.setattr(hosts, "gathered", gathered)
        check(here)
        with pytest.raises(BadInput, match=r"expected the same .* on every host; process 1"):
            check(there)


def test_an_error_that_tells_of_a_lost_process_is_told_from_others():
    gone = "UNKNOWN: Gloo AllGather failed: [pair.cc:538] Read error: Connection reset by peer"
    assert cluster.LOST.search(gone)
    assert not cluster.LOST.search("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes.")
