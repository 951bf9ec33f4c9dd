"""Notices that a run hangs, says which rank is missing from which collective, and ends the generation.

Every rank says in its pulse (`train/pulse.py`) what it is doing since when, and how long that may take. A `Watcher` looks at the
pulses of the ranks on its machine: in the launcher's process, which no hung rank holds up; under torchrun or srun, which are not
ours, in a thread of every rank, of which the first to notice acts. Nothing here needs the ranks' help or the network.

How long is too long is learned: of each phase the first time is left out (kernels are compiled, memory grows); after three more a
phase may take `watchdog.factor` times the longest it has taken so far, but no less than `watchdog.floor_seconds` and no more
than nine tenths of the collectives' own time-out, so that what hangs is named before the others give up. Until then it is those
nine tenths. A phase begins anew at every step, save and batch of an evaluation. All times are monotonic. No torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.config.upkeep import WatchdogSection
from shardwright.train.diagnosis import Verdict, diagnose
from shardwright.train.pulse import Pulse, PulseView, read_pulse
from shardwright.train.stacks import ask_for_stacks, process_state

logger = logging.getLogger(__name__)

_LEFT_OUT, _LEARNED = 1, 3
"""Times of a phase that are left out, and those that must have been seen before a limit is learned."""
_BEFORE_OTHERS = 0.9
"""Of the collectives' time-out: the watchdog speaks first."""
_LOOK_SECONDS = 0.5


@dataclass
class Pace:
    """How long each phase may take, in seconds."""

    section: WatchdogSection
    ceilings: Mapping[str, float]
    """By phase: the collectives' own time-out."""
    _seen: dict[str, int] = field(default_factory=dict)
    _longest: dict[str, float] = field(default_factory=dict)

    def took(self, phase: str, seconds: float) -> None:
        """A phase has ended in good order."""
        self._seen[phase] = self._seen.get(phase, 0) + 1
        if self._seen[phase] > _LEFT_OUT:
            self._longest[phase] = max(self._longest.get(phase, 0.0), seconds)

    def limit(self, phase: str) -> float:
        """Seconds after which somebody must be hanging."""
        if phase == "setup":
            return self.section.setup_seconds
        ceiling = self.ceilings[phase] * _BEFORE_OTHERS
        if self._seen.get(phase, 0) < _LEFT_OUT + _LEARNED:
            return ceiling
        return min(ceiling, max(self.section.floor_seconds, self.section.factor * self._longest[phase]))


class Vigil:
    """A rank's side of the watch: says what it does. A process by itself has nobody who waits for it, and no pulse."""

    def __init__(self, pulse: Pulse | None, pace: Pace) -> None:
        self._pulse, self._pace = pulse, pace
        self._phase, self._since = "setup", time.monotonic()
        if pulse is not None:
            pulse.begin("setup", pace.limit("setup"))

    def begin(self, phase: str, step: int) -> None:
        """What was going on has ended; `phase` begins."""
        now = time.monotonic()
        self._pace.took(self._phase, now - self._since)
        self._phase, self._since = phase, now
        if self._pulse is not None:
            self._pulse.begin(phase, self._pace.limit(phase), step=step)


