"""Packed rows split into one row per document, for models without document masks.

Legend: B rows, T tokens of a row, N = B x T, R documents, L tokens of the longest, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.config.data import IGNORED_LABEL


class DocumentRows(NamedTuple):
    """Map from the tokens of packed rows to rows of single documents.

    Token n of the flat batch is token `column_N[n]` of row `row_N[n]`; row -1 is for omitted
    documents.
    """

    row_N: Tensor
    column_N: Tensor
    num_rows: int
    num_columns: int
    shape: torch.Size

    def scatter_to_rows(self, x_BT: Tensor, fill: int) -> Tensor:
        """Rearrange ids or labels of a batch into rows of documents, `[R, L]`."""
        x_RL = x_BT.new_full((self.num_rows, self.num_columns), fill)
        is_included = self.row_N >= 0
        x_RL[self.row_N[is_included], self.column_N[is_included]] = x_BT.flatten()[is_included]
        return x_RL

    def gather_from_rows(self, x_RLV: Tensor) -> Tensor:
        """Rearrange results of the documents into the packed rows, `[B, T, V]`."""
        return x_RLV[self.row_N, self.column_N].view(*self.shape, -1)


def split_documents(document_ids_BT: Tensor, labels_BT: Tensor | None) -> DocumentRows:
    """Split packed rows into one row per document.

    With labels, documents without supervised tokens, such as padding, are omitted. One row
    always remains: under ZeRO every rank has to run.
    """
    begins_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    begins_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    begins_N = begins_BT.flatten()
    number_N = begins_N.cumsum(0) - 1
    starts_R = begins_N.nonzero().squeeze(1)
    column_N = torch.arange(len(number_N), device=number_N.device) - starts_R[number_N]
    num_documents = len(starts_R)
    if labels_BT is None:
        return DocumentRows(
            number_N, column_N, num_documents, int(column_N.max()) + 1, document_ids_BT.shape
        )
    is_supervised_R = torch.zeros(num_documents, dtype=torch.bool, device=number_N.device)
    is_supervised_R[number_N[labels_BT.flatten() != IGNORED_LABEL]] = True
    is_supervised_R[0] |= ~is_supervised_R.any()
    new_number_R = torch.where(is_supervised_R, is_supervised_R.cumsum(0) - 1, -1)
    row_N = new_number_R[number_N]
    # At least two tokens: with one token a recurrent class does not use its decay parameters.
    # If a parameter is unused on some ranks only, ranks no longer sum the same gradients.
    length = max(2, int(column_N[row_N >= 0].max()) + 1)
    return DocumentRows(row_N, column_N, int(is_supervised_R.sum()), length, document_ids_BT.shape)
