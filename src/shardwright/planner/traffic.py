"""Seconds of each cut's traffic for one layer and one micro-batch, exposed and hidden, and of the data ranks' for one step.
Torch-free.

Legend: N tokens of the micro-batch on this rank, D hidden, K width of its keys (or values), c bytes per activation, k experts
per token.

    cut                 forward                             backward
    tensor              2 all-reduces of N D c; under sequence parallelism 2 all-gathers and 2 reduce-scatters; the same again
    context, ring       cp - 1 sends of 2 N K c             the same again, and cp sends of its gradients in fp32, which come home;
                                                            both behind attention
    context, all_gather one all-gather of cp 2 N K c        the same again, and a reduce-scatter of its gradients in fp32
    context, ulysses    exchanges of N (2 Q + 2 K) c        the same
    expert              2 exchanges of k N D c              the same
Recomputation repeats what lies inside a block's forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from shardwright.planner.activations import context_method, micro_batch_tokens
from shardwright.planner.candidate import Candidate
from shardwright.planner.communication import Group, Network
from shardwright.planner.compute import LayerSeconds, expert_spread
from shardwright.planner.facts import Held, LayerKind, ModelFacts


class Traffic(NamedTuple):
    """Seconds of one direction through one layer (or a stage)."""

    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    hidden_tensor: float = 0.0
    hidden_context: float = 0.0
    hidden_expert: float = 0.0

    @property
    def exposed(self) -> float:
        """What nothing hides."""
        return self.tensor + self.context + self.expert

    @property
    def hidden(self) -> float:
        """What runs beside compute."""
        return self.hidden_tensor + self.hidden_context + self.hidden_expert

    def plus(self, other: Traffic) -> Traffic:
        """Both, part by part."""
        return Traffic._make(map(add, self, other))

    def times(self, count: float) -> Traffic:
        """So many of it."""
        return Traffic._make([seconds * count for seconds in self])


NOTHING = Traffic()


def layer_traffic(
    facts: ModelFacts,
    kind: LayerKind,
    candidate: Candidate,
    network: Network,
    groups: dict[str, Group],
    seconds: LayerSeconds,
) -> tuple[Traffic, Traffic]:
    """Forward and backward (recomputation included) of one layer."""
    layout, efficiency = candidate.layout, network.efficiency
    if layout.tp == 1 and layout.cp == 1 and layout.ep == 1:
        return NOTHING, NOTHING
    again = candidate.recompute != "none"
    tensor_forward, tensor_backward = _tensor(facts, candidate, network, groups["tp"])
    expert, expert_overlap = _expert(facts, kind, candidate, network, groups), _expert_overlap(candidate, network)
    context_forward, context_backward, hideable = _context(facts, candidate, network, groups["cp"])
    directions = []
    for tensor, context, experts, attention in (
        (tensor_forward, context_forward, expert, seconds.attention_forward),
        (
            tensor_backward + again * tensor_forward,
            context_backward + (candidate.recompute == "full") * context_forward,
            expert * (1 + again),
            seconds.attention_backward,
        ),
    ):
        hidden_tensor = tensor * efficiency.tensor_overlap
        hidden_context = min(context, attention) * efficiency.context_overlap if hideable else 0.0
        hidden_expert = experts * expert_overlap
        directions.append(
            Traffic(
                tensor - hidden_tensor,
                context - hidden_context,
                experts - hidden_expert,
                hidden_tensor,
                hidden_context,
                hidden_expert,
            )
        )
    return directions[0], directions[1]


def _tensor(facts: ModelFacts, candidate: Candidate, network: Network, group: Group) -> tuple[float, float]:
    if group.num_ranks == 1:
        return 0.0, 0.0
    size = micro_batch_tokens(candidate) * facts.shape.hidden_size * candidate.activation_bytes
    hops = network.efficiency.hop_seconds * (group.num_ranks - 1)
    if not candidate.layout.sequence_parallel:
        once = 2 * (network.all_reduce(group, size) + 2 * hops)
        return once, once
    gather, scatter = network.all_gather(group, size) + hops, network.reduce_scatter(group, size) + hops
    again = 0.0 if candidate.engine.keeps_gathered_sequence else 2 * gather
    return 2 * (gather + scatter), 2 * (gather + scatter) + again


def end_traffic(facts: ModelFacts, candidate: Candidate, network: Network, groups: dict[str, Group]) -> tuple[float, float]:
    """Seconds of tensor-parallel traffic per micro-batch outside the layers: the embedding's sum, the head's input; both
    directions."""
    group = groups["tp"]
    if group.num_ranks == 1:
        return 0.0, 0.0
    size = micro_batch_tokens(candidate) * facts.shape.hidden_size * candidate.activation_bytes
    if not candidate.layout.sequence_parallel:
        return network.all_reduce(group, size), network.all_reduce(group, size)
    both = network.all_gather(group, size) + network.reduce_scatter(group, size)
    return both, both


def _context(facts: ModelFacts, candidate: Candidate, network: Network, group: Group) -> tuple[float, float, bool]:
    """Seconds forward and backward, and whether attention can hide them."""
    cp, shape, tp = group.num_ranks, facts.shape, candidate.layout.tp
    if cp == 1:
        return 0.0, 0.0, False
    per_token = candidate.activation_bytes * micro_batch_tokens(candidate)
    keys = shape.head_dim * max(1.0, shape.num_kv_heads / tp)
    method = context_method(facts, candidate)
    if method == "ulysses":
        heads = per_token * (shape.query_width / tp + 2 * keys)
        both = network.all_to_all(group, heads) + network.all_to_all(group, per_token * shape.value_width / tp)
        return both, both, False
    pair = 2 * keys * per_token
    gradients = pair * max(1.0, 4 / candidate.activation_bytes)
    if method == "all_gather":
        gathered = network.all_gather(group, cp * pair)
        return gathered, gathered + network.reduce_scatter(group, cp * gradients), False
    neighbour = Group(cp, group.stride)
    passed = (cp - 1) * network.send(neighbour, pair)
    return passed, passed + cp * network.send(neighbour, gradients), True


def _expert(facts: ModelFacts, kind: LayerKind, candidate: Candidate, network: Network, groups: dict[str, Group]) -> float:
    """Seconds of one direction: rows to their experts, and what becomes of them back."""
    experts, spread = facts.shape.experts, expert_spread(candidate)
    if experts is None or not kind.shape.sparse or groups["ep"].num_ranks * spread == 1:
        return 0.0
    group = Group(groups["ep"].num_ranks * spread, groups["ep"].stride // spread)
    per_row = facts.shape.hidden_size * candidate.activation_bytes
    tokens, drawn = micro_batch_tokens(candidate) / spread, experts.experts_per_token
    if not candidate.engine.node_dispatch:
        return 2 * network.all_to_all(group, tokens * drawn * per_row)
    gathered = 0.0
    if candidate.layout.sequence_parallel and spread == 1:
        # Each tensor-parallel rank sends the rows of its part of the sequence, and all that hold a part of an expert get all.
        rows = tokens * drawn * per_row
        gathered = network.all_gather(groups["tp"], rows) + network.reduce_scatter(groups["tp"], rows)
        tokens /= candidate.layout.tp

    def met(places: float) -> float:
        """Of so many places with as many experts each, those that hold one of a token's."""
        return places * (1 - (1 - 1 / places) ** drawn)

    # A token goes once to each domain, and within it to each rank, that holds one of its experts: those that k draws hit, or
    # those of the groups it may choose.
    domains = group.num_ranks / network.cluster.ranks_per_domain(group.num_ranks, group.stride)
    visited = met(domains)
    allowed = max(experts.groups_per_token * domains / experts.num_groups, min(domains, experts.groups_per_token))
    if experts.num_groups > 1:
        visited = min(visited, allowed)
    crossing = tokens * visited * (domains - 1) / domains * per_row
    return gathered + 2 * network.dispatch(group, tokens * met(group.num_ranks) * per_row, crossing)


