"""Checks of the recipe's `offload` section against optimizer, disk and host memory."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch

from shardwright.architecture import HFShape, ModelShape
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe
from shardwright.config.offload import OffloadTier
from shardwright.config.training import OptimizerName
from shardwright.errors import RecipeError
from shardwright.hardware.file_systems import classify_file_system, read_file_system
from shardwright.hardware.host_memory import read_available_memory
from shardwright.launch.devices import should_use_cuda
from shardwright.launch.rank_environment import count_local_ranks, detect_rank_environment
from shardwright.layout import ZERO_AXES, RankGrid, compute_local_boxes, compute_local_shape
from shardwright.model.block_weights import list_block_matrices, list_frozen_matrices
from shardwright.model.hf.hf_weights import WeightsFolder
from shardwright.model.hf.weight_bytes import NotStored, StoredWeights
from shardwright.numerics.precision import resolve_dtypes
from shardwright.planner.engine_model import (
    OPTIMIZER_COSTS,
    OptimizerCosts,
    choose_optimizer_kind,
)
from shardwright.planner.offload_costs import compute_weight_staging_bytes
from shardwright.planner.predictor import predict_rank_memory
from shardwright.planner.problem import build_plan_candidate, get_recipe_facts
from shardwright.planner.update_place import choose_update_place
from shardwright.plans import Plan
from shardwright.training.preference_objective import has_frozen_reference
from shardwright.units import format_bytes

logger = logging.getLogger(__name__)

_PREDICTION_ERROR = 0.03
"""Largest relative error of the predicted bytes of saved tensors."""


@dataclass
class _NodeBytes:
    """Bytes that the ranks of this node keep in each tier."""

    disk: int = 0
    host: int = 0

    def add(self, tier: OffloadTier, num_bytes: int) -> None:
        """Count bytes in a tier."""
        if tier == "disk":
            self.disk += num_bytes
        else:
            self.host += num_bytes


def check_offload(recipe: Recipe, plan: Plan, trained_names: Collection[str]) -> None:
    """Check, before any rank starts, that this node can hold what is offloaded.

    Raises:
        RecipeError: the optimizer has no states, the layout cannot offload the weights, or disk or
            host memory is too small; the message has the numbers.
    """
    check_offload_layout(recipe, plan)
    section = recipe.offload
    needed = _NodeBytes()
    if section.activations != "none":
        if section.activations == "disk":
            _check_folder(_get_folder(recipe))
        _check_activation_space(recipe, plan)
    if section.parameters != "none":
        if (
            section.parameters == "disk"
            and recipe.adapters is not None
            and recipe.model.path is not None
        ):
            _report_model_file_system(recipe.model.path)
        needed.add(section.parameters, _count_weight_bytes(recipe, plan, trained_names))
    if section.optimizer != "none":
        needed.add(section.optimizer, _count_moment_bytes(recipe, plan, trained_names))
        if should_use_cuda(recipe.run.device, field="run.device"):
            needed.host += _count_update_bytes(recipe, plan, trained_names)
    if "disk" in (section.optimizer, section.parameters):
        folder = _get_folder(recipe)
        _check_folder(folder)
        _check_disk(folder, needed.disk)
    if needed.host:
        _check_host_memory(recipe, needed.host)


def check_offload_layout(recipe: Recipe, plan: Plan) -> None:
    """Check that model, layout and optimizer can offload what the recipe offloads.

    Raises:
        RecipeError: they cannot.
    """
    if recipe.offload.activations != "none":
        _refuse_hf_classes(plan, "activations", recipe.offload.activations, "saved tensors")
    if recipe.offload.parameters != "none":
        _check_parameters(recipe, plan)
    if recipe.offload.optimizer != "none":
        _get_optimizer_costs(recipe)
    if recipe.offload.update_on == "host":
        _check_host_optimizer(recipe)


def _get_optimizer_costs(recipe: Recipe) -> OptimizerCosts:
    """Return the costs of an optimizer whose moments are offloaded.

    Raises:
        RecipeError: the optimizer has none.
    """
    kind = choose_optimizer_kind(recipe.optimizer)
    if kind == "sgd":
        raise RecipeError(
            "sgd without momentum has no states to offload",
            field="offload.optimizer",
            got=recipe.offload.optimizer,
            allowed="none",
            remedy="Remove it, or set optimizer.momentum",
        )
    return OPTIMIZER_COSTS[kind]


def _count_moment_bytes(recipe: Recipe, plan: Plan, trained_names: Collection[str]) -> int:
    """Count the bytes of the moments that this node's ranks update."""
    costs = _get_optimizer_costs(recipe)
    matrices = {spec.name for spec in plan.shape.list_parameters() if spec.is_block_matrix}
    others = [name for name in trained_names if name not in matrices]
    return round(
        _count_trained_elements(plan, trained_names) * costs.state_bytes
        + _count_trained_elements(plan, others) * costs.other_bytes
    )


