"""What an algorithm is: a record of pure functions, whose keyword-only parameters are its
hyper-parameters and hold the only defaults."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from rlx.ops import masked


def hyper_parameters(function: Callable) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {n: p for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


class Algorithm(NamedTuple):
    advantages: Callable | None
    """Rollout -> (advantages, returns), each [B 1] or [B T]. None: learns from given text."""
    loss: Callable
    """(logprobs, old_logprobs, ref_logprobs, advantages, mask) -> (loss, metrics); the loss is
    [B T] or [B 1], unreduced."""
    weights: Callable
    """Mask of one update's rows -> [B 1] or [B T]; the scalar loss is sum(weights * loss)."""

    def functions(self) -> tuple[Callable, ...]:
        return tuple(f for f in (self.advantages, self.loss, self.weights) if f is not None)

    def hyper_parameters(self) -> dict[str, inspect.Parameter]:
        """By name, of all functions of the record."""
        return {n: p for f in self.functions() for n, p in hyper_parameters(f).items()}

    def bind(self, **hyper: Any) -> "Algorithm":
        """The same record with hyper-parameters fixed, each in the functions that know it.

        Raises TypeError for a name that none of them knows.
        """
        unknown = hyper.keys() - self.hyper_parameters().keys()
        if unknown:
            raise TypeError(
                f"unknown hyper-parameter {sorted(unknown)}; "
                f"known: {sorted(self.hyper_parameters())}"
            )

        def fix(function):
            known = hyper_parameters(function)
            return functools.partial(function, **{n: v for n, v in hyper.items() if n in known})

        return self._replace(
            advantages=self.advantages and fix(self.advantages),
            loss=fix(self.loss),
            weights=fix(self.weights),
        )

    def uses_reference(self) -> bool:
        """Whether the loss reads `ref_logprobs`: it has a `beta`, and that is not 0."""
        beta = self.hyper_parameters().get("beta")
        return beta is not None and beta.default != 0

    def scalar(
        self,
        logprobs: Float[Array, "B T"],
        old_logprobs: Float[Array, "B T"],
        ref_logprobs: Float[Array, "B T"],
        advantages: Float[Array, "B #T"],
        mask: Bool[Array, "B T"],
        **hyper: Any,
    ) -> Float[Array, ""]:
        """sum(weights * loss). What lies under a false mask may be garbage or NaN."""
        bound = self.bind(**hyper)
        clean = (masked(x, mask) for x in (logprobs, old_logprobs, ref_logprobs))
        loss, _ = bound.loss(*clean, clean_advantages(advantages, mask), mask)
        return jnp.sum(bound.weights(mask) * loss)


def clean_advantages(
    advantages: Float[Array, "B #T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B #T"]:
    """0 where no token of the row (or, per token, not this token) is unmasked."""
    used = mask if advantages.shape == mask.shape else jnp.any(mask, axis=1, keepdims=True)
    return jnp.where(used, advantages, 0.0)
