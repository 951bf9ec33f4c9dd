"""Processes of ranks that outlive a generation, and spares, for warm restarts.

The launcher starts each process once and sends it assignments: a rank, the address of a store and
the arguments of the ranks' module. When a rank is lost, the processes of the others leave the
generation, give up their process groups and wait for the next assignment (`rank_service.py`). A
spare, which has imported everything already, takes the lost rank.

Each generation has a store of its own in this process, so that no rank of an earlier one can join.
Imports no torch before the processes are started.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING

from shardwright.errors import ExitCode
from shardwright.launch.rank_outcome import get_idle_path, get_outcome_path
from shardwright.watchdog.monitor import read_heartbeats

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)

POOL_OPTION = "--wait-for-assignments"
"""Option of the ranks' module: serve the launcher's assignments, which are lines of JSON."""
REBUILD_SECONDS = 10.0
"""Seconds that a surviving process has to leave a failed generation before it is killed."""
_POLL_SECONDS = 0.02
_SPARE_POLL_SECONDS = 0.5
_EXIT_SECONDS = 5.0
"""Seconds that the processes have to exit when the pool is closed."""
_SHARED_VARIABLES = ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")


@dataclass
class RankEndings:
    """Ends of the ranks of one generation, as `find_cause` takes them."""

    statuses: dict[int, int] = field(default_factory=dict)
    """Rank -> exit status, for ranks that failed, the first one first."""
    ended_at_seconds: dict[int, float] = field(default_factory=dict)
    """Rank -> wall clock time of its end; infinite if the launcher had to kill it."""


class RankProcesses:
    """Processes of the ranks of one machine. Leave its context to end them.

    Args:
        num_restarts: Restarts that the run may make; without any left, no spare is started.
    """

    def __init__(self, num_restarts: int) -> None:
        self._module = ""
        self._num_restarts_left = num_restarts
        self._processes: dict[int, Popen[bytes]] = {}
        """Process of each rank of the current or last generation that still runs."""
        self._num_ranks = 0
        """Number of ranks of the current or last generation."""
        self.newest_step = 0
        """Newest step that any generation had finished when it ended."""
        self._spares: list[Popen[bytes]] = []
        self.num_awaited_ranks = 0
        """Number of ranks that the next, larger generation adds, whose processes are started
        ahead as well."""
        self._logs = tempfile.TemporaryDirectory(prefix="shardwright-")
        self.failed_at_seconds = 0.0
        """Wall clock time at which the last generation was found to have lost a rank."""
        self.stuck_ranks: tuple[int, ...] = ()
        """Ranks of the last generation that were killed because they could not leave it."""

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes: those that wait exit at once, others are killed after a while."""
        processes = [*self._processes.values(), *self._spares]
        for process in processes:
            _close_input(process)
        deadline = time.monotonic() + _EXIT_SECONDS
        for process in processes:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            if process.poll() is None:
                process.kill()
            process.wait()
        self._processes.clear()
        self._spares.clear()
        self._logs.cleanup()

    def list_survivors(self, num_ranks: int) -> tuple[int, ...]:
        """List the ranks of the next generation, of `num_ranks`, that have a former process."""
        return tuple(sorted(self._assign_survivors(num_ranks)))

    def _assign_survivors(self, num_ranks: int) -> dict[int, int]:
        """Assign ranks of the next generation to surviving processes: rank -> former rank."""
        alive = {rank for rank, process in self._processes.items() if process.poll() is None}
        staying = alive - choose_leaving_ranks(alive, len(alive) - num_ranks, self._num_ranks)
        assigned = {rank: rank for rank in staying if rank < num_ranks}
        vacant = (rank for rank in range(num_ranks) if rank not in assigned)
        moving = sorted(rank for rank in staying if rank >= num_ranks)
        return assigned | dict(zip(vacant, moving, strict=False))

    def run(
        self, num_ranks: int, module: str, arguments: Sequence[str], control: Path
    ) -> RankEndings:
        """Run one generation and wait for its end.

        After a failure survivors stay in the pool. All stay after `GenerationEnded`, which is no
        failure.

        Args:
            module: Module of the ranks, the same for all generations; supports `POOL_OPTION`.
            arguments: Arguments of the module for this generation.
            control: Folder of this generation for outcomes and heartbeats.
        """
        self._module = module
        survivors = self._assign_survivors(num_ranks)
        former = self._processes
        self._processes = {rank: former.pop(survivors[rank]) for rank in sorted(survivors)}
        for process in former.values():
            self._discard(process)
        for rank in range(num_ranks):
            if rank not in survivors:
                self._processes[rank] = self._take_spare() or self._start_process()
        self._num_ranks = num_ranks
        # In a list, so that nothing else keeps it when a rank is lost.
        stores = [_start_store()]
        run_id = uuid.uuid4().hex
        for rank, process in self._processes.items():
            environment = {
                name: os.environ[name] for name in _SHARED_VARIABLES if name in os.environ
            } | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(stores[0].port),
                "TORCHELASTIC_RUN_ID": run_id,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                # NCCL's thread must not end the process when a peer is lost, only its group.
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"
                ),
            }
            log = None if rank == 0 else str(Path(self._logs.name) / f"rank-{rank}.log")
            _send(
                process,
                {
                    "control": str(control),
                    "arguments": list(arguments),
                    "environment": environment,
                    "log": log,
                },
            )
        return self._wait_for_ranks(num_ranks, control, stores)

    def _wait_for_ranks(
        self, num_ranks: int, control: Path, stores: list[dist.TCPStore]
    ) -> RankEndings:
        """Wait until every rank has exited or waits for its next assignment."""
        endings = RankEndings()
        pending = set(range(num_ranks))
        deadline = float("inf")
        next_spare_check = 0.0
        self.stuck_ranks = ()
        while pending:
            for rank in sorted(pending):
                status = self._processes[rank].poll()
                if status is not None:
                    self._discard(self._processes.pop(rank))
                elif get_idle_path(control, rank).exists():
                    status = int(ExitCode.RUN_FAILED if _has_failed(control, rank) else 0)
                if status is not None:
                    pending.remove(rank)
                if status:
                    endings.statuses[rank] = status
                    endings.ended_at_seconds.setdefault(rank, time.time())
            has_failed = bool(endings.statuses) or any(
                _has_failed(control, rank) for rank in pending
            )
            if has_failed and stores:
                self.failed_at_seconds = time.time()
                deadline = time.monotonic() + REBUILD_SECONDS
                stores.clear()  # its end wakes ranks that wait for others in the store
                for rank in pending:
                    _send(self._processes[rank], {"abort": True})
            now = time.monotonic()
            if now > deadline:
                deadline = float("inf")
                self.stuck_ranks = tuple(sorted(pending))
                for rank in pending:
                    endings.ended_at_seconds[rank] = float("inf")
                    self._processes[rank].kill()
            elif now > next_spare_check and not has_failed:
                next_spare_check = now + _SPARE_POLL_SECONDS
                self._prepare_spares(control, num_ranks)
            time.sleep(_POLL_SECONDS)
        steps = [beat.step for beat in read_heartbeats(control)]
        self.newest_step = max(self.newest_step, *steps, 0)
        if endings.statuses:
            self._num_restarts_left -= 1
        return endings

    def _prepare_spares(self, control: Path, num_ranks: int) -> None:
        """Start the spares once no rank is in its set-up, which they would slow down.

        One while restarts are left, and one for each rank that the next generation adds.
        """
        missing = (self._num_restarts_left > 0) + self.num_awaited_ranks - len(self._spares)
        if missing <= 0:
            return
        heartbeats = read_heartbeats(control)
        if len(heartbeats) == num_ranks and all(beat.phase != "setup" for beat in heartbeats):
            self._spares += [self._start_process() for _ in range(missing)]

    def _take_spare(self) -> Popen[bytes] | None:
        while self._spares:
            spare = self._spares.pop(0)  # the one that has imported the most
            if spare.poll() is None:
                return spare
            self._discard(spare)
        return None

    def _start_process(self) -> Popen[bytes]:
        """Start a process that imports what a rank needs and waits for an assignment."""
        # Its output stays this terminal until it gets a rank: only rank 0 writes there.
        words = [sys.executable, "-m", self._module, POOL_OPTION]
        return Popen(words, stdin=PIPE)

    def _discard(self, process: Popen[bytes]) -> None:
        """End a process that has no further use."""
        _close_input(process)
        if process.poll() is None:
            process.kill()
        process.wait()


