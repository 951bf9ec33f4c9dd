"""Limits of memory and cores: of the root that a container sees, and of groups below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwright.hardware import control_groups, host_memory
from shardwright.hardware.host_cpu import read_core_quota
from shardwright.hardware.host_memory import read_available_memory, read_total_memory

GIB = 2**30


def write_files(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Root of the control groups of a machine with 64 GiB, of which 60 are free."""
    write_files(tmp_path, {"meminfo": f"MemTotal: {64 * 2**20} kB\nMemAvailable: {60 * 2**20} kB"})
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(control_groups, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path / "groups")
    return tmp_path / "groups"


def write_memory(folder: Path, limit: object, used: int, version: int = 2) -> None:
    """Write a group's limit, and its usage, of which 1 GiB are cached files."""
    names = {1: ("limit_in_bytes", "usage_in_bytes"), 2: ("max", "current")}[version]
    prefix = {1: "total_", 2: ""}[version]
    values = dict(zip((f"memory.{name}" for name in names), (limit, used), strict=True))
    write_files(folder, values | {"memory.stat": f"anon 5\n{prefix}inactive_file {GIB}"})


def test_a_machine_without_limits(machine: Path) -> None:
    write_memory(machine / "memory", 2**63 - 4096, 50 * GIB, version=1)
    assert read_total_memory() == 64 * GIB
    assert read_available_memory() == 60 * GIB
    assert read_core_quota() is None


@pytest.mark.parametrize("path", ["/", "/path/of/the/host"])
def test_a_container_sees_its_own_group_as_the_root(machine: Path, path: str) -> None:
    (machine.parent / "membership").write_text(f"0::{path}\n")
    write_memory(machine, 8 * GIB, 7 * GIB)
    write_files(machine, {"cpu.max": "250000 100000"})
    assert read_total_memory() == 8 * GIB
    assert read_available_memory() == 2 * GIB, "1 GiB free, and 1 GiB of cached files"
    assert read_core_quota() == 2.5


def test_the_smallest_limit_of_the_groups_above_counts(machine: Path) -> None:
    (machine.parent / "membership").write_text("0::/slurm/job_7/step_0/task_1\n")
    job = machine / "slurm" / "job_7"
    write_memory(job / "step_0" / "task_1", "max", GIB)
    write_memory(job, 16 * GIB, 4 * GIB)
    write_memory(machine / "slurm", 32 * GIB, 31 * GIB)
    write_files(job, {"cpu.max": "max 100000"})
    write_files(machine / "slurm", {"cpu.max": "400000 100000"})
    assert read_total_memory() == 16 * GIB
    assert read_available_memory() == 2 * GIB
    assert read_core_quota() == 4.0


def test_version_1_has_a_group_for_each_controller(machine: Path) -> None:
    (machine.parent / "membership").write_text("4:memory:/job\n3:cpu,cpuacct:/other\n0::/\n")
    write_memory(machine / "memory" / "job", 16 * GIB, 2 * GIB, version=1)
    quota = {"cpu.cfs_quota_us": 150000, "cpu.cfs_period_us": 100000}
    write_files(machine / "cpu" / "other", quota)
    write_files(machine / "cpu", quota | {"cpu.cfs_quota_us": -1})
    assert read_total_memory() == 16 * GIB
    assert read_available_memory() == 15 * GIB
    assert read_core_quota() == 1.5
