"""One policy update: seconds, tokens a second and peak memory.

    python benchmarks/update.py --size tiny|small [--dtype bfloat16] [--remat block] ...

GRPO without a KL term, AdamW at 1e-6, gradients clipped at norm 1, on a fixed batch of made-up
completions. Prints one JSON line; its `losses` are those of the first three updates, which any
right implementation shares where the weights are the same.
"""

import argparse

import numpy as np
from learner import make_learner
from timing import measure
from workload import PAD, lengths, load_model, parser, report, settle, update_arrays


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--remat", default="none", choices=["none", "block", "dots"])
    flags.add_argument(
        "--share-prompts", type=int, default=1, choices=[0, 1], help="compute a prompt once a group"
    )
    flags.add_argument(
        "--packing",
        type=int,
        default=1,
        choices=[0, 1],
        help="rows in streams without padding; 0: whole rows, whose prompts are never shared",
    )
    options = settle(flags.parse_args())

    import jax

    from rlx.state import initial_state
    from rlx.update import update

    config, params = load_model(options)
    learner = make_learner(options, config, on_policy=False)
    state = initial_state(params, learner, jax.random.key(0))
    del params
    batch, key = make_batch(options), jax.random.key(1)
    step = jax.jit(lambda state, batch, key: update(learner, state, batch, key), donate_argnums=0)
    losses, padding = [], []

    def one_update() -> None:
        nonlocal state
        state, metrics = step(state, batch, key)
        losses.append(round(float(metrics["loss"].total / metrics["loss"].count), 6))
        padding.append(round(float(metrics["padding"].total / metrics["padding"].count), 4))
        jax.block_until_ready(state)

    seconds = measure(one_update, reps=options.reps, warmup=options.warmup)
    rows = options.prompts * options.samples
    tokens = rows * options.prompt_len + int(lengths(options).sum())
    report(
        "update",
        options,
        param_dtype="float32",
        remat=options.remat,
        share_prompts=options.share_prompts,
        packing=options.packing,
        losses=losses[:3],
        padding_share=padding[-1],
        tokens_per_s=round(tokens / seconds["median_s"], 1),
        **seconds,
    )


def make_batch(options: argparse.Namespace):
    """The fixed batch as an update reads it."""
    import jax.numpy as jnp

    from rlx.types import Batch, Signal

    prompts, completions, advantages, old = update_arrays(options)
    rows, width = completions.shape
    mask = np.arange(width) < lengths(options)[:, None]
    whole = np.concatenate([np.ones_like(prompts, bool), mask], axis=1)
    tokens = np.where(whole, np.concatenate([prompts, completions], axis=1), PAD)
    positions = np.where(whole, np.arange(whole.shape[1]), -1)
    mask, old = jnp.asarray(mask), jnp.asarray(old)
    advantages, nothing = jnp.asarray(advantages)[:, None], jnp.zeros((rows, width), jnp.float32)
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        mask=mask,
        sampler_logprobs=old,
        old_logprobs=old,
        ref_logprobs=nothing,
        values=nothing,
        margins=jnp.zeros((rows, 1), jnp.float32),
        signals=(Signal(advantages, advantages, mask),),
    )


if __name__ == "__main__":
    main()
