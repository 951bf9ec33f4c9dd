"""Memory that a published run of nanotron reports: what PyTorch's allocator has reserved after the
update of the third step, on the first rank (its memory columns, helpers.py)."""

from __future__ import annotations

from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.published.host_lead import count_unfinished_passes
from shardwright.planner.published.measurements import PublishedRun
from shardwright.planner.published.nanotron_allocations import (
    BACKWARD_LAUNCHES,
    FORWARD_LAUNCHES,
    QUEUE_LENGTH,
    NanotronRank,
    simulate_reserved_bytes,
)
from shardwright.units import GIB_BYTES

_DRIVER_BYTES = 1.6 * GIB_BYTES
_NODE_GROUP_BYTES = 9.0 * GIB_BYTES
"""Memory of a device that the allocator cannot have, and what tensor-parallel groups of eight or
more ranks take of it in addition. No row has reserved more than 77.1 GiB of 80, none with
such a group more than 68.2."""
_HOST_LAYER_SECONDS = 4.3e-3
"""Time in which the host launches a layer forward and backward: the least of a layer and
micro-batch among pipelines on one node, whose devices wait for it."""


def has_simulated_memory(run: PublishedRun) -> bool:
    """Return True if the simulation describes the run: a dense model, nothing recomputed."""
    candidate = run.candidate
    layout = candidate.layout
    return (
        run.framework == "nanotron"
        and run.is_first_rank_memory
        and run.memory_metric == "reserved"
        and run.shape.experts is None
        and candidate.recompute == "none"
        and candidate.adapter is None
        and layout.zero_stage <= 1
        and layout.cp == layout.ep == 1
        and layout.virtual_stages is None
        and (layout.tp == 1 or layout.sequence_parallel)
    )


def compute_reserved_bytes(run: PublishedRun, load: StageLoad) -> float:
    """Compute the reserved bytes of the first rank, which has this load.

    Sequences that the device has not read when the host frees them need memory of their own. If
    they do not fit, the allocator waits for the device and releases segments, so that the run that
    launches ahead is simulated.
    """
    rank = _build_rank(run, sum(load.layers))
    capacity = run.cluster.accelerator.memory_bytes - _DRIVER_BYTES
    if rank.tp >= run.cluster.gpus_per_node:
        capacity -= _NODE_GROUP_BYTES
    on_time = simulate_reserved_bytes(rank, capacity)
    num_unreleased = _count_unreleased_sequences(run, load, rank)
    reserved = on_time + num_unreleased * rank.sequence_bytes
    if num_unreleased and reserved > capacity:
        return simulate_reserved_bytes(rank, capacity, runs_ahead=True)
    return reserved


def _build_rank(run: PublishedRun, num_layers: int) -> NanotronRank:
    shape = run.shape
    candidate = run.candidate
    layout = candidate.layout
    return NanotronRank(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        key_value_share=shape.num_kv_heads / shape.num_heads,
        vocab_size=shape.vocab_size,
        is_tied=shape.tied_embeddings,
        num_layers=num_layers,
        tp=layout.tp,
        pp=layout.pp,
        data_ranks=layout.data_ranks,
        zero_stage=layout.zero_stage,
        sequence_length=candidate.sequence_length,
        micro_batch_size=candidate.micro_batch_size,
        num_micro_batches=candidate.gradient_accumulation_steps,
    )


def _count_unreleased_sequences(run: PublishedRun, load: StageLoad, rank: NanotronRank) -> float:
    """Count the inputs of reduce-scatters that the device has not read at the peak: two of a layer
    and one of the embedding.

    Of a pipeline, the host waits for the device with each send, so that it launches a backward and
    a forward pass in between. It is ahead if the products alone take longer than the launches.
    """
    largest = run.conventions.num_unreleased_sequences
    if rank.tp == 1 or not largest:
        return 0.0
    of_pass = 2.0 * rank.num_layers + 1.0
    num_passes = load.num_in_flight if rank.pp > 1 else None
    is_accumulated = rank.num_micro_batches > 1
    count = count_unfinished_passes(num_passes, is_accumulated=is_accumulated) * of_pass
    # Without more micro-batches than stages, no forward pass follows a backward one.
    if 1 < rank.pp < rank.num_micro_batches and _is_device_slower(run, rank):
        in_backward = max(0.0, QUEUE_LENGTH - FORWARD_LAUNCHES * rank.num_layers)
        count = max(count, of_pass + 2.0 * in_backward / BACKWARD_LAUNCHES)
    return min(largest, count)


def _is_device_slower(run: PublishedRun, rank: NanotronRank) -> bool:
    """Return True if a layer's products take longer than its launches, even at the peak rate."""
    tokens = rank.micro_batch_size * rank.sequence_length
    attention = rank.sequence_length * rank.hidden_size / rank.tp
    flops = 6.0 * tokens * (sum(rank.layer_elements) + attention)
    return flops / run.cluster.accelerator.peak_flops_per_second["bf16"] > _HOST_LAYER_SECONDS
