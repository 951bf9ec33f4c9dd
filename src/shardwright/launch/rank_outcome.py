"""Outcome of each rank in a JSON file, from which the launcher reports a single cause."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shardwright import errors
from shardwright.errors import (
    ExitCode,
    GenerationEnded,
    InputError,
    RankFailed,
    RunFailed,
    ShardwrightError,
)
from shardwright.masking import mask_secrets
from shardwright.watchdog.hang_diagnosis import HangDiagnosis

CONTROL_VARIABLE = "SHARDWRIGHT_CONTROL_DIR"
"""Environment variable with the folder through which launcher and ranks exchange files."""
LAUNCHER_VARIABLE = "SHARDWRIGHT_LAUNCHER"
"""Environment variable with the launcher's process id."""
_TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
STOP_FILE_NAME = "stop"
"""File in that folder that requests a stop, also of ranks that cannot be signalled yet. It has the
number of the signal."""


@dataclass(frozen=True)
class RankOutcome:
    """Exit of one rank.

    `details` are the parts of an InputError, or the step of a GenerationEnded.
    """

    rank: int
    exit_code: int
    kind: str = ""
    message: str = ""
    trace: str = ""
    at_seconds: float = 0.0
    details: dict[str, str | None] = field(default_factory=dict)


def get_control_folder() -> Path | None:
    """Return the launcher's folder, or None if our launcher did not start this process."""
    folder = os.environ.get(CONTROL_VARIABLE)
    return Path(folder) if folder else None


def get_launcher_pid() -> int:
    """Return the process id of this rank's launcher, or of its parent without a launcher."""
    return int(os.environ.get(LAUNCHER_VARIABLE) or os.getppid())


def find_launcher_pid() -> int | None:
    """Return the process id of the launcher that ends this rank with itself, or None.

    That is our own launcher, or torchrun, if it is the parent: a shell or a profiler may be between
    them. The parent of another rank may end before it, as the shell of an ssh session does.
    """
    launcher_pid = get_launcher_pid()
    is_launched = LAUNCHER_VARIABLE in os.environ or _TORCHRUN_VARIABLE in os.environ
    return launcher_pid if is_launched and launcher_pid == os.getppid() else None


def get_outcome_path(control: Path, rank: int) -> Path:
    """Return the file for the outcome of a rank."""
    return control / f"rank-{rank}.json"


def get_idle_path(control: Path, rank: int) -> Path:
    """Return the file that exists once a failed rank's process waits for another assignment."""
    return control / f"rank-{rank}.idle"


def write_pid(rank: int) -> int:
    """Write this process's id for the launcher's signals; return the signal that has requested a
    stop, 0 for none."""
    folder = get_control_folder()
    if folder is None:
        return 0
    _write_atomically(folder / f"rank-{rank}.pid", str(os.getpid()))
    try:
        return int((folder / STOP_FILE_NAME).read_text())
    except FileNotFoundError:
        return 0


def write_stop(control: Path, number: int) -> None:
    """Request a stop of ranks that cannot be signalled yet; the first signal's number stays."""
    if not (control / STOP_FILE_NAME).exists():
        with suppress(FileNotFoundError):  # in a signal handler, which a second signal interrupted
            _write_atomically(control / STOP_FILE_NAME, str(int(number)))


def write_outcome(rank: int, error: BaseException | None) -> ExitCode:
    """Write this rank's outcome and return its exit code."""
    code = get_exit_code(error)
    if folder := get_control_folder():
        outcome = RankOutcome(rank, int(code), at_seconds=time.time())
        if error is not None:
            details: dict[str, str | None] = {}
            if isinstance(error, GenerationEnded):
                details = {"step": str(error.step)}
            if isinstance(error, InputError):
                got = None if error.got is None else str(error.got)
                details = {
                    "problem": error.problem,
                    "field": error.field,
                    "got": got,
                    "allowed": error.allowed,
                    "remedy": error.remedy,
                }
            trace = mask_secrets("".join(traceback.format_exception(error)))
            message = mask_secrets(str(error))
            outcome = RankOutcome(
                rank, int(code), type(error).__name__, message, trace, time.time(), details
            )
        _write_atomically(get_outcome_path(folder, rank), json.dumps(asdict(outcome)))
    return code


def write_lost_rank(control: Path, rank: int, node: str) -> None:
    """Write the outcome of a rank whose node was lost, and could not report it."""
    message = f"node {node} was lost, with the rank's process"
    outcome = RankOutcome(
        rank, int(ExitCode.RUN_FAILED), RankFailed.__name__, message, at_seconds=time.time()
    )
    _write_atomically(get_outcome_path(control, rank), json.dumps(asdict(outcome)))


def request_stop(control: Path, number: int) -> None:
    """Send a stop signal to the ranks with a file of their process id; leave a note for others."""
    write_stop(control, number)
    for pid_file in control.glob("rank-*.pid"):
        with suppress(ProcessLookupError, ValueError):
            os.kill(int(pid_file.read_text()), number)


