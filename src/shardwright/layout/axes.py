"""Axes by what their ranks see and hold. What each parameter's role owes to them stands in `shardwright.placement`."""

from __future__ import annotations

from shardwright.layout.degrees import Layout

DATA_AXES = ("dp_replicate", "dp_shard", "cp")
"""Axes whose ranks see different tokens: gradients and losses are summed over them."""

BATCH_AXES = ("dp_replicate", "dp_shard")
"""Axes whose ranks see different sequences: supervised tokens are counted over them, every rank counting whole rows."""


def in_use(layout: Layout, *axes: str) -> tuple[str, ...]:
    """Those of `axes` that have more than one rank."""
    return tuple(axis for axis in axes if layout.degree(axis) > 1)
