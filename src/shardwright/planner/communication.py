"""Seconds of collectives on a cluster, by algorithm, size, group and link.

A group has `num_ranks` members that are `stride` ranks apart. The rank grid, in which tp varies
fastest, determines which of them share a node. Each member has its own network link, so a ring
over several nodes uses as many links between nodes as it has members per node.
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
    """Ranks of one collective, `stride` ranks apart."""

    num_ranks: int
    stride: int


def groups_of(layout: Layout) -> dict[str, Group]:
    """Return the group of each axis of the rank grid: pp outermost, then dp_replicate,
    dp_shard, cp, and tp innermost.

    `fsdp` is dp_shard x cp. `ep` groups are neighbours within it, and `efsdp` is the group over
    which ZeRO shards an expert.

    >>> groups_of(Layout(dp_shard=4, tp=8, zero_stage=3))["fsdp"]
    Group(num_ranks=4, stride=8)
    """
    tp = layout.tp
    cp = layout.cp
    fsdp = layout.fsdp
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
    """Time model of collectives on a cluster. `num_bytes` is the message size as
    `hardware.profile` defines it."""

    def __init__(self, cluster: Cluster, efficiency: Efficiency) -> None:
        self.cluster = cluster
        self.efficiency = efficiency
        self.intra_rate = cluster.intra.bytes_per_second * efficiency.intra_share
        inter = cluster.inter or cluster.intra
        self.inter_rate = inter.bytes_per_second * efficiency.inter_share
        self.inter_latency = inter.latency_seconds
        self.meeting_seconds = 0.0 if cluster.profile is None else cluster.profile.handoff_seconds or 0.0
        """Seconds per collective between two computations, beyond its time back to back.
        Measured; 0 if unknown."""
        self._found: dict[tuple[str, Group, float], float] = {}

    def all_gather(self, group: Group, num_bytes: float) -> float:
        """Return seconds until every member has the whole result of `num_bytes`."""
        return self._look("all_gather", group, num_bytes)

    def reduce_scatter(self, group: Group, num_bytes: float) -> float:
        """Return seconds until every member has its shard of the sum of inputs of
        `num_bytes`."""
        return self._look("reduce_scatter", group, num_bytes)

    def all_reduce(self, group: Group, num_bytes: float) -> float:
        """Return seconds until every member has the sum of tensors of `num_bytes`."""
        return self._look("all_reduce", group, num_bytes)

    def all_to_all(self, group: Group, num_bytes: float) -> float:
        """Return seconds until every member has sent every other member a share of its
        `num_bytes`."""
        return self._look("all_to_all", group, num_bytes)

    def dispatch(self, group: Group, num_bytes: float, crossing_bytes: float) -> float:
        """Return seconds of an all-to-all of `num_bytes` of which `crossing_bytes` leave the
        domain (each token once per domain)."""
        local = self.cluster.ranks_per_domain(group.num_ranks, group.stride)
        within = num_bytes * (1 - 1 / local) / self.intra_rate
        latency = self.cluster.intra.latency_seconds + self.inter_latency * log2(max(1, group.num_ranks / local))
        return max(within, crossing_bytes / self.inter_rate) + latency + self.efficiency.collective_seconds

    def send(self, group: Group, num_bytes: float) -> float:
        """Return seconds until the next member of the group has received `num_bytes`."""
        return self._look("send", group, num_bytes)

    def _look(self, kind: CollectiveKind, group: Group, num_bytes: float) -> float:
        if group.num_ranks <= 1 or num_bytes <= 0:
            return 0.0
        key = (kind, group, num_bytes)
        seconds = self._found.get(key)
        if seconds is None:
            seconds = self._found[key] = self._seconds(kind, group, num_bytes) + self.meeting_seconds
        return seconds

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
        # The next stage's first rank may be in the next domain even if both stages would fit
        # into one.
        is_inter_domain = group.num_ranks * group.stride > self.cluster.domain_size and self.cluster.inter is not None
        rate = self.inter_rate if is_inter_domain else self.intra_rate
        latency = self.inter_latency if is_inter_domain else link.latency_seconds
        return num_bytes / rate + latency + self.efficiency.collective_seconds

    def _exchange(self, num_ranks: int, local: int, num_bytes: float) -> float:
        within = num_bytes * (local - 1) / num_ranks / self.intra_rate
        across = num_bytes * (num_ranks - local) / num_ranks / self.inter_rate
        latency = self.cluster.intra.latency_seconds * (local > 1) + self.inter_latency * log2(max(1, num_ranks / local))
        return max(within, across) + latency + self.efficiency.collective_seconds

    def _ring(self, kind: CollectiveKind, num_ranks: int, local: int, num_bytes: float) -> float:
        """Compute the seconds of rings over all links of a member.

        An all-reduce is a reduce-scatter and an all-gather, or one pass if the switch reduces.
        """
        passes = 2.0 if kind == "all_reduce" else 1.0
        domains = num_ranks / local
        within = (num_ranks - 1) / num_ranks * num_bytes / self.intra_rate if local > 1 else 0.0
        across = (domains - 1) / domains * num_bytes / (local * self.inter_rate)
        steps = self._steps(kind, num_ranks, local)
        if kind == "all_reduce" and domains == 1 and self.cluster.intra.multicast_reduction:
            return num_bytes / self.intra_rate + steps + self.efficiency.collective_seconds
        return passes * (max(within, across) + steps) + self.efficiency.collective_seconds

    def _steps(self, kind: CollectiveKind, num_ranks: int, local: int) -> float:
        """Compute the latency of one pass: one hop per member, one of them per domain between
        domains; all-reduces use trees.

        As in NCCL's own model (src/graph/tuning.cc): all-gathers and reduce-scatters use rings
        only, whose hops dominate with thousands of ranks. In a domain whose switch multicasts
        and reduces there is one hop per doubling.
        """
        intra = self.cluster.intra
        domains = num_ranks / local
        if kind == "all_reduce":
            return intra.latency_seconds * log2(max(2, local)) * (local > 1) + self.inter_latency * log2(max(1.0, domains))
        hops = log2(local) * domains if intra.multicast_reduction else num_ranks - domains
        return intra.latency_seconds * hops + self.inter_latency * (domains - 1)