def _count_trained_elements(plan: Plan, trained_names: Collection[str]) -> int:
    """Count the elements of trained parameters that this node's ranks update."""
    return sum(
        math.prod(length for _, length in box.local_bounds)
        for coordinates in _list_node_coordinates(plan)
        for name in trained_names
        for box in compute_local_boxes(plan.placement.parameters[name], plan.layout, coordinates)
    )


def _check_host_optimizer(recipe: Recipe) -> None:
    """Check that an update on the host supports the optimizer, also where it is the device's.

    Raises:
        RecipeError: it does not.
    """
    if OPTIMIZER_COSTS[recipe.optimizer.name].can_update_on_host:
        return
    names = [name for name in get_args(OptimizerName) if OPTIMIZER_COSTS[name].can_update_on_host]
    raise RecipeError(
        f"the update of {recipe.optimizer.name} needs whole matrices of all ranks, which are "
        "on their devices",
        field="offload.update_on",
        got="host",
        allowed=f"auto or device; host with {', '.join(names)}",
        remedy="Remove it, or choose another optimizer",
    )


def _count_update_bytes(recipe: Recipe, plan: Plan, trained_names: Collection[str]) -> int:
    """Count the bytes of host memory that an update on the host takes on this node.

    They are copies of weights and gradients, and for offloaded ones on disk staging memory.
    """
    if choose_update_place(recipe).place == "device":
        return 0
    itemsize = resolve_dtypes(plan.precision).param.itemsize
    copied_names = set(trained_names)
    staging_bytes = 0.0
    if recipe.has_offloaded_trained_weights:
        offloaded_names = copied_names & list_block_matrices(plan.placement.shape).keys()
        copied_names -= offloaded_names
        num_ranks = _count_local_ranks(plan)
        staging_bytes = num_ranks * compute_weight_staging_bytes(
            build_plan_candidate(recipe, plan),
            _count_trained_elements(plan, offloaded_names) * itemsize / num_ranks,
        )
    return 2 * _count_trained_elements(plan, copied_names) * itemsize + round(staging_bytes)


def _check_parameters(recipe: Recipe, plan: Plan) -> None:
    tier = recipe.offload.parameters
    _refuse_hf_classes(plan, "parameters", tier, "weights")
    if recipe.preference is not None and has_frozen_reference(recipe):
        raise RecipeError(
            "the frozen reference model would stay on the device",
            field="offload.parameters",
            got=tier,
            allowed="none with preference.reference: frozen",
            remedy="Use preference.reference: adapter_off, which needs no copy",
        )
    if recipe.adapters is None and recipe.offload.optimizer == "none":
        raise RecipeError(
            "trained weights return for the update with the moments, bucket by bucket",
            field="offload.parameters",
            got=tier,
            allowed="none with offload.optimizer: none",
            remedy="Set offload.optimizer: host or disk",
        )


