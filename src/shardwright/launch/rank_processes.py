"""Processes of ranks that outlive a generation, and spares, for warm restarts.

The launcher starts each process once, on this machine or through another node's service
(`nodes.py`), and sends it assignments: a rank, the address of a store and the arguments of the
ranks' module. When a rank is lost, the processes of the others leave the generation, give up their
process groups and wait for the next assignment (`rank_service.py`). A spare, which has imported
everything already, takes the lost rank.

Each generation has a store of its own in this process, so that no rank of an earlier one can join.
Imports no torch before the processes are started.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.errors import ExitCode, LayoutError
from shardwright.launch.node_connections import Nodes
from shardwright.launch.nodes import RankProcess, RunNode, end_processes
from shardwright.launch.rank_outcome import (
    STOP_FILE_NAME,
    get_idle_path,
    get_outcome_path,
    write_lost_rank,
)
from shardwright.peer_copies.holders import choose_holders

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)

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
    """Processes of the ranks of a run. Leave its context to end them.

    Args:
        num_restarts: Restarts that the run may make; without any left, no spare is started.
        nodes: Nodes that run them; by default this machine.
    """

    def __init__(self, num_restarts: int, nodes: Nodes | None = None) -> None:
        self.nodes = nodes or Nodes()
        self._module = ""
        self._num_restarts_left = num_restarts
        self._processes: dict[int, RankProcess] = {}
        """Process of each rank of the current or last generation that still runs."""
        self._node_of_rank: dict[int, RunNode] = {}
        """Node of each rank of the current or last generation."""
        self._num_ranks = 0
        """Number of ranks of the current or last generation."""
        self.newest_step = 0
        """Newest step that any generation had finished when it ended."""
        self._spares: list[RankProcess] = []
        self.num_awaited_ranks = 0
        """Number of ranks that the next, larger generation adds, whose processes are started
        ahead as well."""
        self.should_wait_for_nodes = True
        """False if a generation without the lost nodes can continue."""
        self._logs = tempfile.TemporaryDirectory(prefix="shardwright-")
        self.failed_at_seconds = 0.0
        """Wall clock time at which the last generation was found to have lost a rank."""
        self.stuck_ranks: tuple[int, ...] = ()
        """Ranks of the last generation that were killed because they could not leave it."""

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes: waiting ones exit immediately, others are killed after a timeout."""
        end_processes([*self._processes.values(), *self._spares], _EXIT_SECONDS)
        self._processes.clear()
        self._spares.clear()
        self._logs.cleanup()

    @property
    def diagnosis(self) -> str | None:
        """Report of a hang in the last generation by another node's watchdog."""
        return next(
            (node.diagnosis for node in self.nodes.list_connected() if node.diagnosis), None
        )

    def list_survivors(self, num_ranks: int) -> tuple[int, ...]:
        """List the ranks of the next generation, of `num_ranks`, that have a former process."""
        return tuple(sorted(self._assign_survivors(num_ranks)))

    def _assign_survivors(self, num_ranks: int) -> dict[int, int]:
        """Assign ranks of the next generation to surviving processes: rank -> former rank."""
        alive = {rank for rank, process in self._processes.items() if process.poll() is None}
        nodes = [self._node_of_rank[rank].index for rank in range(self._num_ranks)]
        staying = alive - choose_leaving_ranks(alive, len(alive) - num_ranks, nodes)
        assigned = {rank: rank for rank in staying if rank < num_ranks}
        vacant = (rank for rank in range(num_ranks) if rank not in assigned)
        moving = sorted(rank for rank in staying if rank >= num_ranks)
        return assigned | dict(zip(vacant, moving, strict=False))

    def run(
        self,
        num_ranks: int,
        module: str,
        arguments: Sequence[str],
        control: Path,
        hang_reports: Path | None = None,
    ) -> RankEndings:
        """Run one generation and wait for its end.

        After a failure survivors stay in the pool. All stay after `GenerationEnded`, which is no
        failure.

        Args:
            module: Module of the ranks, the same for all generations; supports `POOL_OPTION`.
            arguments: Arguments of the module for this generation; the first is a file.
            control: Folder of this generation for outcomes and heartbeats.
            hang_reports: Folder for reports of other nodes' watchdogs.

        Raises:
            RankFailed: The nodes that are connected cannot run so many ranks.
        """
        self._module = module
        self.stuck_ranks = ()
        self.nodes.wait_for_slots(
            num_ranks,
            should_wait=self.should_wait_for_nodes,
            is_stopped=(control / STOP_FILE_NAME).exists,
        )
        self._take_processes(num_ranks)
        for node in self.nodes.list_connected():
            node.diagnosis = None
        for node in {process.node: None for process in self._processes.values()}:
            node.begin_generation(control, arguments, hang_reports)
        # In a list, so that nothing else keeps it when a rank is lost.
        stores = [_start_store()]
        run_id = uuid.uuid4().hex
        for rank, process in self._processes.items():
            ranks_here = [
                other for other, node in self._node_of_rank.items() if node is process.node
            ]
            environment = {
                name: os.environ[name] for name in _SHARED_VARIABLES if name in os.environ
            } | {
                "RANK": str(rank),
                "LOCAL_RANK": str(sorted(ranks_here).index(rank)),
                "GROUP_RANK": str(process.node.index),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(len(ranks_here)),
                "MASTER_ADDR": self.nodes.address,
                "MASTER_PORT": str(stores[0].port),
                "TORCHELASTIC_RUN_ID": run_id,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                # NCCL's thread must not end the process when a peer is lost, only its group.
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"
                ),
            }
            log = None if rank == 0 else str(Path(self._logs.name) / f"rank-{rank}.log")
            process.send(
                {
                    "control": str(control),
                    "arguments": list(arguments),
                    "environment": environment,
                    "log": log,
                }
            )
        return self._wait_for_ranks(num_ranks, control, stores)

    def _take_processes(self, num_ranks: int) -> None:
        """Give every rank of a new generation a process: a survivor, a spare, or a new one."""
        survivors = self._assign_survivors(num_ranks)
        former = self._processes
        former_nodes = self._node_of_rank
        self._processes = {rank: former.pop(survivors[rank]) for rank in sorted(survivors)}
        end_processes(list(former.values()), 0.0)
        for rank in range(num_ranks):
            if rank not in survivors:
                node = self._choose_node(former_nodes.get(rank))
                self._processes[rank] = self._pop_spare(node) or node.start_process(self._module)
        self._processes = dict(sorted(self._processes.items()))
        self._node_of_rank = {rank: process.node for rank, process in self._processes.items()}
        self._num_ranks = num_ranks

    def _choose_node(self, former: RunNode | None) -> RunNode:
        """Choose the node of a rank without a process: its former one, else the first free one."""
        free = [node for node in self.nodes.list_connected() if self._count_free_slots(node) > 0]
        return former if former is not None and former in free else free[0]

    def _count_free_slots(self, node: RunNode) -> int:
        return node.num_slots - sum(process.node is node for process in self._processes.values())

    def _wait_for_ranks(
        self, num_ranks: int, control: Path, stores: list[dist.TCPStore]
    ) -> RankEndings:
        """Wait until every rank has exited or waits for its next assignment."""
        endings = RankEndings()
        pending = set(range(num_ranks))
        deadline = float("inf")
        next_spare_check = 0.0
        is_stop_forwarded = not self.nodes.has_several
        while pending:
            for rank in sorted(pending):
                process = self._processes[rank]
                status = process.poll()
                if status is not None:
                    if process.node.is_lost and not get_outcome_path(control, rank).exists():
                        write_lost_rank(control, rank, process.node.name)
                    end_processes([self._processes.pop(rank)], 0.0)
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
                    self._processes[rank].send({"abort": True, "all": self.nodes.has_several})
            if not is_stop_forwarded and (control / STOP_FILE_NAME).exists():
                is_stop_forwarded = True
                self.nodes.request_stop(signal.SIGTERM)
            now = time.monotonic()
            if now > deadline:
                deadline = float("inf")
                self.stuck_ranks = tuple(sorted(pending))
                for rank in pending:
                    endings.ended_at_seconds[rank] = float("inf")
                    self._processes[rank].kill()
            elif now > next_spare_check and not has_failed:
                next_spare_check = now + _SPARE_POLL_SECONDS
                self._prepare_spares(num_ranks)
            time.sleep(_POLL_SECONDS)
        steps = [step for _, step in self._read_progress().values()]
        self.newest_step = max(self.newest_step, *steps, 0)
        if endings.statuses:
            self._num_restarts_left -= 1
        return endings

    def _read_progress(self) -> dict[int, tuple[str, int]]:
        """Return phase and step of each rank that has a heartbeat."""
        progress: dict[int, tuple[str, int]] = {}
        for node in {self.nodes.local: None, **dict.fromkeys(self._node_of_rank.values())}:
            progress |= node.read_progress()
        return progress

    def _prepare_spares(self, num_ranks: int) -> None:
        """Start the spares once no rank is in its set-up, which they would slow down.

        One per node while restarts are left, one for each rank that the next generation adds, and
        as many as ranks on a node without ranks, which takes those of a lost one.
        """
        progress = self._read_progress()
        if len(progress) < num_ranks or any(phase == "setup" for phase, _ in progress.values()):
            return
        has_restarts = self._num_restarts_left > 0
        for node in self.nodes.list_connected():
            num_free = self._count_free_slots(node)
            num_spares = int(has_restarts) + min(num_free, self.num_awaited_ranks)
            if num_free == node.num_slots and self._processes:
                num_spares = num_free if has_restarts or self.num_awaited_ranks else 0
            num_ready = sum(spare.node is node for spare in self._spares)
            self._spares += [
                node.start_process(self._module) for _ in range(num_spares - num_ready)
            ]

    def _pop_spare(self, node: RunNode) -> RankProcess | None:
        for spare in [spare for spare in self._spares if spare.node is node]:
            self._spares.remove(spare)  # first the one that has imported the most
            if spare.poll() is None:
                return spare
            end_processes([spare], 0.0)
        return None


def choose_leaving_ranks(
    alive: Collection[int], num_leaving: int, nodes: Sequence[int]
) -> set[int]:
    """Choose the processes that a smaller generation ends.

    With `elastic.peer_copies` the process of another rank has the copy of a rank's state. So a
    process leaves whose copy and whose held rank both stay, as long as there are some; then no
    state is lost with its copy. Otherwise the last one leaves.

    >>> choose_leaving_ranks({0, 1, 2}, 1, [0] * 4)  # rank 3 is lost, whose copy rank 0 has
    {1}

    Args:
        alive: Ranks of the former generation whose processes stay.
        num_leaving: Number of them that leave.
        nodes: Node of each rank of the former generation.
    """
    staying = set(alive)
    if num_leaving <= 0:
        return set()
    try:
        holders = choose_holders(nodes)
    except LayoutError:  # peer copies are refused for these nodes
        holders = tuple((rank + 1) % len(nodes) for rank in range(len(nodes)))
    for _ in range(num_leaving):
        apart = [
            rank for rank in staying if {holders[rank], holders.index(rank)} <= staying - {rank}
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
