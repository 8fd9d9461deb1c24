"""Checkpoints in which all experts of a layer share a tensor, read as if each had its own.

mlp.experts.gate_up_proj  [E, 2F, D]      # transformers 5 in memory, and in files that it saves
mlp.experts.down_proj     [E, D, F]       # with save_original_format=False
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

GATE_UP, DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


class ExpertOf(NamedTuple):
    """One expert's tensor in a fused one. It answers as an open file and as its own slice."""

    file: Any
    fused: str
    expert: int
    rows: slice

    def get_slice(self, name: str) -> "ExpertOf":
        return self

    def get_shape(self) -> list[int]:
        _, rows, columns = self.file.get_slice(self.fused).get_shape()
        return [len(range(rows)[self.rows]), columns]

    def get_dtype(self) -> str:
        return self.file.get_slice(self.fused).get_dtype()

    def get_tensor(self, name: str) -> np.ndarray:
        return self.file.get_slice(self.fused)[self.expert][self.rows]


def split_experts(held: Mapping[str, Any]) -> dict[str, Any]:
    """The open file of each tensor, with fused ones replaced by those of their experts."""
    split: dict[str, Any] = {}
    for name, file in held.items():
        shape = file.get_slice(name).get_shape() if name.endswith((GATE_UP, DOWN)) else []
        if len(shape) != 3:
            split[name] = file
            continue
        layer = name.removesuffix(GATE_UP).removesuffix(DOWN)
        half = shape[1] // 2
        parts = {"down_proj": slice(None)}
        if name.endswith(GATE_UP):
            parts = {"gate_proj": slice(half), "up_proj": slice(half, None)}
        for expert in range(shape[0]):
            for part, rows in parts.items():
                own = f"{layer}.mlp.experts.{expert}.{part}.weight"
                split[own] = ExpertOf(file, name, expert, rows)
    return split
