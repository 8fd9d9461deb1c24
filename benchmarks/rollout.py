"""A rollout: tokens a second, seconds and peak memory.

    python benchmarks/rollout.py --size tiny|small [--dtype bfloat16] ...
    python benchmarks/rollout.py --length-distribution long-tailed [--slots 16]

Samples every prompt's group at temperature 1 to the end of each row's length, with no stop token.
Prints one JSON line; its `useful_share` is that of the decoded slot-steps that gave a token of a
row which was not done.
"""

import argparse

import numpy as np
from timing import measure
from workload import PAD, lengths, load_model, parser, prompt_ids, report, settle


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--slots", type=int, help="rows decoded at a time; all without it")
    options = settle(flags.parse_args())

    import jax
    import jax.numpy as jnp

    config, params = load_model(options)
    rollout = jax.jit(sampler(options, config))
    tokens = jnp.asarray(prompt_ids(options), jnp.int32)
    shape = (options.prompts, options.samples)
    limits = jnp.asarray(lengths(options).reshape(shape), jnp.int32)
    rolled = 0
    samples = None

    def one_rollout() -> None:
        nonlocal rolled, samples
        rolled += 1
        samples = rollout(params, tokens, jax.random.split(jax.random.key(rolled), shape), limits)
        jax.block_until_ready(samples)

    seconds = measure(one_rollout, reps=options.reps, warmup=options.warmup)
    sampled = int(np.asarray(samples.mask).sum())
    if sampled != int(limits.sum()):
        raise SystemExit(f"{sampled} tokens were sampled instead of {int(limits.sum())}.")
    report(
        "rollout",
        options,
        slots=options.slots or shape[0] * shape[1],
        tokens_per_s=round(sampled / seconds["median_s"], 1),
        useful_share=round(sampled / int(samples.slot_steps), 4),
        **seconds,
    )


def sampler(options: argparse.Namespace, config):
    """(params, prompts `[N, P]`, keys `[N, G]`, limits `[N, G]`) -> Samples."""
    import jax.numpy as jnp

    from model.product import activations
    from model.sample import sample

    # A full batch is sampled as training samples it: with neither limits nor slots of its own.
    limited = options.length_distribution != "full"

    def rollout(params, tokens, keys, limits):
        chosen = {"slots": options.slots} if options.slots else {}
        if limited:
            chosen["limits"] = limits
        return sample(
            config,
            params,
            tokens,
            jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape),
            keys,
            max_new_tokens=options.new_tokens,
            stop_ids=jnp.zeros(0, jnp.int32),
            pad_id=PAD,
            dtype=jnp.dtype(options.dtype),
            activations=activations(jnp.dtype(options.dtype)),
            **chosen,
        )

    return rollout


if __name__ == "__main__":
    main()
