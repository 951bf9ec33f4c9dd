"""Rows of preference pairs: the chosen response's document followed by the rejected one's.

Shapes: T tokens of a row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwright.data.dataset import Int64Array, TokenArray
from shardwright.data.packed_dataset import OverlongPolicy, PackedDataset, Packing
from shardwright.errors import DataError


def pack_pairs(
    tokens: TokenArray,
    documents: npt.NDArray[np.uint64],
    sequence_length: int,
    supervised_mask: npt.NDArray[np.uint8],
    overlong: OverlongPolicy,
) -> PackedDataset:
    """Place documents 2i and 2i + 1 in one row; a document of n tokens takes n - 1 positions.

    Args:
        documents: starts of the documents and the end of the last.
        overlong: `drop` leaves out pairs longer than a row; other values raise for them,
            because a preference applies to whole responses.

    Raises:
        DataError: a pair is longer than a row and `overlong` is not `drop`.
    """
    document_starts = documents.astype(np.int64)
    assert len(document_starts) % 2 == 1, "an odd number of documents does not make pairs"
    positions_P2 = (np.diff(document_starts) - 1).reshape(-1, 2)
    fits_P = positions_P2.sum(axis=1) <= sequence_length
    if not fits_P.all() and overlong != "drop":
        raise DataError(
            "pairs of responses are longer than a row, which must contain both",
            field="data.overlong",
            got=f"{int((~fits_P).sum())} of {len(fits_P)} pairs, the longest of "
            f"{int(positions_P2.sum(axis=1).max())} tokens",
            allowed=f"{sequence_length} tokens, training.sequence_length",
            remedy="Raise training.sequence_length, or set data.overlong: drop",
        )
    starts = document_starts[:-1].reshape(-1, 2)[fits_P].reshape(-1)
    lengths = positions_P2[fits_P].reshape(-1)
    packing = Packing(
        starts,
        lengths,
        np.arange(0, len(starts) + 1, 2, dtype=np.int64),
        num_dropped=int((~fits_P).sum()),
        num_supervised=_count_pair_supervised(supervised_mask, starts, lengths),
    )
    return PackedDataset(tokens, packing, sequence_length, supervised_mask)


def _count_pair_supervised(
    supervised_mask: npt.NDArray[np.uint8], starts: Int64Array, lengths: Int64Array
) -> int:
    return sum(
        int(np.count_nonzero(supervised_mask[a + 1 : a + n + 1]))
        for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)
    )
