"""One decoder parameter, by name: its shape, what it is for and how it begins. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Normal:
    """Independent normal values of mean 0; row `zero_row`, where one is named, is zero (an embedding's padding)."""

    std: float
    zero_row: int | None = None


@dataclass(frozen=True)
class Ones:
    """All ones."""


@dataclass(frozen=True)
class Zeros:
    """All zeros."""


Init = Normal | Ones | Zeros

Role = Literal[
    "embedding", "positions", "head", "norm",
    "query", "key", "value", "qkv", "attention_out", "query_norm", "key_norm",
    "gate", "up", "gate_up", "down",
]  # fmt: skip


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: the name and shape of it in a weights file, what it is for, and its initial values.

    `layer` is None outside the blocks. A bias carries the role of the module it belongs to.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None
    init: Init

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def is_bias(self) -> bool:
        """Whether it is added rather than multiplied."""
        return self.name.endswith(".bias")
