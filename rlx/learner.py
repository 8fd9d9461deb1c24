"""The learner: the networks that are trained, the terms of their loss, and one forward pass."""

from collections.abc import Callable
from typing import NamedTuple

import optax
from jaxtyping import Array, Float, Int, PyTree

from model.heads import (
    Outputs,
    completion_outputs,
    state_values,
    stream_outputs,
    stream_values,
)
from model.parameters import parameter_axes
from model.qwen import Qwen
from model.sharding import ParameterAxes
from model.stream import Places, Stream
from rlx.algorithms.record import Algorithm


class Term(NamedTuple):
    """One of the losses that share a forward pass and are added up."""

    name: str
    algorithm: Algorithm
    """With its hyper-parameters bound."""
    weight: float = 1.0


class Learner(NamedTuple):
    """What an update needs to know and never changes."""

    model: Qwen
    critic: Qwen | None
    """A critic of its own; None where there is none, or a head on the policy's trunk."""
    terms: tuple[Term, ...]
    """The first names the run's algorithm; at least one."""
    optimizer: optax.GradientTransformation
    """Of (params, critic)."""
    schedule: Callable[[Int[Array, ""]], Float[Array, ""]]
    """Optimizer updates made -> learning rate, for the log; the optimizer has its own."""
    temperature: float
    minibatches: int
    epochs: int
    micro: int
    """Rows of one forward and backward pass: whole units."""
    on_policy: bool
    """The batch gets exactly one update: the old log-probabilities are the current ones."""
    samples: int = 1
    """Successive rows that share their prompt."""
    packing: bool = False
    """Pack rows into streams, each prompt once; `micro` rows of full length fill one."""
    router_aux: float = 0.0
    """Weight of the load-balancing loss of the policy's routers."""

    @property
    def axes(self) -> ParameterAxes:
        """Of all that is trained."""
        of_critic = parameter_axes(self.critic.config) if self.critic else {}
        return of_critic | parameter_axes(self.model.config)

    @property
    def unit(self) -> int:
        """Rows that stay together when a batch is shuffled and cut."""
        return max(term.algorithm.unit for term in self.terms)

    @property
    def valued(self) -> int | None:
        """Which term's advantages read the critic's values."""
        places = [i for i, term in enumerate(self.terms) if term.algorithm.critic]
        return places[0] if places else None

    @property
    def online(self) -> bool:
        return self.terms[0].algorithm.source == "rollouts"


def forward(
    learner: Learner,
    params: PyTree,
    critic: PyTree,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    width: int,
) -> Outputs:
    """Policy and critic on the last `width` columns: what the loss and all scoring read."""
    temperature = learner.temperature
    outputs = completion_outputs(learner.model, params, tokens, positions, width, temperature)
    if learner.critic is None:
        return outputs
    values = state_values(learner.critic, critic, tokens, positions, width)
    return outputs._replace(values=values)


def forward_stream(
    learner: Learner, params: PyTree, critic: PyTree, stream: Stream, places: Places, width: int
) -> Outputs:
    """`forward` of the rows of a stream; beyond a row's end stands garbage."""
    where = (stream, places, width)
    outputs = stream_outputs(learner.model, params, *where, learner.temperature)
    if learner.critic is None:
        return outputs
    values = stream_values(learner.critic, critic, *where)
    return outputs._replace(values=values)
