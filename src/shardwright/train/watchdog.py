"""Watchdog: detects hangs, reports the rank missing from a collective, ends the launch.

Every rank writes its phase, its start and its time limit to its heartbeat (`train/pulse.py`). A
`Watcher` reads the heartbeats of the ranks on its machine. It runs in the launcher's process,
which a hung rank cannot block; under torchrun or srun it runs in a thread of every rank, and
the first one to detect a hang acts. It needs neither the network nor the hung ranks.

Limits are learned per phase. The first duration is ignored (kernels are compiled, memory
grows). After three more, the limit is `watchdog.factor` times the longest one, at least
`watchdog.floor_seconds` and at most nine tenths of the collectives' timeout, so that the
watchdog reports before collectives fail. Until then the limit is those nine tenths. Each step,
save and evaluation batch starts a new phase. All times are monotonic. Imports no torch.
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

_LEFT_OUT = 1
"""First durations of a phase, which are ignored."""
_LEARNED = 3
"""Further durations needed before a limit is learned."""
_BEFORE_OTHERS = 0.9
"""Largest limit, as a fraction of the collectives' timeout."""
_LOOK_SECONDS = 0.5


@dataclass
class Pace:
    """Time limits of the phases, learned from their durations, in seconds."""

    section: WatchdogSection
    ceilings: Mapping[str, float]
    """Timeout of the collectives in seconds, by phase."""
    _seen: dict[str, int] = field(default_factory=dict)
    _longest: dict[str, float] = field(default_factory=dict)

    def took(self, phase: str, seconds: float) -> None:
        """Record the duration of a completed phase."""
        self._seen[phase] = self._seen.get(phase, 0) + 1
        if self._seen[phase] > _LEFT_OUT:
            self._longest[phase] = max(self._longest.get(phase, 0.0), seconds)

    def limit(self, phase: str) -> float:
        """Return the seconds after which a phase counts as hung."""
        if phase == "setup":
            return self.section.setup_seconds
        ceiling = self.ceilings[phase] * _BEFORE_OTHERS
        if self._seen.get(phase, 0) < _LEFT_OUT + _LEARNED:
            return ceiling
        return min(
            ceiling, max(self.section.floor_seconds, self.section.factor * self._longest[phase])
        )


class Vigil:
    """A rank's side of the watchdog: records its phases. A single process has no heartbeat."""

    def __init__(self, pulse: Pulse | None, pace: Pace) -> None:
        self._pulse = pulse
        self._pace = pace
        self._phase = "setup"
        self._since = time.monotonic()
        if pulse is not None:
            pulse.begin("setup", pace.limit("setup"))

    def begin(self, phase: str, step: int) -> None:
        """End the current phase and begin `phase`."""
        now = time.monotonic()
        self._pace.took(self._phase, now - self._since)
        self._phase = phase
        self._since = now
        if self._pulse is not None:
            self._pulse.begin(phase, self._pace.limit(phase), step=step)


class Watcher:
    """Thread that reads the heartbeats in a folder until it is closed or a rank hangs.

    On a hang it sets `verdict` and kills the blocking ranks.
    """

    def __init__(
        self, folder: Path, reports: Path, *, patience_seconds: float = 0.0, tells: bool = False
    ) -> None:
        """
        Args:
            folder: Folder of the heartbeats.
            reports: Folder for the report, which has the stacks of all ranks.
            patience_seconds: Time added to each limit; the watcher with the least acts.
            tells: True to log the message; a launcher raises it instead.
        """
        self.verdict: Verdict | None = None
        self._folder = folder
        self._reports = reports
        self._patience = patience_seconds
        self._tells = tells
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
        last_check = time.monotonic()
        while not self._closing.wait(_LOOK_SECONDS):
            now = time.monotonic()
            if now - last_check > 10 * _LOOK_SECONDS:
                # This process was suspended, and perhaps the ranks too: restart their limits.
                self._awake_since = now
            last_check = now
            views = read_pulses(self._folder)
            if any(self._overdue(view, now) for view in views):
                self._act(views, now)
                return

    def _overdue(self, view: PulseView, now: float) -> bool:
        start = max(view.since, self._awake_since)
        return view.limit_seconds > 0 and now - start > view.limit_seconds + self._patience

    def _act(self, views: list[PulseView], now: float) -> None:
        if not _alone(self._folder, views):
            return
        states = {view.rank: process_state(view.pid) for view in views}
        verdict = diagnose(views, now, states)
        with suppress(OSError):
            self._reports.mkdir(parents=True, exist_ok=True)  # NCCL writes its record there
        stacks = ask_for_stacks(self._folder, views, states)
        path = self._reports / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
        message = f"the run hangs: {verdict.message}"
        try:
            path.write_text(_report(message, views, states, stacks, now), encoding="utf-8")
            message += f". Stacks of all ranks: {path}"
        except OSError as error:
            message += f". The stacks could not be written ({error.strerror})"
        self.verdict = Verdict(verdict.culprits, message)
        if self._tells:
            logger.warning("%s", message)
        for view in views:
            if view.rank in verdict.culprits:
                with suppress(ProcessLookupError):
                    os.kill(view.pid, signal.SIGKILL)


