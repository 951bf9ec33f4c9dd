"""Pairs of documents in rows: the chosen response's, the rejected one's behind it. What keeps packed documents apart keeps these.

Shapes: T tokens of a row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwright.data.dataset import Int64Array, TokenArray
from shardwright.data.pack import Overlong, PackedDataset, Packing
from shardwright.errors import DataError


def lay_pairs(
    tokens: TokenArray,
    documents: npt.NDArray[np.uint64],
    sequence_length: int,
    supervised: npt.NDArray[np.uint8],
    overlong: Overlong,
) -> PackedDataset:
    """Documents 2i and 2i + 1 side by side in a row; a document of n tokens takes n - 1 positions.

    Args:
        documents: starts of the documents and the end of the last.
        overlong: `drop` leaves pairs out that do not fit a row; nothing else is offered, because half a response was not compared.

    Raises:
        DataError: a pair is longer than a row and is not to be dropped.
    """
    firsts = documents.astype(np.int64)
    assert len(firsts) % 2 == 1, "an odd number of documents does not make pairs"
    positions_P2 = (np.diff(firsts) - 1).reshape(-1, 2)
    fits_P = positions_P2.sum(axis=1) <= sequence_length
    if not fits_P.all() and overlong != "drop":
        raise DataError(
            "pairs of responses are longer than a row, which holds both",
            field="data.overlong",
            got=f"{int((~fits_P).sum())} of {len(fits_P)} pairs, the longest of {int(positions_P2.sum(axis=1).max())} tokens",
            allowed=f"{sequence_length} tokens, training.sequence_length",
            remedy="Raise training.sequence_length, or leave them out (data.overlong: drop); cut responses were never compared",
        )
    starts = firsts[:-1].reshape(-1, 2)[fits_P].reshape(-1)
    lengths = positions_P2[fits_P].reshape(-1)
    packing = Packing(
        starts,
        lengths,
        np.arange(0, len(starts) + 1, 2, dtype=np.int64),
        num_dropped=int((~fits_P).sum()),
        num_supervised=_count(supervised, starts, lengths),
    )
    return PackedDataset(tokens, packing, sequence_length, supervised)


def _count(supervised: npt.NDArray[np.uint8], starts: Int64Array, lengths: Int64Array) -> int:
    return sum(int(np.count_nonzero(supervised[a + 1 : a + n + 1])) for a, n in zip(starts.tolist(), lengths.tolist(), strict=True))
