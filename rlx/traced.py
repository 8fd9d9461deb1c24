"""What functions read and give, found out by tracing them with shapes alone."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlx.types import Rollout


def abstract_inputs() -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of a loss's arrays, two rows of three tokens."""
    floats = jax.ShapeDtypeStruct((2, 3), "float32")
    return floats, floats, floats, floats, jax.ShapeDtypeStruct((2, 3), bool)


def loss_a_row(loss: Callable) -> bool:
    """Whether it has one value a row, and not one a token."""
    return jax.eval_shape(loss, *abstract_inputs())[0].shape[1] == 1


def weight_a_row(reduction: Callable) -> bool:
    return jax.eval_shape(reduction, abstract_inputs()[-1]).shape[1] == 1


@functools.cache
def reads_values(estimate: Callable) -> bool:
    """Whether these advantages need a critic."""
    program = jax.make_jaxpr(estimate)(abstract_rollout(2)).jaxpr
    values = program.invars[Rollout._fields.index("values")]
    return any(values is x for equation in program.eqns for x in equation.invars)


def abstract_rollout(samples: int) -> Rollout:
    """The shapes of a rollout of one prompt, to trace functions with."""

    def shape(*axes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(axes, dtype)

    tokens, rows, group = shape(samples, 2), shape(samples), shape(1, samples)
    return Rollout(
        tokens=shape(samples, 3, dtype=jnp.int32),
        positions=shape(samples, 3, dtype=jnp.int32),
        mask=shape(samples, 2, dtype=bool),
        sampler_logprobs=tokens,
        old_logprobs=tokens,
        ref_logprobs=tokens,
        values=tokens,
        bootstrap=rows,
        rewards=group,
        token_rewards=tokens,
        correct=group,
        components=shape(1, samples, 1),
        parts=shape(1, samples, 1),
        token_scores=tokens,
        truncated=shape(samples, dtype=bool),
        rows=shape(1, dtype=jnp.int32),
    )


@functools.cache
def reads_old(loss: Callable) -> bool:
    """Whether it reads what the policy was when the text was sampled."""
    program = jax.make_jaxpr(lambda *arrays: loss(*arrays)[0])(*abstract_inputs()).jaxpr
    old = program.invars[1]
    return any(old is x for equation in program.eqns for x in equation.invars)
