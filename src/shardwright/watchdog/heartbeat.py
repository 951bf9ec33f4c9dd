"""Heartbeat of a rank in a small mapped file: phase, step, time, and the collectives entered.

    rank-3.pulse       header and ring of the last collectives, readable by all local processes
    rank-3.channels    one JSON line per process group or pair of ranks: the ranks of a ring key
    rank-3.stacks      stacks that the rank writes on SIGUSR2

The rank writes by memory stores, so the last state is readable even if the process is stopped
or its interpreter lock is not released. `faulthandler` writes the stacks in the signal handler,
also without that lock. Times are CLOCK_MONOTONIC, which all processes of a machine share and
which changes of the wall clock do not affect. Imports no torch.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import mmap
import os
import signal
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwright.errors import InputError

PHASES = ("setup", "step", "evaluate", "save", "done")
STACKS_SIGNAL = signal.SIGUSR2
HEARTBEAT_INTERVAL_SECONDS = 0.5
NCCL_PIPE_STEM = "nccl-"
"""Prefix of `nccl-<rank>.pipe`, next to the heartbeat on CUDA; NCCL dumps its record when
something is written to it."""

_MAGIC = b"SWPULSE1"
_IDENTITY = struct.Struct("<8sQII")
"""Magic, process id, rank, world size."""
_PHASE = struct.Struct("<qIxxxxdd")
"""Step, phase, start time and time limit of the phase in seconds."""
_TIMESTAMP = struct.Struct("<d")
_COUNT = struct.Struct("<Q")
_PHASE_OFFSET_BYTES = 24
_LIMIT_OFFSET_BYTES = _PHASE_OFFSET_BYTES + 24
_ALIVE_OFFSET_BYTES = 56
_WAITING_OFFSET_BYTES = 64
"""Offset of the start time of a wait; 0 if the rank does not wait."""
_COUNT_OFFSET_BYTES = 72
"""Offset of the number of collectives entered. Fields that change alone have eight bytes, so a
reader never sees a partial write."""
_RECORD = struct.Struct("<QQIxxxxQd")
"""Channel, number, operation, elements, time."""
_RING_OFFSET_BYTES = 256
_NUM_RING_RECORDS = 2048
_SIZE_BYTES = _RING_OFFSET_BYTES + _NUM_RING_RECORDS * _RECORD.size


@dataclass(frozen=True)
class CollectiveEntry:
    """Collective or message that a rank has entered; `sequence_number` starts at 1 in each
    channel.
    """

    channel_key: int
    sequence_number: int
    operation: str
    num_elements: int
    at_seconds: float

    def matches(self, other: CollectiveEntry) -> bool:
        """True if both can be calls of the same collective on different ranks."""
        return (self.operation, self.num_elements) == (other.operation, other.num_elements)

    def __str__(self) -> str:
        return f"{self.operation} #{self.sequence_number}" + (
            f" ({self.num_elements:,} elements)" if self.num_elements else ""
        )


OPERATIONS = (
    "?", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier",
    "reduce", "gather", "scatter", "send", "recv",
)  # fmt: skip
"""Names of operations; the index is the number in the ring."""


@dataclass(frozen=True)
class CommunicationChannel:
    """Process group, or one direction between two of its ranks."""

    key: int
    name: str
    ranks: tuple[int, ...]


def build_channel(
    group: str, ranks: Sequence[int], *, pair: tuple[int, int] | None = None
) -> CommunicationChannel:
    """Build the channel of a group or a pair of its ranks; its key is the same on all ranks."""
    name = f"group {group} (ranks {format_rank_ranges(ranks)})"
    if pair is not None:
        name = f"messages from rank {pair[0]} to rank {pair[1]} in {name}"
    members = tuple(ranks) if pair is None else pair
    return CommunicationChannel(zlib.crc32(name.encode()), name, members)


def format_rank_ranges(ranks: Sequence[int]) -> str:
    """Format ranks as a range if they are consecutive.

    >>> format_rank_ranges([0, 1, 2, 3]), format_rank_ranges([0, 4])
    ('0-3', '0, 4')
    """
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


class HeartbeatWriter:
    """Writer of a rank's heartbeat: phases (`begin_phase`) and communication (`record_collective`,
    `record_wait`).
    """

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        """
        Raises:
            InputError: Another running process has this rank of the same launch.
        """
        self.rank = rank
        self.folder = folder
        self._path = folder / f"rank-{rank}.pulse"
        self._owner_thread = threading.get_ident()
        self._map = self._create_file()
        self._channels = (folder / f"rank-{rank}.channels").open("w", encoding="utf-8")
        self._written_channels: set[int] = set()
        self._last_numbers: dict[int, int] = {}
        self._ring_positions = itertools.count()
        self._stacks = (folder / f"rank-{rank}.stacks").open("w", encoding="utf-8")
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True, chain=False)
        now = time.monotonic()
        _TIMESTAMP.pack_into(self._map, _ALIVE_OFFSET_BYTES, now)
        self.begin_phase("setup", 0.0)
        _IDENTITY.pack_into(self._map, 0, _MAGIC, os.getpid(), rank, world_size)
        self._closing = threading.Event()
        self._heartbeat_thread = threading.Thread(
            target=self._run_heartbeat, name="pulse", daemon=True
        )
        self._heartbeat_thread.start()

    def _create_file(self) -> mmap.mmap:
        """Create the complete file, then rename it; raise if a live process owns the name."""
        before = read_heartbeat(self._path)
        if before is not None and before.pid != os.getpid() and _is_alive(before.pid):
            raise InputError(
                f"two processes have rank {self.rank} of the same run "
                f"(this one and process {before.pid})",
                field="RANK",
                got=self.rank,
                remedy="Give every process its own rank, or end the ranks of the earlier run",
            )
        partial = self._path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(bytes(_SIZE_BYTES))
        with partial.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), _SIZE_BYTES)
        partial.replace(self._path)
        return mapped

    def begin_phase(self, phase: str, limit_seconds: float, *, step: int = 0) -> None:
        """Record that `phase` of `step` starts and should take at most `limit_seconds`."""
        _PHASE.pack_into(
            self._map,
            _PHASE_OFFSET_BYTES,
            step,
            PHASES.index(phase),
            time.monotonic(),
            limit_seconds,
        )

    def record_collective(
        self, channel: CommunicationChannel, operation: int, num_elements: int
    ) -> None:
        """Record that the rank enters a collective of a channel."""
        if channel.key not in self._written_channels:
            self._written_channels.add(channel.key)
            self._channels.write(json.dumps([channel.key, channel.name, channel.ranks]) + "\n")
            self._channels.flush()
        number = self._last_numbers.get(channel.key, 0) + 1
        self._last_numbers[channel.key] = number
        place = next(self._ring_positions)
        start = _RING_OFFSET_BYTES + place % _NUM_RING_RECORDS * _RECORD.size
        _RECORD.pack_into(
            self._map, start, channel.key, number, operation, num_elements, time.monotonic()
        )
        _COUNT.pack_into(self._map, _COUNT_OFFSET_BYTES, place + 1)

    def record_wait(self, *, is_waiting: bool) -> None:
        """Record the start or end of a wait for other ranks, in the training thread only."""
        if threading.get_ident() == self._owner_thread:
            _TIMESTAMP.pack_into(
                self._map, _WAITING_OFFSET_BYTES, time.monotonic() if is_waiting else 0.0
            )

    def _run_heartbeat(self) -> None:
        while not self._closing.wait(HEARTBEAT_INTERVAL_SECONDS):
            _TIMESTAMP.pack_into(self._map, _ALIVE_OFFSET_BYTES, time.monotonic())

    def stop(self) -> None:
        """Stop the heartbeat and the limit of the phase after a failure; the records stay.

        The signal for stacks is still handled: without a handler it would end the process.
        """
        _TIMESTAMP.pack_into(self._map, _LIMIT_OFFSET_BYTES, 0.0)
        self._closing.set()
        self._heartbeat_thread.join()
        self._channels.close()

    def close(self) -> None:
        """Stop the heartbeat and remove the files; other ranks no longer wait for this one."""
        self.begin_phase("done", 0.0)
        self._closing.set()
        self._heartbeat_thread.join()
        faulthandler.unregister(STACKS_SIGNAL)
        self._channels.close()
        self._stacks.close()
        for suffix in (".pulse", ".channels", ".stacks"):
            with suppress(OSError):
                self._path.with_suffix(suffix).unlink()


@dataclass(frozen=True)
class Heartbeat:
    """State of a rank at one moment; times are seconds of CLOCK_MONOTONIC."""

    rank: int
    pid: int
    world_size: int
    phase: str
    step: int
    phase_start_seconds: float
    limit_seconds: float
    """Time limit of the phase; 0 for none."""
    last_beat_seconds: float
    """Last beat of the rank's heartbeat thread, which stops with process or interpreter."""
    wait_start_seconds: float | None
    entries: tuple[CollectiveEntry, ...]
    """Last collectives, oldest first."""
    channels: dict[int, CommunicationChannel]

    def find_last_entry(self, channel_key: int) -> CollectiveEntry | None:
        """Return the newest collective of a channel that is still in the ring."""
        return next(
            (entered for entered in reversed(self.entries) if entered.channel_key == channel_key),
            None,
        )


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Read a heartbeat file; None if it is missing or not complete yet."""
    try:
        data = path.read_bytes()
        lines = path.with_suffix(".channels").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    if len(data) != _SIZE_BYTES or data[:8] != _MAGIC:
        return None
    _, pid, rank, world_size = _IDENTITY.unpack_from(data)
    step, phase, since, limit = _PHASE.unpack_from(data, _PHASE_OFFSET_BYTES)
    (alive,) = _TIMESTAMP.unpack_from(data, _ALIVE_OFFSET_BYTES)
    (waiting,) = _TIMESTAMP.unpack_from(data, _WAITING_OFFSET_BYTES)
    (count,) = _COUNT.unpack_from(data, _COUNT_OFFSET_BYTES)
    records = []
    for place in range(max(0, count - _NUM_RING_RECORDS), count):
        key, number, operation, elements, at = _RECORD.unpack_from(
            data, _RING_OFFSET_BYTES + place % _NUM_RING_RECORDS * _RECORD.size
        )
        records.append(CollectiveEntry(key, number, OPERATIONS[operation], elements, at))
    channels = {}
    for line in lines:
        with suppress(ValueError):  # incomplete line, still being written
            key, name, ranks = json.loads(line)
            channels[key] = CommunicationChannel(key, name, tuple(ranks))
    return Heartbeat(
        rank,
        pid,
        world_size,
        PHASES[phase],
        step,
        since,
        limit,
        alive,
        waiting or None,
        tuple(records),
        channels,
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a live process of another user
    return True
