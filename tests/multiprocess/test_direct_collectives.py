"""Gathers and reduce-scatters by messages over gloo, against sums of all ranks' tensors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.parallel import direct_collectives
from shardwright.parallel.direct_collectives import (
    all_gather_single,
    observe_collectives,
    reduce_scatter_single,
)
from shardwright.rehearsal.collective_recorder import CollectiveRecorder
from shardwright.training.step import accumulate_gradients
from shardwright.watchdog.flight_recorder import record_collectives
from shardwright.watchdog.heartbeat import HeartbeatWriter, read_heartbeat
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_layouts import build, micro_batches

SIZES = (2, 3, 4)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def draw(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Draw a rank's tensor, `[size, 5, 3]`: whole numbers, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, (size, 5, 3), generator=generator).to(dtype)


def scatter_sums(
    size: int, dtype: torch.dtype, is_source_free: bool
) -> tuple[Tensor, bool, list[str]]:
    """Return this rank's sums, whether its source is unchanged, and the recorded calls."""
    source = draw(dist.get_rank(), size, dtype)
    before = source.clone()
    output = torch.empty(5, 3, dtype=dtype)
    with CollectiveRecorder() as recorder:
        reduce_scatter_single(output, source, is_source_free=is_source_free)
    calls = [f"{call.kind} {call.num_bytes} {call.ranks}" for call in recorder.collectives]
    return output, torch.equal(source, before), calls


@pytest.mark.parametrize("is_source_free", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_each_rank_receives_the_sum_of_its_part(
    gloo_ranks: RankPool, size: int, dtype: torch.dtype, is_source_free: bool
) -> None:
    sums = torch.stack([draw(rank, size, dtype) for rank in range(size)]).sum(0)
    results = gloo_ranks.run(size, scatter_sums, size, dtype, is_source_free)
    for rank, (output, is_unchanged, calls) in enumerate(results):
        assert torch.equal(output, sums[rank].to(dtype))
        assert is_unchanged or is_source_free
        num_bytes = size * output.numel() * output.element_size()
        assert calls == [f"reduce_scatter {num_bytes} {tuple(range(size))}"]


def gather_parts(size: int, dtype: torch.dtype, is_part: bool, is_async: bool) -> Tensor:
    """Return the gathered parts, from a source of its own or in place."""
    output = torch.zeros(size, 5, 3, dtype=dtype)
    rank = dist.get_rank()
    source = output[rank] if is_part else torch.empty(5, 3, dtype=dtype)
    source.copy_(draw(rank, 1, dtype)[0])
    work = all_gather_single(output, source, async_op=is_async)
    assert (work is not None) == is_async
    if work is not None:
        later = all_gather_single(torch.empty_like(output), source, async_op=True)
        work.wait()
        later.wait()
    return output


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_receive_all_parts(
    gloo_ranks: RankPool, size: int, dtype: torch.dtype, is_part: bool, is_async: bool
) -> None:
    expected = torch.cat([draw(rank, 1, dtype) for rank in range(size)])
    for output in gloo_ranks.run(size, gather_parts, size, dtype, is_part, is_async):
        assert torch.equal(output, expected)


def reduce_otherwise() -> tuple[Tensor, Tensor, Tensor]:
    """Return a maximum, an asynchronous sum and a sum of nothing over two ranks."""
    rank = dist.get_rank()
    source = torch.tensor([1.0, 4.0]) if rank == 0 else torch.tensor([3.0, 2.0])
    with patch.object(direct_collectives, "_send", side_effect=AssertionError("no messages")):
        largest = torch.empty(1)
        reduce_scatter_single(largest, source, dist.ReduceOp.MAX)
        total = torch.empty(1)
        reduce_scatter_single(total, source, async_op=True).wait()
        nothing = torch.empty(0)
        reduce_scatter_single(nothing, torch.empty(0))
        all_gather_single(torch.empty(0), nothing)
    return largest, total, nothing


def test_other_reductions_are_left_to_the_backend(gloo_ranks: RankPool) -> None:
    results = gloo_ranks.run(2, reduce_otherwise)
    assert [(largest.item(), total.item()) for largest, total, _ in results] == [(3, 4), (4, 6)]


def record_heartbeat(folder: Path) -> list[str]:
    """Return what the watchdog records of three collectives, of which messages run two."""
    heartbeat = HeartbeatWriter(folder, dist.get_rank(), 2)
    x = torch.ones(4)
    with record_collectives(heartbeat, folder, observe_others=observe_collectives):
        dist.all_reduce(x)
        all_gather_single(torch.empty(8), x)
        reduce_scatter_single(x[:2], torch.ones(4))
    all_gather_single(torch.empty(8), x)  # not recorded
    view = read_heartbeat(folder / f"rank-{dist.get_rank()}.pulse")
    assert view is not None
    assert view.wait_start_seconds is None
    heartbeat.close()
    return [f"{entry} {view.channels[entry.channel_key].ranks}" for entry in view.entries]


def test_the_watchdog_records_collectives_and_not_their_messages(
    gloo_ranks: RankPool, tmp_path: Path
) -> None:
    for entries in gloo_ranks.run(2, record_heartbeat, tmp_path):
        assert entries == [
            "all_reduce #1 (4 elements) (0, 1)",
            "all_gather #2 (8 elements) (0, 1)",
            "reduce_scatter #3 (2 elements) (0, 1)",
        ]


def count_messages(layout: Layout) -> tuple[int, Counter[str]]:
    """Count the messages and the collectives of one step."""
    model = build(layout, PrecisionSection(kind="fp32"))
    send = direct_collectives._send
    with (
        patch.object(direct_collectives, "_send", side_effect=send) as sent,
        CollectiveRecorder() as recorder,
    ):
        accumulate_gradients(model, micro_batches(dist.get_rank()), seed=0, step=0)
    return sent.call_count, Counter(call.kind for call in recorder.collectives)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2, zero_stage=1),
        Layout(dp_shard=2, zero_stage=3),
        Layout(cp=2, cp_method="ring", zero_stage=2),
    ],
)
def test_shards_are_gathered_and_summed_by_messages(gloo_ranks: RankPool, layout: Layout) -> None:
    for num_sent, calls in gloo_ranks.run(2, count_messages, layout):
        assert num_sent == calls["all_gather"] + calls["reduce_scatter"] > 0