def get_exit_code(error: BaseException | None) -> ExitCode:
    """Return 0 for None, the exit code of our own errors, and 3 for all others."""
    if error is None:
        return ExitCode.DONE
    return error.exit_code if isinstance(error, ShardwrightError) else ExitCode.RUN_FAILED


def read_outcomes(folder: Path) -> list[RankOutcome]:
    """Read the outcomes of the ranks, in order of time."""
    outcomes = [RankOutcome(**json.loads(path.read_text())) for path in folder.glob("rank-*.json")]
    return sorted(outcomes, key=lambda outcome: outcome.at_seconds)


RESUME_ADVICE = ". All ranks have stopped; --resume continues from the last checkpoint"
"""End of the message about a lost rank; false if the launcher restarts the ranks."""
_TEARDOWN_SECONDS = 10.0
"""Seconds after another rank's failure from which a SIGKILL means that the rank was hanging:
the launcher kills ranks that do not exit within 30 seconds."""


def find_cause(
    outcomes: list[RankOutcome],
    exit_statuses: Mapping[int, int],
    ended_at_seconds: Mapping[int, float] | None = None,
) -> ShardwrightError:
    """Choose the error that explains a failed run.

    In this order: a rank killed by a signal, the first input error, the first failure that is
    not a lost peer, a rank that hung. A rank that aborts after the failure of another one, or after
    its own, is not a cause: NCCL's thread aborts a process whose peer is lost.

    Args:
        outcomes: Outcomes of the ranks, in order of time.
        exit_statuses: Rank -> exit status, for ranks that failed according to the launcher
            (negative: killed by that signal, perhaps by the launcher).
        ended_at_seconds: Rank -> time of its end according to the launcher, on the outcomes'
            clock.
    """
    failed = [
        outcome
        for outcome in outcomes
        if outcome.exit_code and outcome.kind != GenerationEnded.__name__
    ]
    ended = ended_at_seconds or {}
    hung = []
    for rank, status in exit_statuses.items():
        if status < 0 and -status != signal.SIGTERM:
            if failed and ended.get(rank, 0.0) > failed[0].at_seconds + _TEARDOWN_SECONDS:
                hung.append(rank)
                continue
            if -status == signal.SIGABRT and any(
                not is_lost_peer_message(outcome.message)
                and (outcome.rank == rank or outcome.at_seconds < ended.get(rank, 0.0))
                for outcome in failed
            ):
                continue
            name = signal.Signals(-status).name
            hint = "; the system may be out of memory" if name == "SIGKILL" else ""
            return RankFailed(f"rank {rank} was killed by {name}{hint}{RESUME_ADVICE}")
    for outcome in failed:
        if outcome.exit_code == ExitCode.WRONG_INPUT:
            kind = getattr(errors, outcome.kind, InputError)
            details = dict(outcome.details)
            return kind(details.pop("problem") or outcome.message, **details)
    if failed:
        first = next(
            (outcome for outcome in failed if not is_lost_peer_message(outcome.message)), failed[0]
        )
        if hung and is_lost_peer_message(first.message):
            return RankFailed(
                f"rank {hung[0]} hung: rank {first.rank} timed out waiting for it "
                f"({extract_first_line(first.message)}){RESUME_ADVICE}"
            )
        known = getattr(errors, first.kind, None)
        if isinstance(known, type) and issubclass(known, ShardwrightError):
            return known(f"rank {first.rank}: {first.message}")
        return RunFailed(f"rank {first.rank}: {first.kind}: {first.message}\n{first.trace}")
    ranks = ", ".join(f"rank {rank} (status {status})" for rank, status in exit_statuses.items())
    return RankFailed(f"{ranks or 'a rank'} ended without an error message; see the output above")


def attach_skipped_collective(
    error: ShardwrightError, diagnosis: HangDiagnosis | None
) -> ShardwrightError:
    """Replace the error with its cause, a skipped collective, if there is one."""
    if diagnosis is None or isinstance(error, InputError):
        return error
    return RankFailed(f"{diagnosis.message}. It led to this error: {error}")


def is_lost_peer_message(message: str) -> bool:
    """Return True if a message only reports that another rank was lost."""
    signs = (
        "Connection reset by peer",
        "Connection closed by peer",
        "Timed out waiting",
        "Broken pipe",
        "Connection refused",
        "DistNetworkError",
        # NCCL's messages
        "remote process exited",
        "NCCL communicator was aborted",
        "ncclRemoteError",
        "ncclSystemError",
        "Watchdog caught collective operation timeout",
    )
    return any(sign in message for sign in signs)


def extract_first_line(message: str) -> str:
    """Return the first line, without gloo's source file before it, gloo's general advice and c10d's
    stack after it.

    >>> extract_first_line("[/gloo/tcp/pair.cc:78] Timed out waiting 5000ms for recv\\nException")
    'Timed out waiting 5000ms for recv'
    >>> extract_first_line("Connection reset by peer. This is typically caused by a remote worker")
    'Connection reset by peer'
    """
    line = re.sub(r"^\[[^\]]*\] *", "", message.partition("\n")[0])
    return line.partition(". This is typically caused by ")[0]


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text)
    partial.replace(path)
