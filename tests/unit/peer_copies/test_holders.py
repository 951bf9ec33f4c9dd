"""Choice of the ranks that keep the copies."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import LayoutError
from shardwright.peer_copies.holders import choose_holders


@given(st.lists(st.integers(0, 4), min_size=2, max_size=40))
def test_no_node_keeps_the_copies_of_its_own_ranks(nodes: list[int]) -> None:
    sizes = Counter(nodes)
    largest = max(sizes.values())
    if len(sizes) > 1 and 2 * largest > len(nodes):
        with pytest.raises(LayoutError, match=f"has {largest} of {len(nodes)} ranks") as error:
            choose_holders(nodes)
        assert error.value.field == "elastic.peer_copies"
        return
    holders = choose_holders(nodes)
    assert sorted(holders) == list(range(len(nodes)))  # each keeps one copy
    for rank, holder in enumerate(holders):
        assert rank != holder
        assert len(sizes) == 1 or nodes[rank] != nodes[holder]
