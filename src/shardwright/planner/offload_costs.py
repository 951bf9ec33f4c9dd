"""Costs of offloaded state: bytes that stay on the device and rates of the slower tiers."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from shardwright.config.offload import OffloadTier
from shardwright.hardware import MeasuredProfile
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate
from shardwright.schedule.registry import has_split_backward

_BYTES_PER_SECOND: dict[OffloadTier, float] = {"host": 25e9, "disk": 1e9}
"""Assumed rates per rank in each direction, both directions at the same time: of a device's PCIe
4.0 x16 link, as copies reach it, and of a disk."""
_HOST_MEMORY_BYTES_PER_SECOND = 50e9
"""Assumed rate per rank at which the CPU reads and writes host memory, both together."""


def get_transfer_rate(tier: OffloadTier, profile: MeasuredProfile | None) -> float:
    """Return the bytes per second of a tier in each direction: measured, otherwise assumed."""
    measured = None
    if profile is not None:
        tiers = profile.tiers
        measured = (
            tiers.disk_both_bytes_per_second if tier == "disk" else tiers.host_link_bytes_per_second
        )
    return measured or _BYTES_PER_SECOND[tier]


def get_host_memory_rate(profile: MeasuredProfile | None) -> float:
    """Return the bytes per second that the CPU reads and writes: measured, otherwise assumed."""
    measured = None if profile is None else profile.tiers.host_memory_bytes_per_second
    return measured or _HOST_MEMORY_BYTES_PER_SECOND


def compute_device_buffer_bytes(candidate: Candidate, num_bytes: float) -> float:
    """Compute the device memory of the buffers through which a rank's moments pass.

    Moments in host memory that do not fill their last buffer have all of it.
    """
    if candidate.is_updated_on_host:
        return 0.0
    buffer_bytes = candidate.offload_buffer_bytes
    if candidate.optimizer_tier == "host" and num_bytes > buffer_bytes:
        num_bytes = ceil(num_bytes / buffer_bytes) * buffer_bytes
    most_bytes = candidate.engine.compute_staging_bytes(num_bytes, buffer_bytes)
    return min(num_bytes, most_bytes + candidate.read_ahead_bytes)


def count_moving_moments(candidate: Candidate, num_bytes: float, layer_bytes: float = 0.0) -> float:
    """Count the bytes of a rank's moments that an update reads, and as many that it writes.

    On disk the staging memory beyond `compute_ring_bytes` keeps its moments from step to step
    (docs/decisions/0171-buckets-that-stay.md).
    """
    if candidate.optimizer_tier != "disk":
        return num_bytes
    ring_bytes = compute_ring_bytes(candidate, layer_bytes)
    resident_bytes = 1.5 * candidate.resident_state_bytes - ring_bytes
    return min(num_bytes, max(ring_bytes, num_bytes - resident_bytes))


def compute_ring_bytes(candidate: Candidate, layer_bytes: float) -> float:
    """Compute the staging memory through which moments on disk pass: of three buffers one, or more
    for those of a layer.

    Args:
        layer_bytes: Moments of a layer that are transferred while another one computes.
    """
    buffer_bytes = candidate.resident_state_bytes / 2
    return min(3 * buffer_bytes, max(buffer_bytes, layer_bytes))


def compute_weight_staging_bytes(candidate: Candidate, gradient_bytes: float) -> float:
    """Compute the host memory through which a rank's offloaded weights on disk, and their
    gradients, pass if the host updates them: `StoreUpdate.count_staging_bytes`."""
    if not candidate.is_updated_on_host or candidate.parameter_offload != "disk":
        return 0.0
    state_bytes = candidate.engine.get_optimizer_bytes(candidate.optimizer, candidate.master_bytes)
    bucket_elements = candidate.offload_buffer_bytes / max(1.0, state_bytes)
    bucket_bytes = 2.0 * candidate.master_bytes * bucket_elements
    buffer_bytes = candidate.resident_state_bytes / 2
    return min(2.0 * gradient_bytes, max(buffer_bytes, 3.0 * bucket_bytes))


def compute_host_update_seconds(
    candidate: Candidate,
    num_elements: float,
    num_offloaded: float,
    moved_bytes: float,
    pass_seconds: tuple[float, float],
    profile: MeasuredProfile | None,
    *,
    first_share: float,
    num_layers: float,
) -> float:
    """Compute the seconds by which an update on the host extends a step, without the norm.

    Gradients and weights leave during the last backward pass if they are complete then. Weights
    return, and moments on disk are transferred, during the update. It runs during the next forward
    pass, or, if nothing needs the norm first (`is_updated_in_backward`), during the last backward
    pass. Offloaded weights and gradients in host memory are updated where they are; those on disk
    are read, and the weights written. If working weights stay on the device, weights return.

    Args:
        num_offloaded: Those of the `num_elements` whose weights are offloaded.
        moved_bytes: Bytes of host memory that the update reads and writes.
        pass_seconds: Time of a micro-batch's forward pass, and of the last backward pass.
        first_share: Share of the update that the first of `num_layers` waits for.
    """
    link = get_transfer_rate("host", profile)
    forward_seconds, backward_seconds = pass_seconds
    resident_bytes = (num_elements - num_offloaded) * candidate.master_bytes
    returning_bytes = resident_bytes
    if not candidate.moves_weights:
        returning_bytes += num_offloaded * candidate.master_bytes
    seconds = [moved_bytes / get_host_memory_rate(profile), returning_bytes / link]
    on_disk = 0.0
    if candidate.offloads_trained_weights and candidate.parameter_offload == "disk":
        on_disk = num_offloaded * candidate.master_bytes
        if candidate.moves_weights:  # the forward pass reads the same disk
            forward_seconds -= on_disk / get_transfer_rate("disk", profile)
    moments = 0.0
    if candidate.optimizer_tier == "disk":
        state_bytes = candidate.engine.get_optimizer_bytes(
            candidate.optimizer, candidate.master_bytes
        )
        moments = count_moving_moments(candidate, num_elements * state_bytes)
    seconds.append(
        compute_transfer_seconds(
            (("disk", moments + 2 * on_disk, moments + on_disk),),
            profile,
        )
    )
    leaving_seconds = 2 * resident_bytes / link
    hidden_share = (num_layers - 1) / num_layers
    if is_updated_in_backward(candidate):
        return compute_exposed_update_seconds(
            max(*seconds, leaving_seconds), first_share, backward_seconds * hidden_share
        )
    exposed_seconds = max(seconds)
    if candidate.overlaps_update:
        exposed_seconds = compute_exposed_update_seconds(
            exposed_seconds, first_share, max(0.0, forward_seconds) * hidden_share
        )
    hiding_seconds = backward_seconds if _completes_gradients_early(candidate.layout) else 0.0
    return exposed_seconds + max(0.0, leaving_seconds - hiding_seconds)


def _completes_gradients_early(layout: Layout) -> bool:
    """Return True if the last backward pass of a stage completes its gradients one by one.

    A split one computes gradients of weights after it, and a pipeline without ZeRO reduces those of
    a stage at once.
    """
    if layout.pp == 1:
        return True
    is_reduced_at_once = layout.zero_stage == 0 and layout.data_ranks * layout.cp > 1
    return not (is_reduced_at_once or has_split_backward(layout.schedule))


def is_updated_in_backward(candidate: Candidate) -> bool:
    """Return True if the update of offloaded states runs in the last backward pass, as
    `update_place.find_backward_obstacle` says. It must run on a CPU, or on the host of a GPU."""
    layout = candidate.layout
    reduces_late = layout.pp * layout.tp > 1 or (
        layout.zero_stage == 0 and layout.data_ranks * layout.cp > 1
    )
    waits = candidate.needs_gradient_norm or reduces_late or layout.expert_dispatch == "padded"
    return candidate.overlaps_update and not waits and not candidate.offloads_trained_weights


def compute_exposed_update_seconds(
    update_seconds: float, first_share: float, hidden_seconds: float, ahead_seconds: float = 0.0
) -> float:
    """Compute the seconds by which an update extends the forward pass that follows it.

    The first layer begins when its own update ends, the last one when all of it has ended. In a
    backward pass it is the other way round: the first layer is updated last.

    Args:
        first_share: Share of the update that the first layer waits for.
        hidden_seconds: Time of the transfers during the pass of all layers but one.
        ahead_seconds: Time of the transfers that end before the update begins.
    """
    exposed = max(first_share * update_seconds, update_seconds - hidden_seconds)
    return max(0.0, exposed - ahead_seconds)


def sum_tier_bytes(
    candidate: Candidate,
    *,
    optimizer: float,
    parameters: float,
    activations: float,
    staged_weights: float = 0.0,
) -> dict[str, float]:
    """Sum a rank's offloaded bytes by tier. Of staging buffers only that of weights on disk is
    counted (`compute_weight_staging_bytes`)."""
    totals: dict[str, float] = {"host": staged_weights, "disk": 0.0}
    for tier, num_bytes in (
        (candidate.optimizer_tier, optimizer),
        (candidate.parameter_offload, parameters),
        (candidate.activation_offload, activations),
    ):
        if tier != "none":
            totals[tier] += num_bytes
    return totals


class LayerTransfers(NamedTuple):
    """Bytes of one layer that a rank moves for a micro-batch."""

    saved: float = 0.0
    """Saved tensors: they leave in the forward pass and return in the backward pass."""
    weights: float = 0.0
    """Weights: they arrive in both passes."""
    gradients: float = 0.0
    """Gradients of weights: they leave in the backward pass, and arrive in all but the first."""
    inputs: float = 0.0
    """Inputs of deferred weight gradients: they leave and return in the backward pass."""


def compute_transfer_waits(
    candidate: Candidate,
    moved: LayerTransfers,
    forward_seconds: float,
    backward_seconds: float,
    profile: MeasuredProfile | None,
) -> tuple[float, float]:
    """Return the seconds by which a layer's forward and backward pass are extended while another
    layer's bytes are transferred at the same time."""
    steps = candidate.gradient_accumulation_steps
    returning = moved.gradients * (steps - 1) / steps
    activations = candidate.activation_offload
    parameters = candidate.parameter_offload
    forward = compute_transfer_seconds(
        ((activations, 0.0, moved.saved), (parameters, moved.weights, 0.0)), profile
    )
    backward = compute_transfer_seconds(
        (
            (activations, moved.saved + moved.inputs, moved.inputs),
            (parameters, moved.weights + returning, moved.gradients),
        ),
        profile,
    )
    return max(0.0, forward - forward_seconds), max(0.0, backward - backward_seconds)


def compute_transfer_seconds(
    moved: Iterable[tuple[OffloadTier, float, float]], profile: MeasuredProfile | None
) -> float:
    """Compute the seconds in which bytes arrive from tiers and leave to them, all at once.

    Both directions of a tier, and the tiers, are used at the same time.

    Args:
        moved: tier, arriving and leaving bytes.
    """
    totals: dict[OffloadTier, list[float]] = {}
    for tier, arriving, leaving in moved:
        if tier != "none":
            total = totals.setdefault(tier, [0.0, 0.0])
            total[0] += arriving
            total[1] += leaving
    return max(
        (max(both) / get_transfer_rate(tier, profile) for tier, both in totals.items()),
        default=0.0,
    )
