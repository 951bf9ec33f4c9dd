"""Folders that a run writes to: free space, speed with fsync, visibility from all ranks."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from shardwright.doctor.finding import Finding, Verdict, format_ranks
from shardwright.units import (
    GIB_BYTES,
    MIB_BYTES,
    format_bytes,
    format_bytes_per_second,
    format_seconds,
)

SECTION = "storage"

_PROBE_PREFIX = ".shardwright-doctor-"
_TRIAL_BYTES = MIB_BYTES
_MAX_WRITE_SECONDS = 5.0
"""Time limit of a write; a trial of 1 MiB determines the size of the file."""
_MIN_FREE_BYTES = 5 * GIB_BYTES
_SLOW_BYTES_PER_SECOND = 100e6
"""Write rate below which a disk delays every save, such as a hard disk or a full share."""


@dataclass(frozen=True)
class OutputFolder:
    """Folder of a run; if `is_shared`, all ranks write to it and all nodes must share it."""

    purpose: str
    path: str
    is_shared: bool


@dataclass(frozen=True)
class WriteResult:
    """Write test of a folder on one rank: path, free bytes, bytes/s with fsync, error."""

    purpose: str
    path: str
    free_bytes: int = 0
    bytes_per_second: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class FolderVisibility:
    """Ranks whose files a rank did not see in a folder, and seconds until it saw the others."""

    purpose: str
    path: str
    missing_ranks: tuple[int, ...]
    seconds: float
    problem: str = ""


def find_existing_folder(path: Path) -> Path:
    """Find the folder or its nearest existing parent: the examination creates no folders.

    >>> find_existing_folder(Path("/usr/no-such-folder/inside")).as_posix()
    '/usr'
    """
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def time_write(folder: OutputFolder, *, num_bytes: int = 32 * MIB_BYTES) -> WriteResult:
    """Measure writing a file of random bytes (not compressible) with fsync, then remove it.

    The file is smaller than `num_bytes` if the disk would need more than a few seconds for it.
    """
    parent = find_existing_folder(Path(folder.path))
    path = parent / f"{_PROBE_PREFIX}{secrets.token_hex(8)}"
    try:
        file_bytes = min(num_bytes, _TRIAL_BYTES)
        seconds = _write_seconds(path, file_bytes)
        affordable_bytes = min(num_bytes, int(file_bytes * _MAX_WRITE_SECONDS / seconds))
        if affordable_bytes > file_bytes:
            file_bytes = affordable_bytes
            seconds = _write_seconds(path, file_bytes)
        free_bytes = shutil.disk_usage(parent).free
    except OSError as error:
        return WriteResult(folder.purpose, str(parent), problem=error.strerror or str(error))
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return WriteResult(folder.purpose, str(parent), free_bytes, file_bytes / seconds)


def _write_seconds(path: Path, num_bytes: int) -> float:
    block = memoryview(os.urandom(min(num_bytes, 4 * MIB_BYTES)))
    start_time = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, num_bytes, len(block)):
            file.write(block[: num_bytes - start])
        os.fsync(file.fileno())
    return time.perf_counter() - start_time


def check_visibility(
    folder: OutputFolder,
    store: dist.Store,
    rank: int,
    world_size: int,
    *,
    wait_seconds: float = 10.0,
) -> FolderVisibility:
    """Write this rank's file and wait up to `wait_seconds` for all other ranks' files.

    Network file systems may cache the contents of a folder that long. Every rank calls this for
    the same folders in the same order; the store synchronises the ranks.
    """
    parent = find_existing_folder(Path(folder.path))
    topic = f"visibility/{folder.purpose}"
    if rank == 0:
        store.set(f"{topic}/token", secrets.token_hex(8))
    token = store.get(f"{topic}/token").decode()
    own_file = parent / f"{_PROBE_PREFIX}{token}-{rank}"
    problem = ""
    try:
        with own_file.open("wb") as file:
            file.write(token.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = error.strerror or str(error)
    wait_for_all_ranks(store, f"{topic}/written", world_size)
    start = time.perf_counter()
    unseen = {other for other in range(world_size) if other != rank}
    while unseen and time.perf_counter() - start < wait_seconds:
        names = set()
        with suppress(OSError):
            names = {entry.name for entry in os.scandir(parent)}
        unseen = {other for other in unseen if f"{_PROBE_PREFIX}{token}-{other}" not in names}
        if unseen:
            time.sleep(0.2)
    seconds = time.perf_counter() - start
    wait_for_all_ranks(store, f"{topic}/seen", world_size)
    with suppress(OSError):
        own_file.unlink(missing_ok=True)
    return FolderVisibility(folder.purpose, str(parent), tuple(sorted(unseen)), seconds, problem)


def wait_for_all_ranks(store: dist.Store, key: str, world_size: int) -> None:
    """Wait until every rank has called this; the store raises an error after its time-out."""
    if store.add(f"{key}/count", 1) == world_size:
        store.set(f"{key}/all", "1")
    store.wait([f"{key}/all"])


def judge_writes(
    results: Mapping[int, Sequence[WriteResult]], hosts: Mapping[int, str]
) -> list[Finding]:
    """Judge each folder: write errors, free space and speed."""
    findings = []
    for use in dict.fromkeys(item.purpose for items in results.values() for item in items):
        by_rank = {
            rank: item for rank, items in results.items() for item in items if item.purpose == use
        }
        failed = {rank: item for rank, item in by_rank.items() if item.problem}
        if failed:
            rank, item = min(failed.items())
            value = (
                f"{format_ranks(failed)} cannot write to {item.path} ({hosts[rank]}): "
                f"{item.problem}"
            )
            remedy = f"Check ls -ld {item.path}, or set another folder in the recipe"
            findings.append(Finding(SECTION, use, "fail", value, remedy))
            continue
        slowest = min(by_rank.values(), key=lambda item: item.bytes_per_second)
        fullest = min(by_rank.values(), key=lambda item: item.free_bytes)
        value = (
            f"{slowest.path}: {format_bytes(fullest.free_bytes)} free, "
            f"{format_bytes_per_second(slowest.bytes_per_second)} with fsync"
        )
        verdict: Verdict = "pass"
        remedy = ""
        if fullest.free_bytes < _MIN_FREE_BYTES:
            verdict = "warn"
            remedy = f"Free space (du -sh {fullest.path}/*), or set another folder"
        elif slowest.bytes_per_second < _SLOW_BYTES_PER_SECOND:
            verdict = "warn"
            remedy = "Write to a faster disk; checkpoint.asynchronous overlaps part of it"
        numbers = {
            "free_bytes": fullest.free_bytes,
            "bytes_per_second": slowest.bytes_per_second,
            "path": slowest.path,
        }
        findings.append(Finding(SECTION, use, verdict, value, remedy, numbers))
    return findings


def judge_visibility(
    visibility: Mapping[int, Sequence[FolderVisibility]],
    folders: Sequence[OutputFolder],
    hosts: Mapping[int, str],
) -> list[Finding]:
    """Judge whether all ranks see the same folder.

    Caches may be local to a node; checkpoints and run folders may not.
    """
    findings = []
    for folder in folders:
        by_rank = {
            rank: result
            for rank, rank_results in visibility.items()
            for result in rank_results
            if result.purpose == folder.purpose
        }
        if not by_rank:
            continue
        name = f"{folder.purpose} seen by all"
        incomplete = {rank: result for rank, result in by_rank.items() if result.missing_ranks}
        if not incomplete:
            slowest = max(result.seconds for result in by_rank.values())
            value = f"seen by {len(by_rank)} ranks within {format_seconds(slowest)}"
            findings.append(Finding(SECTION, name, "pass", value, numbers={"seconds": slowest}))
            continue
        rank, result = min(
            incomplete.items(), key=lambda item: (-len(item[1].missing_ranks), item[0])
        )
        value = (
            f"rank {rank} ({hosts[rank]}) does not see what "
            f"{format_ranks(result.missing_ranks)} wrote in {result.path}"
        )
        if len(incomplete) > 1:
            value += f"; {len(incomplete)} of {len(by_rank)} ranks do not see all files"
        if folder.is_shared:
            remedy = (
                f"Mount one file system at {folder.path} on all nodes (df {result.path} on "
                "each), or set a shared folder"
            )
            findings.append(Finding(SECTION, name, "fail", value, remedy))
        else:
            remedy = (
                "Every node will tokenise the data itself: set a shared data.cache_dir, or run "
                "`shardwright data` on each"
            )
            findings.append(Finding(SECTION, name, "warn", value, remedy))
    return findings
