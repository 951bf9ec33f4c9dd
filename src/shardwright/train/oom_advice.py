"""Advice after running out of memory: the cheapest change that fits, and a memory snapshot."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from shardwright.errors import InputError
from shardwright.planner.auto_layout import build_cluster
from shardwright.planner.calibration import load_efficiencies
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.predictor import Predictor
from shardwright.planner.problem import build_problem
from shardwright.planner.rejections import find_cheapest_change
from shardwright.train.run_checks import ValidatedRun
from shardwright.train.run_prediction import build_run_candidate
from shardwright.units import format_bytes, format_seconds

logger = logging.getLogger(__name__)

_GENERAL_ADVICE = (
    "To save memory: a smaller training.micro_batch_size, recompute: full, or more sharding"
)


def suggest_cheapest_fit(validated_run: ValidatedRun) -> str:
    """Describe the change with which the planner expects the run to fit and to be fastest.

    General advice if the recipe names no `cluster`, without which the planner cannot tell.
    """
    recipe = validated_run.recipe
    if recipe.cluster is None:
        return (
            f"{_GENERAL_ADVICE}. If the recipe names its `cluster`, the planner finds the cheapest"
        )
    try:
        cluster = build_cluster(recipe.cluster, validated_run.plan.layout.world_size)
        predictor = Predictor(
            get_model_facts(validated_run.shape),
            cluster,
            load_efficiencies().get_efficiency(cluster.accelerator),
        )
        candidate = build_run_candidate(recipe, validated_run)
        change, changed = find_cheapest_change(
            predictor, build_problem(recipe, candidate, cluster.num_gpus), candidate
        )
        before = predictor.predict(candidate)
    except InputError:  # the recipe's cluster does not match the run; the error is about memory
        return _GENERAL_ADVICE
    if change is None or changed is None:
        return (
            f"No change that the planner knows makes the run fit these devices. {_GENERAL_ADVICE}"
        )
    memory = f"{format_bytes(changed.memory.total)} instead of {format_bytes(before.memory.total)}"
    time = f"{format_seconds(changed.time.step)} instead of {format_seconds(before.time.step)}"
    return f"The cheapest change that would fit: {change} (predicted {memory}, step time {time})"


def save_memory_snapshot(folder: Path, rank: int, device: torch.device) -> Path | None:
    """Save the CUDA allocator's blocks as `memory/rank-N.pickle` in the run folder.

    View it at https://pytorch.org/memory_viz. Returns None on a CPU, whose allocator keeps no
    record, and if the file cannot be written.
    """
    if device.type != "cuda":
        return None
    path = folder / "memory" / f"rank-{rank}.pickle"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Documented in Understanding CUDA Memory Usage; memory_snapshot() has another format.
        torch.cuda.memory._dump_snapshot(str(path))
    except (OSError, RuntimeError, MemoryError) as error:
        logger.warning(
            "the memory snapshot of rank %d cannot be written to %s: %s", rank, path, error
        )
        return None
    return path
