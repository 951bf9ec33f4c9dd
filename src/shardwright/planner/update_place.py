"""Choice between device and host for the update of offloaded optimizer states.

The choice follows from the recipe and its measured profile alone: the kernels of a CPU and of a GPU
may round differently, so a run that chose by its own measurements could change its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwright.architecture import HFShape, ModelShape
from shardwright.config.offload import OffloadTier
from shardwright.config.recipe import Recipe
from shardwright.hardware.measured_profile import TierRates, load_profile
from shardwright.planner.engine_model import OPTIMIZER_COSTS, choose_optimizer_kind
from shardwright.units import format_bytes

_HOST_UPDATE_BYTES = 20.0
"""Bytes of host memory that clip and update read and write per parameter, besides its state."""

_OFFLOADED_BYTES = 8.0
"""Bytes of an offloaded weight and its gradient."""


@dataclass(frozen=True)
class UpdateChoice:
    """Place of the update, and why."""

    place: Literal["device", "host"]
    reason: str


def choose_update_place(recipe: Recipe) -> UpdateChoice:
    """Resolve `offload.update_on` for a run on GPUs; on CPUs the two are the same.

    `auto` is the host only if rates were measured by which its update takes less time.

    Raises:
        InputError: the profile cannot be read.
    """
    section = recipe.moved_offload
    if recipe.run.device == "cpu":
        return UpdateChoice("device", "the device is the CPU, so host and device are the same")
    if section.optimizer == "none":
        return UpdateChoice("device", "no states are offloaded")
    if section.update_on != "auto":
        return UpdateChoice(section.update_on, "the recipe says so")
    costs = OPTIMIZER_COSTS[choose_optimizer_kind(recipe.optimizer)]
    if not costs.can_update_on_host:
        return UpdateChoice("device", f"{recipe.optimizer.name} needs whole matrices of all ranks")
    cluster = recipe.cluster
    if cluster is None or cluster.profile is None:
        return UpdateChoice(
            "device", "cluster.profile names no measured rates of host memory and link"
        )
    tiers = load_profile(cluster.profile).tiers
    return _compare_rates(
        section.optimizer,
        section.parameters if recipe.has_offloaded_trained_weights else "none",
        costs.state_bytes,
        tiers,
        cluster.profile,
    )


def find_overlap_obstacle(
    recipe: Recipe,
    shape: ModelShape,
    *,
    has_weight_maxima: bool = False,
    has_host_update: bool = False,
) -> str | None:
    """Return why no pass can run during the update of offloaded states.

    None if one can. `Candidate.overlaps_update` has the same conditions, but not those of peers
    and of transformers' classes.

    Args:
        has_weight_maxima: True if a step begins with maxima of all weights.
        has_host_update: True if the host updates what is on a GPU, offloaded weights where they
            are.
    """
    costs = OPTIMIZER_COSTS[choose_optimizer_kind(recipe.optimizer)]
    obstacles = {
        "weights return to their tier after it": (
            recipe.has_offloaded_trained_weights and not has_host_update
        ),
        f"{recipe.optimizer.name} needs whole matrices of all ranks": not costs.can_update_on_host,
        "zeros of matrices are restored after it": recipe.model.keep_zeros,
        "a class of transformers reads its weights": isinstance(shape, HFShape),
        "a step begins with maxima of all weights": has_weight_maxima,
        "copies for peers read all weights first": recipe.elastic.peer_copies > 0,
    }
    return next((reason for reason, is_present in obstacles.items() if is_present), None)


def find_backward_obstacle(
    recipe: Recipe,
    *,
    precision: str | None = None,
    is_on_gpu: bool = False,
    reduces_late: bool = False,
    has_padded_exchange: bool = False,
) -> str | None:
    """Return why the update of offloaded states cannot run in the backward pass; None if it can.

    It must be able to overlap with passes in general too (`find_overlap_obstacle`).

    Args:
        precision: Precision of a plan that overrides the recipe's.
        is_on_gpu: True if the update runs on a GPU.
        reduces_late: True if gradients are reduced after the backward pass.
        has_padded_exchange: True if a step may have to be repeated.
    """
    training = recipe.training
    obstacles = {
        "training.max_grad_norm clips gradients": training.max_grad_norm is not None,
        "training.max_skipped_steps lets steps be skipped": training.max_skipped_steps > 0,
        "the loss scale of fp16 lets steps be skipped": (
            (precision or recipe.precision.kind) == "fp16"
        ),
        "elastic.rollback continues after a gradient that is not finite": (
            recipe.elastic.rollback is not None
        ),
        "it runs on a GPU": is_on_gpu,
        "gradients are reduced after the backward pass": reduces_late,
        "gradients of offloaded weights leave first": recipe.has_offloaded_trained_weights,
        "a step may be repeated with exact exchanges": has_padded_exchange,
    }
    return next((reason for reason, is_present in obstacles.items() if is_present), None)


def _compare_rates(
    tier: OffloadTier,
    weight_tier: OffloadTier,
    state_bytes: float,
    tiers: TierRates,
    profile: str,
) -> UpdateChoice:
    """Compare the seconds per parameter of both places.

    Copies of gradients and weights to the host run during the backward pass and count nothing.
    Offloaded ones are on the host, or on disk; for an update on the device they arrive with the
    moments.

    Args:
        tier: Of the moments.
        weight_tier: Of trained weights and gradients.
    """
    link = tiers.host_link_bytes_per_second
    memory = tiers.host_memory_bytes_per_second
    disk = tiers.disk_both_bytes_per_second
    disk_bytes = (state_bytes if tier == "disk" else 0.0) + (
        _OFFLOADED_BYTES if weight_tier == "disk" else 0.0
    )
    if link is None or memory is None or (disk_bytes and disk is None):
        return UpdateChoice(
            "device", f"{profile} has no rates of host memory, link and disk; measure them again"
        )
    disk_seconds = 0.0 if disk is None else disk_bytes / disk
    arriving_bytes = state_bytes + (0.0 if weight_tier == "none" else _OFFLOADED_BYTES)
    device_seconds = max(arriving_bytes / link, disk_seconds)
    host_seconds = max((_HOST_UPDATE_BYTES + 2 * state_bytes) / memory, 4.0 / link, disk_seconds)
    place: Literal["device", "host"] = "host" if host_seconds < device_seconds else "device"
    return UpdateChoice(
        place,
        f"{1e9 * device_seconds:.3g} s on the device and {1e9 * host_seconds:.3g} s on the host "
        f"for 10^9 parameters, by {profile}: link {format_bytes(link)}/s, host memory "
        f"{format_bytes(memory)}/s",
    )
