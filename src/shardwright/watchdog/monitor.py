"""Watchdog: detects hangs, reports the rank missing from a collective, ends the launch.

Every rank writes its phase, its start and its time limit to its heartbeat (`heartbeat.py`). A
`Watchdog` reads the heartbeats of the ranks on its machine. It runs in the launcher's process,
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

from shardwright.cluster.scheduler_variables import SCHEDULERS
from shardwright.config.run import WatchdogSection
from shardwright.watchdog.hang_diagnosis import HangDiagnosis, diagnose_hang, find_silent_ranks
from shardwright.watchdog.heartbeat import (
    NCCL_PIPE_STEM,
    Heartbeat,
    HeartbeatWriter,
    read_heartbeat,
)
from shardwright.watchdog.nccl_diagnosis import diagnose_hang_on_cuda, format_records
from shardwright.watchdog.nccl_records import RecordRequest, get_record_stem
from shardwright.watchdog.stack_dump import dump_stacks, read_process_state

logger = logging.getLogger(__name__)

_NUM_IGNORED = 1
"""First durations of a phase, which are ignored."""
_NUM_LEARNED = 3
"""Further durations needed before a limit is learned."""
_TIMEOUT_FRACTION = 0.9
"""Largest limit, as a fraction of the collectives' timeout."""
_POLL_SECONDS = 0.5
_MAX_RECORD_SECONDS = 15.0
"""Time limit for NCCL's records. Torch looks for a request once a second and then finds the Python
lines of all operations."""


@dataclass
class PhaseLimits:
    """Time limits of the phases, learned from their durations, in seconds."""

    section: WatchdogSection
    timeout_seconds: Mapping[str, float]
    """Timeout of the collectives in seconds, by phase."""
    _num_completed: dict[str, int] = field(default_factory=dict)
    _longest_seconds: dict[str, float] = field(default_factory=dict)

    def record(self, phase: str, seconds: float) -> None:
        """Record the duration of a completed phase."""
        self._num_completed[phase] = self._num_completed.get(phase, 0) + 1
        if self._num_completed[phase] > _NUM_IGNORED:
            self._longest_seconds[phase] = max(self._longest_seconds.get(phase, 0.0), seconds)

    def compute_limit_seconds(self, phase: str) -> float:
        """Return the seconds after which a phase counts as hung."""
        if phase == "setup":
            return self.section.setup_seconds
        ceiling = self.timeout_seconds[phase] * _TIMEOUT_FRACTION
        if self._num_completed.get(phase, 0) < _NUM_IGNORED + _NUM_LEARNED:
            return ceiling
        return min(
            ceiling,
            max(self.section.floor_seconds, self.section.factor * self._longest_seconds[phase]),
        )


class WatchdogClient:
    """A rank's side of the watchdog: records its phases. A single process has no heartbeat."""

    def __init__(self, heartbeat: HeartbeatWriter | None, limits: PhaseLimits) -> None:
        self._heartbeat = heartbeat
        self._limits = limits
        self._phase = "setup"
        self._phase_start_seconds = time.monotonic()
        if heartbeat is not None:
            heartbeat.begin_phase("setup", limits.compute_limit_seconds("setup"))

    def begin_phase(self, phase: str, step: int) -> None:
        """End the current phase and begin `phase`."""
        now = time.monotonic()
        self._limits.record(self._phase, now - self._phase_start_seconds)
        self._phase = phase
        self._phase_start_seconds = now
        if self._heartbeat is not None:
            self._heartbeat.begin_phase(phase, self._limits.compute_limit_seconds(phase), step=step)


