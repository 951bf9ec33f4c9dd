"""What one rank is doing, in a small file that others map: phase, step, a heartbeat, and the collectives it has entered.

    rank-3.pulse       a header, then a ring of the last collectives; written by memory stores, read by anybody on the machine
    rank-3.channels    one JSON line per process group or pair of ranks: which ranks belong to a key of the ring
    rank-3.stacks      where the rank's stacks go when it is asked for them by SIGUSR2

A memory store needs nobody's help: a rank that is stopped, or whose interpreter is held, leaves the last thing it did. Its stacks
are written by `faulthandler`, in the signal's handler, without the interpreter's lock. Times are CLOCK_MONOTONIC, which all
processes of a machine share and which no change of the wall clock moves. No torch.
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
"""On CUDA `nccl-<rank>.pipe` lies beside the pulse: NCCL writes down its own record when something is written there."""

_MAGIC = b"SWPULSE1"
_WHO, _WHAT, _TIME, _COUNT = struct.Struct("<8sQII"), struct.Struct("<qIxxxxdd"), struct.Struct("<d"), struct.Struct("<Q")
_WHAT_AT, _ALIVE_AT, _WAITING_AT, _COUNT_AT = 24, 56, 64, 72
"""Bytes: magic, process id, rank and world size; step, phase, since when and for how long at most; the heartbeat; since when the
rank waits, or 0; how many collectives it has entered. Eight bytes each where they change alone: a reader never sees half of one."""
_RECORD = struct.Struct("<QQIxxxxQd")
"""Channel, number, operation, elements, time."""
_RING_START, _RING_LENGTH = 256, 2048
_SIZE_BYTES = _RING_START + _RING_LENGTH * _RECORD.size


@dataclass(frozen=True)
class Entered:
    """A collective or message that a rank has entered: the `number`-th, from 1, of its channel."""

    channel: int
    number: int
    operation: str
    elements: int
    at_seconds: float

    def same_as(self, other: Entered) -> bool:
        """Whether both may be ends of one collective."""
        return (self.operation, self.elements) == (other.operation, other.elements)

    def __str__(self) -> str:
        return f"{self.operation} #{self.number}" + (f" ({self.elements:,} elements)" if self.elements else "")


OPERATIONS = (
    "?", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier", "reduce", "gather", "scatter",
    "send", "recv",
)  # fmt: skip
"""Names by the number that stands in the ring."""


@dataclass(frozen=True)
class Channel:
    """A process group, or one direction of a pair of ranks in one."""

    key: int
    name: str
    ranks: tuple[int, ...]


def channel_of(group: str, ranks: Sequence[int], *, pair: tuple[int, int] | None = None) -> Channel:
    """The channel of a group, or of the messages from one of its ranks to another; its key is the same on every rank."""
    name = f"group {group} (ranks {_spans(ranks)})"
    if pair is not None:
        name = f"messages from rank {pair[0]} to rank {pair[1]} in {name}"
    members = tuple(ranks) if pair is None else pair
    return Channel(zlib.crc32(name.encode()), name, members)


def _spans(ranks: Sequence[int]) -> str:
    """
    >>> _spans([0, 1, 2, 3]), _spans([0, 4])
    ('0-3', '0, 4')
    """
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


class Pulse:
    """The writer: one per rank. `begin` says what it does, `enter` and `wait` what it does with the others."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        """
        Raises:
            InputError: a living process says it is this rank of this generation.
        """
        self.rank, self.folder = rank, folder
        self._path, self._owner = folder / f"rank-{rank}.pulse", threading.get_ident()
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
        """The file, made whole before it gets its name, which only one living process may hold."""
        before = read_pulse(self._path)
        if before is not None and before.pid != os.getpid() and _lives(before.pid):
            raise InputError(
                f"two processes say they are rank {self.rank} of one run (this one and process {before.pid})",
                field="RANK",
                got=self.rank,
                remedy="Give every process a rank of its own, or end the ranks of the run before",
            )
        partial = self._path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(bytes(_SIZE_BYTES))
        with partial.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), _SIZE_BYTES)
        partial.replace(self._path)
        return mapped

    def begin(self, phase: str, limit_seconds: float, *, step: int = 0) -> None:
        """From now on this rank is in `phase` of `step`, for at most `limit_seconds` unless something hangs."""
        _WHAT.pack_into(self._map, _WHAT_AT, step, PHASES.index(phase), time.monotonic(), limit_seconds)

    def enter(self, channel: Channel, operation: int, elements: int) -> None:
        """The rank is about to take part in a collective of a channel."""
        if channel.key not in self._told:
            self._told.add(channel.key)
            self._channels.write(json.dumps([channel.key, channel.name, channel.ranks]) + "\n")
            self._channels.flush()
        number = self._numbers.get(channel.key, 0) + 1
        self._numbers[channel.key] = number
        place = next(self._places)
        start = _RING_START + place % _RING_LENGTH * _RECORD.size
        _RECORD.pack_into(self._map, start, channel.key, number, operation, elements, time.monotonic())
        _COUNT.pack_into(self._map, _COUNT_AT, place + 1)

    def wait(self, *, waits: bool) -> None:
        """The rank begins to wait for others, or has it behind it. Threads beside the training's own do not count."""
        if threading.get_ident() == self._owner:
            _TIME.pack_into(self._map, _WAITING_AT, time.monotonic() if waits else 0.0)

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_SECONDS):
            _TIME.pack_into(self._map, _ALIVE_AT, time.monotonic())

    def close(self) -> None:
        """The rank leaves in good order: nobody is to wait for it any more, and its name is free."""
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
    """A rank as others see it at one moment; times are seconds of CLOCK_MONOTONIC."""

    rank: int
    pid: int
    world_size: int
    phase: str
    step: int
    since: float
    limit_seconds: float
    """0 where nothing is awaited of it."""
    alive: float
    """Last beat of the rank's own thread: it comes to a halt where the process is stopped, or the interpreter held."""
    waiting_since: float | None
    entered: tuple[Entered, ...]
    """The last collectives, oldest first."""
    channels: dict[int, Channel]

    def last_of(self, channel: int) -> Entered | None:
        """The newest collective of a channel that the ring still has."""
        return next((entered for entered in reversed(self.entered) if entered.channel == channel), None)


def read_pulse(path: Path) -> PulseView | None:
    """What a pulse file says; None where there is none, or none yet."""
    try:
        data = path.read_bytes()
        lines = path.with_suffix(".channels").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    if len(data) != _SIZE_BYTES or data[:8] != _MAGIC:
        return None
    _, pid, rank, world_size = _WHO.unpack_from(data)
    step, phase, since, limit = _WHAT.unpack_from(data, _WHAT_AT)
    ((alive,), (waiting,)), (count,) = (
        (_TIME.unpack_from(data, at) for at in (_ALIVE_AT, _WAITING_AT)),
        _COUNT.unpack_from(data, _COUNT_AT),
    )
    records = []
    for place in range(max(0, count - _RING_LENGTH), count):
        key, number, operation, elements, at = _RECORD.unpack_from(data, _RING_START + place % _RING_LENGTH * _RECORD.size)
        records.append(Entered(key, number, OPERATIONS[operation], elements, at))
    channels = {}
    for line in lines:
        with suppress(ValueError):  # a line that is being written
            key, name, ranks = json.loads(line)
            channels[key] = Channel(key, name, tuple(ranks))
    return PulseView(rank, pid, world_size, PHASES[phase], step, since, limit, alive, waiting or None, tuple(records), channels)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, but alive
    return True
