"""Simulated memory of nanotron's runs: which tensors count, and what the host leaves unreleased."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from shardwright.planner.published.measurements import (
    PublishedRun,
    extract_configuration,
    read_published_run,
)
from shardwright.planner.published.nanotron_allocations import (
    NanotronRank,
    simulate_reserved_bytes,
)
from shardwright.planner.published.nanotron_memory import has_simulated_memory
from shardwright.planner.published.predictions import (
    compute_reported_memory_bytes,
    predict_published_run,
)
from shardwright.units import GIB_BYTES
from tests.unit.planner.published.rows import ROW

RANK = NanotronRank(
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    key_value_share=1.0,
    vocab_size=131072,
    is_tied=False,
    num_layers=8,
    tp=1,
    pp=4,
    data_ranks=8,
    zero_stage=1,
    sequence_length=4096,
    micro_batch_size=1,
    num_micro_batches=16,
)
SEQUENCE = 4096 * 4096 * 2
TABLE_ROW = {
    "source_group": "nanotron-ultrascale",
    "source": "nanotron",
    "gpu": "H100-80GB-SXM",
    "model_name": "nanotron-llama",
    "layers": "28",
    "hidden": "3072",
    "heads": "32",
    "kv_heads": "32",
    "ffn_hidden": "8192",
    "vocab": "131072",
    "seq_len": "4096",
    "params_b": "",
    "dp": "",
    "sequence_parallel": "",
    "notes": "tied embeddings",
    "mem_metric": "torch max_memory (alloc or reserved not stated), GiB, logging rank",
}


def simulate(rank: NanotronRank, capacity_bytes: float = inf, *, runs_ahead: bool = False) -> float:
    return simulate_reserved_bytes(rank, capacity_bytes, runs_ahead=runs_ahead)


def read_run(**changes: object) -> PublishedRun:
    row = ROW | TABLE_ROW | {name: str(value) for name, value in changes.items()}
    return read_published_run("row", extract_configuration(row))


def report_gib(**changes: object) -> float:
    run = read_run(**changes)
    return compute_reported_memory_bytes(run, predict_published_run(run)) / GIB_BYTES


def test_each_micro_batch_in_flight_saves_its_activations() -> None:
    # Eight layers of three residual and norm tensors, one more norm, queries with keys and values,
    # their copies, attention, and gate, up, activation and product; log sums, an output.
    layer = SEQUENCE * (4 + 3 + 2 + 1 + 4 * 3.5) + 4 * 4096 * 32
    grown = simulate(replace(RANK, pp=5)) - simulate(RANK)
    assert grown == pytest.approx(8 * layer + SEQUENCE, rel=0.02)


def test_the_gather_of_weights_needs_contiguous_memory_of_its_own() -> None:
    weights = 2 * sum(RANK.list_parameters())
    alone, two = (simulate(replace(RANK, data_ranks=ranks)) for ranks in (1, 2))
    sharded = alone - 6 * weights / 2  # fp32 weights and two moments
    assert two > sharded + 0.5 * weights


def test_memory_that_does_not_suffice_is_released_in_the_update() -> None:
    whole = simulate(RANK)
    assert simulate(RANK, whole - GIB_BYTES) < whole - GIB_BYTES


def test_a_host_that_runs_ahead_keeps_the_inputs_of_reduce_scatters() -> None:
    rank = replace(RANK, tp=16, pp=1, num_layers=32)
    num_sequences = (simulate(rank, runs_ahead=True) - simulate(rank)) / rank.sequence_bytes
    assert 45 < num_sequences < 70  # two in 40 launches


@pytest.mark.parametrize(
    ("micro_batch", "global_batch", "num_unreleased"),
    # The products of 16 layers outlast their launches: 33 sequences of the forward pass, and
    # those in the rest of the queue, (1024 - 640) / 40.
    # Of two micro-batches, no forward pass follows a backward one.
    [(16, 512, 42.6), (8, 512, 0), (16, 64, 0)],
)
def test_a_slow_device_leaves_sequences_of_two_stages(
    micro_batch: int, global_batch: int, num_unreleased: float
) -> None:
    row = {"gpus": 32, "tp": 8, "pp": 2, "micro_batch": micro_batch}
    row["global_batch"] = global_batch
    sequence_gib = micro_batch * 4096 * 3072 * 2 / GIB_BYTES
    polled = {"gpus": 256, "global_batch": 8 * global_batch}  # that release waits for the device
    difference = report_gib(**row) - report_gib(**row | polled)
    shards = 16 * (1 / 2 - 1 / 16)  # of the states; and the parts of the gather
    assert difference == pytest.approx(num_unreleased * sequence_gib, abs=shards)


def test_only_runs_that_the_simulation_describes_are_simulated() -> None:
    row = {"gpus": 32, "tp": 8, "pp": 2}
    assert has_simulated_memory(read_run(**row))
    for changes in (
        {"recompute": "full"},
        {"zero_stage": 3},
        {"mem_metric": "allocated, logging rank"},
        {"mem_metric": "reserved"},
        {"source": "torchtitan", "source_group": "torchtitan"},
    ):
        assert not has_simulated_memory(read_run(**row | changes)), changes


@pytest.mark.parametrize(
    ("changes", "measured_gib"),
    [
        ({"gpus": 64, "tp": 1, "pp": 2, "zero_stage": 0, "micro_batch": 1}, 59.6),
        ({"gpus": 128, "tp": 1, "pp": 4, "micro_batch": 1}, 27.7),
        ({"gpus": 32, "tp": 8, "pp": 2, "micro_batch": 16}, 54.4),
        ({"gpus": 128, "tp": 16, "pp": 1, "micro_batch": 2}, 6.7),
    ],
)
def test_published_runs_of_the_3_6b_model(changes: dict[str, object], measured_gib: float) -> None:
    assert report_gib(**changes | {"global_batch": 256}) == pytest.approx(measured_gib, rel=0.08)
