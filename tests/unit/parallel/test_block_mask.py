"""Tiles of chunks equal the plain definition of visibility for every pair.

Legend: B sequences, T tokens of the row, L queries, S keys.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwright.parallel.context.block_mask import RowChunks, Visibility

CPU = torch.device("cpu")


def compute_mask(tokens: int, window: int | None, ids_BT: Tensor) -> Tensor:
    """Return the mask of the keys that each query sees, shape [B, T, T]."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    visibility = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return visibility & (ids_BT[:, :, None] == ids_BT[:, None, :])


@st.composite
def draw_rows(draw: st.DrawFn) -> tuple[int, int, int | None, Tensor | None]:
    """Draw tokens per chunk, number of chunks, window and document ids of two rows."""
    chunk = draw(st.integers(1, 5))
    count = draw(st.sampled_from([1, 2, 4, 6]))
    window = draw(st.none() | st.integers(1, 30))
    if not draw(st.booleans()):
        return chunk, count, window, None
    starts = [
        torch.tensor(draw(st.lists(st.booleans(), min_size=chunk * count, max_size=chunk * count)))
        for _ in range(2)
    ]
    return chunk, count, window, torch.stack(starts).long().cumsum(1)


@settings(deadline=None, max_examples=150)
@given(row=draw_rows(), data=st.data())
def test_every_visible_pair_is_in_one_tile(
    row: tuple[int, int, int | None, Tensor | None], data: st.DataObject
) -> None:
    chunk, count, window, ids_BT = row
    tokens = chunk * count
    chunks = RowChunks.from_documents(tokens, (range(count),), ids_BT)
    if ids_BT is not None:
        from_host = RowChunks.from_documents(tokens, (range(count),), ids_BT, ids_BT.numpy())
        assert from_host.shared_documents_2CC is not None
        assert chunks.shared_documents_2CC is not None
        assert torch.equal(from_host.shared_documents_2CC, chunks.shared_documents_2CC)
    queries = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=2)))
    keys = data.draw(st.permutations(range(count)))[: data.draw(st.integers(1, count))]
    expected = compute_mask(tokens, window, torch.zeros(2, tokens) if ids_BT is None else ids_BT)
    q_L = chunks.token_indices(queries, CPU)
    k_S = chunks.token_indices(keys, CPU)
    counted = torch.zeros(2, len(q_L), len(k_S), dtype=torch.int64)
    for tile in chunks.list_tiles(queries, keys, window):
        visibility = chunks.build_visibility(tile, q_L, k_S, window)
        part = counted[:, tile.query_slice, tile.key_slice]
        if visibility.visible_BLS is not None:
            part += visibility.visible_BLS
        else:
            part += (
                torch.ones(part.shape[1:], dtype=torch.int64).tril() if visibility.is_causal else 1
            )
        assert torch.equal(visibility.key_indices_S, k_S[tile.key_slice])
    assert torch.equal(counted.bool(), expected[:, q_L][:, :, k_S])
    assert counted.max() <= 1


def test_invisible_tiles_are_omitted_and_full_tiles_have_no_mask() -> None:
    row = RowChunks.from_documents(32, (range(8),), None)
    (diagonal,) = row.list_tiles((1, 6), (1, 6), None)
    assert (diagonal.visibility, diagonal.query_slice) == (Visibility.CAUSAL, slice(0, 8))
    (before,) = row.list_tiles((1, 6), (0, 7), None)
    assert (before.visibility, before.query_slice, before.key_slice) == (
        Visibility.FULL,
        slice(0, 8),
        slice(0, 4),
    )
    (after,) = row.list_tiles((1, 6), (2, 5), None)
    assert (after.visibility, after.query_slice, after.key_slice) == (
        Visibility.FULL,
        slice(4, 8),
        slice(0, 8),
    )
    assert row.list_tiles((1, 6), (2, 4), 5) == []
    documents = RowChunks.from_documents(32, (range(8),), (torch.arange(32) // 8)[None])
    assert documents.list_tiles((1, 6), (2, 5), None) == []
    (diagonal_1, diagonal_6, whole) = documents.list_tiles((1, 6), (0, 1, 5, 6), None)
    assert [diagonal_1.visibility, diagonal_6.visibility, whole.visibility] == [
        Visibility.CAUSAL,
        Visibility.CAUSAL,
        Visibility.FULL,
    ]
