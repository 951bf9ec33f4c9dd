"""Stack dumps of all ranks during a hang, requested from outside.

A rank writes its stacks with `faulthandler`, in the handler of `STACKS_SIGNAL`, line by line.
If the file is read or the rank is stopped again too early, only half of them are there. On
Linux the end is observable: while a handler runs, its thread has its signal blocked. Imports no
torch.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwright.watchdog.heartbeat import NCCL_PIPE_STEM, STACKS_SIGNAL, Heartbeat

_MAX_WAIT_SECONDS = 20.0
"""Time limit for a rank that is blocked in the kernel and never writes."""
_UNCONFIRMED_WAIT_SECONDS = 1.0
"""Time for writers whose end is not observable: NCCL's record, and ranks without /proc."""
_POLL_SECONDS = 0.002
_SIGNAL_BIT = 1 << (STACKS_SIGNAL - 1)


def dump_stacks(
    folder: Path, heartbeats: Sequence[Heartbeat], process_states: Mapping[int, str]
) -> dict[int, str]:
    """Return the stacks of the ranks that could write them, by rank.

    A stopped rank is continued for this, after the others, and then stopped again: the launch
    ends anyway.

    Args:
        folder: Folder of the heartbeats.
        process_states: One-letter process states of the ranks, from /proc.
    """
    stopped = [view for view in heartbeats if process_states[view.rank] in ("T", "t")]
    requests = {
        view.rank: _StackRequest.create(view.pid, _get_stacks_path(folder, view.rank))
        for view in heartbeats
    }
    piped = False
    for view in heartbeats:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(view.pid, STACKS_SIGNAL)
        with suppress(OSError):  # the pipe exists on CUDA only
            _wake_pipe_reader(folder / f"{NCCL_PIPE_STEM}{view.rank}.pipe")
            piped = True
    until = time.monotonic() + _UNCONFIRMED_WAIT_SECONDS
    _wait_for_stacks([requests[view.rank] for view in heartbeats if view not in stopped])
    if piped:
        time.sleep(max(0.0, until - time.monotonic()))
    for view in stopped:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(view.pid, signal.SIGCONT)
            _wait_for_stacks([requests[view.rank]])
            os.kill(view.pid, signal.SIGSTOP)
    stacks = {}
    for view in heartbeats:
        with suppress(OSError):
            stacks[view.rank] = requests[view.rank].file.read_text(
                encoding="utf-8", errors="replace"
            )
    return stacks


@dataclass(frozen=True)
class _StackRequest:
    """Request to one rank, with the state of its stacks file before it."""

    pid: int
    file: Path
    size_bytes: int
    blocking_threads: frozenset[str]
    """Threads that always have the signal blocked, such as those of some libraries."""

    @classmethod
    def create(cls, pid: int, file: Path) -> _StackRequest:
        return cls(pid, file, _get_size_bytes(file), frozenset(_list_blocking_threads(pid)))

    def has_written(self) -> bool:
        """Return True if the stacks are complete, or the process has ended and cannot write."""
        if read_process_state(self.pid) in ("", "Z", "X"):
            return True
        return _get_size_bytes(self.file) > self.size_bytes and self.blocking_threads.issuperset(
            _list_blocking_threads(self.pid)
        )


def _wait_for_stacks(requests: Sequence[_StackRequest]) -> None:
    if not Path("/proc/self/task").is_dir():
        time.sleep(_UNCONFIRMED_WAIT_SECONDS)
        return
    until = time.monotonic() + _MAX_WAIT_SECONDS
    while not all(request.has_written() for request in requests) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)


def read_process_state(pid: int) -> str:
    """Return the one-letter state from /proc; empty without the process or without /proc."""
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _list_blocking_threads(pid: int) -> Iterator[str]:
    """Yield the threads of a process that have `STACKS_SIGNAL` blocked."""
    with suppress(OSError):
        for thread in (Path("/proc") / str(pid) / "task").iterdir():
            with suppress(OSError):  # the thread has ended
                if _read_blocked_mask(thread / "status") & _SIGNAL_BIT:
                    yield thread.name


def _read_blocked_mask(status: Path) -> int:
    return next(
        (
            int(line.split()[1], 16)
            for line in status.read_text().splitlines()
            if line.startswith("SigBlk:")
        ),
        0,
    )


def _get_size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _wake_pipe_reader(path: Path) -> None:
    """Wake the pipe's reader, without waiting for it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.write(descriptor, b"1\n")
    finally:
        os.close(descriptor)


def _get_stacks_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stacks"
