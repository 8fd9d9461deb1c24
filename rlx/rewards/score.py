"""What a verifier gives back, and the error it raises for a row it cannot work with. No JAX."""

from typing import NamedTuple

from model.errors import BadInput


class Score(NamedTuple):
    """The verdict on one completion."""

    reward: float
    correct: bool
    components: dict[str, float]
    """The named parts of the reward; a verifier gives the same names for every completion."""
    reason: str
    """For people: why it is right or wrong."""


class RowError(BadInput):
    """The row lacks a field that its verifier needs, or holds the wrong kind of value there.

    Bad input, to be told to the person; any other exception is the verifier's own failure.
    """
