"""Place of this process among those that torchrun or srun started, one per node.

With `train --nproc` and `elastic.warm_restarts` these are not ranks. Each starts the ranks of its
node; the first is the launcher (`node_connections.py`), which the others follow
(`node_service.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from shardwright.config.run import NODE_TOKEN_VARIABLE, ElasticSection
from shardwright.errors import InputError
from shardwright.launch.rank_environment import count_local_ranks, detect_rank_environment


@dataclass(frozen=True)
class NodePlace:
    """Place of this process among the processes that a launcher started, one per node."""

    index: int
    num_nodes: int
    address: str
    """Address of node 0, whose process is the launcher."""
    port: int
    token: str = field(default="", repr=False)
    """Secret of the run's nodes. Empty if there is one node, which listens for no other."""


def find_node_place(elastic: ElasticSection, num_ranks: int | None) -> NodePlace | None:
    """Return the place of this node if it shares the ranks with others; None otherwise.

    Raises:
        InputError: There are several processes on a node, or several nodes without a token.
    """
    should_share = elastic.warm_restarts and num_ranks is not None
    ranks = detect_rank_environment() if should_share else None
    if ranks is None:
        return None
    num_local = count_local_ranks() or 1
    if num_local != 1 or ranks.local_rank != 0:
        raise InputError(
            "with warm restarts one process per node starts the ranks of its node",
            field="--nproc",
            got=f"{num_local} processes on a node",
            allowed="one process per node",
            remedy="Start one (srun --ntasks-per-node=1), with --nproc ranks",
        )
    token = os.environ.get(NODE_TOKEN_VARIABLE, "")
    if ranks.world_size > 1 and not token:
        raise InputError(
            "the launcher on node 0 accepts only nodes that know the token of the run",
            field=NODE_TOKEN_VARIABLE,
            got="not set",
            allowed="the same secret on every node",
            remedy=f"Set it before the nodes start, for example: "
            f"export {NODE_TOKEN_VARIABLE}=$(openssl rand -hex 16); `shardwright launch` does so",
        )
    return NodePlace(
        ranks.rank,
        ranks.world_size,
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        token,
    )


def count_ranks(elastic: ElasticSection, num_ranks: int | None) -> int:
    """Count the ranks of a run: those of its launcher, or `num_ranks` (default 1) per node.

    Raises:
        InputError: `elastic.spare_nodes` leaves no node.
    """
    place = find_node_place(elastic, num_ranks)
    num_nodes = 1 if place is None else place.num_nodes
    if not 0 <= elastic.spare_nodes < num_nodes:
        raise InputError(
            "all nodes are spare nodes, so none is left for the ranks",
            field="elastic.spare_nodes",
            got=elastic.spare_nodes,
            allowed=f"at most {num_nodes - 1}: the run has {num_nodes} nodes",
            remedy="Lower it, or start more nodes, each with `train --nproc` as its one process",
        )
    if place is not None:
        return (num_nodes - elastic.spare_nodes) * (num_ranks or 1)
    ranks = detect_rank_environment()
    return ranks.world_size if ranks else num_ranks or 1
