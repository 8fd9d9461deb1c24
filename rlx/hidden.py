"""Memory that a compiled program takes beside what XLA has laid out: a CPU's library of kernels
(YNNPACK) makes room of its own for what lies inside of a fusion that it runs."""

from rlx.hlo import Computation, Module, array_bytes, attribute

LIBRARY = '"kind":"__ynn_fusion"'
GIVEN = ("parameter", "constant", "broadcast", "bitcast", "iota", "tuple")
"""What takes no room of its own there."""


def library_bytes(module: Module) -> int:
    """Of the fusion that takes the most: they run one after another."""
    return max(
        (
            _inside(module.computations[attribute(line.text, "calls")])
            for computation in module.computations.values()
            for line in computation.values()
            if line.opcode == "fusion" and LIBRARY in line.text
        ),
        default=0,
    )


def _inside(computation: Computation) -> int:
    """The two largest arrays of a fusion that multiplies matrices: what a product gives and what is
    made of it are there at a time, and all else is computed in their place. (Seen, not stated by
    the library: benchmarks/plan_memory.py.)"""
    if not any(line.opcode == "dot" for line in computation.values()):
        return 0
    own = (x for x in computation.values() if x.opcode not in GIVEN and not x.root)
    return sum(sorted((array_bytes(line.shape) for line in own), reverse=True)[:2])