class Watchdog:
    """Thread that reads the heartbeats in a folder until it is closed or a rank hangs.

    On a hang it sets `diagnosis` and kills the blocking ranks.
    """

    def __init__(
        self,
        folder: Path,
        reports: Path,
        *,
        patience_seconds: float = 0.0,
        should_log: bool = False,
    ) -> None:
        """
        Args:
            folder: Folder of the heartbeats.
            reports: Folder for the report, which has the stacks of all ranks.
            patience_seconds: Time added to each limit; the watcher with the least acts.
            should_log: True to log the message; a launcher raises it instead.
        """
        self.diagnosis: HangDiagnosis | None = None
        self._folder = folder
        self._reports = reports
        self._patience_seconds = patience_seconds
        self._should_log = should_log
        self._awake_since_seconds = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        last_check = time.monotonic()
        while not self._closing.wait(_POLL_SECONDS):
            now = time.monotonic()
            if now - last_check > 10 * _POLL_SECONDS:
                # This process was suspended, and perhaps the ranks too: restart their limits.
                self._awake_since_seconds = now
            last_check = now
            views = read_heartbeats(self._folder)
            if any(self._is_overdue(view, now) for view in views):
                self._handle_hang(views, now)
                return

    def _is_overdue(self, heartbeat: Heartbeat, now_seconds: float) -> bool:
        start = max(heartbeat.phase_start_seconds, self._awake_since_seconds)
        return (
            heartbeat.limit_seconds > 0
            and now_seconds - start > heartbeat.limit_seconds + self._patience_seconds
        )

    def _handle_hang(self, heartbeats: list[Heartbeat], now_seconds: float) -> None:
        if not _acquire_alarm(self._folder, heartbeats):
            return
        states = {view.rank: read_process_state(view.pid) for view in heartbeats}
        with suppress(OSError):
            self._reports.mkdir(parents=True, exist_ok=True)  # NCCL writes its records there
        # NCCL makes a pipe for each rank that uses it.
        recording = [
            view.rank
            for view in heartbeats
            if (self._folder / f"{NCCL_PIPE_STEM}{view.rank}.pipe").exists()
        ]
        request = RecordRequest(get_record_stem(self._reports), recording)
        stacks = dump_stacks(self._folder, heartbeats, states)
        details = ""
        if recording:
            records = request.wait(_MAX_RECORD_SECONDS, optional=find_silent_ranks(heartbeats))
            verdict = diagnose_hang_on_cuda(heartbeats, now_seconds, states, records)
            details = format_records(records)
        else:
            verdict = diagnose_hang(heartbeats, now_seconds, states)
        path = self._reports / f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
        message = f"the run hangs: {verdict.message}"
        try:
            report = _format_report(message, heartbeats, states, stacks, now_seconds)
            path.write_text(report + details, encoding="utf-8")
            message += f". Stacks of all ranks: {path}"
        except OSError as error:
            message += f". The stacks could not be written ({error.strerror})"
        self.diagnosis = HangDiagnosis(verdict.blocking_ranks, message)
        if self._should_log:
            logger.warning("%s", message)
        for view in heartbeats:
            if view.rank in verdict.blocking_ranks:
                with suppress(ProcessLookupError):
                    os.kill(view.pid, signal.SIGKILL)


def read_heartbeats(folder: Path) -> list[Heartbeat]:
    """Read the heartbeats of a folder, by rank, without those that are not complete yet."""
    heartbeats = (read_heartbeat(path) for path in folder.glob("rank-*.pulse"))
    return sorted((view for view in heartbeats if view is not None), key=lambda view: view.rank)


def _acquire_alarm(folder: Path, heartbeats: list[Heartbeat]) -> bool:
    """Return True if this watcher is the first of its machine to act."""
    pids = ",".join(str(view.pid) for view in heartbeats)
    name = f"alarm-{hashlib.sha256(pids.encode()).hexdigest()[:16]}"
    try:
        os.close(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def _format_report(
    message: str,
    heartbeats: list[Heartbeat],
    process_states: Mapping[int, str],
    stacks: Mapping[int, str],
    now_seconds: float,
) -> str:
    parts = [f"{message}\n"]
    for view in heartbeats:
        waiting = ""
        if view.wait_start_seconds is not None:
            waiting = f", waiting for others for {now_seconds - view.wait_start_seconds:.1f} s"
        last = [
            f"    {now_seconds - entered.at_seconds:9.3f} s ago  {entered}  "
            f"{view.channels[entered.channel_key].name}"
            for entered in view.entries[-12:]
            if entered.channel_key in view.channels
        ]
        parts.append(
            f"\nrank {view.rank}, process {view.pid}, "
            f"state {process_states[view.rank] or 'unknown'}: "
            f"{view.phase} {view.step} for {now_seconds - view.phase_start_seconds:.1f} s of "
            f"{view.limit_seconds:.1f} s{waiting}; "
            f"heartbeat {now_seconds - view.last_beat_seconds:.1f} s ago\n"
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


def get_shared_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Create the folder for the heartbeats of this machine and launch, without our launcher."""
    names = ["MASTER_ADDR", "MASTER_PORT"]
    names += [name for scheduler in SCHEDULERS for name in scheduler.launch]
    identity = ",".join(environment.get(name, "") for name in names)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"shardwright-{os.getuid()}-{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


@contextmanager
def start_watchdog(
    limits: PhaseLimits,
    rank: int,
    world_size: int,
    *,
    folder: Path | None,
    reports: Path,
    record_collectives: Callable[[HeartbeatWriter, Path], contextlib.AbstractContextManager[None]],
) -> Iterator[WatchdogClient]:
    """Run the heartbeat of a rank; under torchrun or srun (`folder` is None) also a watcher.

    Args:
        record_collectives: `flight_recorder.record_collectives`, which imports torch.
    """
    launched = folder is not None or "MASTER_PORT" in os.environ
    if world_size == 1 or not launched or not limits.section.enabled:
        yield WatchdogClient(None, limits)
        return
    here = folder or get_shared_folder()
    heartbeat = HeartbeatWriter(here, rank, world_size)
    # Ranks of one machine have different patience, so that only one acts on a hang.
    watcher = (
        contextlib.nullcontext()
        if folder
        else Watchdog(here, reports, patience_seconds=1.0 + 2.0 * (rank % 64), should_log=True)
    )
    try:
        with record_collectives(heartbeat, reports), watcher:
            yield WatchdogClient(heartbeat, limits)
    except BaseException:
        heartbeat.stop()  # its files stay: the last records may show the cause
        raise
    heartbeat.close()
    if folder is None:
        with suppress(OSError):  # other ranks may still have files in it
            here.rmdir()
