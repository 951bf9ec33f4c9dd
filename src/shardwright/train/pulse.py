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
BEAT_SECONDS = 0.5
PIPE_STEM = "nccl-"
"""Prefix of `nccl-<rank>.pipe`, beside the heartbeat on CUDA; NCCL dumps its record when
something is written to it."""

_MAGIC = b"SWPULSE1"
_WHO = struct.Struct("<8sQII")
"""Magic, process id, rank, world size."""
_WHAT = struct.Struct("<qIxxxxdd")
"""Step, phase, start time and time limit of the phase in seconds."""
_TIME = struct.Struct("<d")
_COUNT = struct.Struct("<Q")
_WHAT_AT = 24
_ALIVE_AT = 56
_WAITING_AT = 64
"""Offset of the start time of a wait; 0 if the rank does not wait."""
_COUNT_AT = 72
"""Offset of the number of collectives entered. Fields that change alone have eight bytes, so a
reader never sees a partial write."""
_RECORD = struct.Struct("<QQIxxxxQd")
"""Channel, number, operation, elements, time."""
_RING_START = 256
_RING_LENGTH = 2048
_SIZE_BYTES = _RING_START + _RING_LENGTH * _RECORD.size


@dataclass(frozen=True)
class Entered:
    """Collective or message that a rank has entered; `number` starts at 1 in each channel."""

    channel: int
    number: int
    operation: str
    elements: int
    at_seconds: float

    def same_as(self, other: Entered) -> bool:
        """True if both can be calls of the same collective on different ranks."""
        return (self.operation, self.elements) == (other.operation, other.elements)

    def __str__(self) -> str:
        return f"{self.operation} #{self.number}" + (
            f" ({self.elements:,} elements)" if self.elements else ""
        )


OPERATIONS = (
    "?", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier",
    "reduce", "gather", "scatter", "send", "recv",
)  # fmt: skip
"""Names of operations; the index is the number in the ring."""


@dataclass(frozen=True)
class Channel:
    """Process group, or one direction between two of its ranks."""

    key: int
    name: str
    ranks: tuple[int, ...]


def channel_of(group: str, ranks: Sequence[int], *, pair: tuple[int, int] | None = None) -> Channel:
    """Build the channel of a group or a pair of its ranks; its key is the same on all ranks."""
    name = f"group {group} (ranks {_spans(ranks)})"
    if pair is not None:
        name = f"messages from rank {pair[0]} to rank {pair[1]} in {name}"
    members = tuple(ranks) if pair is None else pair
    return Channel(zlib.crc32(name.encode()), name, members)


def _spans(ranks: Sequence[int]) -> str:
    """Format ranks as a range if they are consecutive.

    >>> _spans([0, 1, 2, 3]), _spans([0, 4])
    ('0-3', '0, 4')
    """
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


class Pulse:
    """Writer of a rank's heartbeat: phases (`begin`) and communication (`enter`, `wait`)."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        """
        Raises:
            InputError: Another running process has this rank of the same launch.
        """
        self.rank = rank
        self.folder = folder
        self._path = folder / f"rank-{rank}.pulse"
        self._owner = threading.get_ident()
        self._map = self._claim()
        self._channels = (folder / f"rank-{rank}.channels").open("w", encoding="utf-8")
        self._told: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._places = itertools.count()
        self._stacks = (folder / f"rank-{rank}.stacks").open("w", encoding="utf-8")
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True, chain=False)
        now = time.monotonic()
        _TIME.pack_into(self._map, _ALIVE_AT, now)
        self.begin("setup", 0.0)
        _WHO.pack_into(self._map, 0, _MAGIC, os.getpid(), rank, world_size)
        self._closing = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._beating.start()

    def _claim(self) -> mmap.mmap:
        """Create the complete file, then rename it; raise if a live process owns the name."""
        before = read_pulse(self._path)
        if before is not None and before.pid != os.getpid() and _lives(before.pid):
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

    def begin(self, phase: str, limit_seconds: float, *, step: int = 0) -> None:
        """Record that `phase` of `step` starts and should take at most `limit_seconds`."""
        _WHAT.pack_into(
            self._map, _WHAT_AT, step, PHASES.index(phase), time.monotonic(), limit_seconds
        )

    def enter(self, channel: Channel, operation: int, elements: int) -> None:
        """Record that the rank enters a collective of a channel."""
        if channel.key not in self._told:
            self._told.add(channel.key)
            self._channels.write(json.dumps([channel.key, channel.name, channel.ranks]) + "\n")
            self._channels.flush()
        number = self._numbers.get(channel.key, 0) + 1
        self._numbers[channel.key] = number
        place = next(self._places)
        start = _RING_START + place % _RING_LENGTH * _RECORD.size
        _RECORD.pack_into(
            self._map, start, channel.key, number, operation, elements, time.monotonic()
        )
        _COUNT.pack_into(self._map, _COUNT_AT, place + 1)

    def wait(self, *, waits: bool) -> None:
        """Record the start or end of a wait for other ranks, in the training thread only."""
        if threading.get_ident() == self._owner:
            _TIME.pack_into(self._map, _WAITING_AT, time.monotonic() if waits else 0.0)

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_SECONDS):
            _TIME.pack_into(self._map, _ALIVE_AT, time.monotonic())

    def close(self) -> None:
        """Stop the heartbeat and remove the files; other ranks no longer wait for this one."""
        self.begin("done", 0.0)
        self._closing.set()
        self._beating.join()
        faulthandler.unregister(STACKS_SIGNAL)
        self._channels.close()
        self._stacks.close()
        for suffix in (".pulse", ".channels", ".stacks"):
            with suppress(OSError):
                self._path.with_suffix(suffix).unlink()


@dataclass(frozen=True)
class PulseView:
    """State of a rank at one moment; times are seconds of CLOCK_MONOTONIC."""

    rank: int
    pid: int
    world_size: int
    phase: str
    step: int
    since: float
    limit_seconds: float
    """Time limit of the phase; 0 for none."""
    alive: float
    """Last beat of the rank's heartbeat thread, which stops with process or interpreter."""
    waiting_since: float | None
    entered: tuple[Entered, ...]
    """Last collectives, oldest first."""
    channels: dict[int, Channel]

    def last_of(self, channel: int) -> Entered | None:
        """Return the newest collective of a channel that is still in the ring."""
        return next(
            (entered for entered in reversed(self.entered) if entered.channel == channel), None
        )


def read_pulse(path: Path) -> PulseView | None:
    """Read a heartbeat file; None if it is missing or not complete yet."""
    try:
        data = path.read_bytes()
        lines = path.with_suffix(".channels").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    if len(data) != _SIZE_BYTES or data[:8] != _MAGIC:
        return None
    _, pid, rank, world_size = _WHO.unpack_from(data)
    step, phase, since, limit = _WHAT.unpack_from(data, _WHAT_AT)
    (alive,) = _TIME.unpack_from(data, _ALIVE_AT)
    (waiting,) = _TIME.unpack_from(data, _WAITING_AT)
    (count,) = _COUNT.unpack_from(data, _COUNT_AT)
    records = []
    for place in range(max(0, count - _RING_LENGTH), count):
        key, number, operation, elements, at = _RECORD.unpack_from(
            data, _RING_START + place % _RING_LENGTH * _RECORD.size
        )
        records.append(Entered(key, number, OPERATIONS[operation], elements, at))
    channels = {}
    for line in lines:
        with suppress(ValueError):  # incomplete line, still being written
            key, name, ranks = json.loads(line)
            channels[key] = Channel(key, name, tuple(ranks))
    return PulseView(
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


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a live process of another user
    return True
