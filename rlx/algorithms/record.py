"""What an algorithm is: a record of pure functions, whose keyword-only parameters are its
hyper-parameters and hold the only defaults."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from model.heads import Outputs
from rlx.ops import masked
from rlx.types import Batch, Signal


def hyper_parameters(function: Callable) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters
    return {n: p for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


class Inputs(NamedTuple):
    """The positional arguments of a loss. Only the first carries a gradient."""

    logprobs: Float[Array, " B #T"]
    old_logprobs: Float[Array, " B #T"]
    ref_logprobs: Float[Array, " B #T"]
    advantages: Float[Array, " B #T"]
    mask: Bool[Array, " B #T"]


def of_logprobs(outputs: Outputs, batch: Batch, signal: Signal) -> Inputs:
    """A loss of the policy's log-probabilities."""
    return Inputs(
        outputs.logprobs, batch.old_logprobs, batch.ref_logprobs, signal.advantages, signal.mask
    )


def of_entropy(outputs: Outputs, batch: Batch, signal: Signal) -> Inputs:
    """A loss of the policy's entropy, which stands where log-probabilities do elsewhere."""
    zeros = jnp.zeros_like(outputs.entropy)
    return Inputs(outputs.entropy, zeros, zeros, signal.advantages, signal.mask)


def of_values(outputs: Outputs, batch: Batch, signal: Signal) -> Inputs:
    """A loss of the critic: its values now and when the text was sampled, and the returns."""
    values = outputs.values[:, :-1]
    return Inputs(values, batch.values, jnp.zeros_like(values), signal.returns, signal.mask)


def of_scores(outputs: Outputs, batch: Batch, signal: Signal) -> Inputs:
    """A loss of one score a row, read at its last unmasked token and never at padding, and the
    margins by which it is to win."""
    last = signal.mask.shape[1] - jnp.argmax(signal.mask[:, ::-1], axis=1)
    # Column t of the values is the state before token t, so that `last` is the one after it.
    scores = jnp.take_along_axis(outputs.values, last[:, None], axis=1)
    rows = jnp.any(signal.mask, axis=1, keepdims=True)
    return Inputs(scores, batch.margins, jnp.zeros_like(scores), signal.advantages, rows)


class Algorithm(NamedTuple):
    """One row of the table."""

    advantages: Callable | None
    """Rollout -> (advantages, returns), each [B 1] or [B T]. None: the loss reads none."""
    loss: Callable
    """(logprobs, old_logprobs, ref_logprobs, advantages, mask) -> (loss, metrics); the loss is
    [B T] or [B 1], unreduced."""
    weights: Callable
    """Mask of one update's rows -> [B T] or [B 1]; the scalar loss is sum(weights * loss)."""
    inputs: Callable[[Outputs, Batch, Signal], Inputs] = of_logprobs
    """What the loss is a function of."""
    source: str = "rollouts"
    """What it learns from where it stands first: `rollouts`, `pairs` or `texts`."""
    reference: bool = False
    """The loss reads `ref_logprobs`."""
    critic: bool = False
    """The advantages read the values of a critic, which learns beside the policy."""
    unit: int = 1
    """Rows that the loss must see together: 2 for a pair, whose rows are 2i and 2i + 1."""
    selects: Callable | None = None
    """Advantages -> which rows have a part in the loss. None: all."""

    @property
    def is_policy_loss(self) -> bool:
        """Its loss is proportional to the advantages of sampled text."""
        return self.source == "rollouts" and self.inputs is of_logprobs and bool(self.advantages)

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
        """Whether a reference must be loaded: the loss reads it, and its weight `beta` is not 0."""
        beta = self.hyper_parameters().get("beta")
        return self.reference and (beta is None or beta.default != 0)

    def scalar(
        self,
        logprobs: Float[Array, " B #T"],
        old_logprobs: Float[Array, " B #T"],
        ref_logprobs: Float[Array, " B #T"],
        advantages: Float[Array, " B #T"],
        mask: Bool[Array, " B #T"],
        **hyper: Any,
    ) -> Float[Array, ""]:
        """sum(weights * loss). What lies under a false mask may be garbage or NaN."""
        bound = self.bind(**hyper)
        inputs = clean(Inputs(logprobs, old_logprobs, ref_logprobs, advantages, mask))
        loss, _ = bound.loss(*inputs)
        return jnp.sum(bound.weights(mask) * loss)


def clean(inputs: Inputs) -> Inputs:
    """0 under a false mask, before any loss sees it; an advantage a row is 0 where no token of the
    row is unmasked."""
    mask, advantages = inputs.mask, inputs.advantages
    arrays = (masked(x, mask) for x in inputs[:3])
    used = mask if advantages.shape == mask.shape else jnp.any(mask, axis=1, keepdims=True)
    return Inputs(*arrays, jnp.where(used, advantages, 0.0), mask)
