"""Every error that shardwright raises on purpose.

    ShardwrightError                exit code
    ├── InputError                  2   what was given is wrong: field, got, allowed, remedy
    │   ├── RecipeError                 the YAML recipe or a `--set`
    │   ├── LayoutError                 degrees that do not fit ranks, model or batch
    │   ├── ScheduleError               a pipeline schedule that cannot be built, read or run
    │   ├── ArchitectureError           a config.json that we refuse
    │   ├── WeightsError                missing, surplus or mis-shaped tensors
    │   ├── TokenizerError              a tokenizer that is absent or does not fit the model
    │   ├── DataError                   sources that cannot be read or hold nothing to learn from
    │   └── CheckpointError             a checkpoint that is damaged, foreign or does not fit
    ├── CheckFailed                 1   a check ran and its answer is no
    ├── RunFailed                   3   the run itself broke
    │   ├── NonFiniteError              too many steps in a row without a finite gradient
    │   ├── SaveFailed                  a checkpoint could not be written; the old ones are whole
    │   ├── OutOfMemory                 a rank found no more memory; says what was predicted
    │   └── RankFailed                  a rank died or hung; names it
    └── Preempted                   4   asked to stop; state is saved

Anything else that escapes is a bug of ours and is shown with its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every verb."""

    DONE = 0
    CHECK_FAILED = 1
    WRONG_INPUT = 2
    RUN_FAILED = 3
    PREEMPTED = 4


class ShardwrightError(Exception):
    """Root of the tree; `exit_code` is what the command line leaves with."""

    exit_code: ExitCode = ExitCode.RUN_FAILED


class InputError(ShardwrightError):
    """Wrong input, told in four parts so that the reader can mend it without reading our code.

    >>> print(InputError("two sequences do not fit", field="training.sequence_length", got=4096,
    ...                  allowed="at most 2048", remedy="shorten it"))
    training.sequence_length: two sequences do not fit (got 4096; allowed: at most 2048). shorten it
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
        self.problem = problem
        self.field = field
        self.got = got
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
        # Errors cross process boundaries (rank -> launcher); keyword-only arguments need help to pickle.
        return (_rebuild, (type(self), self.problem, self.field, self.got, self.allowed, self.remedy))


def _rebuild(
    kind: type[InputError], problem: str, field: str | None, got: object, allowed: str | None, remedy: str | None
) -> InputError:
    return kind(problem, field=field, got=got, allowed=allowed, remedy=remedy)


class RecipeError(InputError):
    """The recipe, or a `--set` on the command line, is wrong."""


class LayoutError(InputError):
    """A layout that does not fit the ranks, the model or the batch."""


class ScheduleError(InputError):
    """A pipeline schedule that cannot be built, read, or run to its end."""


class ArchitectureError(InputError):
    """A config.json that names a family or feature we do not compute exactly."""


class WeightsError(InputError):
    """Tensors of a weights folder that are missing, surplus or mis-shaped."""


class TokenizerError(InputError):
    """A tokenizer that is absent, broken or does not fit the model's vocabulary."""


class DataError(InputError):
    """Data that cannot be read, is broken too often, or supervises nothing."""


class CheckpointError(InputError):
    """A checkpoint that is damaged, foreign, or does not fit the run."""


class CheckFailed(ShardwrightError):
    """A check ran to its end and the answer is no."""

    exit_code = ExitCode.CHECK_FAILED


class RunFailed(ShardwrightError):
    """The run broke."""


class NonFiniteError(RunFailed):
    """Too many steps in a row had a gradient that is not finite."""


class SaveFailed(RunFailed):
    """A checkpoint could not be written. Older checkpoints are untouched."""


class OutOfMemory(RunFailed):
    """A rank found no more memory."""


class RankFailed(RunFailed):
    """A rank died or hung."""


class Preempted(ShardwrightError):
    """The run was asked to stop and has saved its state."""

    exit_code = ExitCode.PREEMPTED


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word closest to `word`, or None when none is close.

    >>> nearest("seqence_length", ["sequence_length", "seed"])
    'sequence_length'
    """
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None
