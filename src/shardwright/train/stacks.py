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

from shardwright.train.pulse import PIPE_STEM, STACKS_SIGNAL, PulseView

_AT_MOST_SECONDS = 20.0
"""Time limit for a rank that is blocked in the kernel and never writes."""
_OTHERS_SECONDS = 1.0
"""Time for writers whose end is not observable: NCCL's record, and ranks without /proc."""
_LOOK_SECONDS = 0.002
_BIT = 1 << (STACKS_SIGNAL - 1)


def ask_for_stacks(
    folder: Path, views: Sequence[PulseView], states: Mapping[int, str]
) -> dict[int, str]:
    """Return the stacks of the ranks that could write them, by rank.

    A stopped rank is continued for this, after the others, and then stopped again: the launch
    ends anyway.

    Args:
        folder: Folder of the heartbeats.
        states: One-letter process states of the ranks, from /proc.
    """
    stopped = [view for view in views if states[view.rank] in ("T", "t")]
    requests = {view.rank: _Asked.of(view.pid, _stacks_file(folder, view.rank)) for view in views}
    piped = False
    for view in views:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(view.pid, STACKS_SIGNAL)
        with suppress(OSError):  # the pipe exists on CUDA only
            _write_to_pipe(folder / f"{PIPE_STEM}{view.rank}.pipe")
            piped = True
    until = time.monotonic() + _OTHERS_SECONDS
    _await([requests[view.rank] for view in views if view not in stopped])
    if piped:
        time.sleep(max(0.0, until - time.monotonic()))
    for view in stopped:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(view.pid, signal.SIGCONT)
            _await([requests[view.rank]])
            os.kill(view.pid, signal.SIGSTOP)
    stacks = {}
    for view in views:
        with suppress(OSError):
            stacks[view.rank] = requests[view.rank].file.read_text(
                encoding="utf-8", errors="replace"
            )
    return stacks


@dataclass(frozen=True)
class _Asked:
    """Request to one rank, with the state of its stacks file before it."""

    pid: int
    file: Path
    size_bytes: int
    deaf: frozenset[str]
    """Threads that always have the signal blocked, such as those of some libraries."""

    @classmethod
    def of(cls, pid: int, file: Path) -> _Asked:
        return cls(pid, file, _size_of(file), frozenset(_blocking(pid)))

    def has_written(self) -> bool:
        """Return True if the stacks are complete, or the process has ended and cannot write."""
        if process_state(self.pid) in ("", "Z", "X"):
            return True
        return _size_of(self.file) > self.size_bytes and self.deaf.issuperset(_blocking(self.pid))


def _await(asked: Sequence[_Asked]) -> None:
    if not Path("/proc/self/task").is_dir():
        time.sleep(_OTHERS_SECONDS)
        return
    until = time.monotonic() + _AT_MOST_SECONDS
    while not all(request.has_written() for request in asked) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)


def process_state(pid: int) -> str:
    """Return the one-letter state from /proc; empty without the process or without /proc."""
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _blocking(pid: int) -> Iterator[str]:
    """Yield the threads of a process that have `STACKS_SIGNAL` blocked."""
    with suppress(OSError):
        for thread in (Path("/proc") / str(pid) / "task").iterdir():
            with suppress(OSError):  # the thread has ended
                if _mask_of(thread / "status") & _BIT:
                    yield thread.name


def _mask_of(status: Path) -> int:
    return next(
        (
            int(line.split()[1], 16)
            for line in status.read_text().splitlines()
            if line.startswith("SigBlk:")
        ),
        0,
    )


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _write_to_pipe(path: Path) -> None:
    """Wake the pipe's reader, without waiting for it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.write(descriptor, b"1\n")
    finally:
        os.close(descriptor)


def _stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stacks"
