"""Verdicts from the measurements of ranks: groups, links, results, clocks, folders, versions. No
ranks are started.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwright.doctor.correctness import (
    CollectiveCheck,
    WrongCollectiveResult,
    build_pattern,
    judge_correctness,
)
from shardwright.doctor.examination import RankExamination, judge_missing_reports
from shardwright.doctor.finding import Finding
from shardwright.doctor.host import Host, judge_hosts
from shardwright.doctor.probe_budget import Omission, build_omission_findings
from shardwright.doctor.rates.collective_bandwidth import (
    GroupTime,
    judge_collectives,
    list_axis_groups,
    merge_group_times,
    round_message_bytes,
)
from shardwright.doctor.rates.device_rates import CopyRate
from shardwright.doctor.rates.link_bandwidth import LinkTime, judge_links, pair_ranks
from shardwright.doctor.rates.rate_findings import judge_copies, judge_matmuls
from shardwright.doctor.rendezvous import RankLocation, judge_clocks
from shardwright.doctor.software import Software, judge_software
from shardwright.doctor.storage import (
    FolderVisibility,
    OutputFolder,
    WriteResult,
    judge_visibility,
    judge_writes,
)
from shardwright.hardware import MatmulRate
from shardwright.layout import Layout
from shardwright.parallel.clock_sync import ClockOffset

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}
LOCATIONS = {rank: RankLocation(host, host, rank % 2) for rank, host in HOSTS.items()}


def list_failures(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in findings if finding.verdict != "pass"}


def make_products(tera: dict[int, float]) -> dict[int, list[MatmulRate]]:
    return {
        rank: [MatmulRate("bf16", 8192, 8192, 8192, value * 1e12)] for rank, value in tera.items()
    }


def test_products_are_compared_with_the_data_sheet_and_each_other() -> None:
    names = dict.fromkeys(range(4), "NVIDIA H100 80GB HBM3")
    assert (
        list_failures(judge_matmuls(make_products({0: 740, 1: 750, 2: 735, 3: 745}), "cuda", names))
        == {}
    )
    assert list_failures(
        judge_matmuls(make_products({0: 740, 1: 750, 2: 300, 3: 745}), "cuda", names)
    ) == {"products, bf16: slow rank 2": "fail"}
    # All ranks equal, and all far below the data sheet.
    assert list_failures(
        judge_matmuls(make_products(dict.fromkeys(range(4), 250.0)), "cuda", names)
    ) == {"products, bf16": "fail"}


def test_an_unknown_device_is_compared_with_other_ranks_only() -> None:
    assert (
        list_failures(
            judge_matmuls(make_products({0: 1.0, 1: 0.9}), "cuda", {0: "abacus", 1: "abacus"})
        )
        == {}
    )


def make_squares(gigaflops: dict[str, dict[int, float]]) -> list[MatmulRate]:
    """Return square products of one rank from GFLOP/s by precision and side."""
    return [
        MatmulRate(precision, side, side, side, 1e9 * rate)
        for precision, rates in gigaflops.items()
        for side, rate in rates.items()
    ]


EMULATING = make_squares(
    {"fp32": {128: 60, 256: 92, 512: 87, 1024: 80}, "bf16": {128: 3.0, 256: 0.7}}
)
NATIVE = make_squares({"fp32": {128: 60, 256: 92}, "bf16": {128: 200, 256: 400}})


def test_emulated_bf16_is_a_warning_with_its_ratio() -> None:
    names = {0: "", 1: ""}
    findings = judge_matmuls({0: EMULATING, 1: EMULATING}, "cpu", names)
    assert list_failures(findings) == {"products, bf16": "warn"}
    (finding,) = [each for each in findings if each.verdict == "warn"]
    assert finding.value.startswith("bf16 is emulated here, 131 times slower than fp32: use fp32")
    assert "precision: fp32" in finding.remedy
    assert finding.numbers["times_slower_than_fp32"] == pytest.approx({0: 92 / 0.7, 1: 92 / 0.7})
    assert finding.numbers["side"] == 256
    assert list_failures(judge_matmuls({0: NATIVE, 1: NATIVE}, "cpu", names)) == {}


def test_ranks_that_emulate_bf16_are_named() -> None:
    findings = judge_matmuls(
        {0: NATIVE, 1: EMULATING, 2: NATIVE}, "cpu", dict.fromkeys(range(3), "")
    )
    (finding,) = [each for each in findings if each.name == "products, bf16"]
    assert "bf16 is emulated on rank 1, 131 times slower" in finding.value
    assert finding.numbers["times_slower_than_fp32"][0] < 1


def test_wide_precisions_are_not_compared_with_fp32() -> None:
    wide = make_squares({"fp32": {256: 90}, "fp64": {256: 20}})
    assert list_failures(judge_matmuls({0: wide}, "cpu", {0: ""})) == {}


def test_ranks_are_compared_at_a_size_that_both_measured() -> None:
    first = make_squares({"fp32": {128: 10, 256: 100}})
    second = make_squares({"fp32": {128: 11}})
    (finding,) = judge_matmuls({0: first, 1: second}, "cpu", {0: "", 1: ""})
    assert finding.numbers["flops_per_second"] == pytest.approx({0: 10e9, 1: 11e9})


def test_omitted_measurements_are_named_with_the_reason() -> None:
    omissions = [
        Omission("products", "bf16 1024 x 2048 x 192", 3.0, "bf16 341 x 2048 x 192"),
        *(Omission("products", f"bf16 {m} x 512 x 512", 7.0) for m in (1, 2, 3, 4)),
        Omission("messages", "broadcast of 4.00 MiB over tp", 5.0),
        Omission("elementwise", "bf16 4096 x 64", 5.0, "bf16 512 x 64"),
    ]
    products, messages, elementwise = build_omission_findings(omissions, 120.0, 60.0)
    assert (products.section, products.verdict) == ("calibration", "warn")
    shapes = "bf16 1 x 512 x 512, bf16 2 x 512 x 512, bf16 3 x 512 x 512"
    assert f"4 omitted ({shapes} and 1 more)" in products.value
    assert "at 7.0 s per call they exceed the time limit" in products.value
    assert (
        "1 measured on a smaller problem (bf16 1024 x 2048 x 192 as bf16 341 x 2048 x 192)"
        in products.value
    )
    assert products.remedy == "Allow more time: --budget 240 --timeout 120"
    assert products.numbers["left_out"]["bf16 4 x 512 x 512"] == 7.0
    assert (messages.section, messages.verdict) == ("collectives", "warn")
    assert (elementwise.verdict, elementwise.remedy) == ("pass", "")


def test_copies_to_the_device_are_compared_with_the_bus() -> None:
    names = {0: "NVIDIA H100 80GB HBM3"}
    rates = {0: [CopyRate("memory", 2**30, 2.9e12), CopyRate("to device", 2**28, 12e9)]}
    assert list_failures(judge_copies(rates, "cuda", names, pcie_generation=5)) == {
        "copies to device": "fail"
    }
    assert list_failures(judge_copies(rates, "cuda", names, pcie_generation=3)) == {}


def make_times(
    seconds: dict[tuple[int, ...], float], kind: Any = "all_reduce", size: int = 2**28
) -> list[GroupTime]:
    return [GroupTime("tp", ranks, kind, size, value) for ranks, value in seconds.items()]


def test_bus_bandwidth_is_that_of_nccl_tests_and_is_compared_with_the_peak() -> None:
    # 256 MiB over 8 ranks in 1.25 ms: 214.7 GB/s x 7/4.
    ranks = tuple(range(8))
    (finding,) = judge_collectives(
        make_times({ranks: 1.25e-3}), {ranks: 8}, "NVIDIA H100 80GB HBM3", None
    )
    assert finding.numbers["bus_bytes_per_second"][2**28] == pytest.approx(2**28 / 1.25e-3 * 1.75)
    assert (finding.numbers["link"], finding.verdict) == ("nvlink4", "pass")
    (finding,) = judge_collectives(
        make_times({ranks: 20e-3}), {ranks: 8}, "NVIDIA H100 80GB HBM3", None
    )
    assert finding.verdict == "fail"  # 23 GB/s: traffic over PCIe
    assert "NCCL_DEBUG" in finding.remedy
    (finding,) = judge_collectives(
        make_times({ranks: 12e-3}), {ranks: 4}, "NVIDIA H100 80GB HBM3", "ib400"
    )
    assert (finding.numbers["link"], finding.verdict) == (
        "ib400",
        "pass",
    )  # two nodes: the network is the link


def test_a_group_that_is_slower_than_the_others_is_named() -> None:
    seconds = {(0, 1): 1.0, (2, 3): 1.05, (4, 5): 4.0, (6, 7): 0.98}
    findings = judge_collectives(make_times(seconds), dict.fromkeys(seconds, 2), None, None)
    assert list_failures(findings) == {"slow group of tp: ranks 4-5": "fail"}


def test_a_group_is_as_slow_as_its_slowest_member() -> None:
    fast = make_times({(0, 1): 1.0})
    slow = make_times({(0, 1): 3.0})
    assert merge_group_times({0: fast, 1: slow}) == make_times({(0, 1): 3.0})


def test_axis_groups_and_message_sizes() -> None:
    axis_groups = list_axis_groups(Layout(pp=2, dp_shard=2, tp=2, zero_stage=3))
    assert {groups.name: groups.groups[0] for groups in axis_groups} == {
        "pp": (0, 4),
        "dp_shard = fsdp": (0, 2),
        "tp": (0, 1),
        "all": tuple(range(8)),
    }
    assert [groups.name for groups in list_axis_groups(Layout(dp_shard=4, ep=2, zero_stage=3))] == [
        "dp_shard = fsdp = all",
        "efsdp",
        "ep",
    ]
    assert list_axis_groups(Layout()) == []
    assert round_message_bytes(1000, 3) == 996
    assert round_message_bytes(1, 8) == 32


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_each_pair_is_measured_once(size: int) -> None:
    rounds = pair_ranks(size)
    assert all(
        partners[partner] == rank for partners in rounds for rank, partner in partners.items()
    )
    pairs = [frozenset(pair) for partners in rounds for pair in partners.items()]
    assert all(pairs.count(pair) == 2 for pair in pairs)
    assert len(set(pairs)) == size * (size - 1) // 2
    assert len(pair_ranks(64)) == 15


def make_link_times(slow: dict[tuple[int, int], float]) -> list[LinkTime]:
    return [
        LinkTime(a, b, 10**6, slow.get((a, b), 1e-3)) for a in range(4) for b in range(4) if a != b
    ]


def test_a_slow_rank_and_a_slow_link_are_distinguished() -> None:
    locations = {rank: RankLocation("a", "a", rank) for rank in range(4)}
    assert list_failures(judge_links(make_link_times({}), locations, "cuda")) == {}
    sends = dict.fromkeys([(1, 0), (1, 2), (1, 3)], 5e-3)
    assert list_failures(judge_links(make_link_times(sends), locations, "cuda")) == {
        "slow rank 1": "fail"
    }
    receives = dict.fromkeys([(0, 3), (1, 3), (2, 3)], 2e-3)
    (finding,) = [
        each
        for each in judge_links(make_link_times(receives), locations, "cuda")
        if each.verdict != "pass"
    ]
    assert "receives" in finding.value
    assert finding.verdict == "warn"
    (finding,) = [
        each
        for each in judge_links(make_link_times({(0, 2): 1e-2}), locations, "cuda")
        if each.verdict != "pass"
    ]
    assert finding.name == "slow link 0 -> 2"
    assert "nvlink" in finding.remedy


def test_links_between_nodes_are_compared_among_themselves() -> None:
    network = {(a, b): 2e-2 for a in range(4) for b in range(4) if HOSTS[a] != HOSTS[b]}
    assert list_failures(judge_links(make_link_times(network), LOCATIONS, "cuda")) == {}
    (finding,) = [
        each
        for each in judge_links(make_link_times({**network, (0, 2): 0.2}), LOCATIONS, "cuda")
        if each.verdict != "pass"
    ]
    assert finding.name == "slow link 0 -> 2"
    assert "between a and b" in finding.remedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("num_members", [2, 3, 8, 64, 512])
def test_sums_of_the_pattern_are_exact_and_change_in_narrower_dtypes(
    dtype: torch.dtype, num_members: int
) -> None:
    patterns = [build_pattern(member, 16, dtype, num_members) for member in range(num_members)]
    total = patterns[0].clone()
    for each in patterns[1:]:
        total += each
    wide = torch.stack(
        [each.double() if dtype.is_floating_point else each for each in patterns]
    ).sum(0)
    assert torch.equal(total.double() if dtype.is_floating_point else total, wide)
    narrower = {
        torch.float32: torch.bfloat16,
        torch.float64: torch.float32,
        torch.int64: torch.float64,
    }.get(dtype)
    if narrower is not None:
        assert not torch.equal(patterns[1].to(narrower).to(dtype), patterns[1])
    if dtype != torch.bfloat16 or num_members <= 64:
        assert not torch.equal(patterns[0], patterns[1])


def test_wrong_results_name_collective_ranks_and_dtype() -> None:
    wrong = WrongCollectiveResult("all_reduce", "float32", "tp", 1, "32 of 96 elements differ")
    results_by_rank = {
        0: [CollectiveCheck(24, ())],
        1: [CollectiveCheck(24, (wrong, replace(wrong, dtype="float64")))],
    }
    (finding,) = judge_correctness(results_by_rank)
    assert (finding.name, finding.verdict) == ("all_reduce over tp", "fail")
    assert "wrong on rank 1 in float32, float64" in finding.value
    assert list_failures(judge_correctness({0: [CollectiveCheck(24, ())]})) == {}


def test_clock_offsets_beyond_their_error_are_reported() -> None:
    small = {1: ClockOffset(0.3, 0.5), 2: ClockOffset(-0.02, 1e-4)}  # within the round-trip error
    assert list_failures(judge_clocks(small, HOSTS)) == {}
    (finding,) = judge_clocks({1: ClockOffset(1e-4, 1e-4), 2: ClockOffset(-3.0, 1e-3)}, HOSTS)
    assert finding.verdict == "warn"
    assert "rank 2: the clock of b is 3.0 s behind" in finding.value
    assert judge_clocks({2: ClockOffset(60.0, 1e-3)}, HOSTS)[0].verdict == "fail"


def test_folders_that_are_not_shared_or_writable_are_reported() -> None:
    shared = OutputFolder("run folder", "/runs", True)
    own = OutputFolder("data cache", "/cache", False)
    invisible = {
        0: [
            FolderVisibility("run folder", "/runs", (2, 3), 10.0),
            FolderVisibility("data cache", "/cache", (2, 3), 10.0),
        ]
    }
    assert list_failures(judge_visibility(invisible, [shared, own], HOSTS)) == {
        "run folder seen by all": "fail",
        "data cache seen by all": "warn",
    }
    visible = {rank: [FolderVisibility("run folder", "/runs", (), 0.1)] for rank in HOSTS}
    assert list_failures(judge_visibility(visible, [shared], HOSTS)) == {}
    writes = {
        0: [WriteResult("run folder", "/runs", 2**40, 1e9)],
        2: [WriteResult("run folder", "/runs", problem="Read-only file system")],
    }
    (finding,) = judge_writes(writes, HOSTS)
    assert "rank 2 cannot write to /runs (b): Read-only" in finding.value
    assert list_failures(
        judge_writes({0: [WriteResult("run folder", "/runs", 2**30, 1e9)]}, HOSTS)
    ) == {"run folder": "warn"}


SOFTWARE = Software({"torch": "2.13.0"}, (), ("flash", "math"), "g++", ("gloo",), False, ())


def test_ranks_with_other_versions_are_named() -> None:
    other = replace(SOFTWARE, versions={"torch": "2.12.1"})
    findings = judge_software({0: SOFTWARE, 1: SOFTWARE, 2: other})
    assert list_failures(findings) == {"same on all ranks": "fail"}
    assert any("2.12.1 on rank 2" in finding.value for finding in findings)


@pytest.mark.parametrize(
    ("change", "name", "verdict"),
    [
        (
            {"unmet_requirements": ("torch>=2.11 is required, 2.4 is installed",)},
            "versions",
            "fail",
        ),
        ({"collective_backends": ()}, "collectives", "fail"),
        ({"has_cuda": True}, "collectives", "fail"),
        ({"attention_kernels": ("math",)}, "attention", "warn"),
        ({"compiler_name": ""}, "compile", "warn"),
    ],
)
def test_missing_software_features_are_reported(
    change: dict[str, Any], name: str, verdict: str
) -> None:
    assert list_failures(judge_software({0: replace(SOFTWARE, **change)})) == {name: verdict}


HOST = Host("a", 32, None, 1.0, 2**37, 2**36, None, 2**34, 2**20, -1, 2, "performance")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"core_quota": 2.0}, "cores"),
        ({"load_average": 60.0}, "other work"),
        ({"available_bytes": 2**30}, "memory"),
        ({"max_open_files": 1024}, "open files"),
        ({"shared_memory_bytes": 64 * 2**20}, "/dev/shm"),
        ({"cpu_governor": "powersave"}, "clock governor"),
    ],
)
def test_a_host_that_is_too_small_is_reported(change: dict[str, Any], name: str) -> None:
    assert list_failures(judge_hosts({"a": (HOST, 8)}, has_cuda=False)) == {}
    assert list_failures(judge_hosts({"a": (replace(HOST, **change), 8)}, has_cuda=False)) == {
        name: "warn"
    }


def test_equal_hosts_are_reported_once() -> None:
    hosts = {name: (replace(HOST, name=name), 8) for name in ("a", "b", "c")}
    names = [finding.name for finding in judge_hosts(hosts, has_cuda=True)]
    assert names.count("cores @ a") == 1
    assert not any(name.endswith("@ b") for name in names)
    with_small_limit = hosts | {"b": (replace(HOST, name="b", max_locked_bytes=65536), 8)}
    assert list_failures(judge_hosts(with_small_limit, has_cuda=True)) == {
        "locked memory @ b": "warn"
    }


def test_silent_ranks_and_failed_stages_are_named() -> None:
    reports = {
        0: RankExamination(0, "a", failure=("collectives", "Connection closed by peer")),
        1: RankExamination(1, "a"),
    }
    findings = judge_missing_reports(reports, 3, HOSTS)
    assert list_failures(findings) == {"reports": "fail", "collectives": "fail"}
    assert "rank 2 (b)" in findings[0].value
