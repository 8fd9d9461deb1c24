"""What a run would need on devices that are not there: memory, time, money.

    python run.py plan --config FILE --topology v5e:4x4 [--fit] [--compare] [--price DOLLARS]

It compiles the programs that `train` would run, for the devices that they would run on, and reads
what the compiler has made of them. Nothing is executed.
"""

import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.stages import Lowered

from model.config import ModelConfig
from model.device import Device, made_for
from model.errors import BadInput
from model.parameters import parameter_count
from rlx.cost import USUAL, Cost, cost
from rlx.derived import offline, reads_whole_rows, rows
from rlx.fits import Usage, usage
from rlx.hlo import origin, parse, turns
from rlx.mesh import Hardware, Sizes, choose, layouts, obstacles, on_mesh
from rlx.plan_programs import Planned, programs
from rlx.plan_shapes import Places, model_shape
from rlx.resolve import SMALL_PARAMETERS, model_paths, resolve, with_mesh
from rlx.roofline import Seconds, beyond, seconds
from rlx.settings import Config
from rlx.topology import Topology, abstract_devices

USED = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class PartEstimate(NamedTuple):
    name: str
    cost: Cost
    seconds: Seconds


class Estimate(NamedTuple):
    """Of one program."""

    name: str
    runs: float
    usage: Usage | None
    """None where the compiler gave up."""
    peak: int
    fits: bool
    parts: tuple[PartEstimate, ...]
    compile_seconds: float

    @property
    def seconds(self) -> float | None:
        """Of all its runs in a step."""
        known = [part.seconds.longest for part in self.parts]
        return None if not known or None in known else self.runs * sum(known)


class Outlook(NamedTuple):
    """Of a run on a mesh."""

    config: Config
    sizes: Sizes
    estimates: tuple[Estimate, ...]

    @property
    def fits(self) -> bool:
        return all(estimate.fits for estimate in self.estimates)

    @property
    def seconds(self) -> float | None:
        """Of a step."""
        known = [estimate.seconds for estimate in self.estimates]
        return None if None in known else sum(known)

    @property
    def tokens(self) -> int:
        """Of a step, at full length: those that are sampled, or learnt from."""
        sampling, batch, probe = self.config.sampling, self.config.batch, self.config.rollout.probe
        width, count = sampling.max_new_tokens, rows(self.config)
        width += sampling.max_prompt_tokens if offline(self.config) else 0
        count += batch.prompts * (batch.samples - probe) if probe else 0
        return count * width


def prepared(config: Config, topology: Topology) -> tuple[Config, tuple[str, ...]]:
    """The configuration as it would be resolved on those devices, and what a person should know."""
    notes = []
    if not offline(config):
        small = parameter_count(model_shape(config.model.path)[0]) <= SMALL_PARAMETERS
        if config.loop.mode == "fused" or (config.loop.mode == "auto" and small):
            notes.append(
                "planned stage by stage; with loop.mode=fused a step is one program, which needs "
                "no less memory than the largest of these"
            )
        staged = config.loop.model_copy(update={"mode": "staged"})
        config = config.model_copy(update={"loop": staged})
        if config.rollout.dynamic_sampling:
            notes.append(
                "one round of dynamic sampling; up to rollout.max_rounds="
                f"{config.rollout.max_rounds} may be drawn"
            )
    if topology.chip.platform == "cuda" and config.model.attention in ("auto", "cudnn"):
        # The compiler asks for the library, which is only there where a GPU is.
        plain = config.model.model_copy(update={"attention": "plain"})
        config = config.model_copy(update={"model": plain})
        if reads_whole_rows(config):
            notes.append(
                "planned with model.attention=plain, since cuDNN is not here: a run with its "
                "kernel needs less memory"
            )
    return resolve(config), tuple(notes)


def shapes_of(config: Config) -> list[ModelConfig]:
    """Of all models that a mesh divides, the policy first."""
    return [model_shape(path, setting)[0] for setting, path in model_paths(config).items()]