def read_pulses(folder: Path) -> list[PulseView]:
    """Read the heartbeats of a folder, by rank, without those that are not complete yet."""
    heartbeats = (read_pulse(path) for path in folder.glob("rank-*.pulse"))
    return sorted((view for view in heartbeats if view is not None), key=lambda view: view.rank)


def _alone(folder: Path, views: list[PulseView]) -> bool:
    """Return True if this watcher is the first of its machine to act."""
    pids = ",".join(str(view.pid) for view in views)
    name = f"alarm-{hashlib.sha256(pids.encode()).hexdigest()[:16]}"
    try:
        os.close(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def _report(
    message: str,
    views: list[PulseView],
    states: Mapping[int, str],
    stacks: Mapping[int, str],
    now: float,
) -> str:
    parts = [f"{message}\n"]
    for view in views:
        waiting = ""
        if view.waiting_since is not None:
            waiting = f", waiting for others for {now - view.waiting_since:.1f} s"
        last = [
            f"    {now - entered.at_seconds:9.3f} s ago  {entered}  "
            f"{view.channels[entered.channel].name}"
            for entered in view.entered[-12:]
            if entered.channel in view.channels
        ]
        parts.append(
            f"\nrank {view.rank}, process {view.pid}, state {states[view.rank] or 'unknown'}: "
            f"{view.phase} {view.step} for {now - view.since:.1f} s of "
            f"{view.limit_seconds:.1f} s{waiting}; heartbeat {now - view.alive:.1f} s ago\n"
            "  last collectives:\n"
            + "\n".join(last or ["    none"])
            + "\n  stacks:\n"
            + "\n".join(
                f"    {line}"
                for line in (stacks.get(view.rank, "").splitlines() or ["none were written"])
            )
            + "\n"
        )
    return "".join(parts)


def shared_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Create the folder for the heartbeats of this machine and launch, without our launcher."""
    names = (
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
    )
    identity = ",".join(environment.get(name, "") for name in names)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"shardwright-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise PermissionError(f"{folder} belongs to another user")
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
    """Run the heartbeat of a rank; under torchrun or srun (`folder` is None) also a watcher.

    Args:
        record: Context manager that records collectives (`train.recorder.recording`).
    """
    launched = folder is not None or "MASTER_PORT" in os.environ
    if world_size == 1 or not launched or not pace.section.enabled:
        yield Vigil(None, pace)
        return
    here = folder or shared_folder()
    pulse = Pulse(here, rank, world_size)
    # Ranks of one machine have different patience, so that only one acts on a hang.
    watcher = (
        contextlib.nullcontext()
        if folder
        else Watcher(here, reports, patience_seconds=1.0 + 2.0 * (rank % 64), tells=True)
    )
    with record(pulse, reports), watcher:
        yield Vigil(pulse, pace)
    pulse.close()  # not after a failure: the last records may show the cause
    if folder is None:
        with suppress(OSError):  # other ranks may still have files in it
            here.rmdir()
