"""Restarts after a lost rank: from the newest complete checkpoint, perhaps with fewer ranks.

Each attempt is a separate launch through torch's elastic agent, with its own rendezvous. The
agent's own restarts share one store, where a late rank of the old attempt could join the new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.checkpoint.commit import LATEST, read_pointer
from shardwright.config import Recipe
from shardwright.errors import InputError, NonFiniteError, OutOfMemory, RunFailed, SaveFailed
from shardwright.plan import resolve_degrees
from shardwright.train.folder import RunFolder
from shardwright.train.signals import StopRequest


@dataclass(frozen=True)
class Generation:
    """One launch of the ranks; `number` starts at 0, `after` is the reason for the restart."""

    number: int
    world_size: int
    after: str = ""


def run_generations(
    recipe: Recipe, world_size: int, launch: Callable[[Generation], None], stop: StopRequest
) -> None:
    """Call `launch` until an attempt succeeds, with at most `elastic.max_restarts` restarts.

    After an attempt that saved no new checkpoint, the next one uses fewer ranks if
    `elastic.min_ranks` and the layout allow it with the same global batch: a lost device may
    not come back.

    Raises:
        ShardwrightError: Error of the last attempt. Raised at once if a stop was requested or a
            restart cannot help (invalid input, disk full at the last save, non-finite
            gradients).
    """
    folder = RunFolder.of(recipe)
    generation = Generation(0, world_size)
    while True:
        saved_before = read_pointer(folder.checkpoints, LATEST)
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
            has_saved = read_pointer(folder.checkpoints, LATEST) != saved_before
            # After running out of memory, fewer ranks would need even more memory each.
            keeps_size = has_saved or isinstance(error, OutOfMemory)
            size = (
                generation.world_size
                if keeps_size
                else smaller_world(recipe, generation.world_size) or generation.world_size
            )
            reason = str(error).partition("\n")[0]
            generation = Generation(generation.number + 1, size, reason)


def smaller_world(recipe: Recipe, world_size: int) -> int | None:
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
