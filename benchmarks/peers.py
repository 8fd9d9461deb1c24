"""Ours and public peers in turn, so that the machine's drift hits all alike; then their ratios.

    python benchmarks/peers.py tiny --rounds 3 --peers DIR --output measured.jsonl
    python benchmarks/peers.py small --dtype bfloat16 --only rollout update ...
    python benchmarks/peers.py tiny --rounds 0 --output measured.jsonl      # only the table

DIR holds the programs that measure Hugging Face's generate, TRL and Tunix with the same flags;
their two environments are given by the paths of their interpreters. Every line that a program
prints is appended to the output file with the round and the contest that it belongs to. A program
that fails is told and left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from workload import ROOT

CACHE = Path("~/.cache/rlx-peers").expanduser()
QUIET_SECONDS = "60"
"""How long a program waits for a quiet machine, unless the environment says otherwise."""
CONTESTS = ("rollout", "update", "update-remat", "iteration")


class Entry(NamedTuple):
    """One program of a contest."""

    contest: str
    label: str
    interpreter: str
    """`ours`, `torch` or `jax`."""
    arguments: tuple[str, ...]


def entries(dtype: str) -> tuple[Entry, ...]:
    """Who takes part, in the order of running. In bfloat16 the parameters of updates stay float32:
    TRL's by autocast, Tunix's and ours by their types."""
    low = dtype == "bfloat16"
    ours = ("--dtype", dtype)
    trl = ("--dtype", "float32", "--bf16", "1") if low else ()
    tunix = ("--dtype", "bfloat16", "--param-dtype", "float32") if low else ()
    return (
        Entry("ceilings", "machine", "ours", ("ceilings.py",)),
        Entry("rollout", "hf", "torch", ("hf_generate.py", *ours, "--cache", "static")),
        Entry("rollout", "trl", "torch", ("trl_generate.py", *ours)),
        Entry("rollout", "tunix", "jax", ("tunix_sample.py", *ours)),
        Entry("rollout", "rlx", "ours", ("rollout.py", *ours)),
        Entry("update", "trl", "torch", ("trl_update.py", *trl, "--grad-ckpt", "0")),
        Entry("update", "tunix", "jax", ("tunix_update.py", *tunix)),
        Entry("update", "rlx", "ours", ("update.py", *ours)),
        Entry("update-remat", "trl", "torch", ("trl_update.py", *trl, "--grad-ckpt", "1")),
        Entry("update-remat", "tunix", "jax", ("tunix_update.py", *tunix, "--remat", "DECODER")),
        Entry("update-remat", "rlx", "ours", ("update.py", *ours, "--remat", "block")),
        Entry("iteration", "trl", "torch", ("trl_e2e.py", *trl, "--grad-ckpt", "0")),
        Entry("iteration", "tunix", "jax", ("tunix_e2e.py", *tunix)),
        Entry("iteration", "rlx", "ours", ("iteration.py", *ours)),
    )


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("size", choices=["tiny", "small"])
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--peers", type=Path, default=CACHE / "programs")
    flags.add_argument("--torch-python", type=Path, default=CACHE / "torch311/bin/python")
    flags.add_argument("--jax-python", type=Path, default=CACHE / "jax312/bin/python")
    flags.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    flags.add_argument("--only", nargs="+", choices=CONTESTS, default=CONTESTS)
    flags.add_argument("--reps", type=int, help="timed calls a program; 3 for tiny, 1 for small")
    flags.add_argument("--timeout", type=float, default=900, help="seconds a program")
    flags.add_argument("--output", type=Path, required=True, help="JSON lines; appended to")
    options = flags.parse_args()
    if options.rounds and not options.peers.is_dir():
        flags.error(f"--peers: {options.peers} is no folder.")
    for number in range(options.rounds):
        for entry in entries(options.dtype):
            if entry.contest not in (*options.only, "ceilings"):
                continue
            line = run(entry, options)
            if line is None:
                continue
            where = {"round": number, "contest": entry.contest, "label": entry.label}
            with options.output.open("a") as file:
                file.write(json.dumps(where | line) + "\n")
    lines = map(json.loads, options.output.read_text().splitlines())
    print("\n".join(table([line for line in lines if fits(line, options)])))


def run(entry: Entry, options: argparse.Namespace) -> dict | None:
    """The line that a program prints; None, and a word on why, where it prints none."""
    reps = options.reps or {"tiny": 3, "small": 1}[options.size]
    interpreter, folder = {
        "ours": (sys.executable, ROOT / "benchmarks"),
        "torch": (options.torch_python, options.peers),
        "jax": (options.jax_python, options.peers),
    }[entry.interpreter]
    program, *arguments = entry.arguments
    command = [str(interpreter), str(Path(folder).resolve() / program), *arguments]
    if entry.contest != "ceilings":
        command += ["--size", options.size, "--reps", str(reps), "--warmup", "1"]
    environment = {"PEER_QUIET_BUDGET_S": QUIET_SECONDS, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            env=environment | os.environ,
            capture_output=True,
            text=True,
            timeout=options.timeout,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _told(entry, str(error))
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not found:
        return _told(entry, "\n".join(done.stderr.splitlines()[-3:]))
    line = json.loads(found[-1])
    print(
        f"{entry.contest} {entry.label}: {line.get('median_s', '')} s, "
        f"{line.get('peak_rss_timed_mb', '')} MB, clean {line.get('clean', '')}",
        file=sys.stderr,
        flush=True,
    )
    return line


def _told(entry: Entry, why: str) -> None:
    print(f"{entry.contest} {entry.label}: left out. {why}", file=sys.stderr, flush=True)


def fits(line: dict, options: argparse.Namespace) -> bool:
    """Whether a line of the file belongs to this size and dtype; TRL's autocast says float32."""
    if line["contest"] == "ceilings":
        return True
    dtype = "bfloat16" if line.get("bf16") else line["dtype"]
    return line["size"] == options.size and dtype == options.dtype


