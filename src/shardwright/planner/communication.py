"""Seconds of collectives on a cluster, by algorithm, size, group and link. Torch-free.

A group is `num_ranks` members, `stride` ranks apart: which of them share a node follows from the rank grid, in which tp varies
fastest.
Each member has its own way out of the node, so that a ring over several nodes crosses between them on as many links as it has
members
on a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from shardwright.hardware import Cluster
from shardwright.hardware.profile import CollectiveKind
from shardwright.layout import Layout
from shardwright.planner.efficiency import Efficiency


@dataclass(frozen=True)
class Group:
    """Ranks that talk with one another."""

    num_ranks: int
    stride: int


def groups_of(layout: Layout) -> dict[str, Group]:
    """Groups by axis, laid out by the rank grid: pp outermost, then dp_replicate, dp_shard, cp, and tp innermost.

    `fsdp` is dp_shard x cp; `ep` are neighbours within it, and `efsdp` what ZeRO shards an expert over.

    >>> groups_of(Layout(dp_shard=4, tp=8, zero_stage=3))["fsdp"]
    Group(num_ranks=4, stride=8)
    """
    tp, cp, fsdp = layout.tp, layout.cp, layout.fsdp
    return {
        "tp": Group(tp, 1),
        "cp": Group(cp, tp),
        "dp_shard": Group(layout.dp_shard, tp * cp),
        "fsdp": Group(fsdp, tp),
        "ep": Group(layout.ep, tp),
        "efsdp": Group(layout.efsdp, tp * layout.ep),
        "dp_replicate": Group(layout.dp_replicate, tp * fsdp),
        "pp": Group(layout.pp, tp * fsdp * layout.dp_replicate),
    }


class Network:
    """Collectives on a cluster; `num_bytes` is as `hardware.profile` defines a message."""

    def __init__(self, cluster: Cluster, efficiency: Efficiency) -> None:
        self.cluster, self.efficiency = cluster, efficiency
        self.intra_rate = cluster.intra.bytes_per_second * efficiency.intra_share
        inter = cluster.inter or cluster.intra
        self.inter_rate = inter.bytes_per_second * efficiency.inter_share
        self.inter_latency = inter.latency_seconds
        self.meeting_seconds = 0.0 if cluster.profile is None else cluster.profile.handoff_seconds or 0.0
        """Of each collective between two pieces of work, beside what it takes back to back; measured, or not known."""
        self._found: dict[tuple[str, Group, float], float] = {}

    def all_gather(self, group: Group, num_bytes: float) -> float:
        """Seconds until every member has the whole result of `num_bytes`."""
        return self._look("all_gather", group, num_bytes)

    def reduce_scatter(self, group: Group, num_bytes: float) -> float:
        """Seconds until every member has its share of the sum of inputs of `num_bytes`."""
        return self._look("reduce_scatter", group, num_bytes)

    def all_reduce(self, group: Group, num_bytes: float) -> float:
        """Seconds until every member has the sum of tensors of `num_bytes`."""
        return self._look("all_reduce", group, num_bytes)

    def all_to_all(self, group: Group, num_bytes: float) -> float:
        """Seconds until every member has sent each other one its share of its `num_bytes`."""
        return self._look("all_to_all", group, num_bytes)

    def dispatch(self, group: Group, num_bytes: float, crossing_bytes: float) -> float:
        """Seconds of an exchange of `num_bytes` of which only `crossing_bytes` leave the domain (each token once per domain)."""
        local = self.cluster.ranks_per_domain(group.num_ranks, group.stride)
        within = num_bytes * (1 - 1 / local) / self.intra_rate
        latency = self.cluster.intra.latency_seconds + self.inter_latency * log2(max(1, group.num_ranks / local))
        return max(within, crossing_bytes / self.inter_rate) + latency + self.efficiency.collective_seconds

    def send(self, group: Group, num_bytes: float) -> float:
        """Seconds until the next member of the group has `num_bytes`."""
        return self._look("send", group, num_bytes)

    def _look(self, kind: CollectiveKind, group: Group, num_bytes: float) -> float:
        if group.num_ranks <= 1 or num_bytes <= 0:
            return 0.0
        key = (kind, group, num_bytes)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = self._seconds(kind, group, num_bytes) + self.meeting_seconds
        return found

    def _seconds(self, kind: CollectiveKind, group: Group, num_bytes: float) -> float:
        local = self.cluster.ranks_per_domain(group.num_ranks, group.stride)
        if self.cluster.profile is not None:
            measured = self.cluster.profile.collective_seconds(kind, group.num_ranks, local, num_bytes)
            if measured is not None:
                return measured / self.efficiency.step_share
        if kind == "send":
            return self._one_way(group, num_bytes)
        if kind == "all_to_all":
            return self._exchange(group.num_ranks, local, num_bytes)
        return self._ring(kind, group.num_ranks, local, num_bytes)

    def _one_way(self, group: Group, num_bytes: float) -> float:
        link = self.cluster.link(2, group.stride)
        # The next stage's first rank may sit in the next domain even where the two would fit into one.
        crosses = group.num_ranks * group.stride > self.cluster.domain_size and self.cluster.inter is not None
        rate = self.inter_rate if crosses else self.intra_rate
        latency = self.inter_latency if crosses else link.latency_seconds
        return num_bytes / rate + latency + self.efficiency.collective_seconds

    def _exchange(self, num_ranks: int, local: int, num_bytes: float) -> float:
        within = num_bytes * (local - 1) / num_ranks / self.intra_rate
        across = num_bytes * (num_ranks - local) / num_ranks / self.inter_rate
        latency = self.cluster.intra.latency_seconds * (local > 1) + self.inter_latency * log2(max(1, num_ranks / local))
        return max(within, across) + latency + self.efficiency.collective_seconds

    def _ring(self, kind: CollectiveKind, num_ranks: int, local: int, num_bytes: float) -> float:
        """Rings, as many as a member has links; an all-reduce is a reduce-scatter and an all-gather, or one pass where the
        switch adds."""
        passes = 2.0 if kind == "all_reduce" else 1.0
        domains = num_ranks / local
        within = (num_ranks - 1) / num_ranks * num_bytes / self.intra_rate if local > 1 else 0.0
        across = (domains - 1) / domains * num_bytes / (local * self.inter_rate)
        steps = self._steps(kind, num_ranks, local)
        if kind == "all_reduce" and domains == 1 and self.cluster.intra.multicast_reduction:
            return num_bytes / self.intra_rate + steps + self.efficiency.collective_seconds
        return passes * (max(within, across) + steps) + self.efficiency.collective_seconds

    def _steps(self, kind: CollectiveKind, num_ranks: int, local: int) -> float:
        """Latency of one pass: a hop from each member to the next, one in so many of them between domains; sums go along trees.

        As NCCL's own model has it (src/graph/tuning.cc): gathers and reductions into shards have nothing but rings, whose hops are
        what thousands of ranks wait for. Within a domain whose switch copies and adds there is a hop for each doubling.
        """
        intra, domains = self.cluster.intra, num_ranks / local
        if kind == "all_reduce":
            return intra.latency_seconds * log2(max(2, local)) * (local > 1) + self.inter_latency * log2(max(1.0, domains))
        hops = log2(local) * domains if intra.multicast_reduction else num_ranks - domains
        return intra.latency_seconds * hops + self.inter_latency * (domains - 1)
