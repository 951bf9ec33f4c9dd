"""Exceptions that shardwright raises on purpose.

    ShardwrightError                exit code
    ├── InputError                  2   invalid input: field, got, allowed, remedy
    │   ├── RecipeError                 the YAML recipe or a `--set`
    │   ├── LayoutError                 degrees that do not fit ranks, model or batch
    │   ├── ScheduleError               a pipeline schedule that cannot be built, read or run
    │   ├── ArchitectureError           a config.json that we do not support
    │   ├── WeightsError                missing, surplus or mis-shaped tensors
    │   ├── TokenizerError              a tokenizer that is missing or does not fit the model
    │   ├── DataError                   sources that are unreadable or contain no training data
    │   └── CheckpointError             a checkpoint that is damaged, not ours or does not fit
    │       └── NonFiniteCheckpoint         one whose tensors contain NaN or infinity
    ├── CheckFailed                 1   a check ran and found a failure
    ├── RunFailed                   3   the run itself failed
    │   ├── NonFiniteError              too many steps in a row without a finite gradient
    │   ├── SaveFailed                  a checkpoint could not be written; older ones are intact
    │   ├── OffloadFailed               state could not be moved; saved checkpoints are intact
    │   ├── OutOfMemory                 a rank ran out of memory; states the prediction
    │   └── RankFailed                  a rank died or hung; names it
    ├── Preempted                   4   stopped on request; state is saved
    └── GenerationEnded             4   ranks left, because more ranks continue the run

Any other exception that escapes is a bug of ours and is shown with its traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from enum import IntEnum

from shardwright.masking import mask_secrets, mask_values


class ExitCode(IntEnum):
    """Exit codes of all commands."""

    DONE = 0
    CHECK_FAILED = 1
    WRONG_INPUT = 2
    RUN_FAILED = 3
    PREEMPTED = 4
    INTERRUPTED = 130
    """Ctrl-C that saved nothing: 128 + SIGINT, as shells report it."""
    PIPE_CLOSED = 141
    """The reader of the output ended first: 128 + SIGPIPE, as shells report it."""


class ShardwrightError(Exception):
    """Base class of our exceptions; `exit_code` is the exit code of the command line.

    Their messages contain no credentials: see `shardwright.masking`.
    """

    exit_code: ExitCode = ExitCode.RUN_FAILED

    def __init__(self, *details: object) -> None:
        super().__init__(*map(mask_values, details))


class InputError(ShardwrightError):
    """Invalid input, described in four parts so that users can fix it without reading our code.

    >>> print(InputError("sequences do not fit", field="training.sequence_length", got=4096,
    ...                  allowed="at most 2048", remedy="shorten it"))
    training.sequence_length: sequences do not fit (got 4096; allowed: at most 2048). shorten it
    """

    exit_code = ExitCode.WRONG_INPUT

    def __init__(
        self,
        problem: str,
        *,
        field: str | None = None,
        got: object = None,
        allowed: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.problem = problem = mask_secrets(problem)
        self.field = field = None if field is None else mask_secrets(field)
        self.got = got = mask_values(got)
        self.allowed = allowed
        self.remedy = remedy
        details = []
        if got is not None:
            details.append(f"got {got}")
        if allowed is not None:
            details.append(f"allowed: {allowed}")
        message = f"{field}: {problem}" if field else problem
        if details:
            message += f" ({'; '.join(details)})"
        if remedy:
            message += f". {remedy}"
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (rank -> launcher); pickle does not pass keyword-only
        # arguments.
        return (
            _rebuild,
            (type(self), self.problem, self.field, self.got, self.allowed, self.remedy),
        )


def _rebuild(
    kind: type[InputError],
    problem: str,
    field: str | None,
    got: object,
    allowed: str | None,
    remedy: str | None,
) -> InputError:
    return kind(problem, field=field, got=got, allowed=allowed, remedy=remedy)


class RecipeError(InputError):
    """Invalid recipe, or invalid `--set` on the command line."""


class LayoutError(InputError):
    """Layout that does not fit the ranks, the model or the batch."""


class ScheduleError(InputError):
    """Pipeline schedule that cannot be built, read, or run to its end."""


class ArchitectureError(InputError):
    """config.json with a family or feature that we do not compute exactly."""


class WeightsError(InputError):
    """Missing, surplus or mis-shaped tensors in a weights folder."""


class TokenizerError(InputError):
    """Tokenizer that is missing, broken or does not fit the model's vocabulary."""


class DataError(InputError):
    """Data that cannot be read, is broken too often, or has no supervised tokens."""


class CheckpointError(InputError):
    """Checkpoint that is damaged, not shardwright's, or does not fit the run."""


class NonFiniteCheckpoint(CheckpointError):
    """Checkpoint of which tensors contain NaN or infinity."""


class CheckFailed(ShardwrightError):
    """Check that ran to its end and found a failure."""

    exit_code = ExitCode.CHECK_FAILED


class RunFailed(ShardwrightError):
    """Failure of the run itself."""


class NonFiniteError(RunFailed):
    """Too many steps in a row with a non-finite gradient."""


class SaveFailed(RunFailed):
    """Checkpoint that could not be written. Older checkpoints are intact."""


class OffloadFailed(RunFailed):
    """Offloaded state that could not be read or written. Checkpoints are intact."""


class OutOfMemory(RunFailed):
    """Rank that ran out of memory."""


class RankFailed(RunFailed):
    """Rank that died or hung."""


class Preempted(ShardwrightError):
    """Run that stopped on request, after saving its state."""

    exit_code = ExitCode.PREEMPTED


class GenerationEnded(ShardwrightError):
    """Generation whose ranks left after a step, because more ranks continue the run. Only the
    launcher sees it; `train` does not raise it.

    Args:
        step: Number of finished steps.
    """

    exit_code = ExitCode.PREEMPTED

    def __init__(self, step: int) -> None:
        super().__init__(f"more ranks continue after step {step}")
        self.step = step


def find_closest_name(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known word closest to `name`, or None if none is close.

    `cutoff` is the least similarity, from 0 to 1 (`difflib`).

    >>> find_closest_name("seqence_length", ["sequence_length", "seed"])
    'sequence_length'
    """
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def explain_missing_path(path: str) -> str:
    """Return a sentence about a path that does not exist, with a space after it, or nothing: a
    variable without braces is not replaced.

    >>> explain_missing_path("$HOME/data")
    'Variables are replaced in braces only: write ${HOME}. '
    >>> explain_missing_path("data")
    ''
    """
    name = re.search(r"\$([A-Za-z_][A-Za-z0-9_]*)", path)
    return f"Variables are replaced in braces only: write ${{{name[1]}}}. " if name else ""


def suggest_name(name: str, known: Iterable[str]) -> str | None:
    """Return a remedy that suggests the known word closest to `name`, or None if none is close.

    >>> suggest_name("seqence_length", ["sequence_length", "seed"])
    'Did you mean `sequence_length`?'
    """
    closest = find_closest_name(name, known)
    return f"Did you mean `{closest}`?" if closest else None
