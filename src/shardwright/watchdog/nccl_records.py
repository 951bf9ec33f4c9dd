"""Records of NCCL's flight recorder: the last operations of a rank on its device.

Torch writes one file per rank, on request or when a collective times out: a pickle of dicts, lists,
tuples, strings and numbers, version 2.x of the format in torch's FlightRecorder.hpp. It is read
without loading any class. Imports no torch.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwright.watchdog.heartbeat import format_rank_ranges

RECORD_STEM = "nccl-rank-"
_STEM_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Names of the variable with the files' prefix, the newer one first."""
_MAX_RECORD_BYTES = 256 * 1024**2
_POLL_SECONDS = 0.1
_UNNAMED_DESCRIPTIONS = ("", "undefined")


@dataclass(frozen=True)
class NcclGroup:
    """Process group. Groups of different ranks may have the same name."""

    name: str
    ranks: tuple[int, ...]
    description: str = field(compare=False)
    """The caller's name. Torch may register a group before it has one."""

    def __str__(self) -> str:
        named = self.description not in _UNNAMED_DESCRIPTIONS
        title = self.description if named else self.name
        return f"group {title} (ranks {format_rank_ranges(self.ranks)})"


@dataclass(frozen=True)
class NcclOperation:
    """Collective, message, or batch of them, as one rank has enqueued it.

    `sequence_number` counts the collectives of a group. It is the same on all ranks of a
    collective; a message has that of the collective before it.
    """

    rank: int
    record_id: int
    group: NcclGroup
    name: str
    sequence_number: int
    message_number: int
    pair: tuple[int, int] | None
    """Sender and receiver of a message."""
    input_elements: int
    output_elements: int
    dtypes: tuple[str, ...]
    state: str
    """`scheduled`, `started` (only if NCCL's events have times) or `completed`."""
    frame: str
    """Line of Python that enqueued it."""
    created_ns: int
    """Wall clock when the host enqueued it."""
    parts: tuple[NcclOperation, ...] = ()
    """Operations of a batch, which have no state of their own."""

    @property
    def is_pending(self) -> bool:
        """True until the device has finished the operation."""
        return self.state != "completed"

    @property
    def is_message(self) -> bool:
        """True for a send or receive, and for a batch of them."""
        return self.pair is not None or any(part.pair is not None for part in self.parts)

    def __str__(self) -> str:
        if self.parts:
            shown = ", ".join(map(str, self.parts[:4])) + (", ..." if len(self.parts) > 4 else "")
            return f"batch #{self.sequence_number} of {len(self.parts)} operations ({shown})"
        sizes = f"{self.input_elements:,}"
        if self.output_elements != self.input_elements:
            sizes += f" to {self.output_elements:,}"
        kind = f" {self.dtypes[0]}" if self.dtypes else ""
        if self.pair is not None:
            return (
                f"{self.name} from rank {self.pair[0]} to rank {self.pair[1]} "
                f"({max(self.input_elements, self.output_elements):,}{kind} elements)"
            )
        return f"{self.name} #{self.sequence_number} ({sizes}{kind} elements)"


@dataclass(frozen=True)
class NcclRecord:
    """Last operations of a rank, in the order in which its host enqueued them."""

    rank: int
    operations: tuple[NcclOperation, ...]
    is_complete: bool
    """True if no operation has been dropped since the process began."""


@dataclass(frozen=True)
class NcclRecords:
    """Records of several ranks; ranks without a readable one, each with the reason."""

    by_rank: Mapping[int, NcclRecord] = field(default_factory=dict)
    unreadable: Mapping[int, str] = field(default_factory=dict)


def get_record_stem(reports: Path, environment: Mapping[str, str] = os.environ) -> str:
    """Return the path to which NCCL appends the rank: the user's, or one in `reports`."""
    chosen = (environment.get(name) for name in _STEM_VARIABLES)
    return next(filter(None, chosen), str(reports / RECORD_STEM))


class RecordRequest:
    """Wait for the records of ranks that are about to write them.

    Created before the request; a file that has not changed since then belongs to an older hang.
    """

    def __init__(self, stem: str, ranks: Collection[int]) -> None:
        self._stem = stem
        self._ranks = sorted(ranks)
        self._before = {rank: self._read_stamp(rank) for rank in self._ranks}

    def wait(self, timeout_seconds: float, *, optional: Collection[int] = ()) -> NcclRecords:
        """Return when all have been read, or after the time limit with those that can be read.

        Args:
            optional: Ranks that cannot write now; they are read, but not waited for.
        """
        until = time.monotonic() + timeout_seconds
        by_rank: dict[int, NcclRecord] = {}
        unreadable: dict[int, str] = {}
        while True:
            for rank in self._ranks:
                if rank not in by_rank:
                    try:
                        by_rank[rank] = self._read(rank)
                        unreadable.pop(rank, None)
                    except NcclRecordError as error:
                        unreadable[rank] = str(error)
            if not set(unreadable).difference(optional) or time.monotonic() > until:
                return NcclRecords(by_rank, unreadable)
            time.sleep(_POLL_SECONDS)

    def _read(self, rank: int) -> NcclRecord:
        stamp = self._read_stamp(rank)
        if stamp is None:
            raise NcclRecordError("it wrote no record")
        if stamp == self._before[rank]:
            raise NcclRecordError("its record belongs to an earlier hang")
        return read_record(Path(f"{self._stem}{rank}"), rank)

    def _read_stamp(self, rank: int) -> tuple[int, int] | None:
        with suppress(OSError):
            status = os.stat(f"{self._stem}{rank}")
            return status.st_mtime_ns, status.st_size
        return None


