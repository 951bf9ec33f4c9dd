"""Event file of a run: one process appends lines, any process may read; survives crashes."""

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
from typing import Any, TypeVar

from shardwright.errors import InputError, RunFailed
from shardwright.files import detect_file_kind, open_regular_file
from shardwright.telemetry.event_encoding import decode_event, encode_event, make_event
from shardwright.telemetry.event_types import (  # noqa: F401 (readers import the types from here)
    EVENT_TYPES,
    EVENTS_FILE_NAME,
    MEASUREMENT_TYPES,
    SCHEMA_VERSION,
    CheckpointEvent,
    EvaluationEvent,
    Event,
    FailureEvent,
    MemoryEvent,
    PipelineEvent,
    PreemptionEvent,
    ProfileEvent,
    RanksEvent,
    ReshardEvent,
    RestartEvent,
    ResumeEvent,
    RollbackEvent,
    RunFinishedEvent,
    RunStartedEvent,
    SkippedStepEvent,
    StepEvent,
    WarningEvent,
)

_EventType = TypeVar("_EventType", bound=Event)


class EventWriter:
    """Writer that appends events to `<run_dir>/events.jsonl`, one line each.

    Only one process, rank 0 in a distributed run, may have the file open for writing (an
    advisory lock that ends with the process). Opening the file removes a last line that a crash
    left incomplete, and logs a `warning` event.

    Args:
        elapsed_seconds: for events of a process that has ended, its seconds so far.

    Raises:
        InputError: another process is writing this run.
        RunFailed: the file cannot be written (such as on a full disk); earlier lines stay
            readable.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, elapsed_seconds: float = 0.0) -> None:
        self.path = Path(run_dir) / EVENTS_FILE_NAME
        self._opened_at = time.monotonic() - elapsed_seconds
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise RunFailed(f"cannot open {self.path}: {error.strerror}") from error
        try:
            _acquire_lock(self._descriptor, self.path.parent)
            torn_bytes = _repair_tail(self._descriptor)
            if torn_bytes:
                message = (
                    f"removed {torn_bytes} bytes of an incomplete line from {EVENTS_FILE_NAME}"
                )
                self.append(WarningEvent(message=message))
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, kind: str, **values: Any) -> Event:
        """Build an event of a kind (see `make_event`), append it and return it as written."""
        return self.append(make_event(kind, **values))

    def append(self, event: Event) -> Event:
        """Fill in the times of the event, write it, and return it as written.

        Raises:
            RunFailed: The file cannot be written.
        """
        stamped = dataclasses.replace(
            event, time=time.time(), elapsed_seconds=time.monotonic() - self._opened_at
        )
        line = (encode_event(stamped) + "\n").encode("utf-8", errors="backslashreplace")
        before = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, line)
            while written < len(line):  # partial writes: signals, or a disk that is almost full
                written += os.write(self._descriptor, line[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, before)
            raise RunFailed(f"cannot write {self.path}: {error.strerror}") from error
        return stamped

    def close(self) -> None:
        """Sync to disk and close the file. Closing twice is allowed."""
        if self._descriptor >= 0:
            descriptor = self._descriptor
            self._descriptor = -1
            try:
                with contextlib.suppress(OSError):  # pipes and some network disks have no fsync
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_unlocked(run_dir: str | os.PathLike[str]) -> None:
    """Check that no process is writing this run; changes nothing.

    Raises:
        InputError: another process is writing it.
    """
    try:
        descriptor = os.open(
            Path(run_dir) / EVENTS_FILE_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        )
    except OSError:
        return  # no events yet; other problems of the folder are reported when it is written
    try:
        _acquire_lock(descriptor, Path(run_dir))
    finally:
        os.close(descriptor)  # releases the lock


def _acquire_lock(descriptor: int, run_dir: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise InputError(
                "another process is writing this run",
                field="run.dir",
                got=run_dir,
                remedy="Wait for it to end, or use another folder for this run",
            ) from error
        # Some network file systems have no locks; training works without one.


def _repair_tail(descriptor: int) -> int:
    """Remove an incomplete last line or add its newline; return the number of bytes removed."""
    size = os.fstat(descriptor).st_size
    tail = b""
    start = size
    while start > 0 and b"\n" not in tail:
        start = max(0, start - 65536)
        tail = os.pread(descriptor, size - start, start)
    torn = tail.rpartition(b"\n")[2]
    if not torn:
        return 0
    try:
        is_complete = isinstance(json.loads(torn), dict)
    except (ValueError, RecursionError):
        is_complete = False
    if is_complete:  # only the newline is missing
        os.write(descriptor, b"\n")
        return 0
    os.ftruncate(descriptor, size - len(torn))
    return len(torn)


@dataclass(frozen=True)
class EventLog:
    """Events read from a run, and the lines that could not be read."""

    path: Path
    events: tuple[Event, ...]
    has_torn_tail: bool = False
    """True if the last line is incomplete: a process is writing it, or crashed."""
    broken_lines: tuple[int, ...] = ()
    """Numbers, from 1, of lines that are not valid events, without an incomplete last line."""
    unknown_kinds: tuple[tuple[str, int], ...] = ()
    """Event kinds that this version does not know, with their count."""
    newer_lines: tuple[int, int] | None = None
    """Number of lines of a newer shardwright, and its schema version; their known fields are
    read."""
    missing_reason: str | None = None
    """Reason why there is no event file, None if there is one."""

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def filter_by_type(self, event_type: type[_EventType]) -> list[_EventType]:
        """Return the events of one type, in file order."""
        return [event for event in self.events if isinstance(event, event_type)]

    @property
    def problems(self) -> tuple[str, ...]:
        """One message for each problem with the file; empty if there is none."""
        problems = []
        if self.missing_reason:
            problems.append(f"there are no events to show yet: {self.path} ({self.missing_reason})")
        if self.newer_lines:
            num_lines, version = self.newer_lines
            problems.append(
                f"{num_lines:,} lines were written by a newer shardwright (schema {version}; "
                f"this version reads {SCHEMA_VERSION}): unknown fields are ignored, and "
                "others may have changed their meaning"
            )
        if self.broken_lines:
            numbers = ", ".join(str(number) for number in self.broken_lines[:5])
            numbers += ", ..." if len(self.broken_lines) > 5 else ""
            problems.append(
                f"{len(self.broken_lines)} lines of {self.path} cannot be read and are ignored "
                f"(line {numbers})"
            )
        problems += [
            f"{count} events of unknown kind `{kind}` are ignored"
            for kind, count in self.unknown_kinds
        ]
        if self.has_torn_tail:
            problems.append("the last line is incomplete: the run is writing it, or was killed")
        return tuple(problems)


def read_events(run: str | os.PathLike[str], *, is_lenient: bool = False) -> EventLog:
    """Read all events of a run folder (or of an events.jsonl), in file order.

    An incomplete last line is ignored; `broken_lines` has the numbers of other unreadable
    lines.

    Args:
        is_lenient: for display, not for resuming: a folder without events gives an empty log, a
            newer schema is read like the current one, and `problems` has a message.

    Raises:
        InputError: there is no event file, or a newer shardwright wrote it in a schema that
            this version would misread.
    """
    folder = Path(run)
    path = Path(run)
    try:
        path = path / EVENTS_FILE_NAME if detect_file_kind(path) == "folder" else path
        with open_regular_file(path) as stream:
            content = stream.read()
    except OSError as error:
        if is_lenient and folder.is_dir():
            return EventLog(path, (), missing_reason=error.strerror)
        raise InputError(
            f"no events to read: {error.strerror}",
            field="run",
            got=path,
            remedy=f"Pass a run folder, which contains {EVENTS_FILE_NAME}",
        ) from error
    lines = content.split(b"\n")
    torn_tail = bool(lines.pop())
    events: list[Event] = []
    broken_lines: list[int] = []
    unknown: Counter[str] = Counter()
    num_newer = 0
    newest = SCHEMA_VERSION
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            version = record["schema_version"]
            if version > SCHEMA_VERSION:
                num_newer += 1
                newest = max(newest, version)
            if version > SCHEMA_VERSION and not is_lenient:
                raise InputError(
                    "written by a newer shardwright",
                    field="schema_version",
                    got=version,
                    allowed=f"up to {SCHEMA_VERSION}",
                    remedy="Upgrade shardwright to read this run",
                )
            if record["kind"] in EVENT_TYPES:
                events.append(decode_event(record))
            else:
                unknown[str(record["kind"])] += 1
        except (ValueError, KeyError, TypeError, RecursionError):
            broken_lines.append(number)
    newer_lines = (num_newer, newest) if num_newer else None
    return EventLog(
        path,
        tuple(events),
        torn_tail,
        tuple(broken_lines),
        tuple(sorted(unknown.items())),
        newer_lines,
    )


_WITHDRAWN_EVENT_TYPES = (
    StepEvent,
    RanksEvent,
    MemoryEvent,
    PipelineEvent,
    EvaluationEvent,
    SkippedStepEvent,
    CheckpointEvent,
)


def select_surviving(events: Iterable[Event]) -> list[Event]:
    """Return the events of the current weights, without those that a resume discarded.

    `resumed` at step R withdraws all earlier lines for steps after R: steps and their
    measurements, evaluations, skipped steps and checkpoints. A `run_started` that reaches a
    step without `resumed` counts as a resume at its own `step` (0 if None), because it trained
    from there. Of two steps, or two evaluations, with the same number the later one stays. All
    other events (starts, warnings, failures) stay.
    """
    surviving_events: list[Event] = []
    limit: float = float("inf")
    seen_keys: set[tuple[type[Event], int]] = set()
    has_reached_step = False
    for event in reversed(list(events)):
        if isinstance(event, ResumeEvent):
            limit = min(limit, event.step or 0)
            has_reached_step = False
        elif isinstance(event, RunStartedEvent):
            if has_reached_step:
                limit = min(limit, event.step or 0)
            has_reached_step = False
        elif isinstance(event, _WITHDRAWN_EVENT_TYPES) and event.step is not None:
            has_reached_step = has_reached_step or isinstance(event, StepEvent)
            key = (type(event), event.step)
            if event.step > limit or key in seen_keys:
                continue
            if isinstance(event, StepEvent | EvaluationEvent):
                seen_keys.add(key)
        surviving_events.append(event)
    return surviving_events[::-1]


def select_surviving_steps(events: Iterable[Event]) -> list[StepEvent]:
    """Return the surviving `step` events, sorted by step."""
    return sorted(
        (e for e in select_surviving(events) if isinstance(e, StepEvent)), key=lambda e: e.step or 0
    )
