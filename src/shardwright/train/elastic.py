"""Go on after a rank was lost: start the ranks again from the newest whole checkpoint, perhaps fewer of them.

Each generation is a launch of its own through torch's elastic agent, with a rendezvous of its own. The agent's own restarts share
one store between generations, where a late rank of the old one can meet the new one; here it finds nobody.
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
    """One start of the ranks; `number` counts from 0, `after` says how the one before ended."""

    number: int
    world_size: int
    after: str = ""


def run_generations(recipe: Recipe, world_size: int, launch: Callable[[Generation], None], stop: StopRequest) -> None:
    """`launch` until a generation ends well, at most `elastic.max_restarts` times more.

    A generation that ended without a new checkpoint is followed by a smaller one, if `elastic.min_ranks` and the layout allow one
    with the same global batch: what was lost may stay lost.

    Raises:
        ShardwrightError: how the last generation ended; at once where another try would end the same (wrong input, a full disk at
            the last save, gradients that are not finite) or a stop was asked for.
    """
    folder, generation = RunFolder.of(recipe), Generation(0, world_size)
    while True:
        saved_before = read_pointer(folder.checkpoints, LATEST)
        try:
            launch(generation)
            return
        except RunFailed as error:
            if isinstance(error, NonFiniteError | SaveFailed) or stop or generation.number >= recipe.elastic.max_restarts:
                raise
            came_on = read_pointer(folder.checkpoints, LATEST) != saved_before
            # Where memory ran out, fewer ranks would each have to hold more.
            stays = came_on or isinstance(error, OutOfMemory)
            size = generation.world_size if stays else smaller_world(recipe, generation.world_size) or generation.world_size
            reason = str(error).partition("\n")[0]
            generation = Generation(generation.number + 1, size, reason)


def smaller_world(recipe: Recipe, world_size: int) -> int | None:
    """The largest number of ranks below `world_size` that the recipe can run on with the same global batch, if there is one."""
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
