"""Restarts after a lost rank: from the newest complete checkpoint, perhaps with fewer ranks.

Each attempt is a separate launch through torch's elastic agent, with its own rendezvous. The
agent's own restarts share one store, where a late rank of the old attempt could join the new.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwright.checkpoint.commit import LATEST_NAME, StepFolder, read_pointer
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.checkpoint.storage_path import StoragePath
from shardwright.config import Recipe
from shardwright.errors import InputError, NonFiniteError, OutOfMemory, RunFailed, SaveFailed
from shardwright.launch.stop_signals import StopRequest
from shardwright.plans import resolve_degrees


@dataclass(frozen=True)
class LaunchAttempt:
    """One launch of the ranks; `number` starts at 0, `restart_reason` is the reason for the
    restart.
    """

    number: int
    world_size: int
    restart_reason: str = ""


@dataclass(frozen=True)
class Restart:
    """Restart as the launcher describes it to rank 0, which logs it."""

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
) -> None:
    """Call `launch` until an attempt succeeds, with at most `elastic.max_restarts` restarts.

    After an attempt that made no progress, the next one uses fewer ranks if `elastic.min_ranks`
    and the layout allow it with the same global batch: a lost device may not come back. Progress
    is a new checkpoint, or with copies in memory a finished step.

    Args:
        recipe: Recipe of the run.
        world_size: Number of ranks of the first attempt.
        launch: Starts the ranks of an attempt and waits for them.
        stop: Request to stop, after which nothing is restarted.
        read_newest_step: Returns the newest finished step from which ranks can continue without a
            checkpoint; 0 if they cannot.

    Raises:
        ShardwrightError: Error of the last attempt. Raised at once if a stop was requested or a
            restart cannot help (invalid input, disk full at the last save, non-finite
            gradients).
    """
    folder = RunFolder.from_recipe(recipe)
    generation = LaunchAttempt(0, world_size)
    while True:
        saved_before = _read_latest(folder.checkpoints)
        step_before = read_newest_step()
        try:
            launch(generation)
            return
        except RunFailed as error:
            if (
                isinstance(error, NonFiniteError | SaveFailed)
                or stop
                or generation.number >= recipe.elastic.max_restarts
            ):
                raise
            has_saved = _read_latest(folder.checkpoints) != saved_before
            has_progressed = has_saved or read_newest_step() > step_before
            # After running out of memory, fewer ranks would need even more memory each.
            keeps_size = has_progressed or isinstance(error, OutOfMemory)
            size = (
                generation.world_size
                if keeps_size
                else find_smaller_world_size(recipe, generation.world_size) or generation.world_size
            )
            reason = str(error).partition("\n")[0]
            generation = LaunchAttempt(generation.number + 1, size, reason)


def _read_latest(root: StoragePath) -> StepFolder | None:
    try:
        return read_pointer(root, LATEST_NAME)
    except OSError as error:
        if isinstance(root, Path):
            raise
        raise RunFailed(f"the checkpoints in {root} cannot be read: {error}") from error


def find_smaller_world_size(recipe: Recipe, world_size: int) -> int | None:
    """Find the largest smaller world size with the same global batch; None if there is none."""
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
