"""Joining a run's other processes, and leaving them: at the end, or at once where one fails."""

import contextlib
import importlib.util
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from model.errors import BadInput
from rlx.hosts import first, several, silence
from rlx.settings import HostSettings

INDEX_VARIABLE = "RLX_HOST_INDEX"

HEARTBEAT_SECONDS = 30
"""A process that gives no sign of life for so long is taken for dead."""
PARTING_SECONDS = 60
"""At the end they have met already."""
LAST_WORDS_SECONDS = 3
"""The first process, without which the others are ended at once, leaves a failed run last."""

LOST = re.compile(
    "gloo|nccl|closed by peer|reset by peer|broken pipe|socket closed|coordination|heartbeat|"
    "UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|barrier",
    re.IGNORECASE,
)
"""What errors say when another process is gone."""
UNUSABLE = (BadInput, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""What is wrong with the input: a full disk or a broken library is not."""


def cluster(environment: Mapping[str, str], *, tpu: bool) -> str:
    """Which cluster that JAX can ask for its processes this one belongs to; empty where none, or
    where it is the only process. `tpu`: whether the machine has one.

    A TPU VM has no variable that says how many there are of it: it is always asked.
    """

    def several(name: str) -> bool:
        return int(environment.get(name) or 1) > 1

    workers = environment.get("TPU_PROCESS_ADDRESSES", environment.get("TPU_WORKER_HOSTNAMES", ""))
    found = {
        # Of the step that srun began: a batch script's own shell has the job's SLURM_NTASKS too.
        "Slurm": several("SLURM_STEP_NUM_TASKS"),
        "Open MPI": several("OMPI_COMM_WORLD_SIZE"),
        "Kubernetes": {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys(),
        "Cloud TPU": "," in workers or (tpu and not workers),
    }
    return next((name for name, holds in found.items() if holds), "")


def has_tpu() -> bool:
    """Whether JAX will use this machine's TPU. It is not asked: that would start it."""
    platforms = os.environ.get("JAX_PLATFORMS") or "tpu"
    chips = any(any(Path("/dev").glob(name)) for name in ("accel[0-9]*", "vfio/[0-9]*"))
    return "tpu" in platforms and chips and importlib.util.find_spec("libtpu") is not None


def join(hosts: HostSettings, environment: Mapping[str, str] = os.environ) -> bool:
    """Joins the run's other processes; False where this is the only one. Before JAX is used.

    Raises BadInput where the settings contradict each other or the environment.
    """
    known = given(hosts, environment)
    name = "" if known or hosts.join == "never" else cluster(environment, tpu=has_tpu())
    if not known and not name:
        return False
    # Its handler would take the place of what ends a process at SIGTERM, and end nothing.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **known,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=PARTING_SECONDS,
        )
    except Exception as error:
        where = f"at {hosts.coordinator}" if known else f"which {name} runs"
        raise BadInput(
            f"hosts: the other processes, {where}, could not be joined: {_line(error)} Give "
            "hosts.coordinator, hosts.count and hosts.index, or hosts.join=never to run alone."
        ) from error
    return True


def given(hosts: HostSettings, environment: Mapping[str, str]) -> dict[str, Any]:
    """What `hosts` says of the cluster, as JAX takes it; empty where it says nothing."""
    index, where = hosts.index, "hosts.index"
    if index is None and INDEX_VARIABLE in environment:
        index, where = environment[INDEX_VARIABLE], INDEX_VARIABLE
        if not index.isdecimal():
            raise BadInput(f"{where}: expected a whole number; came {index!r}.")
        index = int(index)
    parts = {
        "hosts.coordinator": hosts.coordinator,
        "hosts.count": hosts.count,
        f"hosts.index or {INDEX_VARIABLE}": None if index is None else str(index),
    }
    # The variable by itself may be a machine's own, for runs on many hosts.
    if not hosts.coordinator and not hosts.count and hosts.index is None:
        return {}
    if missing := [name for name, value in parts.items() if not value]:
        raise BadInput(
            f"hosts: expected hosts.coordinator, hosts.count and hosts.index together, or none of "
            f"them; {' and '.join(missing)} is missing."
        )
    if hosts.join == "never":
        raise BadInput("hosts.join: expected auto, since hosts.coordinator is given; came never.")
    if index >= hosts.count:
        raise BadInput(
            f"{where}: expected 0 to {hosts.count - 1}, since hosts.count is {hosts.count}; "
            f"came {index}."
        )
    host, _, port = hosts.coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise BadInput(
            f"hosts.coordinator: expected host:port of the first process; came {hosts.coordinator}."
        )
    return {
        "coordinator_address": hosts.coordinator,
        "num_processes": hosts.count,
        "process_id": index,
    }


@contextlib.contextmanager
def joined(hosts: HostSettings) -> Iterator[None]:
    """Code in here is one process of a run. Of several, only the first is heard; and an error in
    one ends it here and now, since a process that lingers keeps the others waiting."""
    if not join(hosts):
        yield
        return
    _free_standard_output()
    try:
        if not first():
            sys.stdout = silence()
        yield
        if several():
            multihost_utils.sync_global_devices("end of the run")
    except BaseException as error:
        if not several():
            jax.distributed.shutdown()
            raise
        _leave(error)
    jax.distributed.shutdown()


def _free_standard_output() -> None:
    """Libraries that write to it (gloo tells who is connected) write to standard error from now on;
    it is kept for what the program prints."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(kept, "w", buffering=1, encoding="utf-8", errors="replace")


def _leave(error: BaseException) -> None:
    """Says what happened, and ends the process without waiting for any other."""
    who = f"process {jax.process_index()} of {jax.process_count()}"
    if isinstance(error, (BadInput, OSError)):
        print(f"error: {who}: {error}", file=sys.stderr)
    elif isinstance(error, RuntimeError) and LOST.search(str(error)):
        print(
            f"error: {who}: another process of the run has ended or cannot be reached, so this one "
            f"ends too ({_line(error)}). Its own output says why. Started again on all hosts with "
            "run.resume=true, the run goes on from its last checkpoint.",
            file=sys.stderr,
        )
    else:
        traceback.print_exception(error)
        print(f"error: {who} failed, which ends the run on all hosts.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if first():
        time.sleep(LAST_WORDS_SECONDS)
    os._exit(2 if isinstance(error, UNUSABLE) else 1)


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
