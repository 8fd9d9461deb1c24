"""FLOPs of the matrix products of a compiled program, whatever they were lowered to."""

import functools
import math
import re

from rlx.hlo import ARRAY, Computation, Instruction, attribute, dimensions, numbers, origin, size


def product_flops(line: Instruction, computation: Computation) -> int:
    """Of a matrix product or a convolution; 0 for any other instruction."""
    if line.opcode == "dot":
        left = dimensions(computation[line.operands[0]].shape)
        contracted = numbers(line.text, "lhs_contracting_dims")
        return 2 * size(line.shape) * math.prod(left[i] for i in contracted)
    if line.opcode == "convolution":
        return _convolution(line, computation)
    if line.opcode == "reduce":
        return _reduced(line, computation)
    if line.opcode == "custom-call":
        target = attribute(line.text, "custom_call_target")
        if "matmul" in target or "gemm" in target:
            # oneDNN's and cuBLAS's: [.., M, K] x [.., K, N] in whatever order of axes.
            out = next(ARRAY.finditer(line.shape))[0]
            sides = [math.prod(dimensions(computation[x].shape)) for x in line.operands[:2]]
            batch = math.prod(dimensions(out)[:-2]) if _batched(line, computation) else 1
            return 2 * math.isqrt(sides[0] * sides[1] * size(out) // batch)
    return 0


def _batched(line: Instruction, computation: Computation) -> bool:
    return all(len(dimensions(computation[x].shape)) > 2 for x in line.operands[:2])


def _reduced(line: Instruction, computation: Computation) -> int:
    """A product with a vector may become a sum of products."""
    if not origin(line).endswith("dot_general"):
        return 0
    source = computation[line.operands[0]]
    while source.opcode in ("convert", "bitcast", "copy", "reshape", "transpose"):
        source = computation[source.operands[0]]
    return 2 * size(source.shape) if source.opcode == "multiply" else 0


def _convolution(line: Instruction, computation: Computation) -> int:
    """A TPU writes every product so, its batch as axes that a window moves over: only those pairs
    count of which neither is padding."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.text)
    left, kernel = (dimensions(computation[x].shape) for x in line.operands[:2])
    out = dimensions(line.shape)
    window = re.search(r"window=\{([^}]*)\}", line.text)
    given = dict(part.split("=") for part in window[1].split()) if window else {}
    axes = [label for label in labels[2] if label.isdigit()]
    total = 2 * kernel[labels[2].index("i")] * out[labels[3].index("f")]
    # Also with batch_group_count: the output's batch is of one group, and a feature sees its own.
    total *= out[labels[3].index("b")]
    for axis in axes:
        place = int(axis)

        def number(name, default, place=place):
            return given[name].split("x")[place] if name in given else default

        total *= _pairs(
            left[labels[1].index(axis)],
            kernel[labels[2].index(axis)],
            out[labels[3].index(axis)],
            int(number("stride", 1)),
            int(number("pad", "0_0").split("_")[0]),
            int(number("lhs_dilate", 1)),
            int(number("rhs_dilate", 1)),
        )
    return total


@functools.lru_cache(100_000)
def _pairs(
    inputs: int, kernel: int, outputs: int, stride: int, pad: int, spread: int, kernel_spread: int
) -> int:
    """Along one axis: pairs of an output and an element of the kernel that meet an input."""
    if kernel == 1 and spread == 1:
        return sum(0 <= out * stride - pad < inputs for out in range(outputs))
    count = 0
    for element in range(kernel):
        # out * stride - pad + element * kernel_spread is a multiple of `spread`, and inside.
        for out in range(outputs):
            place = out * stride - pad + element * kernel_spread
            count += place >= 0 and place % spread == 0 and place // spread < inputs
    return count
