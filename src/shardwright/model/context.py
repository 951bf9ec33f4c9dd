"""What the blocks of one forward pass share: rotation tables, masks, dropout. Built once, read by every layer.

Legend: B sequences, T tokens, R rotated features.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shardwright.model.dropout import Dropout


@dataclass(frozen=True)
class ForwardContext:
    """One forward pass, seen by a block.

    A plain class and not a tuple or a mapping of tensors: FSDP2 casts the float tensors that it finds among a module's
    inputs, and the tables must keep their precision.
    """

    rope_tables: tuple[tuple[Tensor, Tensor], ...]
    masks: dict[int | None, Tensor | None]
    dropout: Dropout | None
    explicit: bool
