"""How each rank ended: a small JSON file per rank, from which the launcher tells one cause instead of many tracebacks."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shardwright import errors
from shardwright.errors import ExitCode, InputError, RankFailed, RunFailed, ShardwrightError
from shardwright.train.diagnosis import Verdict

CONTROL_VARIABLE = "SHARDWRIGHT_CONTROL_DIR"
"""Names the folder in which launcher and ranks leave notes for each other."""
LAUNCHER_VARIABLE = "SHARDWRIGHT_LAUNCHER"
"""The launcher's process id."""
STOP_NOTE = "stop"
"""File there that says: stop was asked for, perhaps before a rank could be signalled."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended. `details` are the parts of an InputError."""

    rank: int
    exit_code: int
    kind: str = ""
    message: str = ""
    trace: str = ""
    at_seconds: float = 0.0
    details: dict[str, str | None] = field(default_factory=dict)


def control_folder() -> Path | None:
    """The launcher's folder, when a launcher of ours started this process."""
    folder = os.environ.get(CONTROL_VARIABLE)
    return Path(folder) if folder else None


def launcher_process() -> int:
    """The process that launched this rank, as it told its id; where nobody did, the one that is its parent now."""
    return int(os.environ.get(LAUNCHER_VARIABLE) or os.getppid())


def note_process(rank: int) -> bool:
    """Leave this process's id, so that the launcher can pass signals on; returns whether a stop was asked for before."""
    folder = control_folder()
    if folder is None:
        return False
    _write(folder / f"rank-{rank}.pid", str(os.getpid()))
    return (folder / STOP_NOTE).exists()


def note_outcome(rank: int, error: BaseException | None) -> ExitCode:
    """Leave how this rank ended; returns the exit code that goes with it."""
    code = exit_code_of(error)
    if folder := control_folder():
        outcome = Outcome(rank, int(code), at_seconds=time.time())
        if error is not None:
            details = {}
            if isinstance(error, InputError):
                got = None if error.got is None else str(error.got)
                details = {
                    "problem": error.problem,
                    "field": error.field,
                    "got": got,
                    "allowed": error.allowed,
                    "remedy": error.remedy,
                }
            trace = "".join(traceback.format_exception(error))
            outcome = Outcome(rank, int(code), type(error).__name__, str(error), trace, time.time(), details)
        _write(folder / f"rank-{rank}.json", json.dumps(asdict(outcome)))
    return code


def exit_code_of(error: BaseException | None) -> ExitCode:
    """0 for None, an error of ours its own, anything else 3."""
    if error is None:
        return ExitCode.DONE
    return error.exit_code if isinstance(error, ShardwrightError) else ExitCode.RUN_FAILED


def read_outcomes(folder: Path) -> list[Outcome]:
    """What the ranks left, by time."""
    found = [Outcome(**json.loads(path.read_text())) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda outcome: outcome.at_seconds)


_TEARDOWN_SECONDS = 10.0
"""A rank that dies by SIGKILL this long after another one has failed was hanging: the launcher kills what does not leave in 30."""


def cause(
    outcomes: list[Outcome], exit_statuses: Mapping[int, int], ended_at_seconds: Mapping[int, float] | None = None
) -> ShardwrightError:
    """The one error to show for a failed run.

    A process that a signal killed is the cause of what its peers complain about; then the first wrong input; then the first
    failure that is not a lost peer; then a rank that its peers waited for in vain.

    Args:
        outcomes: what the ranks left behind, by time.
        exit_statuses: rank -> status of those the launcher saw fail (negative: killed by that signal, perhaps by the launcher).
        ended_at_seconds: rank -> when the launcher saw it, on the clock of the outcomes.
    """
    failed = [outcome for outcome in outcomes if outcome.exit_code]
    hung = []
    for rank, status in exit_statuses.items():
        if status < 0 and -status != signal.SIGTERM:
            if failed and (ended_at_seconds or {}).get(rank, 0.0) > failed[0].at_seconds + _TEARDOWN_SECONDS:
                hung.append(rank)
                continue
            name = signal.Signals(-status).name
            hint = "; the system may be out of memory" if name == "SIGKILL" else ""
            return RankFailed(
                f"rank {rank} was killed by {name}{hint}. All ranks have stopped; --resume goes on from the last checkpoint"
            )
    for outcome in failed:
        if outcome.exit_code == ExitCode.WRONG_INPUT:
            kind = getattr(errors, outcome.kind, InputError)
            details = dict(outcome.details)
            return kind(details.pop("problem") or outcome.message, **details)
    if failed:
        first = next((outcome for outcome in failed if not is_lost_peer(outcome.message)), failed[0])
        if hung and is_lost_peer(first.message):
            return RankFailed(
                f"rank {hung[0]} hung: rank {first.rank} waited for it in vain ({first_line(first.message)}). "
                "All ranks have stopped; --resume goes on from the last checkpoint"
            )
        known = getattr(errors, first.kind, None)
        if isinstance(known, type) and issubclass(known, ShardwrightError):
            return known(f"rank {first.rank}: {first.message}")
        return RunFailed(f"rank {first.rank}: {first.kind}: {first.message}\n{first.trace}")
    ranks = ", ".join(f"rank {rank} (status {status})" for rank, status in exit_statuses.items())
    return RankFailed(f"{ranks or 'a rank'} ended without a word; see the output above")


def with_skip(error: ShardwrightError, skip: Verdict | None) -> ShardwrightError:
    """The error, or what was behind it: a rank that passed over a collective makes the others fail in words that name neither."""
    if skip is None or isinstance(error, InputError):
        return error
    return RankFailed(f"{skip.message}. What came of it: {error}")


def is_lost_peer(message: str) -> bool:
    """Whether a rank only complains that another one went away."""
    signs = (
        "Connection reset by peer",
        "Connection closed by peer",
        "Timed out waiting",
        "Broken pipe",
        "Connection refused",
        "DistNetworkError",
        # NCCL's words for the same
        "remote process exited",
        "ncclRemoteError",
        "ncclSystemError",
        "Watchdog caught collective operation timeout",
    )
    return any(sign in message for sign in signs)


def first_line(message: str) -> str:
    """Without the source file that gloo puts before its messages and the stack that c10d puts behind.

    >>> first_line("[/gloo/transport/tcp/pair.cc:78] Timed out waiting 5000ms for recv\\nException raised from")
    'Timed out waiting 5000ms for recv'
    """
    return re.sub(r"^\[[^\]]*\] *", "", message.partition("\n")[0])


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text)
    partial.replace(path)
