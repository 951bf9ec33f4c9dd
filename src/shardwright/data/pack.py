"""Documents laid side by side in rows of fixed length, such that none sees another.

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

from shardwright.data.dataset import IGNORED_LABEL, Int64Array, Sample, TokenArray
from shardwright.errors import DataError

Overlong = Literal["cut", "drop", "refuse"]
UNEVEN = 0.05
"""From which share of free positions on rows are told by their length."""
_PIECES_AT_A_TIME = 1 << 16


@dataclass(frozen=True)
class Packing:
    """Which stretch of the tokens lies where. Row r holds the pieces from row_starts_R1[r] to row_starts_R1[r + 1].

    `num_cut` documents lie in several pieces and `num_dropped` in none, because they are longer than a row; `num_unsupervised`
    pieces of cut documents are left out, because nothing in them is learnt.
    """

    piece_starts_P: npt.NDArray[np.int64]
    piece_lengths_P: npt.NDArray[np.int64]
    row_starts_R1: npt.NDArray[np.int64]
    num_cut: int = 0
    num_dropped: int = 0
    num_unsupervised: int = 0
    num_supervised: int = 0

    @property
    def num_rows(self) -> int:
        """Rows."""
        return len(self.row_starts_R1) - 1

    def save(self, path: Path) -> None:
        """Write one file."""
        counts = np.array([self.num_cut, self.num_dropped, self.num_unsupervised, self.num_supervised], dtype=np.int64)
        np.savez(path, starts=self.piece_starts_P, lengths=self.piece_lengths_P, rows=self.row_starts_R1, counts=counts)

    @classmethod
    def load(cls, path: Path) -> Packing:
        """Read it."""
        with np.load(path, allow_pickle=False) as content:
            return cls(content["starts"], content["lengths"], content["rows"], *map(int, content["counts"]))


def pack_documents(
    documents: npt.NDArray[np.uint64],
    sequence_length: int,
    *,
    supervised: npt.NDArray[np.uint8] | None = None,
    overlong: Overlong = "cut",
    alone: bool = False,
) -> Packing:
    """Lay documents into rows, longest first, each into the fullest row that still has room (best-fit decreasing).

    `documents` are the starts of the documents and the end of the last. A document of n tokens has n - 1 predictions and
    takes as many positions; one longer than a row is cut into whole rows and a rest, or dropped. Documents that fit are never
    cut. A function of its arguments alone. Source: Ding et al., Fewer Truncations Improve Language Modeling, ICML 2024, section 3.

    Args:
        supervised: a 1 for each token that is learnt, from token 0 on; None is all. Pieces without any are left out.
        overlong: what becomes of documents longer than a row.
        alone: a row for each piece, in the documents' order; nothing is packed.

    Raises:
        DataError: a document is longer than a row and `overlong` is `refuse`.
    """
    firsts = documents.astype(np.int64)
    predictions = np.maximum(np.diff(firsts) - 1, 0)
    too_long = predictions > sequence_length
    if overlong == "refuse" and too_long.any():
        raise DataError(
            "documents are longer than a row",
            field="data.overlong",
            got=f"{int(too_long.sum())} of {len(predictions)} documents, the longest of {int(predictions.max()) + 1} tokens",
            allowed=f"{sequence_length + 1} tokens: training.sequence_length and a label",
            remedy="Raise training.sequence_length, or set data.overlong to cut or drop",
        )
    if overlong == "drop":
        predictions = np.where(too_long, 0, predictions)
    starts, lengths = _pieces(firsts[:-1], predictions, sequence_length)
    learnt = lengths if supervised is None else _count_supervised(supervised, starts, lengths)
    num_unsupervised = int(np.count_nonzero(learnt == 0))
    num_supervised = int(learnt.sum())
    starts, lengths = starts[learnt > 0], lengths[learnt > 0]
    rows = [[piece] for piece in range(len(lengths))] if alone else _best_fit(lengths, sequence_length)
    order = np.fromiter((piece for row in rows for piece in row), dtype=np.int64, count=len(lengths))
    row_starts = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    num_too_long = int(too_long.sum())
    cut, dropped = (0, num_too_long) if overlong == "drop" else (num_too_long, 0)
    return Packing(starts[order], lengths[order], row_starts, cut, dropped, num_unsupervised, num_supervised)


def _best_fit(lengths: Int64Array, sequence_length: int) -> list[list[int]]:
    """The pieces of each row."""
    rows: list[list[int]] = []
    # rows_with[room] are the rows that have so many free positions; bit `room` of `some` is set where there is one.
    rows_with: list[list[int]] = [[] for _ in range(sequence_length + 1)]
    some = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = some >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_with[room].pop()
            if not rows_with[room]:
                some ^= 1 << room
            rows[row].append(piece)
        else:
            room, row = sequence_length, len(rows)
            rows.append([piece])
        left = room - length
        if left:
            rows_with[left].append(row)
            some |= 1 << left
    return rows


def _count_supervised(supervised: npt.NDArray[np.uint8], starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """Learnt labels of each piece: those of the tokens behind its inputs."""
    counts = np.zeros(len(starts), dtype=np.int64)
    for first in range(0, len(starts), _PIECES_AT_A_TIME):
        here = slice(first, first + _PIECES_AT_A_TIME)
        low, high = int(starts[here].min()), int((starts[here] + lengths[here]).max())
        running = np.cumsum(supervised[low + 1 : high + 1], dtype=np.int64)
        running = np.concatenate([[0], running])
        counts[here] = running[starts[here] + lengths[here] - low] - running[starts[here] - low]
    return counts


def _pieces(first_tokens: Int64Array, predictions: Int64Array, sequence_length: int) -> tuple[Int64Array, Int64Array]:
    """First token and number of predictions of every piece, in document order."""
    num_pieces = -(-predictions // sequence_length)
    total = int(num_pieces.sum())
    first_of_document = np.cumsum(num_pieces) - num_pieces
    number = np.arange(total) - np.repeat(first_of_document, num_pieces)
    starts = np.repeat(first_tokens, num_pieces) + number * sequence_length
    lengths = np.minimum(np.repeat(predictions, num_pieces) - number * sequence_length, sequence_length)
    return starts, lengths


@dataclass(frozen=True)
class PackedDataset:
    """Rows of packed documents.

    With `alone` a row is one piece and has no document ids: causal attention sees nothing behind a token anyway, and needs no mask.

    Within a piece, positions count from 0 and labels are the next tokens of the same document; the last position of a
    document predicts its end-of-text token, and nothing predicts the first token of the next document. Free positions at
    the end of a row have an id of their own and supervise nothing. The rows are the same in every epoch.

    `supervised`: a 1 for each token that is learnt; None is all. `weights`: of each token's loss; None is 1.
    """

    tokens: TokenArray
    packing: Packing
    sequence_length: int
    supervised: npt.NDArray[np.uint8] | None = None
    weights: npt.NDArray[np.float32] | None = None
    alone: bool = False

    def __len__(self) -> int:
        return self.packing.num_rows

    @property
    def num_supervised(self) -> int:
        """Tokens predicted in one pass."""
        return self.packing.num_supervised

    @cached_property  # asked for in every step, over all pieces
    def padding_fraction(self) -> float:
        """Share of positions that hold no document."""
        return 1.0 - int(self.packing.piece_lengths_P.sum()) / max(1, len(self) * self.sequence_length)

    @property
    def is_uneven(self) -> bool:
        """Whether much of the rows is free: a document or a pair each, as long as it happens to be."""
        return self.padding_fraction > UNEVEN

    def num_used(self, index: int, epoch: int = 0) -> int:
        """Positions of row `index` that hold a document."""
        return sum(num_positions for _, num_positions in self.pieces(index))

    def pieces(self, index: int) -> Iterator[tuple[int, int]]:
        """First token and number of positions of each piece of a row."""
        row = slice(int(self.packing.row_starts_R1[index]), int(self.packing.row_starts_R1[index + 1]))
        yield from zip(self.packing.piece_starts_P[row].tolist(), self.packing.piece_lengths_P[row].tolist(), strict=True)

    def sample(self, index: int, epoch: int = 0) -> Sample:
        """Row `index`, of any epoch."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        length = self.sequence_length
        input_ids, labels = np.zeros(length, dtype=np.int64), np.full(length, IGNORED_LABEL, dtype=np.int64)
        positions, document_ids = np.zeros(length, dtype=np.int64), np.zeros(length, dtype=np.int64)
        weights = None if self.weights is None else np.ones(length, dtype=np.float32)
        at = number = 0
        for number, (start, num_positions) in enumerate(self.pieces(index), start=1):
            here = slice(at, at + num_positions)
            input_ids[here] = self.tokens[start : start + num_positions]
            labels[here] = self.tokens[start + 1 : start + num_positions + 1]
            if self.supervised is not None:
                labels[here][self.supervised[start + 1 : start + num_positions + 1] == 0] = IGNORED_LABEL
            if self.weights is not None and weights is not None:
                weights[here] = self.weights[start + 1 : start + num_positions + 1]
            positions[here] = np.arange(num_positions)
            document_ids[here] = number - 1
            at += num_positions
        if self.alone:
            # Frequencies that go by a document's length (longrope) read it off the last position.
            positions[at:] = at - 1
            return Sample(input_ids, labels, positions, None, weights, length - at)
        positions[at:] = np.arange(length - at)
        document_ids[at:] = number
        return Sample(input_ids, labels, positions, document_ids, weights, length - at)
