"""Read the micro-batches that one rank recorded, under whatever names its trainer passes them.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.audit.errors import AuditInputError

_ALIASES = {
    "input_ids": ("input_ids", "input_ids_BT", "ids", "tokens", "idx", "input", "inputs", "x"),
    "labels": ("labels", "labels_BT", "targets", "target", "y"),
    "position_ids": ("position_ids", "positions_BT", "positions", "input_pos"),
    "attention_mask": ("attention_mask", "mask"),
    "document_ids": ("document_ids", "document_ids_BT", "seq_idx", "sequence_ids"),
    "cu_seqlens": ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens", "cu_seq_lens"),
    "reference_log_probs": ("reference_log_probs",),
    "chosen_log_probs": ("ref_chosen_logps",),
    "rejected_log_probs": ("ref_rejected_logps",),
}
"""Names under which trainers pass the same field."""


@dataclass(frozen=True)
class RecordedBatch:
    """One micro-batch as one rank's model received it; tensors without a comment [B, T] int64."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None
    attention_mask: Tensor | None
    document_ids: Tensor | None
    has_explicit_documents: bool
    rng_state: Tensor
    reference_log_probs: Tensor | None = None
    """Log-probabilities of the rows' responses under the reference of a preference loss, [B]."""

    @property
    def has_padding(self) -> bool:
        """True if the attention mask leaves out a token."""
        return self.attention_mask is not None and not bool(self.attention_mask.all())

    def equals(self, other: RecordedBatch) -> bool:
        """Return True if ids and labels are equal."""
        return torch.equal(self.input_ids, other.input_ids) and torch.equal(
            self.labels, other.labels
        )


@dataclass(frozen=True)
class RankRecord:
    """Files of one rank: values of the JSON file, and tensors by name."""

    values: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_batch(rank: RankRecord, index: int) -> RecordedBatch:
    """Read a micro-batch of a rank.

    Raises:
        AuditInputError: no ids or labels, or labels of another shape.
    """
    prefix = f"input.{index}."
    fields = {
        key.removeprefix(prefix): tensor
        for key, tensor in rank.tensors.items()
        if key.startswith(prefix)
    }

    def find(field: str) -> Tensor | None:
        return next((fields[alias] for alias in _ALIASES[field] if alias in fields), None)

    ids = find("input_ids")
    labels = find("labels")
    if ids is None or labels is None:
        missing = "input_ids" if ids is None else "labels"
        raise AuditInputError(
            f"micro-batch {index} of rank {rank.values['rank']} has no {missing}",
            field=missing,
            got=f"fields {sorted(fields)}",
            allowed=", ".join(_ALIASES[missing]),
            remedy="Pass the micro-batches to the recorder: record_step(model, batch=[{...}, ...])",
        )
    ids = ids.long().view(-1, ids.shape[-1])
    labels = labels.long()
    if labels.numel() != ids.numel():
        raise AuditInputError(
            f"labels have shape {list(labels.shape)} and ids {list(ids.shape)}",
            field="labels",
            remedy="Pass labels of the ids' shape to the recorder; "
            "Recorder(are_labels_shifted=True) if label t is the target of position t",
        )
    positions = _expand(find("position_ids"), ids)
    mask = find("attention_mask")
    mask = mask if mask is not None and mask.ndim == 2 and mask.shape == ids.shape else None
    documents, is_explicit = _find_documents(
        find("document_ids"), find("cu_seqlens"), positions, ids
    )
    return RecordedBatch(
        ids,
        labels.view(ids.shape),
        positions,
        None if mask is None else (mask != 0).long(),
        documents,
        is_explicit,
        rank.tensors[f"rng.{index}"],
        _read_reference(find, len(ids)),
    )


def _read_reference(find: Callable[[str], Tensor | None], num_rows: int) -> Tensor | None:
    """Return the log-probabilities under the reference, [B]; None if they are not recorded."""
    whole = find("reference_log_probs")
    if whole is None:
        parts = [find("chosen_log_probs"), find("rejected_log_probs")]
        given = [part.flatten() for part in parts if part is not None]
        whole = torch.cat(given) if len(given) == 2 else None
    if whole is None or whole.numel() == num_rows:
        return None if whole is None else whole.flatten()
    raise AuditInputError(
        f"{whole.numel()} log-probabilities of the reference for {num_rows} rows",
        field="reference_log_probs",
        remedy="Pass one number a row: those of the chosen responses, then of the rejected ones",
    )


def _expand(tensor: Tensor | None, ids: Tensor) -> Tensor | None:
    if tensor is None or tensor.shape[-1] != ids.shape[-1]:
        return None
    return tensor.long().view(-1, ids.shape[-1]).expand(ids.shape)


def _find_documents(
    documents: Tensor | None, cu_seqlens: Tensor | None, positions: Tensor | None, ids: Tensor
) -> tuple[Tensor | None, bool]:
    """Number the documents of every row; None if each row is one. True if they were passed."""
    if documents is not None and documents.numel() == ids.numel():
        return documents.long().view(ids.shape), True
    if cu_seqlens is not None and int(cu_seqlens[-1]) == ids.numel():
        index = torch.arange(ids.numel())
        return (torch.bucketize(index, cu_seqlens.long(), right=True) - 1).view(ids.shape), True
    if positions is None:
        return None, False
    begins = torch.zeros_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] < positions[:, :-1]
    return (begins.long().cumsum(1), False) if bool(begins.any()) else (None, False)
