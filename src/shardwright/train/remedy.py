"""What to do about memory that did not suffice: the cheapest change that would fit, and what lay in the device's memory."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from shardwright.errors import InputError
from shardwright.planner.achieved import load_efficiencies
from shardwright.planner.automatic import cluster_of
from shardwright.planner.facts import facts_of
from shardwright.planner.predict import Predictor
from shardwright.planner.question import question_of
from shardwright.planner.rejections import cheapest_change
from shardwright.train.forecast import candidate_of_run
from shardwright.train.preflight import Checked
from shardwright.units import format_bytes, format_seconds

logger = logging.getLogger(__name__)

_IN_GENERAL = "Smaller training.micro_batch_size, recompute: full, or more sharding (layout) take less"


def cheapest_fit(checked: Checked) -> str:
    """A sentence: the change after which the planner expects the run to fit and to be fastest, with memory and time.

    Without a `cluster` in the recipe nobody knows what would fit: then what helps in general.
    """
    recipe = checked.recipe
    if recipe.cluster is None:
        return f"{_IN_GENERAL}; with the recipe's `cluster` named, the planner says which is cheapest"
    try:
        cluster = cluster_of(recipe.cluster, checked.plan.layout.world_size)
        predictor = Predictor(facts_of(checked.shape), cluster, load_efficiencies().of(cluster.accelerator))
        candidate = candidate_of_run(recipe, checked)
        change, changed = cheapest_change(predictor, question_of(recipe, candidate, cluster.num_gpus), candidate)
        before = predictor.predict(candidate)
    except InputError:  # the recipe's cluster is not what runs; the story is the memory
        return _IN_GENERAL
    if change is None or changed is None:
        return f"No change that the planner knows fits these devices. {_IN_GENERAL}"
    return (
        f"The cheapest change that would fit: {change} (predicted {format_bytes(changed.memory.total)} in place of "
        f"{format_bytes(before.memory.total)}, a step {format_seconds(changed.time.step)} in place of "
        f"{format_seconds(before.time.step)})"
    )


def save_snapshot(folder: Path, rank: int, device: torch.device) -> Path | None:
    """What the allocator holds, block by block, as `memory/rank-N.pickle` in the run folder, for https://pytorch.org/memory_viz.

    None on a CPU, whose allocator keeps no books, and where it cannot be written.
    """
    if device.type != "cuda":
        return None
    path = folder / "memory" / f"rank-{rank}.pickle"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Documented under this name (Understanding CUDA Memory Usage); the public memory_snapshot() has another form.
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError, MemoryError) as error:
        logger.warning("the memory of rank %d cannot be written to %s: %s", rank, path, error)
        return None
    return path
