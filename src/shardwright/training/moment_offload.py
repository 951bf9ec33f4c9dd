"""Offloading of a run's optimizer states, and the passes that hide their update."""

from __future__ import annotations

import logging

import torch

from shardwright.checkpoint.run_folder import RunFolder
from shardwright.offload import (
    BackwardUpdate,
    DeferredUpdate,
    HostBackwardUpdate,
    HostDeferredUpdate,
    OffloadedOptimizer,
    ParameterOffload,
    StreamedUpdate,
    UpdateOverlap,
    WeightOffload,
    describe_offload,
    offload_optimizer,
)
from shardwright.parallel.experts.padded_exchange import find_padded_exchange
from shardwright.parallel.parallel_model import ParallelModel
from shardwright.parallel.update_units import list_update_units, wait_before_gathers
from shardwright.planner.update_place import (
    UpdateChoice,
    find_backward_obstacle,
    find_overlap_obstacle,
)
from shardwright.training.checks.run_checks import ValidatedRun

logger = logging.getLogger("shardwright")


def offload_moments(
    validated_run: ValidatedRun,
    optimizer: torch.optim.Optimizer,
    model: ParallelModel,
    weight_offload: WeightOffload | ParameterOffload | None,
    choice: UpdateChoice,
) -> OffloadedOptimizer:
    """Move the optimizer's states to the recipe's tier, and log where the update runs."""
    recipe = validated_run.recipe
    device = model.device
    parameters = weight_offload if isinstance(weight_offload, ParameterOffload) else None
    overlap = None
    if device.type == "cuda":
        logger.info("offload.update_on: %s: %s", choice.place, choice.reason)
    elif recipe.offload.update_on == "host":
        logger.info("offload.update_on: the device is the CPU, so host and device are the same")
    if device.type == "cuda" or recipe.offload.optimizer == "disk":
        overlap = _choose_overlap(
            validated_run, model, has_host_update=device.type == "cuda" and choice.place == "host"
        )
    offloaded = offload_optimizer(
        optimizer,
        recipe.offload.model_copy(update={"update_on": choice.place}),
        model,
        device=device,
        default_folder=RunFolder.from_recipe(recipe).path,
        parameters=parameters,
        overlap=overlap,
    )
    logger.info("%s", describe_offload(offloaded, device))
    return offloaded


def _choose_overlap(
    validated_run: ValidatedRun, model: ParallelModel, *, has_host_update: bool
) -> UpdateOverlap | None:
    """Choose the passes that hide the update, and log why others do not.

    Args:
        has_host_update: True if the host updates what is on a GPU.
    """
    recipe = validated_run.recipe
    is_cuda = model.device.type == "cuda"
    obstacle = find_overlap_obstacle(
        recipe,
        validated_run.shape,
        has_weight_maxima=model.weight_maxima is not None,
        has_host_update=has_host_update,
    )
    late = find_backward_obstacle(
        recipe,
        is_on_gpu=is_cuda and not has_host_update,
        reduces_late=not model.completes_gradients_early,
        has_padded_exchange=find_padded_exchange(model.decoder) is not None,
    )
    if obstacle is not None:
        logger.info("offload: the next forward pass waits for the update, because %s", obstacle)
        return None
    if late is None:
        logger.info("offload: the update runs in the backward pass")
        units = list_update_units(model)
        if has_host_update:
            return HostBackwardUpdate(units, model.device)
        return BackwardUpdate(units, model.decoder.working_weights)
    logger.info("offload: the next forward pass begins during the update")
    if recipe.training.max_grad_norm is None:
        logger.info("offload: the update does not run in the backward pass, because %s", late)
    return overlap_update(
        model,
        is_deferred=recipe.offload.optimizer == "disk",
        has_host_update=has_host_update,
    )


def overlap_update(
    model: ParallelModel, *, is_deferred: bool, has_host_update: bool = False
) -> UpdateOverlap:
    """Let each module, and each gather, wait for the update of its own weights only.

    Args:
        is_deferred: True if the host waits for the transfers of the update.
        has_host_update: True if the host updates what is on a GPU.
    """
    units = list_update_units(model)
    working_weights = model.decoder.working_weights
    overlap: UpdateOverlap
    if has_host_update:
        overlap = HostDeferredUpdate(units, working_weights)
    elif is_deferred:
        overlap = DeferredUpdate(units, working_weights)
    else:
        overlap = StreamedUpdate(units, working_weights, model.device)
    wait_before_gathers(model, overlap.wait_on)
    return overlap
