"""The records that the rooms of rlx hand to each other, and the letters of their axes.

    N  prompts of a step          P  prompt tokens           V  vocabulary
    G  samples of a prompt        T  completion tokens       D  model width
    B  rows, N * G                S  P + T                   C  components of a reward

An axis that is marked `#` may have size one and then stands for all positions.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int, PyTree


class Rollout(NamedTuple):
    """Facts about sampled text; nothing here carries a gradient."""

    tokens: Int[Array, "B S"]
    """Prompt padded on its left to P, so that every completion starts at column P."""
    positions: Int[Array, "B S"]
    """-1 marks padding: one array gives RoPE, the causal mask and the padding mask."""
    mask: Bool[Array, "B T"]
    """True on sampled tokens, the stop token included. A token's id never decides this."""
    sampler_logprobs: Float[Array, "B T"]
    """As the sampler saw them, of the full softmax at the sampling temperature."""
    old_logprobs: Float[Array, "B T"]
    """The training model's when the text was sampled, at the same temperature."""
    ref_logprobs: Float[Array, "B T"]
    """The frozen reference's; zeros where the algorithm asks for none."""
    rewards: Float[Array, "N G"]
    """What is to be maximised, length shaping included. NaN: the row could not be scored."""
    correct: Float[Array, "N G"]
    """The task's own verdict, 1 or 0; NaN with the reward."""
    components: Float[Array, "N G C"]
    """The named parts of the reward before shaping."""
    truncated: Bool[Array, " B"]
    """Ended by the length limit, not by a stop token."""
    rows: Int[Array, " N"]
    """Which row of the task's pool each prompt is."""


class Batch(NamedTuple):
    """What an update reads: one row a completion, and what the loss needs beside its tokens."""

    tokens: Int[Array, "B S"]
    positions: Int[Array, "B S"]
    mask: Bool[Array, "B T"]
    sampler_logprobs: Float[Array, "B T"]
    old_logprobs: Float[Array, "B T"]
    ref_logprobs: Float[Array, "B T"]
    advantages: Float[Array, " B #T"]


class TrainState(NamedTuple):
    """All that a resume needs."""

    params: PyTree
    opt_state: PyTree
    key: jax.Array
    step: Int[Array, ""]
    """Steps taken: one rollout (or one batch of data) each."""
    cursor: Int[Array, ""]
    """Prompts drawn so far; its place in the pool is `cursor % pool size`."""
    updates: Int[Array, ""]
    """Optimizer updates made, the skipped ones not counted: the learning rate's clock."""


class Mean(NamedTuple):
    """A metric that travels as a sum and a count, so that pooling is exact."""

    total: Float[Array, "*axes"]
    count: Float[Array, "*axes"]


class Largest(NamedTuple):
    value: Float[Array, "*axes"]


class Smallest(NamedTuple):
    value: Float[Array, "*axes"]


Metrics = dict[str, Mean | Largest | Smallest]
