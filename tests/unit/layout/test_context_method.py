"""Context parallelism: chunks per rank, the choice of `auto`, and refusals with their numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.layout.context_method import assign_chunks, check_context_parallel, count_chunks

SIZES: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 4, "windows": (None, None)}


def choose_method(layout: Layout, sequence_length: int = 64, **changes: Any) -> tuple[str, str]:
    choice = check_context_parallel(layout, SimpleNamespace(**SIZES | changes), sequence_length)
    return choice.method, choice.reason


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_zigzag_balances_the_attention_pairs_of_ranks(degree: int) -> None:
    chunks = assign_chunks("ring", degree)
    assert sorted(chunk for chunks_of_rank in chunks for chunk in chunks_of_rank) == list(
        range(count_chunks("ring", degree))
    )
    assert len({sum(chunks_of_rank) for chunks_of_rank in chunks}) == 1
    assert assign_chunks("all_gather", degree) == chunks
    assert assign_chunks("ulysses", degree) == tuple((rank,) for rank in range(degree))


@pytest.mark.parametrize(
    ("layout", "changes", "method", "expected_reason"),
    [
        (Layout(cp=2), {}, "ulysses", "heads divide by 2"),
        (Layout(cp=2, tp=2), {}, "ulysses", "4 ranks of tp x cp"),
        (Layout(cp=8), {}, "ring", "heads are not divisible by 8"),
        (
            Layout(cp=4, tp=4),
            {"num_heads": 64, "num_kv_heads": 64},
            "ring",
            "16 ranks of tp x cp may not fit in one node",
        ),
        (Layout(cp=3), {"sequence_length": 66}, "ring", "heads are not divisible by 3"),
        (
            Layout(cp=3),
            {"sequence_length": 66, "windows": (8, 8, None)},
            "all_gather",
            "windows of at most a chunk (11 tokens)",
        ),
        (
            Layout(cp=3),
            {"sequence_length": 66, "windows": (8, None)},
            "ring",
            "heads are not divisible by 3",
        ),
        (Layout(cp=2, cp_method="ring"), {}, "ring", "set by layout.cp_method"),
    ],
)
def test_auto_chooses_a_method_with_a_reason(
    layout: Layout, changes: dict[str, Any], method: str, expected_reason: str
) -> None:
    chosen, reason = choose_method(layout, **changes)
    assert chosen == method
    assert expected_reason in reason


def test_one_rank_accepts_any_length() -> None:
    choose_method(Layout(), sequence_length=7)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        (
            Layout(cp=4, cp_method="ring"),
            {"sequence_length": 100},
            r"100 tokens .* 2 x cp = 8.*multiple of 8.*96 or 104",
        ),
        (
            Layout(cp=4, cp_method="ring"),
            {"sequence_length": 4},
            r"4 tokens .* = 8.*The nearest that works is 8$",
        ),
        (
            Layout(cp=4, cp_method="ulysses"),
            {"sequence_length": 62},
            r"62 tokens .* by cp = 4.*60 or 64",
        ),
        (
            Layout(cp=2, tp=4, cp_method="ring"),
            {"sequence_length": 60},
            r"60 tokens .* = 8.*56 or 64",
        ),
        (
            Layout(cp=3, cp_method="ulysses"),
            {},
            r"8 heads are not divisible by 3 .*got 3.*nearest degree that works is 2",
        ),
        (
            Layout(cp=4, tp=4, cp_method="ulysses"),
            {},
            r"2 heads \(on each of 4 tensor-parallel ranks\) are not divisible by 4",
        ),
        (
            Layout(cp=2, cp_method="ulysses"),
            {"num_heads": 6, "num_kv_heads": 3},
            r"3 key-value heads evenly over 2 .*nearest degree that works is 1; "
            r"cp_method ring and all_gather do not split heads",
        ),
    ],
)
def test_indivisible_sizes_are_refused_with_the_nearest_that_works(
    layout: Layout, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        choose_method(layout, **changes)


def test_few_key_value_heads_are_shared() -> None:
    assert choose_method(Layout(cp=8, cp_method="ulysses"), num_kv_heads=2)[0] == "ulysses"
    choose_method(Layout(cp=2, tp=4, sequence_parallel=False, cp_method="ring"), sequence_length=60)
