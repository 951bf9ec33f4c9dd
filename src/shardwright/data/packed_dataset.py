"""Packing of documents into rows of fixed length, without attention between documents.

Shapes: T tokens of a row, P pieces over all rows, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from shardwright.config.data import IGNORED_LABEL
from shardwright.data.dataset import Int64Array, Sample, TokenArray
from shardwright.errors import DataError

OverlongPolicy = Literal["cut", "drop", "refuse"]
UNEVEN_PADDING_FRACTION = 0.05
"""Fraction of padding above which the rows of a dataset count as uneven in length."""
_PIECES_PER_BLOCK = 1 << 16


@dataclass(frozen=True)
class Packing:
    """Rows of token pieces. Row r has pieces row_starts_R1[r] to row_starts_R1[r + 1] - 1.

    Of documents longer than a row, `num_split` are split into several pieces and `num_dropped`
    are left out. `num_unsupervised` pieces are left out because none of their tokens is
    supervised.
    """

    piece_starts_P: npt.NDArray[np.int64]
    piece_lengths_P: npt.NDArray[np.int64]
    row_starts_R1: npt.NDArray[np.int64]
    num_split: int = 0
    num_dropped: int = 0
    num_unsupervised: int = 0
    num_supervised: int = 0

    @property
    def num_rows(self) -> int:
        """Number of rows, R."""
        return len(self.row_starts_R1) - 1

    def save(self, path: Path) -> None:
        """Write the packing to one .npz file."""
        counts = np.array(
            [self.num_split, self.num_dropped, self.num_unsupervised, self.num_supervised],
            dtype=np.int64,
        )
        np.savez(
            path,
            starts=self.piece_starts_P,
            lengths=self.piece_lengths_P,
            rows=self.row_starts_R1,
            counts=counts,
        )

    @classmethod
    def load(cls, path: Path) -> Packing:
        """Read a packing written by `save`."""
        with np.load(path, allow_pickle=False) as content:
            return cls(
                content["starts"], content["lengths"], content["rows"], *map(int, content["counts"])
            )


def pack_documents(
    documents: npt.NDArray[np.uint64],
    sequence_length: int,
    *,
    supervised_mask: npt.NDArray[np.uint8] | None = None,
    overlong: OverlongPolicy = "cut",
    is_unpacked: bool = False,
) -> Packing:
    """Pack documents by best-fit decreasing: longest first, into the fullest row that fits.

    `documents` are the starts of the documents and the end of the last. A document of n tokens
    has n - 1 predictions and takes that many positions; one longer than a row is split into
    full rows and a remainder, or dropped. Documents that fit in a row are never split.
    Deterministic. Source: Ding et al., Fewer Truncations Improve Language Modeling, ICML 2024,
    section 3.

    Args:
        supervised_mask: 1 for each supervised token, from token 0 on; None means all are.
            Pieces without a supervised token are left out.
        overlong: treatment of documents longer than a row: split, drop or raise.
        is_unpacked: use one row per piece, in the order of the documents, without packing.

    Raises:
        DataError: a document is longer than a row and `overlong` is `refuse`.
    """
    document_starts = documents.astype(np.int64)
    num_predictions = np.maximum(np.diff(document_starts) - 1, 0)
    too_long = num_predictions > sequence_length
    if overlong == "refuse" and too_long.any():
        raise DataError(
            "documents are longer than a row",
            field="data.overlong",
            got=f"{int(too_long.sum())} of {len(num_predictions)} documents, "
            f"the longest of {int(num_predictions.max()) + 1} tokens",
            allowed=f"{sequence_length + 1} tokens: training.sequence_length and a label",
            remedy="Raise training.sequence_length, or set data.overlong to cut or drop",
        )
    if overlong == "drop":
        num_predictions = np.where(too_long, 0, num_predictions)
    starts, lengths = _split_documents(document_starts[:-1], num_predictions, sequence_length)
    supervised_counts = (
        lengths if supervised_mask is None else _count_supervised(supervised_mask, starts, lengths)
    )
    num_unsupervised = int(np.count_nonzero(supervised_counts == 0))
    num_supervised = int(supervised_counts.sum())
    starts, lengths = starts[supervised_counts > 0], lengths[supervised_counts > 0]
    rows = (
        [[piece] for piece in range(len(lengths))]
        if is_unpacked
        else _pack_best_fit(lengths, sequence_length)
    )
    order = np.fromiter(
        (piece for row in rows for piece in row), dtype=np.int64, count=len(lengths)
    )
    row_starts = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    num_too_long = int(too_long.sum())
    num_cut = 0 if overlong == "drop" else num_too_long
    num_dropped = num_too_long - num_cut
    return Packing(
        starts[order],
        lengths[order],
        row_starts,
        num_cut,
        num_dropped,
        num_unsupervised,
        num_supervised,
    )


def _pack_best_fit(lengths: Int64Array, sequence_length: int) -> list[list[int]]:
    """Return the indices of the pieces of each row."""
    rows: list[list[int]] = []
    # rows_by_space[s] lists rows with s free positions; bit s of space_bits is set if any has.
    rows_by_space: list[list[int]] = [[] for _ in range(sequence_length + 1)]
    space_bits = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting_bits = space_bits >> length
        if fitting_bits:
            space = length + (fitting_bits & -fitting_bits).bit_length() - 1
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                space_bits ^= 1 << space
            rows[row].append(piece)
        else:
            space = sequence_length
            row = len(rows)
            rows.append([piece])
        remaining = space - length
        if remaining:
            rows_by_space[remaining].append(row)
            space_bits |= 1 << remaining
    return rows


def _count_supervised(
    supervised_mask: npt.NDArray[np.uint8], starts: Int64Array, lengths: Int64Array
) -> Int64Array:
    """Count the supervised labels of each piece; label t is token t + 1."""
    counts = np.zeros(len(starts), dtype=np.int64)
    for first in range(0, len(starts), _PIECES_PER_BLOCK):
        block = slice(first, first + _PIECES_PER_BLOCK)
        low = int(starts[block].min())
        high = int((starts[block] + lengths[block]).max())
        cumulative = np.cumsum(supervised_mask[low + 1 : high + 1], dtype=np.int64)
        cumulative = np.concatenate([[0], cumulative])
        counts[block] = (
            cumulative[starts[block] + lengths[block] - low] - cumulative[starts[block] - low]
        )
    return counts


def _split_documents(
    first_tokens: Int64Array, predictions: Int64Array, sequence_length: int
) -> tuple[Int64Array, Int64Array]:
    """Return first token and number of predictions of every piece, in document order."""
    num_pieces = -(-predictions // sequence_length)
    total = int(num_pieces.sum())
    first_of_document = np.cumsum(num_pieces) - num_pieces
    piece_index = np.arange(total) - np.repeat(first_of_document, num_pieces)
    starts = np.repeat(first_tokens, num_pieces) + piece_index * sequence_length
    lengths = np.minimum(
        np.repeat(predictions, num_pieces) - piece_index * sequence_length, sequence_length
    )
    return starts, lengths


@dataclass(frozen=True)
class PackedDataset:
    """Rows of packed documents.

    With `is_unpacked` a row is one piece and has no document ids: causal attention needs no further
    mask.

    Within a piece, positions count from 0 and labels are the next tokens of the same document;
    the last position of a document predicts its end-of-text token, and the first token of a
    document is never predicted. Padding at the end of a row has a document id of its own and is
    unsupervised. The rows are the same in every epoch.

    `supervised_mask`: 1 for each supervised token; None means all are. `weights`: loss weight of
    each token; None means 1.
    """

    tokens: TokenArray
    packing: Packing
    sequence_length: int
    supervised_mask: npt.NDArray[np.uint8] | None = None
    weights: npt.NDArray[np.float32] | None = None
    is_unpacked: bool = False

    def __len__(self) -> int:
        return self.packing.num_rows

    @property
    def num_supervised(self) -> int:
        """Tokens predicted in one pass over all rows."""
        return self.packing.num_supervised

    @cached_property  # a sum over all pieces that every step needs
    def padding_fraction(self) -> float:
        """Fraction of positions that are padding."""
        return 1.0 - int(self.packing.piece_lengths_P.sum()) / max(
            1, len(self) * self.sequence_length
        )

    @property
    def is_uneven(self) -> bool:
        """True if a large part of the rows is padding, as with one document or pair per row."""
        return self.padding_fraction > UNEVEN_PADDING_FRACTION

    def count_used_positions(self, index: int, epoch: int = 0) -> int:
        """Return the number of positions of row `index` that are not padding."""
        return sum(self.list_document_lengths(index))

    def list_document_lengths(self, index: int, epoch: int = 0) -> tuple[int, ...]:
        """Return the positions of each piece of row `index`."""
        return tuple(num_positions for _, num_positions in self.iterate_pieces(index))

    def iterate_pieces(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield the first token and the number of positions of each piece of a row."""
        row = slice(
            int(self.packing.row_starts_R1[index]), int(self.packing.row_starts_R1[index + 1])
        )
        yield from zip(
            self.packing.piece_starts_P[row].tolist(),
            self.packing.piece_lengths_P[row].tolist(),
            strict=True,
        )

    def get_sample(self, index: int, epoch: int = 0) -> Sample:
        """Return row `index`; `epoch` has no effect."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        length = self.sequence_length
        input_ids = np.zeros(length, dtype=np.int64)
        labels = np.full(length, IGNORED_LABEL, dtype=np.int64)
        positions = np.zeros(length, dtype=np.int64)
        document_ids = np.zeros(length, dtype=np.int64)
        weights = None if self.weights is None else np.ones(length, dtype=np.float32)
        offset = number = 0
        for number, (start, num_positions) in enumerate(self.iterate_pieces(index), start=1):
            span = slice(offset, offset + num_positions)
            input_ids[span] = self.tokens[start : start + num_positions]
            labels[span] = self.tokens[start + 1 : start + num_positions + 1]
            if self.supervised_mask is not None:
                labels[span][self.supervised_mask[start + 1 : start + num_positions + 1] == 0] = (
                    IGNORED_LABEL
                )
            if self.weights is not None and weights is not None:
                weights[span] = self.weights[start + 1 : start + num_positions + 1]
            positions[span] = np.arange(num_positions)
            document_ids[span] = number - 1
            offset += num_positions
        if self.is_unpacked:
            # RoPE variants that depend on the length (longrope) read the last position.
            positions[offset:] = offset - 1
            return Sample(input_ids, labels, positions, None, weights, length - offset)
        positions[offset:] = np.arange(length - offset)
        document_ids[offset:] = number
        return Sample(input_ids, labels, positions, document_ids, weights, length - offset)
