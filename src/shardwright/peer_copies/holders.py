"""Choice of the rank that keeps the copy of each rank's state. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from shardwright.errors import LayoutError


def choose_holders(nodes: Sequence[int]) -> tuple[int, ...]:
    """Choose for each rank the rank that keeps its copy; every rank keeps the copy of one other.

    The holder is on another node. On a single node it is another process. Ranks in the order of
    their nodes are shifted by the ranks of the largest node, so neighbours stay on neighbouring
    nodes, and ranks of equal nodes have holders with the same local rank.

    >>> choose_holders([0, 0, 1, 1])
    (2, 3, 0, 1)
    >>> choose_holders([0, 0, 0])
    (1, 2, 0)

    Args:
        nodes: Number of the node of each rank; at least two ranks.

    Raises:
        LayoutError: One node of several has more than half of the ranks, so that the others
            cannot keep all of its copies.
    """
    assert len(nodes) > 1
    ordered = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    sizes = {node: len(list(ranks)) for node, ranks in groupby(ordered, key=nodes.__getitem__)}
    shift = 1 if len(sizes) == 1 else max(sizes.values())
    if 2 * shift > len(nodes) and len(sizes) > 1:
        largest = max(sizes, key=sizes.__getitem__)
        raise LayoutError(
            f"node {largest} has {shift} of {len(nodes)} ranks; the ranks of other nodes keep one "
            "copy each, which is not enough",
            field="elastic.peer_copies",
            got=1,
            allowed="1 if no node has more than half of the ranks",
            remedy="Set it to 0, or start the same number of ranks on every node",
        )
    holders = [0] * len(nodes)
    for place, rank in enumerate(ordered):
        holders[rank] = ordered[(place + shift) % len(ordered)]
    return tuple(holders)
