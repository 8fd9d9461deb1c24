"""Whether a program fits into a device's memory, and which setting to change where it doesn't."""

from typing import Any, NamedTuple

from model.errors import BadInput
from rlx.derived import offline, unit
from rlx.hidden import LIBRARY, library_bytes
from rlx.hlo import parse
from rlx.settings import Config

GIB = 2**30


class Usage(NamedTuple):
    """Bytes of a device."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    """Of outputs that take the place of arguments."""
    beside: int
    """What the run holds there meanwhile that is none of the program's arguments."""

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs + self.temporaries - self.aliased + self.beside


def usage(compiled: Any, held: int = 0) -> Usage:
    """Of a compiled program, as XLA has laid it out. `held`: what the run keeps on the device,
    arguments included."""
    found = compiled.memory_analysis()
    arguments = found.argument_size_in_bytes
    text = compiled.as_text()
    # Only a CPU's compiler leaves a part of the memory to a library.
    hidden = library_bytes(parse(text)) if LIBRARY in text else 0
    return Usage(
        arguments,
        found.output_size_in_bytes,
        found.temp_size_in_bytes + hidden,
        found.alias_size_in_bytes,
        max(0, held - arguments),
    )


def check_fits(config: Config, name: str, part: Usage, limit: int) -> None:
    """Raises BadInput where the program needs more than `limit` bytes; it names the settings that
    would make it smaller."""
    if part.peak <= limit:
        return
    raise BadInput(
        f"The program `{name}` needs {part.peak / GIB:.2f} GiB of a device's "
        f"{limit / GIB:.2f}: {part.arguments / GIB:.2f} of arguments, "
        f"{part.temporaries / GIB:.2f} of temporaries, {part.beside / GIB:.2f} that the run keeps "
        f"beside it. {remedy(config, name, part)}"
    )


def remedy(config: Config, name: str, part: Usage | None) -> str:
    """What makes the program smaller."""
    batch, sampling, ways = config.batch, config.sampling, []
    more = "raise mesh.fsdp or mesh.tensor, or use more devices"
    if part and part.arguments + part.beside > part.temporaries:
        ways.append(more)
    # Each part of the mesh has a row of its own, or a pair.
    least = max(1, config.mesh.data) * max(1, config.mesh.fsdp)
    if name in ("sample", "complete"):
        if not sampling.slots:
            ways.append("set sampling.slots below the step's rows")
        else:
            ways.append(f"lower sampling.slots ({sampling.slots})")
        if sampling.cache != "int8":
            ways.append("set sampling.cache=int8")
        if batch.prompts > least:
            ways.append(f"lower batch.prompts ({batch.prompts})")
    else:
        whole = batch.prompts * (1 if offline(config) else batch.samples) // batch.minibatches
        micro = batch.micro or whole
        if micro > least * unit(config):
            ways.append(f"lower batch.micro ({micro})")
        if config.model.remat == "none" and name == "update":
            ways.append("set model.remat=block")
    ways = ways or [more]
    first = ways[0][0].upper() + ways[0][1:]
    return "; or ".join([first, *ways[1:]]) + "."
