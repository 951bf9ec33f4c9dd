"""Time limit of every stage of the examination.

A thread watches it, because a hanging kernel or system call cannot measure its own time.
"""

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
"""Key of the number of measurements of all ranks."""
BROKEN = "broken"
"""Key that a rank sets if its stage fails."""


class Watch:
    """Thread that calls `expired` with a stage's name after `timeout_seconds` without progress.

    Ranks other than 0 wait a few seconds longer, so that rank 0 reports the hang first.
    """

    def __init__(
        self,
        timeout_seconds: float,
        expired: Callable[[str], None],
        rank: int = 0,
        store: dist.Store | None = None,
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
        """Watch the block, and show the other ranks the stage of this rank."""
        if self._store is not None:
            self._store.set(f"stage/{self._rank}", name)
        self._since = time.monotonic()
        self._stage = name
        try:
            yield
        finally:
            self._stage = None

    def progress(self) -> None:
        """Record a measurement; restart the time of this rank and of ranks that wait for it."""
        self._since = time.monotonic()
        if self._store is not None:
            self._store.add(_PROGRESS, 1)

    def wait(self, key: str) -> None:
        """Wait for a key; any rank's progress restarts the time of this rank.

        Raises:
            RankFailed: another rank has failed, so it will not set the key.
        """
        assert self._store is not None
        seen = 0
        while True:
            with suppress(dist.DistError):
                self._store.wait([key], _POLL)
                return
            if self._store.check([BROKEN]):
                raise RankFailed("another rank has failed")
            num_measurements = self._store.add(_PROGRESS, 0)
            if num_measurements != seen:
                seen = num_measurements
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


def wait_for_reports(
    store: dist.Store, keys: Mapping[int, str], timeout_seconds: float
) -> list[int]:
    """Wait for keys; return ranks without one after `timeout_seconds` without any progress."""
    missing = dict(keys)
    seen = 0
    since = time.monotonic()
    while missing and time.monotonic() - since < timeout_seconds:
        missing = {rank: key for rank, key in missing.items() if not store.check([key])}
        num_measurements = store.add(_PROGRESS, 0)
        if num_measurements != seen:
            seen = num_measurements
            since = time.monotonic()
        if missing:
            with suppress(dist.DistError):
                store.wait([next(iter(missing.values()))], _POLL)
    return sorted(missing)


def judge_standstill(
    stage: str, timeout_seconds: float, meeting: Meeting | None, order: tuple[str, ...]
) -> Finding:
    """Report a stage without progress, with the ranks in an earlier stage if there are any."""
    value = f"no progress in {timeout_seconds:g} s"
    if meeting is None:
        remedy = "The device or the file system hangs: check dmesg | tail, nvidia-smi"
        return Finding("peers", stage, "fail", value, remedy)
    ranks_by_stage: dict[str, list[int]] = {}
    for rank in range(meeting.world_size):
        key = f"stage/{rank}"
        rank_stage = meeting.side.get(key).decode() if meeting.side.check([key]) else "the start"
        ranks_by_stage.setdefault(rank_stage, []).append(rank)
    behind = {
        rank_stage: ranks
        for rank_stage, ranks in ranks_by_stage.items()
        if rank_stage not in order or order.index(rank_stage) < order.index(stage)
    }
    if not behind:
        remedy = "Its collectives hang: set NCCL_DEBUG=INFO, or GLOO_SOCKET_IFNAME=eth0"
        return Finding("peers", stage, "fail", f"{value}; all ranks are in this stage", remedy)
    behind_text = "; ".join(
        f"{name_ranks(ranks)} ({', '.join(sorted({meeting.hosts[rank] for rank in ranks}))}) "
        f"still at {rank_stage}"
        for rank_stage, ranks in behind.items()
    )
    hosts = sorted({meeting.hosts[rank] for ranks in behind.values() for rank in ranks})
    remedy = f"Check {', '.join(hosts)} (dmesg | tail, nvidia-smi), or exclude it"
    ranks_behind = sorted(rank for ranks in behind.values() for rank in ranks)
    return Finding(
        "peers", stage, "fail", f"{value}: {behind_text}", remedy, {"behind": ranks_behind}
    )
