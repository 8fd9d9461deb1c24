"""`plan` as a person reads it, and as a program does."""

from typing import Any

from rlx.fits import remedy
from rlx.plan import Estimate, Outlook, Planner, compare, fit, prepared
from rlx.settings import Config
from rlx.topology import Topology

GIB = 2**30


def plan(
    config: Config,
    topology: Topology,
    *,
    fitting: bool = False,
    comparing: bool = False,
    price: float | None = None,
    tell=lambda line: None,
) -> dict[str, Any]:
    """`price`: dollars a device and hour. `tell` gets a line for each program that is compiled."""
    planner = Planner(topology, tell)
    with planner.made_for():
        config, notes = prepared(config, topology)
        sizes = planner.sizes(config)
    outlook = planner.outlook(config, sizes)
    result = {
        "topology": topology.name,
        "devices": topology.devices,
        "hosts": topology.hosts,
        "device_bytes": topology.memory,
        **told(outlook, topology, price),
        "notes": list(notes),
    }
    if fitting:
        result["fit"] = fit(planner, config, sizes)
    if comparing:
        result["compare"] = [told(x, topology, price) for x in compare(planner, config)]
    result["programs_compiled"] = planner.compiled
    return result


def told(outlook: Outlook, topology: Topology, price: float | None) -> dict[str, Any]:
    step = outlook.seconds
    result = {
        "mesh": outlook.sizes._asdict(),
        "fits": outlook.fits,
        "peak_bytes": max(estimate.peak for estimate in outlook.estimates),
        "programs": [_program(outlook, estimate) for estimate in outlook.estimates],
        "step_seconds": step,
        "tokens_a_step": outlook.tokens,
        "tokens_a_second": outlook.tokens / step if step else None,
    }
    if price is not None:
        a_step = step and price * topology.devices * step / 3600
        result["dollars_a_step"] = a_step
        result["dollars_a_run"] = a_step and a_step * outlook.config.loop.steps
    return result


def _program(outlook: Outlook, estimate: Estimate) -> dict[str, Any]:
    used = estimate.usage
    result = {
        "name": estimate.name,
        "runs_a_step": estimate.runs,
        "bytes": used and {**used._asdict(), "peak": used.peak},
        "peak_bytes": estimate.peak,
        "fits": estimate.fits,
        "seconds": estimate.seconds,
        "compile_seconds": round(estimate.compile_seconds, 1),
        "parts": [
            {
                "name": part.name,
                "flops": float(part.cost.flops),
                "memory_bytes": float(part.cost.bytes),
                "sent_bytes": float(part.cost.sent),
                "sent": {_named(kind): float(x) for kind, x in part.cost.messages.items()},
                "uncounted": {name: float(x) for name, x in part.cost.uncounted.items()},
                "seconds": part.seconds._asdict(),
                "bound": part.seconds.bound,
            }
            for part in estimate.parts
        ],
    }
    if not estimate.fits:
        result["remedy"] = remedy(outlook.config, estimate.name, used)
    return result


def _named(kind: Any) -> str:
    across = "" if kind.beside == kind.devices else ", between hosts"
    return f"{kind.kind} of {kind.devices}{across}"


# ---- for a person --------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    memory = result["device_bytes"]
    lines = [
        f"{result['topology']}: {result['devices']} devices, {result['hosts']} hosts, "
        f"{_gib(memory)} GiB a device; mesh {_mesh(result['mesh'])}",
        "",
        f"{'GiB a device':10} {'argum.':>8} {'outputs':>8} {'tempor.':>8} {'beside':>8} "
        f"{'peak':>8}",
    ]
    for program in result["programs"]:
        used = program["bytes"]
        if used is None:
            lines.append(
                f"{program['name']:12} the compiler gave up: {_gib(program['peak_bytes'])} GiB "
                "without what lies beside"
            )
        else:
            keys = ("arguments", "outputs", "temporaries", "beside", "peak")
            cells = "".join(f"{_gib(used[key]):>9}" for key in keys)
            lines.append(f"{program['name']:12}{cells}  {'fits' if program['fits'] else 'NO'}")
        if not program["fits"]:
            lines.append(f"             {program['remedy']}")
    lines += [
        "",
        f"{'a device':12} {'TFLOP':>9} {'GB moved':>9} {'GB sent':>9} {'compute s':>10} "
        f"{'memory s':>10} {'sending s':>10}",
    ]
    for program in result["programs"]:
        for part in program["parts"]:
            times = "".join(f"{_seconds(x):>11}" for x in part["seconds"].values())
            lines.append(
                f"{part['name']:12} {part['flops'] / 1e12:>9.3f} {part['memory_bytes'] / 1e9:>9.2f}"
                f" {part['sent_bytes'] / 1e9:>9.3f}{times}"
            )
    lines += ["", *_closing(result)]
    return "\n".join(lines)


def _closing(result: dict[str, Any]):
    if result["step_seconds"]:
        yield (
            f"a step: {_seconds(result['step_seconds'])} s by the vendor's figures, "
            f"{result['tokens_a_second']:,.0f} tokens a second"
        )
    if result.get("dollars_a_step") is not None:
        yield f"dollars: {result['dollars_a_step']:.4f} a step, {result['dollars_a_run']:.2f} a run"
    if found := result.get("fit"):
        yield (
            f"fits: batch.micro={found['micro']} batch.prompts={found['prompts']} "
            f"({found['rows']} rows)"
            if found["micro"]
            else "fits: no batch.micro, however small"
        )
    for place, other in enumerate(result.get("compare", ()), 1):
        state = "" if other["fits"] else "  does not fit"
        yield (
            f"{place:3}. {_mesh(other['mesh'])}: {_seconds(other['step_seconds'])} s a step, "
            f"{_gib(other['peak_bytes'])} GiB{state}"
        )
    uncounted = {x for p in result["programs"] for part in p["parts"] for x in part["uncounted"]}
    if uncounted:
        yield f"not counted as FLOPs: {', '.join(sorted(uncounted))}"
    yield from (f"note: {note}" for note in result["notes"])


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / GIB:.2f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.3f}" if value >= 0.1 or not value else f"{value:.2g}"


def _mesh(mesh: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())
