"""The memory that `plan` predicts for an update against what the process grows by, on CPU.

    python benchmarks/plan_memory.py [--rows 64] [--columns 1024] [--shape nano] [--remat none]

The process compiles first; from its level then growth is counted, arguments included. The update is
of random weights and tokens that are all 0. Prints one JSON line; `ratio` is measured by predicted.
"""

import argparse
import json

from learner import make_learner
from memory import operands
from shapes import SHAPES
from timing import peak_megabytes, reset_peak
from workload import versions

MIB = 2**20


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--shape", default="nano", choices=list(SHAPES))
    flags.add_argument("--rows", type=int, default=64)
    flags.add_argument("--columns", type=int, default=1024)
    flags.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    flags.add_argument("--remat", default="none", choices=["none", "block", "dots"])
    options = flags.parse_args()
    options.prompts, options.samples, options.micro_batch = options.rows, 1, options.rows
    options.share_prompts = options.packing = 0

    import jax
    import numpy as np

    from rlx.compilation import give_back_memory
    from rlx.fits import usage
    from rlx.update import update

    learner = make_learner(options, SHAPES[options.shape], on_policy=True, unrolled=False)
    shapes = jax.eval_shape(lambda: operands(learner, options))
    key = jax.random.key(0)
    step = jax.jit(lambda state, batch, key: update(learner, state, batch, key), donate_argnums=0)
    compiled = step.lower(*shapes, key).compile()
    predicted = usage(compiled)

    def made(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        # Ones, each page of which is written; and jax's own copy, which a step may write over.
        return jax.numpy.array(np.ones(x.shape, x.dtype))

    # What the first program of a process takes for good: threads, and the library of kernels.
    jax.block_until_ready(jax.jit(lambda x: jax.nn.softmax(x @ x) @ x)(np.ones((64, 64), "f")))
    give_back_memory()
    reset_peak()
    before = peak_megabytes()
    given = jax.tree.map(made, shapes)
    jax.block_until_ready(compiled(*given, key))
    grown = peak_megabytes() - before
    print(
        json.dumps(
            {
                "bench": "plan_memory",
                "impl": "rlx",
                **{name: getattr(options, name) for name in ("shape", "rows", "columns")},
                **{name: getattr(options, name) for name in ("dtype", "remat")},
                "arguments_mib": round(predicted.arguments / MIB),
                "temporaries_mib": round(predicted.temporaries / MIB),
                "predicted_mib": round(predicted.peak / MIB),
                "measured_mib": round(grown),
                "ratio": round(grown * MIB / predicted.peak, 4),
                "versions": versions(),
            }
        )
    )


if __name__ == "__main__":
    main()
