"""The optimizer and its learning-rate schedule, assembled from optax."""

from collections.abc import Callable

import jax
import optax
from jaxtyping import PyTree

from rlx.optimizer_state import scale_by_adam
from rlx.settings import OptimizerSettings


def schedule(optimizer: OptimizerSettings, total: int) -> Callable:
    """Learning rate by optimizer updates made; the first of `total` updates already moves."""
    peak, warmup = optimizer.learning_rate, optimizer.warmup_steps
    last = peak * optimizer.final_fraction
    decay = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, last, total - warmup),
        "cosine": lambda: optax.cosine_decay_schedule(
            peak, total - warmup, optimizer.final_fraction
        ),
    }[optimizer.schedule]()
    if not warmup:
        return decay
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, decay], [warmup])


def make_optimizer(optimizer: OptimizerSettings, rate: Callable) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW or plain SGD. Biases and norms don't decay."""
    rules = {
        "adamw": lambda: optax.chain(
            scale_by_adam(optimizer.b1, optimizer.b2, optimizer.eps, optimizer.state_dtype),
            optax.add_decayed_weights(optimizer.weight_decay, matrices),
            optax.scale_by_learning_rate(rate),
        ),
        "sgd": lambda: optax.sgd(rate),
    }
    rule = rules[optimizer.name]()
    if not optimizer.clip_norm:
        return rule
    return optax.chain(optax.clip_by_global_norm(optimizer.clip_norm), rule)


def apart(
    policy: optax.GradientTransformation, critic: optax.GradientTransformation
) -> optax.GradientTransformation:
    """A rule for (params, critic): each part by its own, its gradient clipped by its own norm."""

    def labels(trained: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        return tuple(
            jax.tree.map(lambda _, name=name: name, part)
            for name, part in zip(("policy", "critic"), trained, strict=True)
        )

    return optax.partition({"policy": policy, "critic": critic}, labels)


def matrices(params: PyTree) -> PyTree:
    """True for kernels, embeddings and adapters."""
    names = ("kernel", "embedding", "lora_a", "lora_b")
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in names, params)
