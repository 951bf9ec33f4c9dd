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

from shardwright.doctor.finding import Finding, format_ranks
from shardwright.doctor.rendezvous import Rendezvous
from shardwright.errors import RankFailed

_TICK_SECONDS = 0.25
_POLL_INTERVAL = timedelta(seconds=1)
_PROGRESS_KEY = "progress"
"""Key of the number of measurements of all ranks."""
BROKEN_KEY = "broken"
"""Key that a rank sets if its stage fails."""


class StageWatchdog:
    """Thread that calls `expired` with a stage's name after `timeout_seconds` without progress.

    Ranks other than 0 wait a few seconds longer, so that rank 0 reports the hang first.
    """

    def __init__(
        self,
        timeout_seconds: float,
        on_timeout: Callable[[str], None],
        rank: int = 0,
        store: dist.Store | None = None,
    ) -> None:
        self.timeout_seconds = timeout_seconds + (5.0 if rank else 0.0)
        self._on_timeout = on_timeout
        self._rank = rank
        self._store = store
        self._stage: str | None = None
        self._last_progress = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="examination-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def watch_stage(self, name: str) -> Iterator[None]:
        """Watch the block, and show the other ranks the stage of this rank."""
        if self._store is not None:
            self._store.set(f"stage/{self._rank}", name)
        self._last_progress = time.monotonic()
        self._stage = name
        try:
            yield
        finally:
            self._stage = None

    def record_progress(self) -> None:
        """Record a measurement; restart the time of this rank and of ranks that wait for it."""
        self._last_progress = time.monotonic()
        if self._store is not None:
            self._store.add(_PROGRESS_KEY, 1)

    def wait_for_key(self, key: str) -> None:
        """Wait for a key; any rank's progress restarts the time of this rank.

        Raises:
            RankFailed: another rank has failed, so it will not set the key.
        """
        assert self._store is not None
        seen = 0
        while True:
            with suppress(dist.DistError):
                self._store.wait([key], _POLL_INTERVAL)
                return
            if self._store.check([BROKEN_KEY]):
                raise RankFailed("another rank has failed")
            num_measurements = self._store.add(_PROGRESS_KEY, 0)
            if num_measurements != seen:
                seen = num_measurements
                self._last_progress = time.monotonic()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_TICK_SECONDS):
            stage = self._stage
            if stage is not None and time.monotonic() - self._last_progress > self.timeout_seconds:
                self._on_timeout(stage)
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
        num_measurements = store.add(_PROGRESS_KEY, 0)
        if num_measurements != seen:
            seen = num_measurements
            since = time.monotonic()
        if missing:
            with suppress(dist.DistError):
                store.wait([next(iter(missing.values()))], _POLL_INTERVAL)
    return sorted(missing)


def judge_timeout(
    stage: str, timeout_seconds: float, rendezvous: Rendezvous | None, stage_order: tuple[str, ...]
) -> Finding:
    """Report a stage without progress, with the ranks in an earlier stage if there are any."""
    value = f"no progress in {timeout_seconds:g} s"
    if rendezvous is None:
        remedy = "The device or the file system hangs: check dmesg | tail, nvidia-smi"
        return Finding("peers", stage, "fail", value, remedy)
    ranks_by_stage: dict[str, list[int]] = {}
    for rank in range(rendezvous.world_size):
        key = f"stage/{rank}"
        rank_stage = (
            rendezvous.watchdog_store.get(key).decode()
            if rendezvous.watchdog_store.check([key])
            else "the start"
        )
        ranks_by_stage.setdefault(rank_stage, []).append(rank)
    behind = {
        rank_stage: ranks
        for rank_stage, ranks in ranks_by_stage.items()
        if rank_stage not in stage_order or stage_order.index(rank_stage) < stage_order.index(stage)
    }
    if not behind:
        remedy = "Its collectives hang: set NCCL_DEBUG=INFO, or GLOO_SOCKET_IFNAME=eth0"
        return Finding("peers", stage, "fail", f"{value}; all ranks are in this stage", remedy)
    behind_text = "; ".join(
        f"{format_ranks(ranks)} ({', '.join(sorted({rendezvous.hosts[rank] for rank in ranks}))}) "
        f"still at {rank_stage}"
        for rank_stage, ranks in behind.items()
    )
    hosts = sorted({rendezvous.hosts[rank] for ranks in behind.values() for rank in ranks})
    remedy = f"Check {', '.join(hosts)} (dmesg | tail, nvidia-smi), or exclude it"
    ranks_behind = sorted(rank for ranks in behind.values() for rank in ranks)
    return Finding(
        "peers", stage, "fail", f"{value}: {behind_text}", remedy, {"behind": ranks_behind}
    )
