"""Folders that a run writes to: room, speed with fsync, and whether every rank sees the same one."""

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

from shardwright.probe.finding import Finding, Verdict, name_ranks
from shardwright.units import GIB_BYTES, MIB_BYTES, format_bytes

SECTION = "storage"

_PREFIX = ".shardwright-doctor-"
_TRIAL_BYTES = MIB_BYTES
_LONGEST_WRITE_SECONDS = 5.0
"""A slow disk gets a smaller file, by what a trial of one MiB takes."""
_LEAST_FREE = 5 * GIB_BYTES
_SLOW_BYTES_PER_SECOND = 100e6
"""A disk that writes less holds up every save: a spinning disk, or a share that is full."""


@dataclass(frozen=True)
class Folder:
    """A folder of a run. `shared`: every rank writes there, so that all nodes must see the same one."""

    use: str
    path: str
    shared: bool


@dataclass(frozen=True)
class Written:
    """What one rank found of a folder: where a file could be made, room, bytes/s of a write with fsync; or why none was made."""

    use: str
    path: str
    free_bytes: int = 0
    bytes_per_second: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class Sight:
    """Which other ranks' files a rank did not see in a folder, and how long the slowest took to appear."""

    use: str
    path: str
    unseen: tuple[int, ...]
    seconds: float
    problem: str = ""


def existing(path: Path) -> Path:
    """The folder, or the nearest above it that is there: the examination makes no folder.

    >>> existing(Path("/usr/no-such-folder/inside")).as_posix()
    '/usr'
    """
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def time_write(folder: Folder, *, num_bytes: int = 32 * MIB_BYTES) -> Written:
    """Write a file of random bytes (nothing can compress them), bring it to the device, remove it.

    The file is smaller than `num_bytes` where the disk would take more than a few seconds for it.
    """
    place = existing(Path(folder.path))
    path = place / f"{_PREFIX}{secrets.token_hex(8)}"
    try:
        seconds = _write_seconds(path, written := min(num_bytes, _TRIAL_BYTES))
        affordable = min(num_bytes, int(written * _LONGEST_WRITE_SECONDS / seconds))
        if affordable > written:
            seconds = _write_seconds(path, written := affordable)
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Written(folder.use, str(place), problem=error.strerror or str(error))
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return Written(folder.use, str(place), free, written / seconds)


def _write_seconds(path: Path, num_bytes: int) -> float:
    block = memoryview(os.urandom(min(num_bytes, 4 * MIB_BYTES)))
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, num_bytes, len(block)):
            file.write(block[: num_bytes - start])
        os.fsync(file.fileno())
    return time.perf_counter() - began


def look_for_others(folder: Folder, store: dist.Store, rank: int, world_size: int, *, wait_seconds: float = 10.0) -> Sight:
    """Leave a file of this rank and look for everyone else's, as long as a network file system may keep its view of a folder.

    Every rank calls this for the same folders in the same order; the store says who is ready and who has looked.
    """
    place = existing(Path(folder.path))
    topic = f"sight/{folder.use}"
    if rank == 0:
        store.set(f"{topic}/token", secrets.token_hex(8))
    token = store.get(f"{topic}/token").decode()
    mine = place / f"{_PREFIX}{token}-{rank}"
    problem = ""
    try:
        with mine.open("wb") as file:
            file.write(token.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = error.strerror or str(error)
    wait_for_all(store, f"{topic}/written", world_size)
    began = time.perf_counter()
    unseen = {other for other in range(world_size) if other != rank}
    while unseen and time.perf_counter() - began < wait_seconds:
        names = set()
        with suppress(OSError):
            names = {entry.name for entry in os.scandir(place)}
        unseen = {other for other in unseen if f"{_PREFIX}{token}-{other}" not in names}
        if unseen:
            time.sleep(0.2)
    seconds = time.perf_counter() - began
    wait_for_all(store, f"{topic}/seen", world_size)
    with suppress(OSError):
        mine.unlink(missing_ok=True)
    return Sight(folder.use, str(place), tuple(sorted(unseen)), seconds, problem)


def wait_for_all(store: dist.Store, key: str, world_size: int) -> None:
    """Until every rank has come here once; the store's own time-out ends the waiting with an error."""
    if store.add(f"{key}/count", 1) == world_size:
        store.set(f"{key}/all", "1")
    store.wait([f"{key}/all"])


def judge_writes(written: Mapping[int, Sequence[Written]], hosts: Mapping[int, str]) -> list[Finding]:
    """Each folder: where it cannot be written, where it is full, where it is slow."""
    findings = []
    for use in dict.fromkeys(item.use for items in written.values() for item in items):
        of_rank = {rank: item for rank, items in written.items() for item in items if item.use == use}
        broken = {rank: item for rank, item in of_rank.items() if item.problem}
        if broken:
            rank, item = min(broken.items())
            told = f"{name_ranks(broken)} cannot write to {item.path} ({hosts[rank]}): {item.problem}"
            findings.append(Finding(SECTION, use, "fail", told, f"ls -ld {item.path}; or name another folder in the recipe"))
            continue
        slowest = min(of_rank.values(), key=lambda item: item.bytes_per_second)
        fullest = min(of_rank.values(), key=lambda item: item.free_bytes)
        told = f"{slowest.path}: {format_bytes(fullest.free_bytes)} free, {slowest.bytes_per_second / 1e6:.3g} MB/s with fsync"
        verdict: Verdict = "pass"
        remedy = ""
        if fullest.free_bytes < _LEAST_FREE:
            verdict = "warn"
            remedy = f"du -sh {fullest.path}/*: make room, or name another folder in the recipe"
        elif slowest.bytes_per_second < _SLOW_BYTES_PER_SECOND:
            verdict = "warn"
            remedy = "Write to a faster disk; checkpoint.asynchronous hides some of it"
        numbers = {"free_bytes": fullest.free_bytes, "bytes_per_second": slowest.bytes_per_second, "path": slowest.path}
        findings.append(Finding(SECTION, use, verdict, told, remedy, numbers))
    return findings


def judge_sights(sights: Mapping[int, Sequence[Sight]], folders: Sequence[Folder], hosts: Mapping[int, str]) -> list[Finding]:
    """Whether all ranks see one folder. A cache of its own on every node works; checkpoints and runs do not."""
    findings = []
    for folder in folders:
        of_rank = {rank: sight for rank, found in sights.items() for sight in found if sight.use == folder.use}
        if not of_rank:
            continue
        name = f"{folder.use} seen by all"
        blind = {rank: sight for rank, sight in of_rank.items() if sight.unseen}
        if not blind:
            slowest = max(sight.seconds for sight in of_rank.values())
            told = f"{len(of_rank)} ranks, after {slowest:.1f} s at most"
            findings.append(Finding(SECTION, name, "pass", told, numbers={"seconds": slowest}))
            continue
        rank, sight = min(blind.items(), key=lambda item: (-len(item[1].unseen), item[0]))
        told = f"rank {rank} ({hosts[rank]}) does not see what {name_ranks(sight.unseen)} wrote in {sight.path}"
        if len(blind) > 1:
            told += f"; {len(blind)} of {len(of_rank)} ranks do not see everybody's"
        if folder.shared:
            remedy = f"Mount one file system at {folder.path} on every node (df {sight.path} on each), or name a shared folder"
            findings.append(Finding(SECTION, name, "fail", told, remedy))
        else:
            remedy = "Every node will tokenise for itself: name a shared data.cache_dir, or fill each with `shardwright data`"
            findings.append(Finding(SECTION, name, "warn", told, remedy))
    return findings
