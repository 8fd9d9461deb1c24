"""How much temporary memory an update needs, with its head in chunks and in one piece.

    python benchmarks/memory.py [--dtype bfloat16] [--rows 8] [--columns 1024] [--shape 3b]

Compiles the real update at Qwen2.5-0.5B's shape, its layers recomputed on the way back, for this
machine, and asks XLA's plan; nothing is run and no weight is made. Prints one JSON line.
"""

import argparse
import json

from learner import make_learner
from shapes import SHAPES
from workload import versions


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--shape", default="0.5b", choices=list(SHAPES))
    flags.add_argument("--rows", type=int, default=8)
    flags.add_argument("--columns", type=int, default=1024)
    flags.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    flags.add_argument("--remat", default="block", choices=["none", "block", "dots"])
    options = flags.parse_args()
    # All columns but two are a completion's: as many logits as there can be.
    options.prompts, options.samples, options.micro_batch = options.rows, 1, options.rows
    options.share_prompts = options.packing = 0

    from model import heads

    chunked = temporary(options)
    heads.chosen_and_entropy = in_one_piece
    whole = temporary(options)
    print(
        json.dumps(
            {
                "bench": "memory",
                "impl": "rlx",
                "shape": options.shape,
                "rows": options.rows,
                "columns": options.columns,
                "dtype": options.dtype,
                "remat": options.remat,
                "chunked_mib": round(chunked / 2**20),
                "whole_mib": round(whole / 2**20),
                "ratio": round(chunked / whole, 4),
                "versions": versions(),
            }
        )
    )


def in_one_piece(kernel, hidden, targets, temperature, needed, *, used_ids, ids_first, dtype):
    """The definition: all logits exist, and what their gradient needs of them."""
    import jax
    import jax.numpy as jnp

    from model.product import product

    raw = product(hidden, kernel.T if ids_first else kernel, dtype)
    logprobs = jax.nn.log_softmax(raw / temperature)
    chosen = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
    return chosen, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)


def temporary(options: argparse.Namespace) -> int:
    """Bytes that the compiled update holds beside its arguments and results."""
    import jax

    from rlx.cost import temporary_bytes
    from rlx.update import update

    learner = make_learner(options, SHAPES[options.shape], on_policy=True, unrolled=False)
    state, batch = jax.eval_shape(lambda: operands(learner, options))
    step = jax.jit(lambda state, batch, key: update(learner, state, batch, key), donate_argnums=0)
    return temporary_bytes(step.lower(state, batch, jax.random.key(0)).compile())


def operands(learner, options: argparse.Namespace):
    """A state and a batch, of which only the shapes are asked for."""
    import jax
    import jax.numpy as jnp

    from model.parameters import initialise
    from rlx.state import initial_state
    from rlx.types import Batch, Signal

    rows, width = options.rows, options.columns - 2
    state = initial_state(
        initialise(learner.model.config, jax.random.key(0)), learner, jax.random.key(0)
    )
    mask, numbers = jnp.ones((rows, width), bool), jnp.zeros((rows, width), jnp.float32)
    tokens = jnp.zeros((rows, options.columns), jnp.int32)
    return state, Batch(
        tokens=tokens,
        positions=tokens,
        mask=mask,
        sampler_logprobs=numbers,
        old_logprobs=numbers,
        ref_logprobs=numbers,
        values=numbers,
        margins=numbers[:, :1],
        signals=(Signal(numbers[:, :1], numbers[:, :1], mask),),
    )


if __name__ == "__main__":
    main()
