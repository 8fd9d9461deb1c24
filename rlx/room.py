"""Whether a run has room on this machine's devices: told before its weights are read, and again
before each of its programs first runs.

Where devices don't say how much memory they have, as a CPU doesn't, nothing is checked.
"""

from collections.abc import Callable

import jax

from model.errors import BadInput
from rlx import hosts
from rlx.fits import GIB, check_fits, remedy, usage
from rlx.mesh import current, this_hardware
from rlx.plan_programs import programs
from rlx.plan_shapes import Places
from rlx.settings import Config


def check_state(config: Config) -> None:
    """Raises BadInput where what the run keeps on a device all the time, its data aside
    (parameters, moments, what is frozen), is more than it has. Nothing is compiled.

    How much data there is, and how wide, no one knows before the task is loaded.
    """
    limit = this_hardware().memory
    if limit is None:
        return
    kept = max(planned.lasting for planned in programs(config, Places(current(), jax.devices())))
    if kept > limit:
        raise BadInput(
            f"The run keeps {kept / GIB:.2f} GiB on each device (parameters, moments, a "
            f"reference), and one has {limit / GIB:.2f}. Raise mesh.fsdp or mesh.tensor, or use "
            "more devices; or set optimizer.state_dtype=int8; or train adapters (lora.rank)."
        )


def guard(config: Config, name: str, program: Callable) -> Callable:
    """The jitted `program`, which at its first call raises BadInput where the device has no room
    for it beside what lies there. It is compiled once: the call that follows finds it compiled."""
    if this_hardware().memory is None:
        return program
    checked = False

    def call(*operands, **fields):
        nonlocal checked
        if not checked:
            _check_program(config, name, program, operands, fields)
            checked = True
        return program(*operands, **fields)

    return call


def _check_program(config, name, program, operands, fields):
    # What is still computed holds memory that is free afterwards.
    jax.block_until_ready(operands)
    try:
        compiled = program.lower(*operands, **fields).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise BadInput(
            f"The program `{name}` needs more memory than a device has: "
            f"{remedy(config, name, None)}"
        ) from error
    # Devices of one kind may differ a little, and all processes must go on, or none.
    limit, used = hosts.from_first(lambda: (this_hardware().memory, memory_in_use()))
    check_fits(config, name, usage(compiled, used), limit)


def memory_in_use() -> int:
    """Bytes of this process's first device; 0 where it doesn't say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0)
