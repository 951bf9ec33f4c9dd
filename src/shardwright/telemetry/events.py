"""The event file on disk: written by one process line by line, read by anybody at any time, whole after any crash."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from shardwright.errors import InputError, RunFailed
from shardwright.files import file_kind, open_regular
from shardwright.telemetry.kinds import (
    EVENT_TYPES,
    FILE_NAME,
    MEASUREMENTS,
    SCHEMA_VERSION,
    Checkpoint,
    Evaluation,
    Event,
    Failed,
    Memory,
    PipelineRan,
    Preempted,
    Profiled,
    Ranks,
    Resumed,
    RolledBack,
    RunFinished,
    RunStarted,
    SkippedStep,
    Step,
    Warned,
)
from shardwright.telemetry.lines import decode, encode, make_event

__all__ = [
    "FILE_NAME",
    "MEASUREMENTS",
    "SCHEMA_VERSION",
    "Checkpoint",
    "Evaluation",
    "Event",
    "EventLog",
    "EventWriter",
    "Failed",
    "Memory",
    "PipelineRan",
    "Preempted",
    "Profiled",
    "Ranks",
    "Resumed",
    "RolledBack",
    "RunFinished",
    "RunStarted",
    "SkippedStep",
    "Step",
    "Warned",
    "check_free",
    "make_event",
    "read_events",
    "surviving",
    "surviving_steps",
]

_Kind = TypeVar("_Kind", bound=Event)


class EventWriter:
    """Appends events to `<run_dir>/events.jsonl`, each in one write of one whole line.

    One process holds the file at a time (an advisory lock that dies with the process); in a distributed run that is rank 0.
    A last line that a crash left without its end is taken out when the file is opened again, and a `warning` event says so.

    Raises:
        InputError: another process is writing this run.
        RunFailed: the file cannot be written (a full disk, say); what was written before stays readable.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self._opened_at = time.monotonic()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunFailed(f"cannot open {self.path}: {error.strerror}") from error
        try:
            _lock(self._descriptor, self.path.parent)
            torn_bytes = _heal(self._descriptor)
            if torn_bytes:
                self.append(Warned(message=f"took out {torn_bytes} bytes of a line that a crash cut short in {FILE_NAME}"))
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, kind: str, **values: Any) -> Event:
        """Build the event of a kind (see `make_event`), append it and return it as written."""
        return self.append(make_event(kind, **values))

    def append(self, event: Event) -> Event:
        """Stamp the event with the clocks, write it, and return it as written."""
        stamped = dataclasses.replace(event, time=time.time(), elapsed_seconds=time.monotonic() - self._opened_at)
        line = (encode(stamped) + "\n").encode("utf-8", errors="backslashreplace")
        before = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):  # short on signals and on a disk that is filling up
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, before)
            raise RunFailed(f"cannot write {self.path}: {error.strerror}") from error
        return stamped

    def close(self) -> None:
        """Sync to disk and let go of the file. Closing twice is fine."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            try:
                with contextlib.suppress(OSError):  # pipes and some network disks have no fsync
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_free(run_dir: str | os.PathLike[str]) -> None:
    """See that nobody writes this run now; nothing is changed.

    Raises:
        InputError: another process is writing it.
    """
    try:
        descriptor = os.open(Path(run_dir) / FILE_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return  # no events yet; what else may be wrong with the folder is told when it is written
    try:
        _lock(descriptor, Path(run_dir))
    finally:
        os.close(descriptor)  # and with it the lock


def _lock(descriptor: int, run_dir: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise InputError(
                "another process is writing this run",
                field="run.dir",
                got=run_dir,
                remedy="Wait for it to end, or give this run a folder of its own",
            ) from error
        # A disk without locks (some network file systems) is no reason not to train.


def _heal(descriptor: int) -> int:
    """Make the file end in a newline; the number of torn bytes that were taken out."""
    size = os.fstat(descriptor).st_size
    tail, start = b"", size
    while start > 0 and b"\n" not in tail:
        start = max(0, start - 65536)
        tail = os.pread(descriptor, size - start, start)
    torn = tail.rpartition(b"\n")[2]
    if not torn:
        return 0
    try:
        whole = isinstance(json.loads(torn), dict)
    except (ValueError, RecursionError):
        whole = False
    if whole:  # only the newline was lost
        os.write(descriptor, b"\n")
        return 0
    os.ftruncate(descriptor, size - len(torn))
    return len(torn)


@dataclass(frozen=True)
class EventLog:
    """What was read of a run's events, and what could not be."""

    path: Path
    events: tuple[Event, ...]
    torn_tail: bool = False
    """The last line has no end yet: a writer is at work, or crashed."""
    broken_lines: tuple[int, ...] = ()
    """Numbers, from 1, of lines that are not an event of ours; the torn tail is not among them."""
    unknown_kinds: tuple[tuple[str, int], ...] = ()
    """Kinds that this version does not know, with their count."""
    newer: tuple[int, int] | None = None
    """Lines that a newer shardwright wrote, and its schema: read as far as this one understands them."""
    missing: str | None = None
    """Why there is no event file."""

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def of(self, event_type: type[_Kind]) -> list[_Kind]:
        """Events of one type, in file order."""
        return [event for event in self.events if isinstance(event, event_type)]

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for people for each thing that was not read; empty for a whole file."""
        found = []
        if self.missing:
            found.append(f"there are no events to show yet: {self.path} ({self.missing})")
        if self.newer:
            found.append(
                f"{self.newer[0]:,} lines are a newer shardwright's (schema {self.newer[1]}, this one knows {SCHEMA_VERSION}): "
                "shown as far as they are understood; what they mean may have changed"
            )
        if self.broken_lines:
            shown = ", ".join(str(number) for number in self.broken_lines[:5]) + (", ..." if len(self.broken_lines) > 5 else "")
            found.append(f"{len(self.broken_lines)} lines of {self.path} cannot be read and are left out (line {shown})")
        found += [f"{count} events of unknown kind `{kind}` are left out" for kind, count in self.unknown_kinds]
        if self.torn_tail:
            found.append("the last line has no end: the run is still writing, or was killed while it wrote")
        return tuple(found)


def read_events(run: str | os.PathLike[str], *, as_far_as_it_goes: bool = False) -> EventLog:
    """All events of a run folder (or of an events.jsonl), in file order.

    A torn last line is left out; other lines that cannot be read are counted with their numbers, never passed over silently.

    Args:
        as_far_as_it_goes: for showing, not for going on: a folder without events is an empty log, a newer schema is read as if it
            were ours, and `problems` says so.

    Raises:
        InputError: there is no event file, or a newer shardwright wrote it in a schema that this one would misread.
    """
    folder = Path(run)
    path = Path(run)
    try:
        path = path / FILE_NAME if file_kind(path) == "folder" else path
        with open_regular(path) as stream:
            content = stream.read()
    except OSError as error:
        if as_far_as_it_goes and folder.is_dir():
            return EventLog(path, (), missing=error.strerror)
        raise InputError(
            f"no events to read: {error.strerror}", field="run", got=path, remedy=f"Give a run folder, one that holds {FILE_NAME}"
        ) from error
    lines = content.split(b"\n")
    torn_tail = bool(lines.pop())
    events: list[Event] = []
    broken: list[int] = []
    unknown: Counter[str] = Counter()
    newer, newest = 0, SCHEMA_VERSION
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            version = record["schema_version"]
            if version > SCHEMA_VERSION:
                newer, newest = newer + 1, max(newest, version)
            if version > SCHEMA_VERSION and not as_far_as_it_goes:
                raise InputError(
                    "written by a newer shardwright",
                    field="schema_version",
                    got=version,
                    allowed=f"up to {SCHEMA_VERSION}",
                    remedy="Upgrade shardwright to read this run",
                )
            if record["kind"] in EVENT_TYPES:
                events.append(decode(record))
            else:
                unknown[str(record["kind"])] += 1
        except (ValueError, KeyError, TypeError, RecursionError):
            broken.append(number)
    told_newer = (newer, newest) if newer else None
    return EventLog(path, tuple(events), torn_tail, tuple(broken), tuple(sorted(unknown.items())), told_newer)


_WITHDRAWN_BY_RESUME = (Step, Ranks, Memory, PipelineRan, Evaluation, SkippedStep, Checkpoint)


def surviving(events: Iterable[Event]) -> list[Event]:
    """The events without those that a resume left behind: one curve, the one whose weights exist.

    `resumed` at step R withdraws every earlier step (and what was measured of it), evaluation, skipped step and checkpoint after
    R. A `run_started` that reaches a step without `resumed` counts as a resume at its own `step`, 0 when it says none: it trained
    anew. Of two steps, or two evaluations, with the same number the later one stays. Everything else (starts, warnings, failures)
    is history and stays.
    """
    kept: list[Event] = []
    limit: float = float("inf")
    seen: set[tuple[type[Event], int]] = set()
    reached_a_step = False
    for event in reversed(list(events)):
        if isinstance(event, Resumed):
            limit, reached_a_step = min(limit, event.step or 0), False
        elif isinstance(event, RunStarted):
            limit, reached_a_step = min(limit, event.step or 0) if reached_a_step else limit, False
        elif isinstance(event, _WITHDRAWN_BY_RESUME) and event.step is not None:
            reached_a_step = reached_a_step or isinstance(event, Step)
            key = (type(event), event.step)
            if event.step > limit or key in seen:
                continue
            if isinstance(event, Step | Evaluation):
                seen.add(key)
        kept.append(event)
    return kept[::-1]


def surviving_steps(events: Iterable[Event]) -> list[Step]:
    """The steps of the surviving curve, by rising step."""
    return sorted((e for e in surviving(events) if isinstance(e, Step)), key=lambda e: e.step or 0)
