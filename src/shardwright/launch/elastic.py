"""Restarts after a lost rank, with as many ranks, fewer, or later as many as at first again.

Each attempt is a separate launch through torch's elastic agent, with its own rendezvous. The
agent's own restarts share one store, where a late rank of the old attempt could join the new.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwright.checkpoint.commit import LATEST_NAME, StepFolder, read_pointer
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.checkpoint.storage_path import StoragePath
from shardwright.config import Recipe
from shardwright.errors import (
    GenerationEnded,
    InputError,
    NonFiniteError,
    OutOfMemory,
    RunFailed,
    SaveFailed,
)
from shardwright.launch.rank_outcome import RESUME_ADVICE
from shardwright.launch.stop_signals import StopRequest
from shardwright.plans import resolve_degrees


@dataclass(frozen=True)
class LaunchAttempt:
    """One launch of the ranks; `number` counts the restarts after failures, `restart_reason` is
    the reason for the last one.
    """

    number: int
    world_size: int
    restart_reason: str = ""
    former_world_size: int | None = None
    """Number of ranks of the launch before, if that was another."""
    leave_after_steps: int | None = None
    """Number of steps after which the ranks leave, because a larger launch follows; None if none
    does."""


@dataclass(frozen=True)
class Restart:
    """New start of the ranks as the launcher describes it to them; rank 0 logs it."""

    number: int
    max_restarts: int
    world_size: int
    reason: str
    is_warm: bool = False
    surviving_ranks: tuple[int, ...] = ()
    """Ranks that keep their process in a warm restart."""
    stuck_ranks: tuple[int, ...] = ()
    """Ranks whose process had to be killed although they were not lost."""
    noticed_at_seconds: float | None = None
    """Wall clock time at which the launcher noticed the loss."""
    former_world_size: int | None = None
    """Number of ranks before, if that was another."""
    leave_after_steps: int | None = None
    """Number of steps after which the ranks leave for a larger launch."""

    @property
    def is_growth(self) -> bool:
        """True if no rank was lost: more ranks continue the run than before."""
        return self.former_world_size is not None and self.world_size > self.former_world_size

    def to_json(self) -> str:
        """Return the text for the ranks' command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Restart:
        """Read the text of `to_json`."""
        fields = json.loads(text)
        for name in ("surviving_ranks", "stuck_ranks"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


def run_with_restarts(
    recipe: Recipe,
    world_size: int,
    launch: Callable[[LaunchAttempt], None],
    stop: StopRequest,
    read_newest_step: Callable[[], int] = lambda: 0,
    find_smaller: Callable[[int], int | None] | None = None,
    count_slots: Callable[[], int] = lambda: sys.maxsize,
) -> None:
    """Call `launch` until an attempt succeeds, with at most `elastic.max_restarts` restarts.

    After an attempt that made no progress, the next one uses fewer ranks if `elastic.min_ranks`
    and the layout allow it with the same global batch: a lost device may not come back. Progress
    is a new checkpoint, or with copies in memory a finished step. With `elastic.grow_after_steps`
    a smaller attempt ends after that many steps, and as many ranks as at first continue. If these
    make no progress, the former number continues, and twice as many steps pass before the next
    try.

    Args:
        recipe: Recipe of the run.
        world_size: Number of ranks of the first attempt.
        launch: Starts the ranks of an attempt and waits for them.
        stop: Request to stop, after which nothing is restarted.
        read_newest_step: Returns the newest finished step from which ranks can continue without a
            checkpoint; 0 if they cannot.
        find_smaller: Returns the number of ranks that replaces a given one, None if there is
            none; by default `find_smaller_world_size`.
        count_slots: Returns how many ranks the nodes that are left can run.

    Raises:
        ShardwrightError: Error of the last attempt. Raised at once if a stop was requested or a
            restart cannot help (invalid input, disk full at the last save, non-finite
            gradients).
    """
    find_smaller = find_smaller or (lambda size: find_smaller_world_size(recipe, size))
    folder = RunFolder.from_recipe(recipe)
    attempt = LaunchAttempt(0, world_size)
    num_failed_growths = 0
    left_at_step = 0
    while True:
        saved_before = _read_latest(folder.checkpoints)
        step_before = max(read_newest_step(), left_at_step)
        is_failed_growth = False
        try:
            launch(attempt)
            return
        except GenerationEnded as ended:
            left_at_step = ended.step
            # After a stop signal the same processes save what they have in memory.
            lacks_nodes = count_slots() < world_size
            size = attempt.world_size if stop or lacks_nodes else world_size
            is_failed_growth = lacks_nodes
            number = attempt.number
            reason = ""
            if size < world_size:
                cause = "a stop was requested" if stop else "too few nodes were connected"
                reason = f"{cause} while more ranks were about to start"
        except (RunFailed, InputError) as error:
            former_size = attempt.former_world_size or attempt.world_size
            has_grown = attempt.world_size > former_size
            is_last = attempt.number >= recipe.elastic.max_restarts
            if stop or is_last or _is_permanent(error, has_grown=has_grown):
                raise
            has_saved = _read_latest(folder.checkpoints) != saved_before
            has_progressed = has_saved or read_newest_step() > step_before
            is_failed_growth = has_grown and not has_progressed
            size = attempt.world_size
            if is_failed_growth:
                size = former_size
            elif not (has_progressed or isinstance(error, OutOfMemory)):
                # After running out of memory, fewer ranks would need even more memory each.
                size = _find_size_that_fits(size, find_smaller, count_slots()) or size
            number = attempt.number + 1
            reason = str(error).partition("\n")[0].removesuffix(RESUME_ADVICE)
        num_failed_growths += is_failed_growth
        every_steps = recipe.elastic.grow_after_steps
        attempt = LaunchAttempt(
            number,
            size,
            reason,
            attempt.world_size if attempt.world_size != size else None,
            every_steps * 2**num_failed_growths
            if every_steps is not None and size < world_size and not stop
            else None,
        )


def _find_size_that_fits(
    size: int, find_smaller: Callable[[int], int | None], num_slots: int
) -> int | None:
    """Return the next smaller number of ranks that fits in `num_slots`; None if there is none."""
    smaller = find_smaller(size)
    while smaller is not None and smaller > num_slots:
        smaller = find_smaller(smaller)
    return smaller


def _is_permanent(error: RunFailed | InputError, *, has_grown: bool) -> bool:
    """Return True if a restart would fail with the same error.

    Wrong input would be wrong again. After a growth, the error can be a device that is missing.
    """
    return isinstance(error, NonFiniteError | SaveFailed) or (
        isinstance(error, InputError) and not has_grown
    )


def _read_latest(root: StoragePath) -> StepFolder | None:
    try:
        return read_pointer(root, LATEST_NAME)
    except OSError as error:
        if isinstance(root, Path):
            raise
        raise RunFailed(f"the checkpoints in {root} cannot be read: {error}") from error


def find_smaller_world_size(recipe: Recipe, world_size: int) -> int | None:
    """Find the largest smaller world size with the same global batch; None if there is none.

    Degrees that the recipe names are kept; the data degree that it leaves open shrinks.
    """
    if recipe.elastic.min_ranks is None:
        return None
    _, batch = resolve_degrees(recipe, world_size)
    for fewer in range(world_size - 1, recipe.elastic.min_ranks - 1, -1):
        try:
            _, smaller = resolve_degrees(recipe, fewer)
        except InputError:
            continue
        if smaller.global_batch_size == batch.global_batch_size:
            return fewer
    return None
