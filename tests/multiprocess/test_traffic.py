"""Bytes that a training step sends, counted call by call, equal the formula of each cut."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardwright.config.schema import PrecisionSection
from shardwright.layout import Layout, RankGrid
from shardwright.rehearse.collectives import Collective, Recorder, bytes_by_axis
from shardwright.train.step import accumulate_gradients
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_layouts import build, micro_batches

ACCUMULATION = 2
FLOAT = 4


def a_step(layout: Layout) -> tuple[list[Collective], int]:
    """The collectives of a third step on this rank, and the number of the model's parameters."""
    model = build(layout, PrecisionSection())
    for step in range(3):  # DDP arranges its buckets anew in the second
        with Recorder() as recorder:
            accumulate_gradients(model, micro_batches(dist.get_rank()), seed=0, step=step)
    return recorder.collectives, sum(spec.num_elements for spec in model.decoder.shape.parameters())


def sent_for_weights(calls: list[Collective], layout: Layout, rank: int) -> dict[tuple[str, str], float]:
    """Bytes by axis and kind, scalars (losses and counts) left out."""
    names = {
        group: axis for axis in ("dp_replicate", "fsdp") for group in [RankGrid(layout).group_of(rank, [axis])] if len(group) > 1
    }
    return dict(bytes_by_axis([call for call in calls if call.num_bytes > 8], lambda ranks: names[ranks]))


def ring(n: int) -> float:
    return (n - 1) / n


@pytest.mark.parametrize("ranks_in_all", [2, 3])
def test_replicated_gradients_are_summed_once_a_step(ranks: RankPool, ranks_in_all: int) -> None:
    layout = Layout(dp_replicate=ranks_in_all, bucket_size_bytes=2048)
    for rank, (calls, parameters) in enumerate(ranks.run(ranks_in_all, a_step, layout)):
        sent = sent_for_weights(calls, layout, rank)
        assert sent == {("dp_replicate", "all_reduce"): pytest.approx(2 * ring(ranks_in_all) * FLOAT * parameters)}


@pytest.mark.parametrize(
    ("stage", "gathers", "scatters"),
    # Stage 3 gathers in both passes, but for the root (embedding, head), whose weights the backward pass does not read.
    [(1, 1, 1), (2, 1, ACCUMULATION), (3, 2 * ACCUMULATION, ACCUMULATION)],
)
def test_sharded_weights_are_gathered_and_gradients_scattered(ranks: RankPool, stage: int, gathers: int, scatters: int) -> None:
    layout = Layout(dp_shard=2, zero_stage=stage)  # type: ignore[arg-type]
    for rank, (calls, parameters) in enumerate(ranks.run(2, a_step, layout)):
        sent = sent_for_weights(calls, layout, rank)
        whole = ring(2) * FLOAT * parameters
        root_bytes = ring(2) * FLOAT * 2 * 61 * 20 if stage == 3 else 0  # an embedding and a head of 61 x 20
        # FSDP2 pads uneven shards: a dimension of 27 is sent as 28.
        assert sent["fsdp", "all_gather"] == pytest.approx(gathers * whole - ACCUMULATION * root_bytes, rel=0.03)
        assert sent["fsdp", "reduce_scatter"] == pytest.approx(scatters * whole, rel=0.03)
        assert set(sent) == {("fsdp", "all_gather"), ("fsdp", "reduce_scatter")}


def test_hybrid_sums_shards_over_replicas(ranks: RankPool) -> None:
    layout = Layout(dp_replicate=2, dp_shard=2, zero_stage=3)
    for rank, (calls, parameters) in enumerate(ranks.run(4, a_step, layout)):
        sent = sent_for_weights(calls, layout, rank)
        # Deferred to the last micro-batch: once a step, and the operand is a shard.
        assert sent["dp_replicate", "all_reduce"] == pytest.approx(2 * ring(2) * FLOAT * parameters / 2, rel=0.03)


def test_an_unknown_collective_is_not_left_out_of_the_account() -> None:
    from shardwright.rehearse.collectives import describe

    with pytest.raises(AssertionError, match="unknown collective gossip"):
        describe("gossip", [torch.ones(1)])
