"""Blocks of chunks against the plain definition of what is seen, pair by pair.

Legend: B sequences, T tokens of the row, L queries, S keys.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwright.parallel.block_mask import RowChunks, Visibility

CPU = torch.device("cpu")


def visible(tokens: int, window: int | None, ids_BT: Tensor) -> Tensor:
    """Which key each query sees, `[B, T, T]`."""
    back = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = back >= 0 if window is None else (back >= 0) & (back < window)
    return seen & (ids_BT[:, :, None] == ids_BT[:, None, :])


@st.composite
def rows(draw: st.DrawFn) -> tuple[int, int, int | None, Tensor | None]:
    """Tokens of a chunk, number of chunks, window, document ids of two rows."""
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
@given(row=rows(), data=st.data())
def test_every_pair_that_is_seen_is_in_one_block(
    row: tuple[int, int, int | None, Tensor | None], data: st.DataObject
) -> None:
    chunk, count, window, ids_BT = row
    tokens = chunk * count
    cut = RowChunks.from_documents(tokens, count, ids_BT)
    queries = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=2)))
    keys = data.draw(st.permutations(range(count)))[: data.draw(st.integers(1, count))]
    wanted = visible(tokens, window, torch.zeros(2, tokens) if ids_BT is None else ids_BT)
    q_L = cut.token_indices(queries, CPU)
    k_S = cut.token_indices(keys, CPU)
    counted = torch.zeros(2, len(q_L), len(k_S), dtype=torch.int64)
    for block in cut.list_tiles(queries, keys, window):
        seen = cut.build_visibility(block, q_L, k_S, window)
        part = counted[:, block.query_slice, block.key_slice]
        if seen.visible_BLS is not None:
            part += seen.visible_BLS
        else:
            part += torch.ones(part.shape[1:], dtype=torch.int64).tril() if seen.is_causal else 1
        assert torch.equal(seen.key_indices_S, k_S[block.key_slice])
    assert torch.equal(counted.bool(), wanted[:, q_L][:, :, k_S])
    assert counted.max() <= 1


def test_what_nobody_sees_is_not_computed_and_what_is_seen_whole_takes_no_mask() -> None:
    row = RowChunks.from_documents(32, 8, None)
    (own,) = row.list_tiles((1, 6), (1, 6), None)
    assert (own.visibility, own.query_slice) == (Visibility.CAUSAL, slice(0, 8))
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
    documents = RowChunks.from_documents(32, 8, (torch.arange(32) // 8)[None])
    assert documents.list_tiles((1, 6), (2, 5), None) == []
    (own_1, own_6, whole) = documents.list_tiles((1, 6), (0, 1, 5, 6), None)
    assert [own_1.visibility, own_6.visibility, whole.visibility] == [
        Visibility.CAUSAL,
        Visibility.CAUSAL,
        Visibility.FULL,
    ]
