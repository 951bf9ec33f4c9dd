"""A time limit on every stage of the examination, kept by a thread: what hangs in a kernel or a system call cannot time itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from shardwright.errors import RankFailed
from shardwright.probe.finding import Finding, name_ranks
from shardwright.probe.rendezvous import Meeting

_TICK_SECONDS = 0.25
_POLL = timedelta(seconds=1)
_PROGRESS = "progress"
"""Counts what all ranks have measured."""
BROKEN = "broken"
"""Set by a rank whose stage failed."""


class Watch:
    """Calls `expired` from its thread, with the stage's name, when a stage makes no progress for `timeout_seconds`.

    Ranks other than 0 are given a few seconds more, so that rank 0 tells of it before anybody leaves.
    """

    def __init__(
        self, timeout_seconds: float, expired: Callable[[str], None], rank: int = 0, store: dist.Store | None = None
    ) -> None:
        self.timeout_seconds = timeout_seconds + (5.0 if rank else 0.0)
        self._expired = expired
        self._rank = rank
        self._store = store
        self._stage: str | None = None
        self._since = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="examination-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What happens in the block is watched, and the others can see that this rank is there."""
        if self._store is not None:
            self._store.set(f"stage/{self._rank}", name)
        self._since = time.monotonic()
        self._stage = name
        try:
            yield
        finally:
            self._stage = None

    def progress(self) -> None:
        """One more measurement is done: the time begins anew, for this rank and for those that wait for it."""
        self._since = time.monotonic()
        if self._store is not None:
            self._store.add(_PROGRESS, 1)

    def wait(self, key: str) -> None:
        """Until a key is there, as long as any rank makes progress; this rank's time goes on where none does.

        Raises:
            RankFailed: a rank has broken off, so that the key will not come.
        """
        assert self._store is not None
        seen = 0
        while True:
            with suppress(dist.DistError):
                self._store.wait([key], _POLL)
                return
            if self._store.check([BROKEN]):
                raise RankFailed("another rank has broken off")
            now = self._store.add(_PROGRESS, 0)
            if now != seen:
                seen = now
                self._since = time.monotonic()

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_TICK_SECONDS):
            stage = self._stage
            if stage is not None and time.monotonic() - self._since > self.timeout_seconds:
                self._expired(stage)
                return


def wait_for_reports(store: dist.Store, keys: Mapping[int, str], timeout_seconds: float) -> list[int]:
    """Ranks whose key has not come when no rank has made progress for so long."""
    missing = dict(keys)
    seen = 0
    since = time.monotonic()
    while missing and time.monotonic() - since < timeout_seconds:
        missing = {rank: key for rank, key in missing.items() if not store.check([key])}
        now = store.add(_PROGRESS, 0)
        if now != seen:
            seen = now
            since = time.monotonic()
        if missing:
            with suppress(dist.DistError):
                store.wait([next(iter(missing.values()))], _POLL)
    return sorted(missing)


def judge_standstill(stage: str, timeout_seconds: float, meeting: Meeting | None, order: tuple[str, ...]) -> Finding:
    """Who is behind, where one rank's stage has made no progress: ranks in an earlier stage, or all where all are in the same."""
    told = f"no progress in {timeout_seconds:g} s"
    if meeting is None:
        return Finding("peers", stage, "fail", told, "The device or the file system hangs: dmesg | tail, nvidia-smi")
    places: dict[str, list[int]] = {}
    for rank in range(meeting.world_size):
        key = f"stage/{rank}"
        place = meeting.side.get(key).decode() if meeting.side.check([key]) else "the start"
        places.setdefault(place, []).append(rank)
    behind = {place: ranks for place, ranks in places.items() if place not in order or order.index(place) < order.index(stage)}
    if not behind:
        return Finding(
            "peers",
            stage,
            "fail",
            f"{told}; every rank is in it",
            "Its collectives hang: NCCL_DEBUG=INFO, or GLOO_SOCKET_IFNAME=eth0",
        )
    who = "; ".join(
        f"{name_ranks(ranks)} ({', '.join(sorted({meeting.hosts[rank] for rank in ranks}))}) still at {place}"
        for place, ranks in behind.items()
    )
    hosts = sorted({meeting.hosts[rank] for ranks in behind.values() for rank in ranks})
    remedy = f"Look at {', '.join(hosts)}: dmesg | tail, nvidia-smi; leave it out"
    return Finding(
        "peers", stage, "fail", f"{told}: {who}", remedy, {"behind": sorted(r for ranks in behind.values() for r in ranks)}
    )
