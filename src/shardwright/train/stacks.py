"""Every rank's stacks, asked for from outside while the ranks hang.

A rank writes them by `faulthandler`, inside the handler of `STACKS_SIGNAL`, line by line. A reader that comes too early finds half
of them, and a rank that is stopped again too early leaves half of them; the time it takes is the machine's affair. Linux tells
when it is over: as long as a handler runs, its thread has its signal blocked. No torch.
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
"""For a rank that is held inside the kernel and will never write."""
_OTHERS_SECONDS = 1.0
"""Granted where nobody tells when it is over: to NCCL for its record, and where there is no /proc."""
_LOOK_SECONDS = 0.002
_BIT = 1 << (STACKS_SIGNAL - 1)


def ask_for_stacks(folder: Path, views: Sequence[PulseView], states: Mapping[int, str]) -> dict[int, str]:
    """The stacks of the ranks that could write them, by rank.

    A stopped rank is let go on for it at the last, and stopped again: its generation ends anyway.

    Args:
        folder: where the pulses are.
        states: the ranks' process states, one letter each as /proc has them.
    """
    stopped = [view for view in views if states[view.rank] in ("T", "t")]
    asked = {view.rank: _Asked.of(view.pid, _stacks_file(folder, view.rank)) for view in views}
    piped = False
    for view in views:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(view.pid, STACKS_SIGNAL)
        with suppress(OSError):  # there is one on CUDA only
            _write_to_pipe(folder / f"{PIPE_STEM}{view.rank}.pipe")
            piped = True
    until = time.monotonic() + _OTHERS_SECONDS
    _await([asked[view.rank] for view in views if view not in stopped])
    if piped:
        time.sleep(max(0.0, until - time.monotonic()))
    for view in stopped:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(view.pid, signal.SIGCONT)
            _await([asked[view.rank]])
            os.kill(view.pid, signal.SIGSTOP)
    found = {}
    for view in views:
        with suppress(OSError):
            found[view.rank] = asked[view.rank].file.read_text(encoding="utf-8", errors="replace")
    return found


@dataclass(frozen=True)
class _Asked:
    """A rank before it is asked."""

    pid: int
    file: Path
    size_bytes: int
    deaf: frozenset[str]
    """Threads that have the signal blocked at all times, as those of some libraries have."""

    @classmethod
    def of(cls, pid: int, file: Path) -> _Asked:
        return cls(pid, file, _size_of(file), frozenset(_blocking(pid)))

    def has_written(self) -> bool:
        """Whether it has begun and no thread is in the handler any more, or it never will: its process has ended."""
        if process_state(self.pid) in ("", "Z", "X"):
            return True
        return _size_of(self.file) > self.size_bytes and self.deaf.issuperset(_blocking(self.pid))


def _await(asked: Sequence[_Asked]) -> None:
    if not Path("/proc/self/task").is_dir():
        time.sleep(_OTHERS_SECONDS)
        return
    until = time.monotonic() + _AT_MOST_SECONDS
    while not all(one.has_written() for one in asked) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)


def process_state(pid: int) -> str:
    """One letter, as /proc has it; empty where the process is gone or there is no /proc."""
    with suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _blocking(pid: int) -> Iterator[str]:
    """The threads of a process that have `STACKS_SIGNAL` blocked."""
    with suppress(OSError):
        for thread in (Path("/proc") / str(pid) / "task").iterdir():
            with suppress(OSError):  # it has ended
                if _mask_of(thread / "status") & _BIT:
                    yield thread.name


def _mask_of(status: Path) -> int:
    return next((int(line.split()[1], 16) for line in status.read_text().splitlines() if line.startswith("SigBlk:")), 0)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _write_to_pipe(path: Path) -> None:
    """Wake whoever reads there; nobody is waited for."""
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.write(descriptor, b"1\n")
    finally:
        os.close(descriptor)


def _stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stacks"
