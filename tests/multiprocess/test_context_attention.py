"""Attention over context-parallel ranks against dense attention in one process: output and
gradients.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.multiprocess.context_attention import (
    Sample,
    compute_dense,
    compute_on_ranks,
    count_blocks,
    measure_traffic,
    record_order,
)
from tests.multiprocess.pool import RankPool

SAMPLES = [
    Sample(),
    Sample(kv_heads=4),
    Sample(heads=12, kv_heads=1),
    Sample(window=5),
    Sample(window=2),
    Sample(window=13, documents=True),
    Sample(documents=True),
    Sample(documents=True, broken=True),
    Sample(soft_cap=1.5),
    Sample(soft_cap=1.5, window=7, documents=True),
    Sample(dropout=True),
    Sample(dropout=True, documents=True, soft_cap=2.0),
    Sample(sinks=True),
    Sample(sinks=True, window=6, dropout=True),
    Sample(explicit=True, documents=True),
    Sample(value_width=4),
    Sample(by_work=True, documents=True, dropout=True),
    Sample(by_work=True, documents=True, broken=True, window=5, sinks=True),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_output_and_gradients_equal_dense_attention(
    ranks: RankPool, num_ranks: int, method: str, sample: Sample
) -> None:
    if method == "ulysses" and sample.by_work:
        pytest.skip("ranks of ulysses have whole rows")
    if method == "ulysses" and sample.heads % num_ranks:
        sample = replace(sample, heads=12, kv_heads={1: 1, 4: 12}.get(sample.kv_heads, 3))
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 3e-7)):
        case = replace(sample, dtype=dtype)
        for got in ranks.run(num_ranks, compute_on_ranks, case, method):
            for name, ours, expected in zip(
                ("out", "dq", "dk", "dv", "dsinks"), got, compute_dense(case), strict=False
            ):
                error = float((ours - expected).norm() / expected.norm())
                # A sink's gradient is a sum over all tokens whose terms nearly cancel.
                allowed = 3 * tolerance if name == "dsinks" else tolerance
                assert error <= allowed, f"{name} of {dtype}: {error:.1e}"


@pytest.mark.parametrize(("num_ranks", "method"), [(3, "ring"), (2, "all_gather")])
def test_passes_overlap_with_attention(ranks: RankPool, num_ranks: int, method: str) -> None:
    """Each receive starts before the block that it overlaps and is waited for after it."""
    forward = "send 0, compute, wait 0, send 1, compute, wait 1, compute"
    # Passes 2 and 4 are keys and values; 3, 5 and 6 are their gradients, one step later, the last
    # back to their owner.
    backward = (
        "send 2, compute, send 3, wait 2, send 4, compute, wait 3, send 5, "
        "wait 4, compute, wait 5, send 6, wait 6"
    )
    if method == "all_gather":
        forward = "send 0, compute, wait 0, compute"
        backward = "send 1, compute, wait 1, compute, reduce-scatter"
    for got in ranks.run(num_ranks, record_order, method):
        assert got == [forward, backward]


def test_blocks_that_no_query_sees_are_not_computed(ranks: RankPool) -> None:
    """With a window of 4 and chunks of 6, a chunk of queries sees its own keys and the chunk
    before.
    """
    for rank, got in enumerate(ranks.run(2, count_blocks, Sample(window=4))):
        assert got == (3 if rank == 0 else 4)


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bytes_sent_equal_the_formula(gloo_ranks: RankPool, num_ranks: int, method: str) -> None:
    """Each of n ranks has Q bytes of queries (and of output) and P of keys and values."""
    sample = Sample(dtype=torch.float32)
    tokens = 2 * sample.tokens // num_ranks * 8 * 4  # of both rows, 8 features of 4 bytes
    q = sample.heads * tokens
    pair = 2 * sample.kv_heads * tokens
    others = num_ranks - 1
    if method == "ulysses" and sample.kv_heads < num_ranks:
        pair = 2 * num_ranks * tokens  # a key-value head for every rank
    exchanged = others / num_ranks * (2 * q + pair)
    expected = {
        # Gradients need one pass more, back to their owner.
        "ring": [{"send": others * pair}, {"send": others * pair + num_ranks * pair}],
        "all_gather": [
            {"all_gather": others * pair},
            {"all_gather": others * pair, "reduce_scatter": others * pair},
        ],
        "ulysses": [{"all_to_all": exchanged}, {"all_to_all": exchanged}],
    }
    for got in gloo_ranks.run(num_ranks, measure_traffic, sample, method):
        assert got == expected[method]
