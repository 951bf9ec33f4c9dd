"""Out-of-memory errors: the plan's prediction, the cheapest change that fits, a snapshot."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shardwright.errors import InputError, OutOfMemory
from shardwright.launch.rank_outcome import extract_first_line
from shardwright.planner.auto_layout import build_cluster
from shardwright.planner.predictor import build_predictor
from shardwright.planner.problem import build_plan_candidate, build_problem, get_recipe_facts
from shardwright.planner.rejections import find_cheapest_change
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.training.metrics.run_prediction import predict_training_memory
from shardwright.training.rank_context import RankContext
from shardwright.units import format_bytes, format_seconds

logger = logging.getLogger(__name__)

_OOM_MESSAGES = (
    "can't allocate memory",
    "out of memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "can't start new thread",
)
"""Messages of torch's CPU allocator, CUDA, the system and C++ in exceptions of other types."""

_GENERAL_ADVICE = (
    "To save memory: a smaller training.micro_batch_size, recompute: full, or more sharding"
)


@contextmanager
def convert_oom_errors(context: RankContext) -> Iterator[None]:
    """Convert out-of-memory errors of the block to `OutOfMemory`.

    Raises:
        OutOfMemory: With the plan's prediction and the memory that this process uses.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        rank = context.rank_environment.rank
        message = extract_first_line(str(error)) or type(error).__name__
        snapshot = save_memory_snapshot(context.folder.path, rank, context.device)
        raise OutOfMemory(
            f"rank {rank} ran out of memory ({message}). "
            f"{_describe_prediction(context.validated_run)}; {_describe_usage(context.device)}. "
            f"{suggest_cheapest_fit(context.validated_run)}"
            + (f". Snapshot of its memory: {snapshot}" if snapshot else "")
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception means that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(sign in str(error) for sign in _OOM_MESSAGES)


def _describe_prediction(validated_run: ValidatedRun) -> str:
    parts = predict_training_memory(validated_run)
    breakdown = ", ".join(
        f"{name} {format_bytes(value)}"
        for name, value in (
            ("weights", parts.weights),
            ("gradients", parts.gradients),
            ("optimizer", parts.optimizer),
            ("activations", parts.activations + parts.logits + parts.gathered + parts.workspaces),
        )
    )
    total = format_bytes(parts.live)
    return f"The plan predicted {total} of tensors on the fullest rank ({breakdown})"


def _describe_usage(device: torch.device) -> str:
    if device.type == "cuda":
        allocated = format_bytes(torch.cuda.memory_allocated(device))
        reserved = format_bytes(torch.cuda.memory_reserved(device))
        return f"{allocated} were allocated and {reserved} reserved on {device}"
    pages = (
        int(Path("/proc/self/statm").read_text().split()[1])
        if Path("/proc/self/statm").exists()
        else 0
    )
    resident = format_bytes(pages * resource.getpagesize())
    return f"this process had {resident} resident, including Python and its libraries"


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
        predictor = build_predictor(get_recipe_facts(recipe, validated_run.shape), cluster)
        candidate = build_plan_candidate(recipe, validated_run.plan)
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
