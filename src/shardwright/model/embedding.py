"""Embedding tables of tokens and positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.model.tensor_parallel_hooks import TensorParallelHooks


class Embedding(nn.Module):
    """Table of embeddings; `padding_row` gets no gradient."""

    working_weight: Tensor | None
    """Declared if the head is tied to the table, which is looked up in its own dtype."""

    def __init__(self, num_rows: int, width: int, padding_row: int | None = None) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.padding_row = padding_row
        self.weight = nn.Parameter(torch.empty(num_rows, width))

    def forward(
        self, indices: Tensor, tensor_parallel: TensorParallelHooks | None = None
    ) -> Tensor:
        """Look up rows; with `tensor_parallel` the result is partial, to be summed over the
        ranks.
        """
        if tensor_parallel is not None:
            return tensor_parallel.embed(indices, self.weight, self.num_rows, self.padding_row)
        return F.embedding(indices, self.weight, self.padding_row)
