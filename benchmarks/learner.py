"""The learner of the speed benchmarks: GRPO without a KL term, AdamW at 1e-6, one update a step."""

import argparse

import optax


def make_learner(
    options: argparse.Namespace, config, *, on_policy: bool, unrolled: bool | None = None
):
    """As a run would assemble it for these flags; `options` has those of update.py.

    `unrolled` layers are compiled one by one, on CPU by default.
    """
    import jax
    import jax.numpy as jnp

    from model.device import this_device
    from model.kernels import fitting
    from model.product import activations
    from model.qwen import Qwen
    from rlx.algorithms import ALGORITHMS
    from rlx.learner import Learner, Term

    rate = 1e-6
    if unrolled is None:
        unrolled = jax.default_backend() == "cpu"
    return Learner(
        model=Qwen(
            config,
            jnp.dtype(options.dtype),
            activations=activations(jnp.dtype(options.dtype)),
            remat=options.remat,
            attention=fitting(config, jnp.dtype(options.dtype), False, this_device()),
            unroll=config.num_layers if unrolled else 1,
        ),
        critic=None,
        terms=(Term("grpo", ALGORITHMS["grpo"].bind(beta=0.0)),),
        optimizer=optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.999, weight_decay=0.0)
        ),
        schedule=optax.constant_schedule(rate),
        temperature=1.0,
        minibatches=1,
        epochs=1,
        micro=options.micro_batch,
        on_policy=on_policy,
        samples=options.samples if options.share_prompts else 1,
        packing=bool(options.packing),
    )
