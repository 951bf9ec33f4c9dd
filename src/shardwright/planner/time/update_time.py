"""Bytes and seconds of the optimizer's update on a rank."""

from __future__ import annotations

from shardwright.hardware import Accelerator
from shardwright.hardware.cluster_spec import AcceleratorKind
from shardwright.planner.candidate import Candidate
from shardwright.planner.engine_model import OPTIMIZER_COSTS
from shardwright.planner.rates.device_rates import DeviceRates

_CLIP_BYTES = 8.0
"""Bytes that clipping reads and writes per fp32 gradient in a pass of its own."""
_CODE_BYTES = 4.0
"""Bytes of the codes of both moments, read and written."""


def compute_update_seconds(num_elements: float, candidate: Candidate, rates: DeviceRates) -> float:
    """Compute seconds of norm, clip and update of the trained parameters on a rank."""
    num_bytes = count_update_bytes(num_elements, candidate, rates.cluster.accelerator)
    return num_bytes / rates.update_bytes_per_second


def count_update_bytes(
    num_elements: float, candidate: Candidate, accelerator: Accelerator
) -> float:
    """Count the bytes that norm, clip and update read and write."""
    per_element = OPTIMIZER_COSTS[candidate.optimizer].update_bytes
    if has_one_pass_update(candidate, accelerator.kind):
        per_element -= _CLIP_BYTES
    num_bytes = num_elements * per_element * candidate.master_bytes / 4
    if candidate.has_bf16_masters and candidate.optimizer == "adamw_8bit":
        num_bytes += num_elements * _CODE_BYTES / 2  # codes take the same bytes in any precision
    return num_bytes


def has_one_pass_update(candidate: Candidate, device_kind: AcceleratorKind) -> bool:
    """Return True if the update itself clips gradients and writes working weights; where states or
    trained weights are offloaded, it updates pieces of them and does neither."""
    has_all = candidate.offload == "none" and not candidate.offloads_trained_weights
    setting = candidate.compile_functions
    is_compiled = device_kind != "cpu" if setting == "auto" else setting
    return is_compiled and has_all and OPTIMIZER_COSTS[candidate.optimizer].has_one_pass


def saves_casts(candidate: Candidate, device_kind: AcceleratorKind) -> bool:
    """Return True if working weights save casts of a step, or bytes of them.

    One micro-batch without recomputation casts each weight once, as copies do; so copies save time
    there only if the update writes them in its own pass.
    """
    is_cast_again = candidate.recompute != "none" or candidate.gradient_accumulation_steps > 1
    return is_cast_again or has_one_pass_update(candidate, device_kind)
