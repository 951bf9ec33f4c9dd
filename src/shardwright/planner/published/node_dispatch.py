"""Time of an exchange that sends a token once to each node with one of its experts (DeepEP)."""

from __future__ import annotations

from shardwright.architecture.expert_shape import ExpertShape
from shardwright.planner.time.communication import NetworkModel, StridedGroup


def time_node_dispatch(
    network: NetworkModel,
    group: StridedGroup,
    experts: ExpertShape,
    tokens: float,
    row_bytes: int,
    sequence_group: StridedGroup | None,
) -> float:
    """Return the seconds to send `tokens` rows of `row_bytes` to their experts and back."""
    num_draws = experts.experts_per_token
    gathered = 0.0
    if sequence_group is not None:
        # Each tensor-parallel rank sends the rows of its part of the sequence, and all ranks
        # with a shard of an expert receive all of its rows.
        num_bytes = tokens * num_draws * row_bytes
        gathered = network.time_all_gather(sequence_group, num_bytes) + network.time_reduce_scatter(
            sequence_group, num_bytes
        )
        tokens /= sequence_group.num_ranks
    # A token is sent once to each domain, and within it to each rank, that has one of its
    # experts: those that k draws hit, or those of the groups it may use.
    domains = group.num_ranks / network.cluster.count_ranks_per_domain(
        group.num_ranks, group.stride
    )
    num_domains_reached = _count_places_reached(domains, num_draws)
    if experts.num_groups > 1:
        max_domains = max(
            experts.groups_per_token * domains / experts.num_groups,
            min(domains, experts.groups_per_token),
        )
        num_domains_reached = min(num_domains_reached, max_domains)
    num_bytes = tokens * _count_places_reached(group.num_ranks, num_draws) * row_bytes
    crossing = tokens * num_domains_reached * (domains - 1) / domains * row_bytes
    return gathered + 2 * network.time_dispatch(group, num_bytes, crossing)


def _count_places_reached(places: float, num_draws: int) -> float:
    """Return the expected number of places, with equal numbers of experts, that have an expert
    of a token."""
    return places * (1 - (1 - 1 / places) ** num_draws)