def _expert_overlap(candidate: Candidate, network: Network) -> float:
    """Share of that traffic that may run beside compute: another one where it leaves a domain than where it does not."""
    layout, efficiency = candidate.layout, network.efficiency
    reach = layout.ep * layout.tp
    near = network.cluster.ranks_per_domain(reach, 1) == reach
    return efficiency.near_expert_overlap if near else efficiency.expert_overlap


@dataclass(frozen=True)
class DataTraffic:
    """Seconds of the data ranks' traffic on one pipeline rank. `gather` and `reduce` are of all its parameters once, `first`
    and `last`
    of what nothing can hide: the first group gathered, the last one reduced. `replicas` sums shards over dp_replicate, once a
    step."""

    gather: float = 0.0
    reduce: float = 0.0
    first: float = 0.0
    last: float = 0.0
    replicas: float = 0.0


def data_traffic(
    parts: tuple[Held, Held, Held], num_groups: int, candidate: Candidate, network: Network, groups: dict[str, Group]
) -> DataTraffic:
    """Gathers and reductions of a rank's parameters: those of its layers together, of one group of them, and of the ends."""
    layout = candidate.layout
    layers, group, ends = parts
    gather_size = candidate.engine.gather_bytes or float(candidate.activation_bytes)
    reduce_size = candidate.engine.reduce_bytes or (2.0 if candidate.reduce_in_bf16 else float(candidate.master_bytes))
    if layout.zero_stage == 0 or layout.fsdp == 1:
        everybody = Group(layout.dp_replicate * layout.fsdp, groups["fsdp"].stride)
        total = network.all_reduce(everybody, (layers.whole + ends.whole) * reduce_size)
        buckets = max(1.0, (layers.whole + ends.whole) * reduce_size / layout.bucket_size_bytes)
        total += (total > 0) * (buckets * network.efficiency.handoff_seconds + (buckets - 1) * network.meeting_seconds)
        return DataTraffic(reduce=total, last=total / buckets)

    def over(held: Held, times: float, size: float, collective: str) -> float:
        call = getattr(network, collective)
        dense, expert = (held.whole - held.expert_whole) * size / times, held.expert_whole * size / times
        seconds = 0.0
        for name, num_bytes in (("fsdp", dense), ("efsdp", expert)):
            once = float(call(groups[name], num_bytes))
            if once > 0:
                hops = network.efficiency.data_hop_seconds * (groups[name].num_ranks - 1)
                seconds += times * (once + hops + network.efficiency.handoff_seconds)
        if min(dense, expert) > 0 and groups["efsdp"] == groups["fsdp"] and seconds > 0:
            # One call has both: nobody meets twice.
            seconds -= times * (network.efficiency.handoff_seconds + network.meeting_seconds)
        return seconds

    pieces = max(1, num_groups)
    return DataTraffic(
        gather=over(layers, pieces, gather_size, "all_gather") + over(ends, 1, gather_size, "all_gather"),
        reduce=over(layers, pieces, reduce_size, "reduce_scatter") + over(ends, 1, reduce_size, "reduce_scatter"),
        first=over(ends, 1, gather_size, "all_gather") + over(group, 1, gather_size, "all_gather"),
        last=over(ends, 1, reduce_size, "reduce_scatter"),
        replicas=network.all_reduce(groups["dp_replicate"], (layers.shard + ends.shard) * reduce_size),
    )
