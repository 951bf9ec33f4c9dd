"""A foreign model as one process runs it, plainly: document by document, all logits, autograd. The reference of its cells.

Shapes: B rows, T tokens of a row, S tokens of a document, V vocabulary.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.data.dataset import IGNORED_LABEL
from shardwright.model.foreign import ForeignDecoder, Widened


class PlainForeign(ForeignDecoder):
    """transformers' module called on one document at a time; of ours it has the names of the parameters only."""

    interferes = False

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
        """The summed loss of the supervised tokens."""
        assert labels_BT is not None
        losses = []
        for row, ids_T in enumerate(input_ids_BT):
            documents_T = torch.zeros_like(ids_T) if document_ids_BT is None else document_ids_BT[row]
            for document in documents_T.unique():
                here_T = documents_T == document
                wide = self.compute_dtype == torch.float64
                with Widened() if wide else contextlib.nullcontext():
                    logits_SV = self.foreign(input_ids=ids_T[here_T][None]).logits[0]
                losses_S = F.cross_entropy(logits_SV, labels_BT[row][here_T], ignore_index=IGNORED_LABEL, reduction="none")
                losses.append(losses_S.sum() if weights_BT is None else losses_S @ weights_BT[row][here_T])
        return torch.stack(losses).sum()
