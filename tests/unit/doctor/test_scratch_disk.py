"""Rates of the disk that offloading uses: measured within bounds, judged, and part of profiles."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.checkpoint.disk import Disk
from shardwright.config.recipe_loading import validate_recipe
from shardwright.doctor.diagnosis import examine
from shardwright.doctor.examination import ExaminationRequest
from shardwright.doctor.rates import scratch_disk
from shardwright.doctor.rates.cluster_profile import build_profile, build_request
from shardwright.doctor.rates.scratch_disk import ScratchRate, judge_scratch, measure_scratch
from shardwright.doctor.rates.tier_rates import build_tiers
from shardwright.hardware import TierRates
from shardwright.layout import Layout

HOSTS = {0: "node-a", 1: "node-b"}
FAST = ScratchRate("/scratch", "ext4", 6e9, 5e9, 3e9, num_bytes=2**30)


class CountingDisk(Disk):
    """Disk whose operations take a time, and are recorded."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.reads: list[int] = []
        self.writes: list[int] = []

    def read_at(self, descriptor: int, data: memoryview, position: int) -> None:
        time.sleep(self.seconds)
        self.reads.append(position)
        super().read_at(descriptor, data, position)

    def write_at(self, descriptor: int, data: memoryview, position: int) -> None:
        time.sleep(self.seconds)
        self.writes.append(position)
        super().write_at(descriptor, data, position)


def test_a_slow_disk_is_measured_within_its_time_and_leaves_nothing(tmp_path: Path) -> None:
    disk = CountingDisk(0.02)
    rate = measure_scratch(
        str(tmp_path / "not-there"), max_seconds=0.3, buffer_bytes=8192, disk=disk
    )
    assert list(tmp_path.iterdir()) == []
    assert rate.path == str(tmp_path)
    for measured in (
        rate.read_bytes_per_second, rate.write_bytes_per_second, rate.both_bytes_per_second,
    ):  # fmt: skip
        assert 0.5 * 8192 / 0.02 < measured < 8192 / 0.02
    assert len(disk.writes) + len(disk.reads) < 30
    # Nothing is read that was not written, and both directions do not share a block.
    assert set(disk.reads) <= set(disk.writes)


def test_ranks_share_a_tenth_of_the_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch_disk, "_read_free_bytes", lambda path: 80 * 8192)
    sizes = [
        measure_scratch(str(tmp_path), num_local_ranks=ranks, buffer_bytes=8192).num_bytes
        for ranks in (1, 2, 8)
    ]
    assert sizes == [8 * 8192, 4 * 8192, 2 * 8192]


def test_a_disk_that_cannot_be_written_fails_with_its_folder(tmp_path: Path) -> None:
    class FullDisk(Disk):
        def reserve(self, descriptor: int, num_bytes: int, position: int = 0) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rate = measure_scratch(str(tmp_path), disk=FullDisk())
    (finding,) = judge_scratch({1: rate}, HOSTS)
    assert finding.verdict == "fail"
    assert f"rank 1 cannot write to {tmp_path} (node-b): No space left" in finding.value
    assert "offload.dir" in finding.remedy


@pytest.mark.parametrize(
    ("rate", "verdict", "remedy"),
    [
        (FAST, "pass", ""),
        (replace(FAST, both_bytes_per_second=1e8), "warn", "A slow disk"),
        (replace(FAST, file_system="nfs4"), "warn", "network file system (nfs4)"),
        (replace(FAST, file_system="tmpfs"), "warn", "host memory (tmpfs)"),
        (replace(FAST, has_direct_io=False), "warn", "No direct I/O"),
    ],
)
def test_slow_network_and_memory_file_systems_are_warned_about(
    rate: ScratchRate, verdict: str, remedy: str
) -> None:
    (finding,) = judge_scratch({0: FAST, 1: rate}, HOSTS)
    assert finding.verdict == verdict
    assert remedy in finding.remedy
    assert f"{rate.both_bytes_per_second / 1e9:.3g} GB/s in each direction" in finding.value


def test_an_examination_measures_the_folder_and_a_profile_has_its_rates(tmp_path: Path) -> None:
    request = ExaminationRequest(Layout(), device="cpu", scratch_folder=str(tmp_path))
    diagnosis = examine(request, 1)
    (finding,) = (found for found in diagnosis.findings if found.name == "scratch files")
    assert str(tmp_path) in finding.value
    tiers = build_profile(diagnosis, request).tiers
    (measured,) = diagnosis.rates["scratch"]
    assert tiers.disk_both_bytes_per_second == measured["both_bytes_per_second"] > 0
    assert tiers.disk_read_bytes_per_second == measured["read_bytes_per_second"]
    assert tiers.disk_write_bytes_per_second == measured["write_bytes_per_second"]
    (memory,) = (rate for rate in diagnosis.rates["copies"] if rate["kind"] == "memory")
    assert tiers.host_memory_bytes_per_second == memory["bytes_per_second"]
    assert tiers.host_link_bytes_per_second is None


def test_the_folder_is_that_of_the_recipe_and_measured_if_it_offloads_to_disk(
    tmp_path: Path,
) -> None:
    def find_folder(offload: dict[str, str]) -> str | None:
        recipe = validate_recipe(
            {
                "model": {"config": {"model_type": "llama"}},
                "data": {"sources": ["nowhere"]},
                "training": {"sequence_length": 8, "learning_rate": 1e-3, "max_steps": 1},
                "run": {"dir": str(tmp_path / "run")},
                "offload": offload,
            }
        )
        return build_request(recipe, Layout()).scratch_folder

    assert find_folder({}) is None
    assert find_folder({"optimizer": "host"}) is None
    assert find_folder({"optimizer": "disk"}) == str(tmp_path / "run")
    scratch = {"activations": "disk", "dir": str(tmp_path / "scratch")}
    assert find_folder(scratch) == str(tmp_path / "scratch")


def test_the_slowest_rank_decides_the_rates_of_a_profile() -> None:
    """A rank on a far NUMA node, or with a slower disk, is the one that all others wait for."""
    disks = ((4e9, 3e9, 2e9), (5e9, 1e9, 3e9), (6e9, 4e9, 4e9))
    rates = {
        "copies": [
            {"kind": kind, "bytes_per_second": rate}
            for kind, by_rank in (
                ("to device", (20e9, 24e9, 24e9)),
                ("from device", (22e9, 23e9, 23e9)),
                ("host memory", (90e9, 60e9, 80e9)),
            )
            for rate in by_rank
        ],
        "scratch": [
            {
                "read_bytes_per_second": read,
                "write_bytes_per_second": write,
                "both_bytes_per_second": both,
            }
            for read, write, both in disks
        ],
    }
    assert build_tiers(rates, "gpu") == TierRates(20e9, 60e9, 4e9, 1e9, 2e9)
    assert build_tiers({"copies": []}, "gpu") == TierRates()
