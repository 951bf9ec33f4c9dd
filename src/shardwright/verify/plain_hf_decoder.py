"""Reference for models of transformers' classes: document by document, full logits, autograd.

Shapes: B rows, T tokens of a row, S tokens of a document, V vocabulary.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.data.dataset import IGNORED_LABEL
from shardwright.model.hf_decoder import Float64Mode, HFDecoder


class PlainHFDecoder(HFDecoder):
    """Module of transformers called on one document at a time, with our parameter names."""

    has_block_wrappers = False

    def forward(
        self,
        input_ids_BT: Tensor,
        *,
        positions_BT: Tensor | None = None,
        document_ids_BT: Tensor | None = None,
        labels_BT: Tensor | None = None,
        weights_BT: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Sum the loss of the supervised tokens."""
        assert labels_BT is not None
        losses = []
        for row, ids_T in enumerate(input_ids_BT):
            documents_T = (
                torch.zeros_like(ids_T) if document_ids_BT is None else document_ids_BT[row]
            )
            for document in documents_T.unique():
                is_document_T = documents_T == document
                is_float64 = self.compute_dtype == torch.float64
                with Float64Mode() if is_float64 else contextlib.nullcontext():
                    logits_SV = self.hf_module(input_ids=ids_T[is_document_T][None]).logits[0]
                losses_S = F.cross_entropy(
                    logits_SV,
                    labels_BT[row][is_document_T],
                    ignore_index=IGNORED_LABEL,
                    reduction="none",
                )
                losses.append(
                    losses_S.sum()
                    if weights_BT is None
                    else losses_S @ weights_BT[row][is_document_T]
                )
        return torch.stack(losses).sum()
