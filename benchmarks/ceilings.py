"""What this machine can do at most: matrix products a second and memory copied a second.

    python benchmarks/ceilings.py [--n 2048] [--copy-mib 512]

Prints one JSON line: GFLOP/s of an n x n product in float32, in bfloat16, and in bfloat16 added up
in float32; GB/s of a copy, bytes read and bytes written counted.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

from workload import versions


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--n", type=int, default=2048)
    flags.add_argument("--copy-mib", type=int, default=512)
    flags.add_argument("--reps", type=int, default=9)
    options = flags.parse_args()

    import jax

    print(
        json.dumps(
            {
                "bench": "ceilings",
                "impl": "rlx",
                "device": jax.devices()[0].device_kind,
                "n": options.n,
                **ceilings(options.n, options.copy_mib * 2**20, options.reps),
                "versions": versions(),
            }
        )
    )


def ceilings(n: int, copied: int, reps: int = 9) -> dict[str, float]:
    """Medians and bests; `copied` are the bytes of the array that is copied."""
    import jax
    import jax.numpy as jnp

    found = {}
    keys = jax.random.split(jax.random.key(0))
    for name, dtype, total in (
        ("fp32", jnp.float32, jnp.float32),
        ("bf16", jnp.bfloat16, jnp.bfloat16),
        ("bf16_fp32", jnp.bfloat16, jnp.float32),
    ):
        left, right = (jax.random.normal(key, (n, n), dtype) for key in keys)
        product = jax.jit(lambda x, y, t=total: jnp.matmul(x, y, preferred_element_type=t))
        seconds = _seconds(lambda f=product, x=left, y=right: f(x, y), reps)
        for of, value in (("median", statistics.median(seconds)), ("best", min(seconds))):
            found[f"{name}_gflops_{of}"] = round(2 * n**3 / value / 1e9, 1)
    # Into memory that is there already: a fresh array's pages cost more than the copy.
    copy = jax.jit(lambda source, _: source + 1, donate_argnums=1, keep_unused=True)
    source = jnp.ones(copied // 4, jnp.float32)
    target = jnp.zeros_like(source)

    def one_copy():
        nonlocal target
        target = copy(source, target)
        return target

    seconds = _seconds(one_copy, reps)
    for of, value in (("median", statistics.median(seconds)), ("best", min(seconds))):
        found[f"copy_gbs_{of}"] = round(2 * source.nbytes / value / 1e9, 2)
    return found


def _seconds(call: Callable, reps: int) -> list[float]:
    import jax

    seconds = []
    for i in range(reps + 3):
        start = time.perf_counter()
        jax.block_until_ready(call())
        if i >= 3:
            seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