def table(lines: list[dict]) -> Iterator[str]:
    """Markdown: medians over the rounds, and ours against the best peer of each contest."""
    seconds: dict[tuple[str, str], float] = {}
    memory: dict[tuple[str, str], float] = {}
    yield "| contest | program | seconds | tokens/s | peak MB | rounds | clean | first losses |"
    yield "|---|---|---|---|---|---|---|---|"
    timed = [line for line in lines if line["contest"] != "ceilings"]
    for key in dict.fromkeys((line["contest"], line["label"]) for line in timed):
        rounds = [line for line in timed if (line["contest"], line["label"]) == key]
        seconds[key] = statistics.median(line["median_s"] for line in rounds)
        memory[key] = statistics.median(line["peak_rss_timed_mb"] for line in rounds)
        rate = statistics.median(line["tokens_per_s"] for line in rounds)
        clean = sum(line["clean"] for line in rounds)
        losses = ", ".join(f"{loss:.6f}" for loss in rounds[0].get("losses", ()))
        yield (
            f"| {' | '.join(key)} | {seconds[key]:.3f} | {rate:,.0f} | {memory[key]:,.0f} "
            f"| {len(rounds)} | {clean} | {losses} |"
        )
    yield ""
    for contest in CONTESTS:
        ours = seconds.get((contest, "rlx"))
        peers = {name: s for (where, name), s in seconds.items() if where == contest}
        peers.pop("rlx", None)
        if ours is None or not peers:
            continue
        best = min(peers, key=peers.get)
        least = min(memory[contest, name] for name in peers)
        yield (
            f"{contest}: {peers[best] / ours:.2f} times the speed of the best peer ({best}); "
            f"peak memory {memory[contest, 'rlx'] / least:.2f} of the least peer's"
        )
    parts = [seconds.get((name, "rlx")) for name in ("rollout", "update", "iteration")]
    if all(parts):
        rollout, update, iteration = parts
        yield f"iteration: {iteration / (rollout + update):.2f} of our rollout and update together"
    for name in ("fp32_gflops", "bf16_fp32_gflops", "copy_gbs"):
        found = [x[f"{name}_median"] for x in lines if x["contest"] == "ceilings"]
        if found:
            yield f"ceiling {name}: {statistics.median(found):.1f} ({min(found)} to {max(found)})"


if __name__ == "__main__":
    main()