def _refuse_hf_classes(plan: Plan, key: str, tier: OffloadTier, content: str) -> None:
    if isinstance(plan.placement.shape, HFShape):
        raise RecipeError(
            f"models that run through transformers' own classes cannot offload their {content}",
            field=f"offload.{key}",
            got=tier,
            allowed="none for this family of models",
        )


def _count_weight_bytes(recipe: Recipe, plan: Plan, trained_names: Collection[str]) -> int:
    """Count the bytes that this node's ranks store of weights, and of gradients of trained ones.

    On disk of frozen weights only what the model's own files do not have as it is needed.
    """
    section = recipe.offload
    is_on_cpu = not should_use_cuda(recipe.run.device, field="run.device")
    if section.parameters == "host" and is_on_cpu:
        return 0  # nothing moves
    if recipe.adapters is None:
        return _count_trained_bytes(plan, trained_names)
    stored = None
    if section.parameters == "disk":
        stored = open_stored_weights(recipe, plan.placement.shape)
    compute = resolve_dtypes(plan.precision).compute
    total = 0
    for coordinates in _list_node_coordinates(plan):
        for name, spec in list_frozen_matrices(plan.placement.shape).items():
            layout = plan.placement.parameters[name]
            boxes = compute_local_boxes(layout, plan.layout, coordinates, with_zero=False)
            if not boxes:
                continue  # of another pipeline stage
            shape = compute_local_shape(layout, plan.layout, coordinates, with_zero=False)
            dtype = torch.uint8 if spec.packed_matrix is not None else compute
            if stored is None or isinstance(stored.locate(spec, boxes, shape, dtype), NotStored):
                num_ranks = math.prod(
                    plan.layout.degree(axis) for axis in layout.shard_axes if axis in ZERO_AXES
                )
                total += -(-math.prod(shape) * dtype.itemsize // num_ranks)
    return total


def _count_trained_bytes(plan: Plan, trained_names: Collection[str]) -> int:
    """Count the bytes of block weights, in the parameters' precision, and of their gradients."""
    itemsize = resolve_dtypes(plan.precision).param.itemsize
    total = 0
    for coordinates in _list_node_coordinates(plan):
        for name in list_block_matrices(plan.placement.shape):
            layout = plan.placement.parameters[name]
            if compute_local_boxes(layout, plan.layout, coordinates):
                shape = compute_local_shape(layout, plan.layout, coordinates)
                num_copies = 2 if name in trained_names else 1
                total += num_copies * math.prod(shape) * itemsize
    return total


def open_stored_weights(recipe: Recipe, shape: ModelShape) -> StoredWeights | None:
    """Open the files of the model's folder; None if the initial weights are in none."""
    if not recipe.model.is_pretrained:
        return None
    assert recipe.model.path is not None
    folder = WeightsFolder(recipe.model.path)
    folder.check(shape.base_shape)
    return StoredWeights(folder)


def _check_activation_space(recipe: Recipe, plan: Plan) -> None:
    """Check the space for the saved tensors of full rows on the disk or in host memory.

    Too little is a warning where the bytes may be fewer: if rows may be shorter, if ranks of
    pipelines or experts differ, and for host memory, of which other processes may free some.

    Raises:
        RecipeError: the disk is too small for bytes that are known.
    """
    tier = recipe.moved_offload.activations
    if tier == "none":
        return
    candidate = replace(
        build_plan_candidate(recipe, plan), offload="none", parameter_offload="none"
    )
    by_rank = predict_rank_memory(get_recipe_facts(recipe, plan.placement.shape), candidate)
    needed_bytes = max(parts.offloaded for parts in by_rank) * _count_local_ranks(plan)
    place = "this node's memory"
    free_bytes = read_available_memory()
    if tier == "disk":
        folder = _get_folder(recipe)
        place = f"the disk of {folder}"
        free_bytes = _read_free_disk(folder)
    if free_bytes is None or free_bytes >= needed_bytes:
        return
    has_equal_ranks = plan.layout.ep == plan.layout.pp == 1
    is_known = tier == "disk" and plan.batch.row_multiple is None and has_equal_ranks
    if is_known and free_bytes < (1.0 - _PREDICTION_ERROR) * needed_bytes:
        raise RecipeError(
            f"{place} has not enough free space for the saved tensors of the ranks of this node, "
            "whose rows all have training.sequence_length tokens",
            field="offload.dir",
            got=f"{format_bytes(free_bytes)} free",
            allowed=f"at least {format_bytes(needed_bytes)}",
            remedy="Free space, choose a folder on another disk, set recompute: full, or make "
            "micro_batch_size smaller",
        )
    logger.warning(
        "offload.activations: %s has %s free, and the saved tensors of the ranks of this node "
        "need up to %s if all rows are full. The run ends with an error when it is full. Free "
        "space, set recompute: full, or make micro_batch_size smaller",
        place,
        format_bytes(free_bytes),
        format_bytes(needed_bytes),
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


def _list_node_coordinates(plan: Plan) -> list[dict[str, int]]:
    """List the mesh coordinates of all ranks on this node."""
    world_size = plan.layout.world_size
    ranks = detect_rank_environment()
    first_rank = 0 if ranks is None else ranks.rank - ranks.local_rank
    num_ranks = _count_local_ranks(plan)
    grid = RankGrid(plan.layout)
    return [
        grid.coordinates(rank)
        for rank in range(first_rank, min(first_rank + num_ranks, world_size))
    ]


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


def _read_free_disk(folder: Path) -> int:
    """Read how many bytes of the folder's disk this process may write."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _check_disk(folder: Path, needed_bytes: int) -> None:
    free_bytes = _read_free_disk(folder)
    if free_bytes < needed_bytes:
        raise RecipeError(
            f"the disk of {folder} has not enough free space for the offloaded states of the "
            "ranks of this node",
            field="offload.dir",
            got=f"{format_bytes(free_bytes)} free",
            allowed=f"at least {format_bytes(needed_bytes)}",
            remedy="Free space, or choose a folder on another disk",
        )
    kind = read_file_system(folder)
    if classify_file_system(kind) == "network":
        logger.warning(
            "offload.dir: %s is on a network file system (%s): every step reads and writes %s "
            "there. Choose a local disk",
            folder,
            kind,
            format_bytes(needed_bytes),
        )
    elif classify_file_system(kind) == "memory":
        logger.warning(
            "offload.dir: %s is in host memory (%s), so the states take %s of it. "
            "The tier `host` is faster",
            folder,
            kind,
            format_bytes(needed_bytes),
        )


def _report_model_file_system(path: str) -> None:
    """Warn about a model folder from which reads are slow, or take host memory."""
    kind = read_file_system(Path(path))
    if classify_file_system(kind) == "network":
        logger.warning(
            "model.path: %s is on a network file system (%s): with `offload.parameters: disk` "
            "every forward and backward pass reads the frozen weights there. Copy the folder to "
            "a local disk",
            path,
            kind,
        )
    elif classify_file_system(kind) == "memory":
        logger.warning(
            "model.path: %s is in host memory (%s), so `offload.parameters: disk` frees none of "
            "it. Copy the folder to a local disk",
            path,
            kind,
        )


def _check_host_memory(recipe: Recipe, needed_bytes: int) -> None:
    available_bytes = read_available_memory()
    if available_bytes is not None and available_bytes < needed_bytes:
        tiers = {"optimizer": recipe.offload.optimizer, "parameters": recipe.offload.parameters}
        names = [f"offload.{name}" for name, tier in tiers.items() if tier == "host"]
        raise RecipeError(
            "this node has not enough host memory for the offloaded states of its ranks",
            field=" and ".join(names) or "offload.update_on",
            got=f"host, with {format_bytes(available_bytes)} available",
            allowed=f"at least {format_bytes(needed_bytes)}",
            remedy=f"Use {' or '.join(f'`{name}: disk`' for name in names)}"
            if names
            else "Set offload.update_on: device, which needs no copies of weights and gradients",
        )
