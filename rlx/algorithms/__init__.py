"""The family of algorithms: one file each, one table."""

from rlx.advantages import group_normalised, per_row
from rlx.algorithms.dapo import dapo
from rlx.algorithms.grpo import grpo
from rlx.algorithms.record import Algorithm
from rlx.algorithms.sft import sft
from rlx.ops import sequence_mean, token_mean

ALGORITHMS = {
    "grpo": Algorithm(per_row(group_normalised), grpo, sequence_mean),
    "dapo": Algorithm(per_row(group_normalised), dapo, token_mean),
    "sft": Algorithm(None, sft, token_mean),
}

__all__ = ["ALGORITHMS", "Algorithm"]
