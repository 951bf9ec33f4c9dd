"""Copier of a run's state to the memory of other ranks, as `elastic.peer_copies` says."""

from __future__ import annotations

import logging
from datetime import timedelta

import torch.distributed as dist

from shardwright.checkpoint.rank_group import RankGroup
from shardwright.parallel.mesh import get_host_group
from shardwright.peer_copies.copier import CopyCounts, PeerCopier
from shardwright.peer_copies.holders import choose_holders
from shardwright.peer_copies.memory import get_process_memory
from shardwright.training.rank_context import RankContext
from shardwright.units import format_bytes, format_seconds

logger = logging.getLogger("shardwright")


def build_peer_copier(context: RankContext) -> PeerCopier | None:
    """Build the copier of this rank, or return None without `elastic.peer_copies`. Collective.

    Raises:
        LayoutError: One node has more than half of the ranks.
    """
    recipe = context.recipe
    if not recipe.elastic.peer_copies or context.is_trial:
        return None
    if context.rank_environment.world_size == 1:
        context.log_warning("peer copies: one rank is left, which has no peer, so nothing is kept")
        return None
    nodes = RankGroup(get_host_group()).all_gather(context.rank_environment.node)
    holders = choose_holders(nodes)
    memory = get_process_memory()
    if len(set(nodes)) == 1 and memory.generation == 0:
        context.log_warning(
            "peer copies: all ranks are on one node, so the loss of the node is not covered"
        )
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=recipe.run.timeout_seconds))
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    return PeerCopier(memory, group, holders)


def describe_copies(counts: CopyCounts) -> str:
    """Describe the cost of a generation's copies in one line."""
    return (
        f"peer copies: {counts.num_copies} x {format_bytes(counts.own_bytes)} per rank, of which "
        f"{format_bytes(counts.sent_bytes)} were sent; the last took "
        f"{format_seconds(counts.copy_seconds)}; training waited "
        f"{format_seconds(counts.stall_seconds)} in all"
    )
