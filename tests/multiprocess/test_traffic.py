"""Bytes that a training step sends, counted call by call, equal the formula of each
parallelism.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout, RankGrid
from shardwright.rehearsal.collective_recorder import (
    Collective,
    CollectiveRecorder,
    sum_bytes_by_axis,
)
from shardwright.training.step import accumulate_gradients
from shardwright.verification.grid import GRID_MODELS
from tests.multiprocess.models import LLAMA
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_layouts import TOKENS, build, micro_batches

ACCUMULATION = 2
FLOAT = 4


def record_step(layout: Layout, config: dict[str, Any] = LLAMA) -> tuple[list[Collective], int]:
    """Return the collectives of a third step on this rank, and the number of the model's
    parameters.
    """
    model = build(layout, PrecisionSection(kind="fp32"), config)
    for step in range(3):  # DDP rearranges its buckets in the second
        with CollectiveRecorder() as recorder:
            accumulate_gradients(model, micro_batches(dist.get_rank()), seed=0, step=step)
    return recorder.collectives, sum(
        spec.num_elements for spec in model.decoder.shape.list_parameters()
    )


def sum_bytes_by_kind(calls: list[Collective], dtype: str = "float32") -> dict[str, float]:
    """Return sent bytes by kind, scalars excluded."""
    totals: dict[str, float] = {}
    for call in calls:
        if call.num_bytes > 8 and call.dtype == dtype:
            totals[call.kind] = totals.get(call.kind, 0.0) + call.sent_bytes
    return totals


def sum_weight_bytes(
    calls: list[Collective], layout: Layout, rank: int
) -> dict[tuple[str, str], float]:
    """Return sent bytes by axis and kind, scalars (losses and counts) excluded."""
    names = {
        group: axis
        for axis in ("dp_replicate", "fsdp")
        for group in [RankGrid(layout).group_of(rank, [axis])]
        if len(group) > 1
    }
    return dict(
        sum_bytes_by_axis(
            [call for call in calls if call.num_bytes > 8], lambda ranks: names[ranks]
        )
    )


def compute_ring_share(n: int) -> float:
    return (n - 1) / n


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_replicated_gradients_are_summed_once_a_step(gloo_ranks: RankPool, num_ranks: int) -> None:
    layout = Layout(dp_replicate=num_ranks, bucket_size_bytes=2048)
    for rank, (calls, parameters) in enumerate(gloo_ranks.run(num_ranks, record_step, layout)):
        sent = sum_weight_bytes(calls, layout, rank)
        assert sent == {
            ("dp_replicate", "all_reduce"): pytest.approx(
                2 * compute_ring_share(num_ranks) * FLOAT * parameters
            )
        }


@pytest.mark.parametrize(
    ("stage", "gathers", "scatters"),
    # Stage 3 gathers in both passes, except for the root (embedding, head): the backward pass does
    # not read its weights.
    [(1, 1, 1), (2, 1, ACCUMULATION), (3, 2 * ACCUMULATION, ACCUMULATION)],
)
def test_sharded_weights_are_gathered_and_gradients_scattered(
    gloo_ranks: RankPool, stage: int, gathers: int, scatters: int
) -> None:
    layout = Layout(dp_shard=2, zero_stage=stage)  # type: ignore[arg-type]
    for rank, (calls, parameters) in enumerate(gloo_ranks.run(2, record_step, layout)):
        sent = sum_weight_bytes(calls, layout, rank)
        whole = compute_ring_share(2) * FLOAT * parameters
        # An embedding and a head of 61 x 20.
        root_bytes = compute_ring_share(2) * FLOAT * 2 * 61 * 20 if stage == 3 else 0
        # FSDP2 pads uneven shards: a dimension of 27 is sent as 28.
        assert sent["fsdp", "all_gather"] == pytest.approx(
            gathers * whole - ACCUMULATION * root_bytes, rel=0.03
        )
        assert sent["fsdp", "reduce_scatter"] == pytest.approx(scatters * whole, rel=0.03)
        assert set(sent) == {("fsdp", "all_gather"), ("fsdp", "reduce_scatter")}


def test_hybrid_sums_shards_over_replicas(gloo_ranks: RankPool) -> None:
    layout = Layout(dp_replicate=2, dp_shard=2, zero_stage=3)
    for rank, (calls, parameters) in enumerate(gloo_ranks.run(4, record_step, layout)):
        sent = sum_weight_bytes(calls, layout, rank)
        # Deferred to the last micro-batch, so once a step; the operand is a shard.
        assert sent["dp_replicate", "all_reduce"] == pytest.approx(
            2 * compute_ring_share(2) * FLOAT * parameters / 2, rel=0.03
        )


# One micro-batch of two rows of twelve tokens through four layers, 32 wide, four heads of 8 and two
# for keys and values.
DENSE = GRID_MODELS["dense"]
MOE = GRID_MODELS["moe"]
ROWS = 2
WIDTH = 32
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 8


@pytest.mark.parametrize("degree", [2, 3])
def test_a_ring_passes_keys_and_values_twice_and_their_gradients_once(
    gloo_ranks: RankPool, degree: int
) -> None:
    layout = Layout(cp=degree, cp_method="ring")
    keys_values = 2 * ROWS * KV_HEADS * (TOKENS // degree) * HEAD_DIM * FLOAT
    # Keys and values stop before they reach their owner; gradients return to it.
    passes = 2 * (degree - 1) + degree
    for calls, parameters in gloo_ranks.run(degree, record_step, layout, DENSE):
        sent = sum_bytes_by_kind(calls)
        assert sent["send"] == ACCUMULATION * LAYERS * passes * keys_values
        assert sent["all_reduce"] == pytest.approx(
            2 * compute_ring_share(degree) * FLOAT * parameters
        )


def test_all_gather_context_sends_two_gathers_and_one_scatter(
    gloo_ranks: RankPool,
) -> None:
    whole = 2 * ROWS * KV_HEADS * TOKENS * HEAD_DIM * FLOAT
    for calls, _ in gloo_ranks.run(2, record_step, Layout(cp=2, cp_method="all_gather"), DENSE):
        sent = sum_bytes_by_kind(calls)
        assert sent["all_gather"] == ACCUMULATION * LAYERS * 2 * compute_ring_share(2) * whole
        assert sent["reduce_scatter"] == ACCUMULATION * LAYERS * compute_ring_share(2) * whole


def test_ulysses_exchanges_queries_keys_values_and_outputs_in_both_passes(
    gloo_ranks: RankPool,
) -> None:
    exchanged = (2 * HEADS + 2 * KV_HEADS) * ROWS * (TOKENS // 2) * HEAD_DIM * FLOAT
    for calls, _ in gloo_ranks.run(2, record_step, Layout(cp=2, cp_method="ulysses"), DENSE):
        assert (
            sum_bytes_by_kind(calls)["all_to_all"]
            == ACCUMULATION * LAYERS * 2 * compute_ring_share(2) * exchanged
        )


@pytest.mark.parametrize(
    ("schedule", "boundaries"), [("1f1b", 1), ("interleaved_1f1b", 3), ("zb_h1", 1), ("zbv", 2)]
)
def test_a_pipeline_sends_hidden_states_forward_and_gradients_back(
    gloo_ranks: RankPool, schedule: str, boundaries: int
) -> None:
    # Two ranks. Looped stages cross ranks at every boundary; a V crosses twice and turns within a
    # rank.
    hidden = ROWS * TOKENS * WIDTH * FLOAT
    by_rank = gloo_ranks.run(2, record_step, Layout(pp=2, schedule=schedule), DENSE)
    sent = sum(sum_bytes_by_kind(calls).get("send", 0.0) for calls, _ in by_rank)
    assert sent == ACCUMULATION * 2 * boundaries * hidden


@pytest.mark.parametrize("degree", [2, 4])
def test_tensor_parallel_layers_gather_and_scatter_the_residual_stream(
    gloo_ranks: RankPool, degree: int
) -> None:
    hidden = ROWS * TOKENS * WIDTH * FLOAT
    # Attention and feed-forward each gather and scatter, in both passes; the embedding scatters,
    # the head gathers.
    expected = ACCUMULATION * (2 * LAYERS + 1) * 2 * compute_ring_share(degree) * hidden
    for calls, _ in gloo_ranks.run(degree, record_step, Layout(tp=degree), DENSE):
        sent = sum_bytes_by_kind(calls)
        assert sent["all_gather"] - sum_vocabulary_bytes(calls, degree) == pytest.approx(expected)
        assert sent["reduce_scatter"] == pytest.approx(expected)
    for calls, _ in gloo_ranks.run(
        degree, record_step, Layout(tp=degree, sequence_parallel=False), DENSE
    ):
        # The same bytes in all-reduces: at the end of a pair of products in the forward pass, and
        # at its start in the backward pass.
        whole = [
            call.sent_bytes
            for call in calls
            if call.kind == "all_reduce" and call.num_bytes == hidden
        ]
        assert sum(whole) == pytest.approx(2 * expected)


def sum_vocabulary_bytes(calls: list[Collective], degree: int) -> float:
    """Return the bytes that the loss sends: a few numbers per token, gathered over the ranks
    that share the vocabulary.
    """
    per_token = [
        call
        for call in calls
        if call.kind == "all_gather" and call.num_bytes < ROWS * TOKENS * WIDTH * FLOAT
    ]
    assert all(call.num_bytes <= degree * 3 * ROWS * TOKENS * FLOAT for call in per_token)
    return sum(call.sent_bytes for call in per_token)


def test_experts_send_and_return_rows_in_both_passes(gloo_ranks: RankPool) -> None:
    by_rank = gloo_ranks.run(2, record_step, Layout(dp_shard=2, ep=2, zero_stage=1), MOE)
    exchanges = [
        [call for call in calls if call.kind == "all_to_all" and call.dtype == "float32"]
        for calls, _ in by_rank
    ]
    assert [len(calls) for calls in exchanges] == [ACCUMULATION * LAYERS * 4] * 2
    # Each rank sends rows and returns the other's, so both send the same total, in whole rows.
    totals = [sum(call.sent_bytes for call in calls) for calls in exchanges]
    assert totals[0] == totals[1]
    assert totals[0] % (2 * WIDTH * FLOAT) == 0
    upper_bound = (
        ACCUMULATION * LAYERS * 2 * (2 * ROWS * TOKENS * MOE["num_experts_per_tok"]) * WIDTH * FLOAT
    )
    assert 0.2 * upper_bound < totals[0] < 0.8 * upper_bound


def test_an_unknown_collective_is_an_error() -> None:
    from shardwright.rehearsal.collective_recorder import parse_operator

    with pytest.raises(AssertionError, match="unknown collective gossip"):
        parse_operator("gossip", [torch.ones(1)])
