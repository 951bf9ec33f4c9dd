"""Read recorded micro-batches as rows of single documents, correctly or with a known mistake.

Shapes: B rows, T tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.audit.mistakes.fault import ComputationFault, TokenPlaces
from shardwright.audit.recorded_batch import RecordedBatch
from shardwright.config.data import IGNORED_LABEL


class ContextPart(NamedTuple):
    """Part of every row that one context parallel rank has.

    Rows are split into `degree` pieces; if `is_mirrored` into twice as many, of which a rank has
    one and its mirror image from the end, which balances causal attention.
    """

    number: int
    degree: int
    is_mirrored: bool

    def select(self, length: int) -> Tensor:
        """Return True for the positions of this part, [T]."""
        num_pieces = self.degree * (2 if self.is_mirrored else 1)
        piece = torch.arange(length) * num_pieces // length
        if self.is_mirrored:
            piece = torch.minimum(piece, num_pieces - 1 - piece)
        return piece == self.number


@dataclass(frozen=True)
class BatchReading:
    """Interpretation of a micro-batch; the default is the one that users expect."""

    label_offset: int = 1
    """Distance from a position to its target in the labels: 1 if labels are not shifted yet."""
    separates_documents: bool = True
    resets_positions: bool = True
    crosses_documents: bool = False
    """True if the last token of a document predicts the first one of the next."""
    supervises_prompt: bool = False
    """True if tokens whose label is ignored are supervised."""
    supervises_padding: bool = False
    replays_dropout: bool = False
    """True to run the rows as received, in training mode, with the recorded random numbers."""
    detaches_routers: bool = False
    """True if no gradient flows through the routers of a sparse model."""
    swaps_pairs: bool = False
    """True if the rejected response of a pair is taken for the chosen one."""
    averages_log_probs: bool = False
    """True if a response's log-probability is the mean over its tokens, not the sum."""
    omits_reference: bool = False
    is_own_reference: bool = False
    """True if the reference is the trained model itself."""
    context_part: ContextPart | None = None
    """Part of the rows whose tokens count; None for all."""
    fault: ComputationFault | None = None
    """Wrong computation inside the model."""


@dataclass(frozen=True)
class Segment:
    """Tokens that are one row of the reference; all tensors [T] int64."""

    ids: Tensor
    positions: Tensor
    targets: Tensor
    columns: Tensor
    row: int
    mask: Tensor | None = None


def build_segments(
    batch: RecordedBatch, reading: BatchReading, *, keeps_all: bool = False
) -> list[Segment]:
    """Split the rows of a micro-batch into segments.

    Those without a target are omitted unless `keeps_all`; at least one segment remains.
    """
    segments = []
    for row in range(batch.input_ids.shape[0]):
        segments += _build_row_segments(batch, row, reading)
    if keeps_all:
        return segments
    supervised = [s for s in segments if bool((s.targets != IGNORED_LABEL).any())]
    return supervised or segments[:1]


def build_targets(batch: RecordedBatch, row: int, reading: BatchReading) -> Tensor:
    """Build the target of every position of a row, [T]; -100 for none."""
    ids = batch.input_ids[row]
    labels = batch.labels[row]
    is_padding = (
        torch.zeros_like(ids, dtype=torch.bool)
        if batch.attention_mask is None
        else batch.attention_mask[row] == 0
    )
    if reading.supervises_prompt:
        labels = torch.where((labels == IGNORED_LABEL) & ~is_padding, ids, labels)
    if reading.supervises_padding:
        labels = torch.where(is_padding, ids, labels)
    offset = reading.label_offset
    targets = torch.full_like(labels, IGNORED_LABEL)
    targets[: len(labels) - offset] = labels[offset:]
    if not reading.supervises_padding:
        targets[is_padding] = IGNORED_LABEL
    if batch.document_ids is not None and not reading.crosses_documents and offset > 0:
        documents = batch.document_ids[row]
        is_other = documents[offset:] != documents[:-offset]
        targets[: len(targets) - offset][is_other] = IGNORED_LABEL
    if reading.context_part is not None:
        targets[~reading.context_part.select(len(targets))] = IGNORED_LABEL
    return targets


def build_positions(batch: RecordedBatch, row: int, reading: BatchReading) -> Tensor:
    """Build the position of every token of a row, [T]."""
    line = torch.arange(batch.input_ids.shape[1])
    given = line if batch.position_ids is None else batch.position_ids[row]
    if batch.document_ids is None:
        return given
    if not reading.resets_positions:
        return line
    if not reading.separates_documents and not batch.has_explicit_documents:
        return given
    documents = batch.document_ids[row]
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[1:] = documents[1:] != documents[:-1]
    starts = line[begins]
    return line - starts[begins.long().cumsum(0) - 1]


def _build_row_segments(batch: RecordedBatch, row: int, reading: BatchReading) -> list[Segment]:
    ids = batch.input_ids[row]
    targets = build_targets(batch, row, reading)
    positions = build_positions(batch, row, reading)
    mask = None if batch.attention_mask is None else batch.attention_mask[row]
    is_valid = torch.ones_like(ids, dtype=torch.bool)
    if mask is not None and not reading.supervises_padding:
        is_valid = mask != 0
        mask = None
    documents = (
        torch.zeros_like(ids)
        if batch.document_ids is None or not reading.separates_documents
        else batch.document_ids[row]
    )
    segments = []
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[1:] = documents[1:] != documents[:-1]
    number = begins.long().cumsum(0)
    for index in range(1, int(number[-1]) + 1):
        chosen = (number == index) & is_valid
        if bool(chosen.any()):
            visible = None if mask is None else mask[chosen]
            columns = chosen.nonzero().flatten()
            segments.append(
                Segment(ids[chosen], positions[chosen], targets[chosen], columns, row, visible)
            )
    return segments


def build_token_mask(segments: list[Segment]) -> Tensor:
    """Build the mask of padded segments: 1 for their tokens, 0 for what `pad_segments` adds."""
    lengths = torch.tensor([len(segment.ids) for segment in segments])
    return (torch.arange(int(lengths.max())) < lengths[:, None]).long()


class PaddedRows(NamedTuple):
    """Rows of single documents, padded at the end; each [B, T]."""

    ids: Tensor
    positions: Tensor
    targets: Tensor
    mask: Tensor


def pad_segments(segments: list[Segment]) -> PaddedRows:
    """Stack segments, padded at the end.

    Causal attention does not look at later tokens, so the padding changes nothing.
    """
    length = max(len(segment.ids) for segment in segments)
    ids = torch.zeros(len(segments), length, dtype=torch.int64)
    positions = torch.arange(length).repeat(len(segments), 1)
    targets = torch.full_like(ids, IGNORED_LABEL)
    mask = torch.ones_like(ids)
    for row, segment in enumerate(segments):
        size = len(segment.ids)
        ids[row, :size] = segment.ids
        positions[row, :size] = segment.positions
        targets[row, :size] = segment.targets
        if segment.mask is not None:
            mask[row, :size] = segment.mask
    return PaddedRows(ids, positions, targets, mask)


def locate_tokens(batch: RecordedBatch, segments: list[Segment]) -> TokenPlaces:
    """Say where the tokens of padded segments are in the recorded rows."""
    num_rows, num_columns = batch.input_ids.shape
    columns = torch.full((len(segments), max(len(s.ids) for s in segments)), -1)
    for row, segment in enumerate(segments):
        columns[row, : len(segment.columns)] = segment.columns
    rows = torch.tensor([segment.row for segment in segments])
    return TokenPlaces(rows, columns, num_rows, num_columns, batch.has_padding)
