"""The records that the rooms of rlx hand to each other, and the letters of their axes.

    N  prompts of a step          P  prompt tokens           V  vocabulary
    G  samples of a prompt        T  completion tokens       D  model width
    B  rows, N * G                S  P + T                   C  components of a score

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
    values: Float[Array, "B T"]
    """The critic's, of the state before each token; zeros without one."""
    bootstrap: Float[Array, " B"]
    """The critic's value after the last token of a truncated row; 0 for a row that finished."""
    rewards: Float[Array, "N G"]
    """What is to be maximised, all shaping included. NaN: the row could not be scored."""
    token_rewards: Float[Array, "B T"]
    """The same reward where it was earned: a row's sum is its reward. 0 where it has none."""
    correct: Float[Array, "N G"]
    """The task's own verdict, 1 or 0; NaN with the reward."""
    components: Float[Array, "N G C"]
    """What the verifier tells of a row, by name."""
    parts: Float[Array, "N G K"]
    """What adds up to the verifier's reward, before shaping: the components that have a weight,
    times it (in a mixture up to a positive factor), or the reward as one thing."""
    token_scores: Float[Array, "B T"]
    """Parts of the verifier's reward that belong to single places of the text, each at the token
    that ends its place; zeros where a verifier scores whole texts only."""
    truncated: Bool[Array, " B"]
    """Ended by the length limit, not by a stop token."""
    rows: Int[Array, " N"]
    """Which row of the task's pool each prompt is."""


class Signal(NamedTuple):
    """What one term of the loss learns from."""

    advantages: Float[Array, " B #T"]
    """In preference pairs +1 on the chosen row, -1 on the rejected; +1 on text to be imitated."""
    returns: Float[Array, " B #T"]
    """What a critic is to predict."""
    mask: Bool[Array, "B T"]
    """Tokens that count for this term; none that the batch's mask leaves out."""


class Batch(NamedTuple):
    """What an update reads: one row a completion, and what the losses need beside its tokens."""

    tokens: Int[Array, "B S"]
    positions: Int[Array, "B S"]
    mask: Bool[Array, "B T"]
    sampler_logprobs: Float[Array, "B T"]
    old_logprobs: Float[Array, "B T"]
    ref_logprobs: Float[Array, "B T"]
    values: Float[Array, "B T"]
    margins: Float[Array, "B 1"]
    """By how much a preferred text is to beat the other, where the data say so; else 0."""
    signals: tuple[Signal, ...]
    """One for each term of the loss."""


class Moments(NamedTuple):
    """A running mean and variance. https://doi.org/10.1080/00401706.1962.10490022 (Welford)"""

    count: Float[Array, ""]
    mean: Float[Array, ""]
    squares: Float[Array, ""]
    """Sum of squared distances from the mean."""


class Replay(NamedTuple):
    """Groups with differences in their rewards, of earlier steps. Letter R: its groups."""

    rollout: Rollout
    """Of R prompts."""
    born: Int[Array, " R"]
    """The step that sampled each; -1 where there is none."""
    uses: Int[Array, " R"]
    """How often each has been learnt from again."""


class Memory(NamedTuple):
    """What a run remembers of its earlier steps beside its parameters."""

    kl_beta: Float[Array, ""]
    """Weight of the KL penalty in the reward, where it adapts."""
    rewards: Moments
    """Of all rewards so far, where rewards are normalised by them."""
    solved: Int[Array, " M"] | None
    """Of each prompt of the pool, how many visits in a row found all its samples right; None where
    no prompt is ever retired."""
    replay: Replay | None
    """None where no group is kept."""


class Mixture(NamedTuple):
    """Where the drawing of prompts of several tasks stands. Letter K: tasks."""

    drawn: Int[Array, " K"]
    """Prompts so far."""
    credit: Float[Array, " K"]
    """By how many prompts each is behind its share."""
    weights: Float[Array, " K"]
    """Of the next draws; they add up to 1."""
    solve_rate: Float[Array, " K"]
    """Of late."""
    steps: Int[Array, ""]
    """Begun so far."""


Cursor = Int[Array, ""] | Mixture
"""Prompts drawn or passed over so far; of a single task its place in the pool is
`cursor % pool size`."""


class TrainState(NamedTuple):
    """All that a resume needs."""

    params: PyTree
    """The policy's, of a frozen base its adapters alone; with a `value_head` where the critic is a
    head on its trunk."""
    critic: PyTree
    """A separate critic's; empty without one."""
    opt_state: PyTree
    """Of (params, critic)."""
    memory: Memory
    key: jax.Array
    step: Int[Array, ""]
    """Steps taken: one rollout (or one batch of data) each."""
    cursor: Cursor
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