def choose_leaving_ranks(alive: Collection[int], num_leaving: int, num_ranks: int) -> set[int]:
    """Choose the processes that a smaller generation ends.

    On one machine the copy of a rank's state is in the process of the next rank
    (`elastic.peer_copies`). So a process leaves that has both neighbours, as long as there are
    some; then no state is lost with its copy. Otherwise the last one leaves.

    >>> choose_leaving_ranks({0, 1, 2}, 1, 4)  # rank 3 is lost, whose copy rank 0 has
    {1}

    Args:
        alive: Ranks of the former generation whose processes stay.
        num_leaving: Number of them that leave.
        num_ranks: Number of ranks of the former generation.
    """
    staying = set(alive)
    for _ in range(num_leaving):
        apart = [
            rank
            for rank in staying
            if {(rank - 1) % num_ranks, (rank + 1) % num_ranks} <= staying - {rank}
        ]
        staying.remove(max(apart or staying))
    return set(alive) - staying


def _start_store() -> dist.TCPStore:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _has_failed(control: Path, rank: int) -> bool:
    """Return True if a rank has written that it failed."""
    try:
        code = json.loads(get_outcome_path(control, rank).read_text())["exit_code"]
    except FileNotFoundError:
        return False
    return code not in (ExitCode.DONE, ExitCode.PREEMPTED)


def _send(process: Popen[bytes], message: dict[str, object]) -> None:
    """Send a line of JSON to a process; one that has exited is noticed by its status."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()


def _close_input(process: Popen[bytes]) -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
