"""Rates of direct I/O in the folder of scratch files, and their limits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardwright.checkpoint.disk import LOCAL_DISK, Disk
from shardwright.config.offload import DEFAULT_BUFFER_BYTES
from shardwright.doctor.finding import Finding, Verdict, format_ranks
from shardwright.doctor.storage import SECTION, find_existing_folder
from shardwright.hardware.file_systems import classify_file_system, read_file_system
from shardwright.offload.disk_store import allocate_buffer
from shardwright.units import GIB_BYTES

QUANTITY = "scratch files"
_MAX_FILE_BYTES = GIB_BYTES
_MAX_FREE_SHARE = 0.1
"""Share of the free space that all ranks of a node may use for a moment."""
_SLOW_BYTES_PER_SECOND = 500e6
"""Rate in each direction below which offloaded moments wait: 8 GB for each 10^9 parameters of AdamW
take 16 s."""


@dataclass(frozen=True)
class ScratchRate:
    """Rates of one rank, in bytes per second, while all ranks of its node measure."""

    path: str
    file_system: str = ""
    read_bytes_per_second: float = 0.0
    write_bytes_per_second: float = 0.0
    both_bytes_per_second: float = 0.0
    """Rate of each direction while both are busy."""
    has_direct_io: bool = True
    num_bytes: int = 0
    """Size of the file, which is smaller on a slow or full disk."""
    problem: str = ""


def measure_scratch(
    folder: str,
    *,
    num_local_ranks: int = 1,
    max_seconds: float = 4.0,
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    disk: Disk = LOCAL_DISK,
) -> ScratchRate:
    """Measure sequential writes, reads and both at once, as offloading does them.

    The file has no name, so nothing remains of it. Of each part one buffer is moved at least.

    Args:
        max_seconds: Time limit of all three parts together.
    """
    path = find_existing_folder(Path(folder))
    try:
        descriptor = disk.create_scratch(path)
        try:
            return _measure(
                path,
                descriptor,
                min(
                    _MAX_FILE_BYTES,
                    int(_read_free_bytes(path) * _MAX_FREE_SHARE) // num_local_ranks,
                ),
                max_seconds / 3,
                buffer_bytes,
                disk,
            )
        finally:
            disk.close(descriptor)
    except OSError as error:
        return ScratchRate(str(path), problem=error.strerror or str(error))


def _read_free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _measure(
    path: Path, descriptor: int, max_bytes: int, part_seconds: float, buffer_bytes: int, disk: Disk
) -> ScratchRate:
    num_blocks = max(2, max_bytes // buffer_bytes)
    disk.reserve(descriptor, num_blocks * buffer_bytes)
    has_direct_io = disk.bypass_cache(descriptor, True)
    buffers = [allocate_buffer(buffer_bytes, is_pinned=False) for _ in range(2)]
    source, target = (buffer.numpy() for buffer in buffers)
    source[:] = 1  # pages of zeros may be stored as holes
    write = partial(disk.write_at, descriptor, source.data)
    read = partial(disk.read_at, descriptor, target.data)
    num_written, write_seconds = _repeat(write, range(num_blocks), buffer_bytes, part_seconds)
    num_read, read_seconds = _repeat(read, range(num_written), buffer_bytes, part_seconds)
    half = max(1, num_written // 2)
    with ThreadPoolExecutor(2) as threads:
        parts = [
            threads.submit(_repeat, work, blocks, buffer_bytes, part_seconds)
            for work, blocks in ((read, range(half)), (write, range(half, max(2 * half, 2))))
        ]
        both = min(num * buffer_bytes / seconds for num, seconds in (p.result() for p in parts))
    return ScratchRate(
        str(path),
        read_file_system(path),
        num_read * buffer_bytes / read_seconds,
        num_written * buffer_bytes / write_seconds,
        both,
        has_direct_io,
        num_blocks * buffer_bytes,
    )


def _repeat(
    work: Callable[[int], None], blocks: range, block_bytes: int, max_seconds: float
) -> tuple[int, float]:
    """Do the work at each block until the time is over; return how many, and the seconds."""
    start_seconds = time.perf_counter()
    num_done = 0
    for block in blocks:
        work(block * block_bytes)
        num_done += 1
        if time.perf_counter() - start_seconds > max_seconds:
            break
    return num_done, time.perf_counter() - start_seconds


def judge_scratch(rates: Mapping[int, ScratchRate], hosts: Mapping[int, str]) -> list[Finding]:
    """Judge the folder of scratch files: errors, file system, direct I/O and speed."""
    if not rates:
        return []
    failed = {rank: rate for rank, rate in rates.items() if rate.problem}
    if failed:
        rank, rate = min(failed.items())
        return [
            Finding(
                SECTION,
                QUANTITY,
                "fail",
                f"{format_ranks(failed)} cannot write to {rate.path} ({hosts[rank]}): "
                f"{rate.problem}",
                "Set offload.dir to a writable folder on a local disk with free space",
            )
        ]
    slowest = min(rates.values(), key=lambda rate: rate.both_bytes_per_second)
    value = (
        f"{slowest.path}: {slowest.read_bytes_per_second / 1e9:.3g} GB/s read, "
        f"{slowest.write_bytes_per_second / 1e9:.3g} GB/s written, "
        f"{slowest.both_bytes_per_second / 1e9:.3g} GB/s in each direction at once"
    )
    kinds = {rate.file_system: classify_file_system(rate.file_system) for rate in rates.values()}
    network, memory = (
        next((name for name, kind in kinds.items() if kind == wanted), "")
        for wanted in ("network", "memory")
    )
    remedy = ""
    if network:
        remedy = f"This is a network file system ({network}): set offload.dir to a local disk"
    elif memory:
        remedy = f"This is host memory ({memory}): offload to `host`, or set offload.dir to a disk"
    elif not all(rate.has_direct_io for rate in rates.values()):
        remedy = "No direct I/O here: transfers take host memory and time; use another file system"
    elif slowest.both_bytes_per_second < _SLOW_BYTES_PER_SECOND:
        remedy = (
            "A slow disk: offload to `host`, set offload.dir to an NVMe disk, or take larger "
            "batches, so that steps are longer than transfers"
        )
    verdict: Verdict = "warn" if remedy else "pass"
    numbers = {
        "path": slowest.path,
        "read_bytes_per_second": slowest.read_bytes_per_second,
        "write_bytes_per_second": slowest.write_bytes_per_second,
        "both_bytes_per_second": slowest.both_bytes_per_second,
        "file_system": slowest.file_system,
    }
    return [Finding(SECTION, QUANTITY, verdict, value, remedy, numbers)]
