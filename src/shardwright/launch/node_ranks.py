"""Start the ranks of one node of a job, and exit with their exit code.

`python -m shardwright.launch.node_ranks --num-ranks 8 --num-nodes 2 --node-rank 0
--master-addr HOST --master-port 29500 -- train RECIPE` is the command of a pod. torchrun would
replace the ranks' exit codes with 1, and Kubernetes could not distinguish a rank that has saved
from one that was lost or had wrong input.

Imports no torch: each rank does, on its own.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import Popen
from types import FrameType

from shardwright.errors import ExitCode
from shardwright.launch.rank_outcome import LAUNCHER_VARIABLE
from shardwright.launch.stop_signals import STOP_SIGNALS

PEER_SECONDS = 30.0
"""Seconds that the other ranks have to end after one that failed; torchrun gives them as many."""
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class NodeRanks:
    """Ranks of node `node_rank` of `num_nodes` nodes; the address is that of the first node."""

    num_ranks: int
    num_nodes: int = 1
    node_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 29500

    def build_environment(self, local_rank: int) -> dict[str, str]:
        """Return the variables of one rank, by the names of torchrun.

        >>> ranks = NodeRanks(4, num_nodes=2, node_rank=1, master_address="first")
        >>> ranks.build_environment(2)["RANK"], ranks.build_environment(2)["WORLD_SIZE"]
        ('6', '8')
        """
        return {
            "RANK": str(self.node_rank * self.num_ranks + local_rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(self.node_rank),
            "WORLD_SIZE": str(self.num_nodes * self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": str(self.master_port),
        }


def run_node_ranks(
    ranks: NodeRanks, command: Sequence[str], peer_seconds: float = PEER_SECONDS
) -> ExitCode:
    """Run the command once per rank, forward stop signals, and return the ranks' exit code.

    If a rank fails, the others get SIGTERM, and SIGKILL after `peer_seconds`. Ranks that save
    because of a stop signal are waited for; the sender of the signal limits their
    time.
    """
    with _forward_stop_signals() as processes:
        for local_rank in range(ranks.num_ranks):
            environment = os.environ | ranks.build_environment(local_rank)
            environment[LAUNCHER_VARIABLE] = str(os.getpid())
            processes.append(Popen(list(command), env=environment))
        statuses = _wait_for_ranks(processes, peer_seconds)
    for local_rank, status in sorted(statuses.items()):
        if status not in (ExitCode.DONE, ExitCode.PREEMPTED):
            rank = ranks.node_rank * ranks.num_ranks + local_rank
            sys.stderr.write(f"shardwright: rank {rank} {describe_status(status)}\n")
    return choose_exit_code(list(statuses.values()))


def choose_exit_code(statuses: Sequence[int]) -> ExitCode:
    """Choose the exit code of a node from the statuses of its ranks, in order of their ends.

    Wrong input and failed checks come first: whatever else happened, a retry would fail again.
    Then a failure or a signal; then a stop after a save.

    >>> choose_exit_code([3, 2]), choose_exit_code([4, -9]), choose_exit_code([0, 4])
    (<ExitCode.WRONG_INPUT: 2>, <ExitCode.RUN_FAILED: 3>, <ExitCode.PREEMPTED: 4>)
    """
    for status in statuses:
        if status in (ExitCode.CHECK_FAILED, ExitCode.WRONG_INPUT):
            return ExitCode(status)
    if any(status not in (ExitCode.DONE, ExitCode.PREEMPTED) for status in statuses):
        return ExitCode.RUN_FAILED
    return ExitCode.PREEMPTED if ExitCode.PREEMPTED in statuses else ExitCode.DONE


def describe_status(status: int) -> str:
    """Describe how a process ended.

    >>> describe_status(-9), describe_status(3)
    ('was killed by SIGKILL', 'ended with exit code 3')
    """
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"


def _wait_for_ranks(processes: Sequence[Popen[bytes]], peer_seconds: float) -> dict[int, int]:
    """Wait until all ranks have ended; return local rank -> status, in the order of their ends."""
    statuses: dict[int, int] = {}
    deadline = float("inf")
    while len(statuses) < len(processes):
        for local_rank, process in enumerate(processes):
            status = process.poll()
            if status is None or local_rank in statuses:
                continue
            statuses[local_rank] = status
            if status not in (ExitCode.DONE, ExitCode.PREEMPTED) and deadline == float("inf"):
                deadline = time.monotonic() + peer_seconds
                _signal_all(processes, signal.SIGTERM)
        if time.monotonic() > deadline:
            _signal_all(processes, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return statuses


def _signal_all(processes: Sequence[Popen[bytes]], number: int) -> None:
    """Send a signal to the processes that still run."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


@contextmanager
def _forward_stop_signals() -> Iterator[list[Popen[bytes]]]:
    """Forward stop signals to the processes in the list, also to those that start afterwards."""
    processes = _SignalledProcesses()

    def forward(number: int, frame: FrameType | None) -> None:
        processes.stop_signal = number
        _signal_all(processes, number)

    former = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield processes
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


class _SignalledProcesses(list["Popen[bytes]"]):
    """Processes; one that is appended after a stop signal receives it as well."""

    stop_signal: int | None = None

    def append(self, process: Popen[bytes]) -> None:
        super().append(process)
        if self.stop_signal is not None:
            process.send_signal(self.stop_signal)


def _find_free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def parse_arguments(arguments: Sequence[str]) -> tuple[NodeRanks, list[str]]:
    """Parse the command line into the node's ranks and their arguments; exit with 2 if wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m shardwright.launch.node_ranks",
        description="Start the ranks of one node of a job, and exit with their exit code.",
    )
    parser.add_argument("--num-ranks", type=int, required=True, help="ranks of this node")
    parser.add_argument("--num-nodes", type=int, default=1, help="nodes of the job")
    parser.add_argument("--node-rank", type=int, default=0, help="number of this node, from 0")
    parser.add_argument("--master-addr", help="address of the first node")
    parser.add_argument("--master-port", type=int, help="port of the rendezvous there")
    parser.add_argument("words", nargs="+", metavar="-- WORD", help="arguments of shardwright")
    options = parser.parse_args(arguments)
    if options.num_ranks < 1 or not 0 <= options.node_rank < options.num_nodes:
        parser.error(
            f"--num-ranks {options.num_ranks} and --node-rank {options.node_rank} must be at "
            f"least 1 and from 0 to {options.num_nodes - 1}"
        )
    if options.num_nodes > 1 and (options.master_addr is None or options.master_port is None):
        parser.error("several nodes need --master-addr and --master-port")
    return (
        NodeRanks(
            options.num_ranks,
            options.num_nodes,
            options.node_rank,
            options.master_addr or "127.0.0.1",
            options.master_port or _find_free_port(),
        ),
        options.words,
    )


def main() -> int:
    """Run the ranks that the command line describes."""
    ranks, words = parse_arguments(sys.argv[1:])
    return run_node_ranks(ranks, [sys.executable, "-m", "shardwright", *words])


if __name__ == "__main__":
    sys.exit(main())
