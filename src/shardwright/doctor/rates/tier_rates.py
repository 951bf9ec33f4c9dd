"""Rates of host memory and disk, for offloading: which to measure, and their form in a profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.checkpoint.run_folder import RunFolder
from shardwright.config import Recipe
from shardwright.hardware import TierRates


def choose_scratch_folder(recipe: Recipe | None, *, should_calibrate: bool) -> str | None:
    """Return the folder whose disk is measured; None without calibration or offloading to disk."""
    if recipe is None:
        return "runs" if should_calibrate else None
    if not should_calibrate and "disk" not in recipe.offload.list_tiers():
        return None
    return recipe.offload.dir or str(RunFolder.from_recipe(recipe).path)


def build_tiers(rates: Mapping[str, Any], device_kind: str) -> TierRates:
    """Build the rates of host memory and disk: those of the slowest rank.

    In every step all ranks wait for the slowest one. Its disk may be slower, or it may run on
    another NUMA node than its device.
    """

    def find_copy(kind: str) -> float | None:
        known = [rate["bytes_per_second"] for rate in rates["copies"] if rate["kind"] == kind]
        return min(known, default=None)

    directions = [rate for kind in ("to device", "from device") if (rate := find_copy(kind))]
    disk: dict[str, float] = {
        f"disk_{part}_bytes_per_second": min(
            rate[f"{part}_bytes_per_second"] for rate in rates["scratch"]
        )
        for part in ("read", "write", "both")
        if rates.get("scratch")
    }
    return TierRates(
        host_link_bytes_per_second=min(directions, default=None),
        host_memory_bytes_per_second=find_copy("memory" if device_kind == "cpu" else "host memory"),
        **disk,
    )
