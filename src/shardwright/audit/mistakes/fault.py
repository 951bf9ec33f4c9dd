"""Description of a wrong computation, and of the tokens that it concerns.

Shapes: B rows that the class gets, T their tokens, R recorded rows of C columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class FaultNotApplicable(Exception):
    """A fault that this model or these rows cannot have."""


class TokenPlaces(NamedTuple):
    """Places, in the recorded rows, of the tokens of the rows that the class gets.

    Attributes:
        rows: Recorded row of each of the class's rows, [B].
        columns: Column of each token, [B, T]; -1 where the class's row is padded.
        num_rows: R.
        num_columns: C.
        has_padding: True if recorded rows have padding, which the class does not get.
    """

    rows: Tensor
    columns: Tensor
    num_rows: int
    num_columns: int
    has_padding: bool

    def number_parts(self, degree: int, is_mirrored: bool = False) -> Tensor:
        """Number the part of the columns that each token is in, [B, T].

        Columns are split into `degree` pieces; if `is_mirrored` into twice as many, of which a part
        has one and its mirror image from the end.
        """
        num_pieces = degree * (2 if is_mirrored else 1)
        size = -(-self.num_columns // num_pieces)
        piece = self.columns.clamp(min=0) // size
        return torch.minimum(piece, num_pieces - 1 - piece) if is_mirrored else piece


@dataclass(frozen=True)
class ComputationFault:
    """A wrong computation of ranks that share rows, or of experts with a capacity.

    `kind` is a key of `FAULT_MISTAKES`; `degree` the number of ranks that split columns, heads or
    the vocabulary; `is_mirrored` whether a rank has a piece and its mirror image.

    Where gradients between queries and keys are lost, those between queries of part n and keys of
    part n + `offset` are the only ones that are kept, or lost if `loses_offset`.

    The other fields belong to experts: the tokens of a micro-batch that an expert takes are at
    most `capacity_factor` times the mean, chosen in an order; `renormalises` scales the weights of
    the experts that are left to a sum of 1.
    """

    kind: str
    degree: int = 1
    is_mirrored: bool = False
    offset: int = 0
    loses_offset: bool = False
    capacity_factor: float = 0.0
    renormalises: bool = False

    def describe(self) -> str:
        """Return the settings in words."""
        if self.capacity_factor:
            return f"capacity factor {self.capacity_factor:g}"
        if self.kind == "layer numbers":
            return f"{self.degree} stages"
        if self.kind not in ("keys", "queries", "keys and queries"):
            return f"{self.degree} ranks"
        unit = "pair" if self.is_mirrored else "piece"
        pieces = f"{self.degree} {'pairs of mirrored pieces' if self.is_mirrored else 'pieces'}"
        owner = f"{unit} n + {self.offset}" if self.offset else f"{unit} n"
        verb = "lost" if self.loses_offset else "left"
        return (
            f"rows in {pieces}: of queries in {unit} n, gradients with keys in {owner} are {verb}"
        )
