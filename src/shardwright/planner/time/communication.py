"""Seconds of collectives on a cluster, by algorithm, size, group and link.

A group has `num_ranks` members that are `stride` ranks apart. The rank grid, in which tp varies
fastest, determines which of them share a node. Each member has its own network link, so a ring
over several nodes uses as many links between nodes as it has members per node.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from shardwright.hardware import Cluster
from shardwright.hardware.collective_rate import CollectiveKind
from shardwright.layout import Layout
from shardwright.planner.rates.efficiency import Efficiency


class StridedGroup(NamedTuple):
    """Ranks of one collective, `stride` ranks apart."""

    num_ranks: int
    stride: int


def build_groups(layout: Layout) -> dict[str, StridedGroup]:
    """Return the group of each axis of the rank grid: pp outermost, then dp_replicate,
    dp_shard, cp, and tp innermost.

    `fsdp` is dp_shard x cp. `ep` groups are neighbours within it, and `efsdp` is the group over
    which ZeRO shards an expert.

    >>> build_groups(Layout(dp_shard=4, tp=8, zero_stage=3))["fsdp"]
    StridedGroup(num_ranks=4, stride=8)
    """
    tp = layout.tp
    cp = layout.cp
    fsdp = layout.fsdp
    return {
        "tp": StridedGroup(tp, 1),
        "cp": StridedGroup(cp, tp),
        "dp_shard": StridedGroup(layout.dp_shard, tp * cp),
        "fsdp": StridedGroup(fsdp, tp),
        "ep": StridedGroup(layout.ep, tp),
        "efsdp": StridedGroup(layout.efsdp, tp * layout.ep),
        "dp_replicate": StridedGroup(layout.dp_replicate, tp * fsdp),
        "pp": StridedGroup(layout.pp, tp * fsdp * layout.dp_replicate),
    }


class NetworkModel:
    """Time model of collectives on a cluster. `num_bytes` is the message size as
    `hardware.measured_profile` defines it."""

    def __init__(self, cluster: Cluster, efficiency: Efficiency) -> None:
        self.cluster = cluster
        self.efficiency = efficiency
        self.intra_bytes_per_second = cluster.intra.bytes_per_second * efficiency.intra_share
        inter = cluster.inter or cluster.intra
        self.inter_bytes_per_second = inter.bytes_per_second * efficiency.inter_share
        self.inter_latency_seconds = inter.latency_seconds
        measured = None if cluster.profile is None else cluster.profile.handoff_seconds
        self.handoff_seconds = measured or 0.0
        """Seconds per collective between two computations, beyond its time back to back.
        Measured; 0 if unknown."""
        self.data_handoff_seconds = (
            efficiency.handoff_seconds if measured is None else efficiency.handoff_share * measured
        )
        """Further seconds per gather or reduction of data ranks: hooks, threads, late peers."""
        self._cache: dict[tuple[str, StridedGroup, float], tuple[float, float]] = {}
        """Seconds of a collective, and those of them in which a CPU rank's processor is idle."""

    def time_all_gather(self, group: StridedGroup, num_bytes: float) -> float:
        """Return seconds until every member has the whole result of `num_bytes`."""
        return self._get_seconds("all_gather", group, num_bytes)

    def time_reduce_scatter(self, group: StridedGroup, num_bytes: float) -> float:
        """Return seconds until every member has its shard of the sum of inputs of
        `num_bytes`."""
        return self._get_seconds("reduce_scatter", group, num_bytes)

    def time_owner_calls(self, group: StridedGroup, num_bytes: float, num_calls: int) -> float:
        """Return seconds until `num_calls` members, one after the other, have each broadcast their
        part of `num_bytes`, or received its sum: rings whose hops are not shared."""
        seconds = self.time_all_gather(group, num_bytes)
        if not seconds:
            return 0.0
        local = self.cluster.count_ranks_per_domain(group.num_ranks, group.stride)
        hops = self._compute_latency_seconds("all_gather", group.num_ranks, local)
        return seconds + (num_calls - 1) * (hops + self.efficiency.collective_seconds)

    def time_all_reduce(self, group: StridedGroup, num_bytes: float) -> float:
        """Return seconds until every member has the sum of tensors of `num_bytes`."""
        return self._get_seconds("all_reduce", group, num_bytes)

    def time_all_to_all(self, group: StridedGroup, num_bytes: float) -> float:
        """Return seconds until every member has sent every other member a share of its
        `num_bytes`."""
        return self._get_seconds("all_to_all", group, num_bytes)

    def time_dispatch(self, group: StridedGroup, num_bytes: float, crossing_bytes: float) -> float:
        """Return seconds of an all-to-all of `num_bytes` of which `crossing_bytes` leave the
        domain (each token once per domain)."""
        local = self.cluster.count_ranks_per_domain(group.num_ranks, group.stride)
        within = num_bytes * (1 - 1 / local) / self.intra_bytes_per_second
        latency = self.cluster.intra.latency_seconds + self.inter_latency_seconds * log2(
            max(1, group.num_ranks / local)
        )
        return (
            max(within, crossing_bytes / self.inter_bytes_per_second)
            + latency
            + self.efficiency.collective_seconds
        ) * self._get_slowdown(group)

    def time_send(self, group: StridedGroup, num_bytes: float) -> float:
        """Return seconds until the next member of the group has received `num_bytes`."""
        return self._get_seconds("send", group, num_bytes)

    def get_idle_share(self, kind: CollectiveKind, group: StridedGroup, num_bytes: float) -> float:
        """Return the share of a collective in which a CPU rank's processor waits for the link, so
        that it may compute. 0 if that was not measured."""
        seconds, idle_seconds = self._get_times(kind, group, num_bytes)
        return idle_seconds / seconds if seconds else 0.0

    def _get_seconds(self, kind: CollectiveKind, group: StridedGroup, num_bytes: float) -> float:
        return self._get_times(kind, group, num_bytes)[0]

    def _get_times(
        self, kind: CollectiveKind, group: StridedGroup, num_bytes: float
    ) -> tuple[float, float]:
        if group.num_ranks <= 1 or num_bytes <= 0:
            return 0.0, 0.0
        key = (kind, group, num_bytes)
        times = self._cache.get(key)
        if times is None:
            times = self._find_step_times(kind, group, num_bytes)
            if times is None:
                seconds, idle_seconds = self._compute_times(kind, group, num_bytes)
                slowdown = self._get_slowdown(group)
                times = (seconds * slowdown + self.handoff_seconds, idle_seconds * slowdown)
            self._cache[key] = times
        return times

    def _find_step_times(
        self, kind: CollectiveKind, group: StridedGroup, num_bytes: float
    ) -> tuple[float, float] | None:
        """Return the times that were measured between two computations, if they were."""
        profile = self.cluster.profile
        if profile is None:
            return None
        local = self.cluster.count_ranks_per_domain(group.num_ranks, group.stride)
        message = (kind, group.num_ranks, local, num_bytes)
        in_step = profile.find_step_seconds(*message)
        if in_step is None:
            return None
        alone = profile.find_collective_seconds(*message)
        processor = profile.find_processor_seconds(*message)
        if alone is None or processor is None:
            return in_step, 0.0
        return in_step, min(in_step, max(0.0, alone - processor))

    def _get_slowdown(self, group: StridedGroup) -> float:
        """Return the measured slowdown of the slowest link of a group."""
        link = self.cluster.get_link(group.num_ranks, group.stride)
        return (
            self.efficiency.intra_slowdown
            if link is self.cluster.intra
            else self.efficiency.inter_slowdown
        )

    def _compute_times(
        self, kind: CollectiveKind, group: StridedGroup, num_bytes: float
    ) -> tuple[float, float]:
        local = self.cluster.count_ranks_per_domain(group.num_ranks, group.stride)
        profile = self.cluster.profile
        if profile is not None:
            message = (kind, group.num_ranks, local, num_bytes)
            measured = profile.find_collective_seconds(*message)
            if measured is not None:
                # In a step the processor is slower at its part, not the link.
                processor = profile.find_processor_seconds(*message)
                idle = 0.0 if processor is None else max(0.0, measured - processor)
                return (measured - idle) / self.efficiency.step_share + idle, idle
        if kind == "send":
            return self._compute_send_seconds(group, num_bytes), 0.0
        if kind == "all_to_all":
            return self._compute_all_to_all_seconds(group.num_ranks, local, num_bytes), 0.0
        return self._compute_ring_seconds(kind, group.num_ranks, local, num_bytes), 0.0

    def _compute_send_seconds(self, group: StridedGroup, num_bytes: float) -> float:
        link = self.cluster.get_link(2, group.stride)
        # The next stage's first rank may be in the next domain even if both stages would fit
        # into one.
        is_inter_domain = (
            group.num_ranks * group.stride > self.cluster.domain_size
            and self.cluster.inter is not None
        )
        rate = self.inter_bytes_per_second if is_inter_domain else self.intra_bytes_per_second
        latency = self.inter_latency_seconds if is_inter_domain else link.latency_seconds
        return num_bytes / rate + latency + self.efficiency.collective_seconds

    def _compute_all_to_all_seconds(
        self, num_ranks: int, num_local_ranks: int, num_bytes: float
    ) -> float:
        within = num_bytes * (num_local_ranks - 1) / num_ranks / self.intra_bytes_per_second
        across = num_bytes * (num_ranks - num_local_ranks) / num_ranks / self.inter_bytes_per_second
        latency = self.cluster.intra.latency_seconds * (
            num_local_ranks > 1
        ) + self.inter_latency_seconds * log2(max(1, num_ranks / num_local_ranks))
        return max(within, across) + latency + self.efficiency.collective_seconds

    def _compute_ring_seconds(
        self, kind: CollectiveKind, num_ranks: int, num_local_ranks: int, num_bytes: float
    ) -> float:
        """Compute the seconds of rings over all links of a member.

        An all-reduce is a reduce-scatter and an all-gather, or one pass if the switch reduces.
        """
        passes = 2.0 if kind == "all_reduce" else 1.0
        domains = num_ranks / num_local_ranks
        within = (
            (num_ranks - 1) / num_ranks * num_bytes / self.intra_bytes_per_second
            if num_local_ranks > 1
            else 0.0
        )
        across = (
            (domains - 1) / domains * num_bytes / (num_local_ranks * self.inter_bytes_per_second)
        )
        steps = self._compute_latency_seconds(kind, num_ranks, num_local_ranks)
        if kind == "all_reduce" and domains == 1 and self.cluster.intra.has_multicast_reduction:
            return (
                num_bytes / self.intra_bytes_per_second + steps + self.efficiency.collective_seconds
            )
        return passes * (max(within, across) + steps) + self.efficiency.collective_seconds

    def _compute_latency_seconds(
        self, kind: CollectiveKind, num_ranks: int, num_local_ranks: int
    ) -> float:
        """Compute the latency of one pass: one hop per member, one of them per domain between
        domains; all-reduces use trees.

        As in NCCL's own model (src/graph/tuning.cc): all-gathers and reduce-scatters use rings
        only, whose hops dominate with thousands of ranks. In a domain whose switch multicasts
        and reduces there is one hop per doubling.
        """
        intra = self.cluster.intra
        domains = num_ranks / num_local_ranks
        if kind == "all_reduce":
            return intra.latency_seconds * log2(max(2, num_local_ranks)) * (
                num_local_ranks > 1
            ) + self.inter_latency_seconds * log2(max(1.0, domains))
        hops = (
            log2(num_local_ranks) * domains
            if intra.has_multicast_reduction
            else num_ranks - domains
        )
        return intra.latency_seconds * hops + self.inter_latency_seconds * (domains - 1)
