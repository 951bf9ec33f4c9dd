"""Split of packed rows over context ranks by the attention work of their documents.

Legend: B sequences, T tokens of a row, C chunks of a row.
"""

from __future__ import annotations

import numpy as np

from shardwright.placement.row_assignment import assign_by_work


def assign_chunks_by_work(work_C: np.ndarray, degree: int) -> tuple[tuple[int, ...], ...]:
    """Return the chunks of each rank, in ascending order: as many for each, of similar work.

    Args:
        work_C: work of each chunk; `degree` divides their number.
    """
    return tuple(tuple(sorted(chunks)) for chunks in assign_by_work(work_C.tolist(), degree))


def count_visible_keys(
    document_ids_BT: np.ndarray, windows: tuple[int | None, ...], num_chunks: int
) -> np.ndarray:
    """Count the keys that the queries of each chunk see, over all rows and layers, `[C]`.

    Args:
        document_ids_BT: documents of each row, contiguous.
        windows: window of each layer, in tokens; None for a layer without one.
    """
    num_rows, num_tokens = document_ids_BT.shape
    indices_T = np.arange(num_tokens)
    is_first_BT = np.ones((num_rows, num_tokens), dtype=bool)
    is_first_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    first_BT = np.maximum.accumulate(np.where(is_first_BT, indices_T, 0), axis=1)
    seen_BT = indices_T - first_BT + 1
    keys_T = np.zeros(num_tokens)
    for window in set(windows):
        visible_BT = seen_BT if window is None else np.minimum(seen_BT, window)
        keys_T += windows.count(window) * visible_BT.sum(0)
    return keys_T.reshape(num_chunks, -1).sum(1)