class Planner:
    """Compiles a configuration's programs for a topology."""

    def __init__(self, topology: Topology, tell: Callable[[str], None]):
        self.topology, self.tell = topology, tell
        self.devices = abstract_devices(topology)
        self.compiled = 0
        """Programs so far."""

    def made_for(self):
        chip = self.topology.chip
        return made_for(Device(chip.platform, chip.capability))

    def sizes(self, config: Config) -> Sizes:
        """The mesh that `train` would choose there."""
        shapes = shapes_of(config)
        return choose(config, shapes, parameter_count(shapes[0]), self.hardware)

    @property
    def hardware(self) -> Hardware:
        return Hardware(self.topology.devices, self.topology.hosts, self.topology.memory)

    def legal(self, config: Config) -> Iterator[Sizes]:
        """All meshes of all devices that the run can be split over."""
        shapes = shapes_of(config)
        for sizes in layouts(self.topology.devices):
            if not obstacles(config, shapes, sizes):
                yield sizes

    def outlook(self, config: Config, sizes: Sizes, only: tuple[str, ...] = ()) -> Outlook:
        """Of the programs named `only`, or of all. `config` is prepared."""
        with self.made_for(), on_mesh(sizes, self.devices) as mesh:
            places = Places(mesh, self.devices)
            hosts = None
            if self.topology.hosts > 1 and self.topology.chip.platform != "tpu":
                # A TPU's slice is one network, whatever the hosts.
                hosts = tuple(d.process_index for d in mesh.devices.flat) if mesh else None
            planned = programs(with_mesh(config, sizes), places)
            planned = [p for p in planned if not only or p.name in only]
            # A compiler of a large program uses one core, and a second one the next.
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                waiting = []
                for p in planned:
                    self.tell(f"compiling {p.name}")
                    waiting.append(pool.submit(self.estimate, p, p.lowered(), hosts))
                    self.compiled += 1
                estimates = [estimate.result() for estimate in waiting]
        return Outlook(config, sizes, tuple(estimates))

    def estimate(
        self, planned: Planned, lowered: Lowered, hosts: tuple[int, ...] | None
    ) -> Estimate:
        limit = self.topology.memory
        begun = time.monotonic()
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            took = time.monotonic() - begun
            # The compiler does not count what lies there beside the program.
            needed = _needed(str(error)) or limit + 1
            return Estimate(planned.name, planned.runs, None, needed, False, (), took)
        took = time.monotonic() - begun
        used = usage(compiled, planned.held)
        text, parts, before = numbered(compiled.as_text()), [], Cost()
        for part in planned.parts:
            whole = cost(text, part.trips, hosts=hosts)
            own, before = beyond(whole, before), whole
            parts.append(PartEstimate(part.name, own, seconds(own, self.topology.chip)))
        return Estimate(
            planned.name,
            planned.runs,
            used,
            used.peak,
            limit is None or used.peak <= limit,
            tuple(parts),
            took,
        )


def numbered(text: str) -> str:
    """A compiled program's text, where each outermost loop whose turns depend on data has its
    place in its name: loops that follow one another have the same name, `jit(f)/while`, and are
    `loop_0:jit(f)/while` and `loop_1:jit(f)/while` here."""
    module = parse(text)
    loops = [
        line
        for computation in module.computations.values()
        for line in computation.values()
        if line.opcode == "while"
        and origin(line).split("/").count("while") == 1
        and not USUAL.search(origin(line))
        and turns(module, line) is None
    ]
    for place, line in enumerate(loops):
        named = line.text.replace('op_name="', f'op_name="loop_{place}:')
        text = text.replace(line.text, named, 1)
    return text


def _needed(message: str) -> int | None:
    found = USED.search(message)
    return int(float(found[1]) * UNITS[found[2]]) if found else None


def compare(planner: Any, config: Config) -> list[Outlook]:
    """All legal meshes, those that fit first, the fastest first."""
    found = []
    for sizes in planner.legal(config):
        planner.tell(f"{sizes}")
        found.append(planner.outlook(config, sizes))
    if not found:
        raise BadInput("mesh: no mesh of these devices can run this configuration.")
    return sorted(found, key=lambda x: (not x.fits, x.seconds or 0.0, max(_peaks(x))))


def _peaks(outlook: Outlook) -> list[int]:
    return [estimate.peak for estimate in outlook.estimates]


def fit(planner: Any, config: Config, sizes: Sizes) -> dict[str, Any]:
    """The largest batch.micro that fits at this number of rows, and with it the largest number of
    prompts, in doublings. Each 0 where nothing fits."""
    of_update = ("update", "score", "prepare")

    def changed(**batch: int) -> Config:
        return config.model_copy(update={"batch": config.batch.model_copy(update=batch)})

    def possible(**batch: int) -> bool:
        made = changed(**batch)
        whole = rows(made) % (made.batch.minibatches * made.batch.micro) == 0
        return whole and not obstacles(made, shapes, sizes)

    total = rows(config) // config.batch.minibatches
    shapes = shapes_of(config)
    candidates = [micro for micro in range(1, total + 1) if possible(micro=micro)]
    best, low, high = 0, 0, len(candidates) - 1
    while low <= high:
        middle = (low + high) // 2
        if planner.outlook(changed(micro=candidates[middle]), sizes, of_update).fits:
            best, low = candidates[middle], middle + 1
        else:
            high = middle - 1
    prompts = config.batch.prompts
    if not best:
        return {"micro": 0, "prompts": 0, "rows": 0, "compiled": planner.compiled}

    def all_fit(count: int) -> bool:
        return planner.outlook(changed(micro=best, prompts=count), sizes, ()).fits

    # Half as many where these are too many, twice as many where there is room.
    if all_fit(prompts):
        for _ in range(MOST_DOUBLINGS):
            if not all_fit(2 * prompts):
                break
            prompts *= 2
    else:
        while prompts:
            half = prompts // 2 if prompts % 2 == 0 else 0
            prompts = half if half and possible(micro=best, prompts=half) else 0
            if prompts and all_fit(prompts):
                break
    count = rows(config) * prompts // config.batch.prompts
    return {"micro": best, "prompts": prompts, "rows": count, "compiled": planner.compiled}


MOST_DOUBLINGS = 6
