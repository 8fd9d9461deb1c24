"""What a step logs of a policy's routers, and the loss that makes them send tokens everywhere.

    router/aux            the load-balancing loss, whatever its weight; k where the load is even
    router/load_max       share of the busiest expert of a layer; the mean over layers
    router/load_min       that of the idlest
    router/unused         experts of a layer without a token; the mean over layers
    router/entropy        of a layer's shares, nats: log(E) if they are even; the mean over layers
    router/expert_<i>     tokens that the step's updates sent to expert i, summed over layers

All are of the update's forward passes, prompts included and padding left out. The last are logged
of models with at most NAMED experts.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from model.moe import Load, balance_loss
from rlx import ops
from rlx.types import Mean, Metrics

NAMED = 16

SENT = "router/sent"
"""Tokens a layer and expert, on their way to `load_metrics`: a sum over the step."""


def balance(load: Load) -> tuple[Float[Array, ""], Metrics]:
    """The loss of one micro-batch, and what is measured of it."""
    loss = balance_loss(load)
    sent = jax.lax.stop_gradient(load.sent)
    measured = {
        "router/aux": ops.scalar_metric(jax.lax.stop_gradient(loss)),
        SENT: Mean(sent, jnp.zeros_like(sent)),
    }
    return loss, measured


def load_metrics(sent: Float[Array, "layers E"]) -> Metrics:
    """From the tokens that a step sent to each expert. Without any, all is 0."""
    shares = sent / jnp.maximum(jnp.sum(sent, axis=1, keepdims=True), 1.0)
    logs = jnp.log(jnp.where(shares > 0, shares, 1.0))
    of_layers = {
        "router/load_max": jnp.max(shares, axis=1),
        "router/load_min": jnp.min(shares, axis=1),
        "router/unused": jnp.sum(sent == 0, axis=1),
        "router/entropy": -jnp.sum(shares * logs, axis=1),
    }
    metrics = {name: ops.scalar_metric(jnp.mean(x)) for name, x in of_layers.items()}
    if sent.shape[1] <= NAMED:
        of_experts = jnp.sum(sent, axis=0)
        metrics |= {
            f"router/expert_{i}": ops.scalar_metric(tokens) for i, tokens in enumerate(of_experts)
        }
    return metrics