class NcclRecordError(Exception):
    """A record cannot be read; the message is the reason."""


def read_record(path: Path, rank: int) -> NcclRecord:
    """Read the record of a rank.

    Raises:
        NcclRecordError: The file is missing, incomplete, damaged, or of an unknown format.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_RECORD_BYTES + 1)
    except OSError as error:
        raise NcclRecordError(f"its record cannot be opened ({error.strerror})") from error
    if len(data) > _MAX_RECORD_BYTES:
        raise NcclRecordError(f"its record has more than {_MAX_RECORD_BYTES:,} bytes")
    if not data:
        raise NcclRecordError("its record is empty")
    try:
        content = _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # a damaged pickle raises errors of any kind
        raise NcclRecordError(
            f"its record of {len(data):,} bytes is incomplete or damaged "
            f"({type(error).__name__}: {error})"
        ) from error
    try:
        return parse_record(content, rank)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise NcclRecordError(
            f"its record has an unknown format ({type(error).__name__}: {error})"
        ) from error


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of built-in containers, strings and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it contains an object of {module}.{name}")


def parse_record(content: Mapping[str, Any], rank: int) -> NcclRecord:
    """Parse the content of a record.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, IndexError: It has another format.
    """
    version = str(content["version"])
    if version.split(".")[0] != "2":
        raise ValueError(f"version {version}, not 2.x")
    ranks_of_groups = {
        name: tuple(map(int, json.loads(group["ranks"])))
        for name, group in content["pg_config"].items()
    }
    entries = sorted(content.get("entries", ()), key=lambda entry: int(entry["record_id"]))
    operations: list[NcclOperation] = []
    for entry in entries:
        name, description = entry["process_group"]
        # Torch registers a group when it connects; without its ranks an operation says nothing.
        if name in ranks_of_groups:
            group = NcclGroup(str(name), ranks_of_groups[name], str(description))
            _append_operation(operations, _parse_entry(entry, group, rank))
    is_complete = not entries or int(entries[0]["record_id"]) == 0
    return NcclRecord(rank, tuple(operations), is_complete)


def _append_operation(operations: list[NcclOperation], operation: NcclOperation) -> None:
    """Append an operation; the entry that ends a batch takes its parts from the end of the list.

    Torch gives the parts the numbers of that entry and leaves their state `scheduled`.
    """
    if operation.name.endswith("coalesced") and not operation.input_elements:
        numbers = (operation.group, operation.sequence_number, operation.message_number)
        parts: list[NcclOperation] = []
        for place in range(len(operations) - 1, -1, -1):
            candidate = operations[place]
            if candidate.group != operation.group:
                continue
            if (
                candidate.parts
                or candidate.state != "scheduled"
                or numbers != (candidate.group, candidate.sequence_number, candidate.message_number)
            ):
                break
            parts.insert(0, operations.pop(place))
        operation = replace(operation, parts=tuple(parts))
    operations.append(operation)


def _parse_entry(entry: Mapping[str, Any], group: NcclGroup, rank: int) -> NcclOperation:
    name, _, members = str(entry["profiling_name"]).rpartition(":")[2].partition(" ")
    pair = None
    if name == "send":
        sender, receiver = members.split("->")
        pair = group.ranks[int(sender)], group.ranks[int(receiver)]
    elif name == "recv":
        receiver, sender = members.split("<-")
        pair = group.ranks[int(sender)], group.ranks[int(receiver)]
    state = str(entry["state"])
    if state not in ("scheduled", "started", "completed"):
        raise ValueError(f"state {state!r}")
    return NcclOperation(
        rank=rank,
        record_id=int(entry["record_id"]),
        group=group,
        name=name.removeprefix("_").removesuffix("_base"),
        sequence_number=int(entry["collective_seq_id"]),
        message_number=int(entry["p2p_seq_id"]),
        pair=pair,
        input_elements=_count_elements(entry["input_sizes"]),
        output_elements=_count_elements(entry["output_sizes"]),
        dtypes=tuple(map(str, (*entry.get("input_dtypes", ()), *entry.get("output_dtypes", ())))),
        state=state,
        frame=_choose_frame(entry.get("frames", ())) or "an unknown line",
        created_ns=int(entry["time_created_ns"]),
    )


def _count_elements(sizes: Sequence[Sequence[int]]) -> int:
    total = 0
    for shape in sizes:
        elements = 1
        for size in shape:
            elements *= int(size)
        total += elements
    return total


def _choose_frame(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the innermost line outside torch, as `folder/file.py:12 in function`."""
    shown = ""
    for frame in frames:
        path = Path(str(frame["filename"]))
        line = f"{'/'.join(path.parts[-3:])}:{frame['line']} in {frame['name']}"
        if "torch" not in path.parts:
            return line
        shown = shown or line
    return shown