class Watcher:
    """Looks at the pulses in a folder until it is closed, or one hangs: then `verdict` is set and the culprits are killed."""

    def __init__(self, folder: Path, reports: Path, *, patience_seconds: float = 0.0, tells: bool = False) -> None:
        """
        Args:
            folder: where the ranks' pulses are.
            reports: gets a file with everybody's stacks.
            patience_seconds: beyond each limit; of several watchers the one with the least acts.
            tells: log what was found; a launcher raises it instead.
        """
        self.verdict: Verdict | None = None
        self._folder, self._reports, self._patience, self._tells = folder, reports, patience_seconds, tells
        self._awake_since = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._closing.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if now - looked > 10 * _LOOK_SECONDS:
                self._awake_since = now  # this process was stopped; so were the ranks, perhaps: their clocks begin anew
            looked = now
            views = read_pulses(self._folder)
            if any(self._overdue(view, now) for view in views):
                self._act(views, now)
                return

    def _overdue(self, view: PulseView, now: float) -> bool:
        began = max(view.since, self._awake_since)
        return view.limit_seconds > 0 and now - began > view.limit_seconds + self._patience

    def _act(self, views: list[PulseView], now: float) -> None:
        if not _alone(self._folder, views):
            return
        states = {view.rank: process_state(view.pid) for view in views}
        verdict = diagnose(views, now, states)
        with suppress(OSError):
            self._reports.mkdir(parents=True, exist_ok=True)  # before NCCL is asked to write there
        stacks = ask_for_stacks(self._folder, views, states)
        path = self._reports / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
        message = f"the run hangs: {verdict.message}"
        try:
            path.write_text(_report(message, views, states, stacks, now), encoding="utf-8")
            message += f". Stacks of all ranks: {path}"
        except OSError as error:
            message += f". No file with stacks ({error.strerror})"
        self.verdict = Verdict(verdict.culprits, message)
        if self._tells:
            logger.warning("%s", message)
        for view in views:
            if view.rank in verdict.culprits:
                with suppress(ProcessLookupError):
                    os.kill(view.pid, signal.SIGKILL)


def read_pulses(folder: Path) -> list[PulseView]:
    """The pulses of a folder, by rank; those that are being made are left out."""
    found = (read_pulse(path) for path in folder.glob("rank-*.pulse"))
    return sorted((view for view in found if view is not None), key=lambda view: view.rank)


def _alone(folder: Path, views: list[PulseView]) -> bool:
    """Whether this watcher is the first of its machine to act."""
    pids = ",".join(str(view.pid) for view in views)
    name = f"alarm-{hashlib.sha256(pids.encode()).hexdigest()[:16]}"
    try:
        os.close(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def _report(message: str, views: list[PulseView], states: Mapping[int, str], stacks: Mapping[int, str], now: float) -> str:
    parts = [f"{message}\n"]
    for view in views:
        waiting = "" if view.waiting_since is None else f", waiting for others for {now - view.waiting_since:.1f} s"
        last = [
            f"    {now - entered.at_seconds:9.3f} s ago  {entered}  {view.channels[entered.channel].name}"
            for entered in view.entered[-12:]
            if entered.channel in view.channels
        ]
        parts.append(
            f"\nrank {view.rank}, process {view.pid}, state {states[view.rank] or 'unknown'}: {view.phase} {view.step} "
            f"for {now - view.since:.1f} s of {view.limit_seconds:.1f} s{waiting}; heartbeat {now - view.alive:.1f} s ago\n"
            "  last collectives:\n"
            + "\n".join(last or ["    none"])
            + "\n  stacks:\n"
            + "\n".join(f"    {line}" for line in (stacks.get(view.rank, "").splitlines() or ["none were written"]))
            + "\n"
        )
    return "".join(parts)


def shared_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the ranks of this machine and generation meet when the launcher is not ours; its name is theirs alone."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    told = ",".join(environment.get(name, "") for name in names)
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"shardwright-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


@contextmanager
def watched(
    pace: Pace,
    rank: int,
    world_size: int,
    *,
    folder: Path | None,
    reports: Path,
    record: Callable[[Pulse, Path], contextlib.AbstractContextManager[None]],
) -> Iterator[Vigil]:
    """A rank's vigil. Where torchrun or srun started it (`folder` is None) this rank watches, too.

    Args:
        record: has collectives noted while the block runs (`train.recorder.recording`).
    """
    launched = folder is not None or "MASTER_PORT" in os.environ
    if world_size == 1 or not launched or not pace.section.enabled:
        yield Vigil(None, pace)
        return
    here = folder or shared_folder()
    pulse = Pulse(here, rank, world_size)
    # Ranks of one machine have different patience, so that one acts and the others find that it has.
    watcher = contextlib.nullcontext() if folder else Watcher(here, reports, patience_seconds=1.0 + 2.0 * (rank % 64), tells=True)
    with record(pulse, reports), watcher:
        yield Vigil(pulse, pace)
    pulse.close()  # not after a failure: what this rank did last may tell why
    if folder is None:
        with suppress(OSError):  # others may still be there
            here.rmdir()
