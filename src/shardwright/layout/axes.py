"""Mesh axes by the data that their ranks see.

`shardwright.placement` states how each parameter's role uses them.
"""

from __future__ import annotations

from shardwright.layout.degrees import Layout

DATA_AXES = ("dp_replicate", "dp_shard", "cp")
"""Axes whose ranks see different tokens: gradients and losses are summed over them."""

BATCH_AXES = ("dp_replicate", "dp_shard")
"""Axes whose ranks see different sequences: supervised tokens are counted over them, by whole
rows."""


def select_used_axes(layout: Layout, *axes: str) -> tuple[str, ...]:
    """Return those of `axes` that have more than one rank."""
    return tuple(axis for axis in axes if layout.degree(axis) > 1)
