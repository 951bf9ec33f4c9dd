"""CPU ranks without measured rates share this machine's cores and memory."""

from __future__ import annotations

import pytest

from shardwright.config import Recipe
from shardwright.config.layout import ClusterSection
from shardwright.hardware import Cluster, MeasuredProfile, host_cpu
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.hardware.host_cpu import guess_host
from shardwright.planner.auto_layout import build_cluster
from shardwright.planner.cluster_choice import choose_cluster
from shardwright.planner.problem import build_problem, build_template, choose_precision_on
from shardwright.planner.scaling import find_min_gpus
from tests.unit.planner.test_memory_settings import (
    LLAMA3_12_LAYERS,
    build_predictor,
    build_recipe,
)


def guess(monkeypatch: pytest.MonkeyPatch, node: str, num_cores: float, *, bf16: bool) -> Cluster:
    monkeypatch.setattr(host_cpu, "count_host_cores", lambda: num_cores)
    monkeypatch.setattr(host_cpu, "read_total_memory", lambda: 32 * 2**30)
    monkeypatch.setattr(host_cpu, "_has_bf16_instructions", lambda: bf16)
    return guess_host(parse_cluster(node), node)


def test_ranks_have_equal_shares_of_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    socket = parse_cluster("1xEPYC-9654").accelerator
    cluster = guess(monkeypatch, "4 x CPU", 8, bf16=True)
    rank = cluster.accelerator
    assert rank.memory_bytes == 8 * 2**30
    for precision, rate in socket.peak_flops_per_second.items():
        assert rank.peak_flops_per_second[precision] == pytest.approx(rate * 2 / 96)
    assert rank.memory_bytes_per_second == 5e10 / 4
    assert guess(monkeypatch, "2xcpu", 2, bf16=True).accelerator.memory_bytes_per_second == 1.5e10
    whole = guess(monkeypatch, "1xcpu", 96, bf16=True).accelerator
    assert whole.memory_bytes_per_second == socket.memory_bytes_per_second
    assert cluster.core_shortage is None
    crowded = guess(monkeypatch, "4xcpu", 2, bf16=True).core_shortage
    assert crowded is not None
    assert "4 ranks share the 2 cores of a host (this machine)" in crowded


def test_a_resized_cluster_shares_the_same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    four = guess(monkeypatch, "4xcpu", 8, bf16=False)
    # More ranks share it too: they need no multiple of four, and have no further memory.
    for count in (2, 6, 8):
        resized = build_cluster(ClusterSection(node="4xcpu"), count)
        expected = guess(monkeypatch, f"{count}xcpu", 8, bf16=False)
        assert (resized.gpus_per_node, resized.num_nodes) == (count, 1)
        assert resized.domain_size == count
        rank = resized.accelerator
        assert rank.memory_bytes == expected.accelerator.memory_bytes
        assert rank.peak_flops_per_second == pytest.approx(
            expected.accelerator.peak_flops_per_second
        )
    small = LLAMA3_12_LAYERS | {"num_hidden_layers": 1, "vocab_size": 1000}
    recipe = build_recipe(
        model={"config": small}, training={"sequence_length": 64, "global_batch_size": 8}
    )
    predictor = build_predictor(recipe, four)
    problem = build_problem(recipe, build_template(recipe), 4)
    assert find_min_gpus(predictor, problem) is None
    assert four.rates_source == "guessed from the 8 cores of this machine"
    assert choose_cluster(Recipe.model_construct(cluster=None), "4xcpu") == four


def test_bf16_is_emulated_without_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = guess(monkeypatch, "2xcpu", 4, bf16=False).accelerator
    peaks = rank.peak_flops_per_second
    assert peaks["bf16"] == pytest.approx(0.03 * peaks["fp32"])
    assert choose_precision_on(rank).kind == "fp32"
    with_units = guess(monkeypatch, "2xcpu", 4, bf16=True).accelerator
    assert choose_precision_on(with_units).kind == "bf16"


def test_other_clusters_are_those_of_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    for node in ("2xEPYC-9654", "8xH100-80GB"):
        assert guess(monkeypatch, node, 2, bf16=False) == parse_cluster(node)
    nodes = parse_cluster("2xcpu", num_nodes=2)
    assert guess_host(nodes, "2xcpu") is nodes
    profile = MeasuredProfile("CPU", "EPYC-9654", "today", 2**36, 2e10)
    measured = parse_cluster("2xcpu", profile=profile)
    assert guess_host(measured, "2xcpu") is measured


@pytest.mark.parametrize(("quota", "expected"), [(None, 6.0), (2.5, 2.5), (64.0, 6.0)])
def test_cores_are_those_of_the_machine_or_its_container(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: float
) -> None:
    monkeypatch.setattr(host_cpu.os, "cpu_count", lambda: 6)
    monkeypatch.setattr(host_cpu, "read_core_quota", lambda: quota)
    assert host_cpu.count_host_cores() == expected
