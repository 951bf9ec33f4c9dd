"""Checks of the recipe's `offload` section against optimizer, disk and host memory."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from shardwright.architecture import HFShape
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe
from shardwright.errors import RecipeError
from shardwright.launch.rank_environment import count_local_ranks, detect_rank_environment
from shardwright.layout import RankGrid, compute_local_boxes
from shardwright.planner.engine_model import OPTIMIZER_STATE_BYTES
from shardwright.planner.memory.peaks import predict_memory
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.problem import build_template
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.time.pipeline import get_pipeline
from shardwright.plans import Plan
from shardwright.schedule import has_split_backward
from shardwright.units import format_bytes

logger = logging.getLogger(__name__)

_NETWORK_FILE_SYSTEMS = (
    "nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "9p", "gpfs", "beegfs", "afs", "fuse",
)  # fmt: skip
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


def check_offload(recipe: Recipe, plan: Plan, trained_names: Collection[str]) -> None:
    """Check, before any rank starts, that this node can hold what is offloaded.

    Raises:
        RecipeError: the optimizer has no states, or disk or host memory is too small; the message
            has the numbers.
    """
    section = recipe.offload
    if section.activations != "none":
        _check_activations(recipe, plan)
        _warn_of_little_space(recipe, plan)
    if section.optimizer == "none":
        return
    name = recipe.optimizer.name
    has_momentum = name == "sgd" and recipe.optimizer.effective_momentum > 0.0
    if name == "sgd" and not has_momentum:
        raise RecipeError(
            "sgd without momentum has no states to offload",
            field="offload.optimizer",
            got=section.optimizer,
            allowed="none",
            remedy="Remove it, or set optimizer.momentum",
        )
    needed_bytes = _count_node_bytes(
        plan, trained_names, OPTIMIZER_STATE_BYTES["sgd_momentum" if has_momentum else name]
    )
    if section.optimizer == "disk":
        folder = _get_folder(recipe)
        _check_folder(folder)
        _check_disk(folder, needed_bytes)
    else:
        _check_host_memory(needed_bytes)


def _check_activations(recipe: Recipe, plan: Plan) -> None:
    tier = recipe.offload.activations
    if isinstance(plan.placement.shape, HFShape):
        raise RecipeError(
            "blocks of transformers' own classes cannot offload their saved tensors",
            field="offload.activations",
            got=tier,
            allowed="none for this family of models",
        )
    if plan.layout.pp > 1 and has_split_backward(plan.layout.schedule):
        raise RecipeError(
            f"schedule {plan.layout.schedule} defers weight gradients, whose factors stay on the "
            "device",
            field="offload.activations",
            got=tier,
            allowed="none with this schedule",
            remedy="Choose layout.schedule 1f1b, interleaved_1f1b or gpipe",
        )
    if tier == "disk":
        _check_folder(_get_folder(recipe))


def _warn_of_little_space(recipe: Recipe, plan: Plan) -> None:
    """Warn if the saved tensors of full rows need more than the disk or the host memory has.

    A warning, because shorter rows save less.
    """
    tier = recipe.offload.activations
    if recipe.run.device == "cpu" and tier == "host":
        return
    needed_bytes = _predict_offloaded_bytes(recipe, plan) * _count_local_ranks(plan)
    place = f"the disk of {_get_folder(recipe)}" if tier == "disk" else "this node's memory"
    free_bytes: int | None = read_available_memory()
    if tier == "disk":
        status = os.statvfs(_get_folder(recipe))
        free_bytes = status.f_bavail * status.f_frsize
    if free_bytes is not None and free_bytes < needed_bytes:
        logger.warning(
            "offload.activations: %s has %s free, and the saved tensors of the ranks of this node "
            "need up to %s if all rows are full. The run ends with an error when it is full. Free "
            "space, set recompute: full, or make micro_batch_size smaller",
            place,
            format_bytes(free_bytes),
            format_bytes(needed_bytes),
        )


def _predict_offloaded_bytes(recipe: Recipe, plan: Plan) -> float:
    """Predict the bytes of saved tensors that leave the fullest rank."""
    facts = get_model_facts(plan.placement.shape)
    template = build_template(recipe)
    candidate = replace(
        template,
        layout=plan.layout,
        micro_batch_size=plan.batch.micro_batch_size,
        gradient_accumulation_steps=plan.batch.gradient_accumulation_steps,
        recompute=plan.recompute,
        offload="none",
    )
    pipeline = get_pipeline(
        facts, plan.layout, plan.batch.gradient_accumulation_steps, plan.batch.sequence_length
    )
    return max(
        predict_memory(facts, candidate, load, Efficiency()).offloaded
        for load in pipeline.distinct_loads
    )


def _get_folder(recipe: Recipe) -> Path:
    """Return the folder of the scratch files, or its nearest parent that exists."""
    folder = RunFolder.from_recipe(recipe).path
    if recipe.offload.dir is not None:
        folder = Path(recipe.offload.dir)
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _count_node_bytes(plan: Plan, trained_names: Collection[str], bytes_per_element: float) -> int:
    """Count the bytes of the states of all ranks on this node."""
    world_size = plan.layout.world_size
    ranks = detect_rank_environment()
    first_rank = 0 if ranks is None else ranks.rank - ranks.local_rank
    num_ranks = _count_local_ranks(plan)
    grid = RankGrid(plan.layout)
    num_elements = sum(
        math.prod(length for _, length in box.local_bounds)
        for rank in range(first_rank, min(first_rank + num_ranks, world_size))
        for name in trained_names
        for box in compute_local_boxes(
            plan.placement.parameters[name], plan.layout, grid.coordinates(rank)
        )
    )
    return round(num_elements * bytes_per_element)


def _count_local_ranks(plan: Plan) -> int:
    """Count the ranks of this node: all of them if this process starts them."""
    if detect_rank_environment() is None:
        return plan.layout.world_size
    return count_local_ranks() or 1


def _check_folder(folder: Path) -> None:
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise RecipeError(
            "scratch files cannot be written here",
            field="offload.dir",
            got=str(folder),
            allowed="a writable folder on a local disk",
        )


def _check_disk(folder: Path, needed_bytes: int) -> None:
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    if free_bytes < needed_bytes:
        raise RecipeError(
            f"the disk of {folder} has not enough free space for the optimizer states of the "
            "ranks of this node",
            field="offload.dir",
            got=f"{format_bytes(free_bytes)} free",
            allowed=f"at least {format_bytes(needed_bytes)}",
            remedy="Free space, or choose a folder on another disk",
        )
    kind = _read_file_system(folder)
    if kind.partition(".")[0] in _NETWORK_FILE_SYSTEMS:
        logger.warning(
            "offload.dir: %s is on a network file system (%s): every step reads and writes %s "
            "there. Choose a local disk",
            folder,
            kind,
            format_bytes(needed_bytes),
        )
    elif kind in _MEMORY_FILE_SYSTEMS:
        logger.warning(
            "offload.dir: %s is in host memory (%s), so the states take %s of it. "
            "`offload.optimizer: host` is faster",
            folder,
            kind,
            format_bytes(needed_bytes),
        )


def _check_host_memory(needed_bytes: int) -> None:
    available_bytes = read_available_memory()
    if available_bytes is not None and available_bytes < needed_bytes:
        raise RecipeError(
            "this node has not enough host memory for the optimizer states of its ranks",
            field="offload.optimizer",
            got=f"host, with {format_bytes(available_bytes)} available",
            allowed=f"at least {format_bytes(needed_bytes)}",
            remedy="Use `offload.optimizer: disk`",
        )


def read_available_memory() -> int | None:
    """Read how many bytes of host memory can be allocated; None where that is unknown.

    The smaller of the machine's and the container's (cgroup).
    """
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for limit_path, usage_path in _CGROUP_FILES:
        try:
            limits.append(int(Path(limit_path).read_text()) - int(Path(usage_path).read_text()))
        except (OSError, ValueError):  # no such cgroup, or the limit is `max`
            continue
    return min(limits, default=None)


def _read_file_system(folder: Path) -> str:
    """Return the type of the file system of a folder; empty if it is unknown."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return ""
