"""Communication seconds of one layer and micro-batch, and of the data ranks per step.

Exposed and overlapped seconds are separate. Legend: N tokens of the micro-batch on this rank, D
hidden size, Q and K widths of its queries and of its keys (or values), c bytes per activation,
k experts per token.

    axis                 forward                         backward
    tensor               2 all-reduces of N D c; under   the same
                         sequence parallelism 2 all-
                         gathers and 2 reduce-scatters
    context, ring        cp - 1 sends of 2 N K c         the same, and cp sends of fp32
                                                         gradients back; both overlap with
                                                         attention
    context, all_gather  one all-gather of cp 2 N K c    the same, and a reduce-scatter of fp32
                                                         gradients
    context, ulysses     all-to-alls of N (2 Q + 2 K) c  the same
    expert               2 all-to-alls of k N D c        the same
    maxima of scales     an all-reduce of 4 bytes per    the same for each product that shards
                         row (or tensor) for each        outputs; 4 bytes for each weight gradient
                         product that shards inputs      whose scales cover tensors

Recomputation repeats the communication inside a block's forward pass whose results it does not
keep; `selective` keeps those of tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import add
from typing import NamedTuple

from shardwright.config.recipe import RecomputeMode
from shardwright.layout import Layout
from shardwright.layout.degrees import MAX_TENSOR_CHUNKS
from shardwright.layout.saved_results import ResultName
from shardwright.planner.candidate import EXCHANGE_INDEX_BYTES, Candidate
from shardwright.planner.memory.attention_activations import (
    get_attended_value_dim,
    resolve_context_method,
)
from shardwright.planner.model_costs import (
    LayerKind,
    ModelFacts,
    ParameterElements,
    get_layer_recompute,
)
from shardwright.planner.time.communication import NetworkModel, StridedGroup
from shardwright.planner.time.compute import LayerSeconds
from shardwright.planner.time.maxima_exchanges import compute_maxima_seconds
from shardwright.schedule import count_stages_per_rank


class LayerTraffic(NamedTuple):
    """Communication seconds of one direction through one layer or stage."""

    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    hidden_tensor: float = 0.0
    hidden_context: float = 0.0
    hidden_expert: float = 0.0

    @property
    def exposed(self) -> float:
        """Exposed seconds."""
        return self.tensor + self.context + self.expert

    @property
    def hidden(self) -> float:
        """Seconds that overlap with compute."""
        return self.hidden_tensor + self.hidden_context + self.hidden_expert

    def add(self, other: LayerTraffic) -> LayerTraffic:
        """Return the sum of each part."""
        return _make_traffic(map(add, self, other))

    def multiply(self, count: float) -> LayerTraffic:
        """Return each part times `count`."""
        return _make_traffic([seconds * count for seconds in self])


_make_traffic = partial(tuple.__new__, LayerTraffic)
"""As `LayerTraffic._make`, in half of its time."""
NO_TRAFFIC = LayerTraffic()


def compute_layer_traffic(
    facts: ModelFacts,
    kind: LayerKind,
    candidate: Candidate,
    network: NetworkModel,
    groups: dict[str, StridedGroup],
    seconds: LayerSeconds,
) -> tuple[LayerTraffic, LayerTraffic]:
    """Compute forward and backward (with recomputation) communication of one layer."""
    layout = candidate.layout
    if layout.tp == 1 and layout.cp == 1 and layout.ep == 1:
        return NO_TRAFFIC, NO_TRAFFIC
    recompute = get_layer_recompute(kind, candidate.recompute)
    is_recomputed = recompute != "none"
    repeats_attention = recompute == "full" or (
        recompute == "mixed"
        and kind.saved_results is not None
        and "attention" not in kind.saved_results
    )
    tensor_forward, tensor_backward = _compute_tensor_seconds(
        facts, candidate, network, groups["tp"]
    )
    tensor_repeated = is_recomputed * tensor_forward
    if is_recomputed and candidate.engine.should_keep_collectives:
        tensor_repeated = _sum_repeated_seconds(
            kind, recompute, compute_collective_seconds(facts, candidate, network, groups)
        )
    maxima = compute_maxima_seconds(facts, kind, candidate, network, groups["tp"])
    tensor_forward += maxima[0]
    tensor_backward += maxima[1]
    expert, expert_repeated = _compute_expert_seconds(facts, kind, candidate, network, groups)
    context_forward, context_backward, can_overlap = _compute_context_seconds(
        facts, candidate, network, groups["cp"]
    )
    forward = _PassSeconds(
        tensor_forward,
        seconds.forward - seconds.attention_forward,
        context_forward,
        seconds.attention_forward,
        expert,
        seconds.experts_forward,
    )
    backward = _PassSeconds(
        tensor_backward + tensor_repeated,
        seconds.backward - seconds.attention_backward,
        context_backward + repeats_attention * context_forward,
        seconds.attention_backward,
        expert + is_recomputed * expert_repeated,
        seconds.experts_backward,
    )
    return (
        _split_by_overlap(forward, candidate, network, can_overlap_context=can_overlap),
        _split_by_overlap(backward, candidate, network, can_overlap_context=can_overlap)
        if kind.has_backward
        else NO_TRAFFIC,
    )


class _PassSeconds(NamedTuple):
    """Seconds of communication in one pass, each with the computation that it can overlap with."""

    tensor: float
    products: float
    context: float
    attention: float
    experts: float
    expert_products: float


def _split_by_overlap(
    seconds: _PassSeconds,
    candidate: Candidate,
    network: NetworkModel,
    *,
    can_overlap_context: bool,
) -> LayerTraffic:
    """Divide communication into a part that overlaps with computation, and the exposed rest."""
    efficiency = network.efficiency
    tensor_overlap = _get_tensor_overlap(candidate.layout)
    hidden_tensor = max(
        seconds.tensor * efficiency.tensor_overlap,
        min(seconds.tensor * tensor_overlap, seconds.products),
    )
    hidden_context = (
        min(seconds.context, seconds.attention) * efficiency.context_overlap
        if can_overlap_context
        else 0.0
    )
    # The first part's rows and the last part's results travel while no experts compute.
    hidden_expert = max(
        seconds.experts * _get_expert_overlap(candidate, network),
        min(seconds.experts, seconds.expert_products) * (1.0 - 1.0 / candidate.num_expert_parts),
    )
    return LayerTraffic(
        seconds.tensor - hidden_tensor,
        seconds.context - hidden_context,
        seconds.experts - hidden_expert,
        hidden_tensor,
        hidden_context,
        hidden_expert,
    )


def compute_collective_seconds(
    facts: ModelFacts, candidate: Candidate, network: NetworkModel, groups: dict[str, StridedGroup]
) -> dict[ResultName, float]:
    """Compute the seconds of a layer's tensor-parallel collectives by the name of their result.

    Recomputation ends before a block's last collective unless a norm or dropout follows it.
    """
    group = groups["tp"]
    if group.num_ranks == 1:
        return {}
    gather, reduction = _time_stream_collectives(facts, candidate, network, group)
    seconds: dict[ResultName, float] = {"gathered": 2 * gather, "attention_out": reduction}
    if facts.shape.is_block_end_read:
        seconds["down"] = reduction
    return seconds


def _sum_repeated_seconds(
    kind: LayerKind, recompute: RecomputeMode, seconds: dict[ResultName, float]
) -> float:
    """Sum the seconds of the collectives that a layer's recomputation repeats."""
    if recompute == "selective":
        return 0.0
    saved = kind.saved_results if recompute == "mixed" else None
    return sum(value for name, value in seconds.items() if name not in (saved or ()))


def _time_stream_collectives(
    facts: ModelFacts, candidate: Candidate, network: NetworkModel, group: StridedGroup
) -> tuple[float, float]:
    """Return the seconds of a branch's gather, 0 without sequence parallelism, and of its sum."""
    size = candidate.micro_batch_tokens * facts.shape.hidden_size * candidate.activation_bytes
    hops = network.efficiency.hop_seconds * (group.num_ranks - 1)
    if not candidate.layout.sequence_parallel:
        return 0.0, network.time_all_reduce(group, size) + 2 * hops
    gather = network.time_all_gather(group, size) + hops
    return gather, network.time_reduce_scatter(group, size) + hops


def _compute_tensor_seconds(
    facts: ModelFacts, candidate: Candidate, network: NetworkModel, group: StridedGroup
) -> tuple[float, float]:
    if group.num_ranks == 1:
        return 0.0, 0.0
    gather, reduction = _time_stream_collectives(facts, candidate, network, group)
    both = 2 * (gather + reduction)
    repeated_gathers = 0.0 if candidate.engine.should_save_gathered_sequence else 2 * gather
    return both, both + repeated_gathers


def compute_end_traffic(
    facts: ModelFacts, candidate: Candidate, network: NetworkModel, groups: dict[str, StridedGroup]
) -> tuple[float, float]:
    """Compute tensor-parallel seconds per micro-batch outside the layers, forward and backward:
    the embedding's reduction, the head's input."""
    group = groups["tp"]
    if group.num_ranks == 1:
        return 0.0, 0.0
    size = candidate.micro_batch_tokens * facts.shape.hidden_size * candidate.activation_bytes
    if not candidate.layout.sequence_parallel:
        return network.time_all_reduce(group, size), network.time_all_reduce(group, size)
    both = network.time_all_gather(group, size) + network.time_reduce_scatter(group, size)
    return both, both


def _compute_context_seconds(
    facts: ModelFacts, candidate: Candidate, network: NetworkModel, group: StridedGroup
) -> tuple[float, float, bool]:
    """Return seconds forward and backward, and True if attention can overlap with them."""
    cp = group.num_ranks
    shape = facts.shape
    tp = candidate.layout.tp
    if cp == 1:
        return 0.0, 0.0, False
    per_token = candidate.activation_bytes * candidate.micro_batch_tokens
    keys = shape.head_dim * max(1.0, shape.num_kv_heads / tp)
    method = resolve_context_method(facts, candidate)
    if method == "ulysses":
        heads = per_token * (shape.query_width / tp + 2 * keys)
        outputs = per_token * shape.num_heads * get_attended_value_dim(facts, candidate) / tp
        both = network.time_all_to_all(group, heads) + network.time_all_to_all(group, outputs)
        return both, both, False
    pair = 2 * keys * per_token
    gradients = pair * max(1.0, 4 / candidate.activation_bytes)
    if method == "all_gather":
        gathered = network.time_all_gather(group, cp * pair)
        return gathered, gathered + network.time_reduce_scatter(group, cp * gradients), False
    neighbour = StridedGroup(cp, group.stride)
    sends = (cp - 1) * network.time_send(neighbour, pair)
    return sends, sends + cp * network.time_send(neighbour, gradients), True


def _compute_expert_seconds(
    facts: ModelFacts,
    kind: LayerKind,
    candidate: Candidate,
    network: NetworkModel,
    groups: dict[str, StridedGroup],
) -> tuple[float, float]:
    """Compute seconds of one direction, for the busiest rank: rows sent to their experts, and
    results sent back; and seconds of a recomputation."""
    experts = facts.shape.experts
    spread = candidate.engine.count_expert_tensor_ranks(candidate.layout.tp)
    if experts is None or not kind.shape.sparse or groups["ep"].num_ranks * spread == 1:
        return 0.0, 0.0
    group = StridedGroup(groups["ep"].num_ranks * spread, groups["ep"].stride // spread)
    per_row = facts.shape.hidden_size * candidate.activation_bytes
    if candidate.has_rows_per_rank:
        choices = candidate.count_expert_rows(experts.experts_per_token)
        sent = network.time_all_to_all(group, candidate.count_exchanged_rows(experts) * per_row)
        if candidate.layout.expert_dispatch == "deep_ep":
            both = 2 * sent + network.time_all_to_all(group, candidate.count_plan_bytes(experts))
            return both, both if facts.shape.is_block_end_read else sent
        sent += network.time_all_to_all(group, choices * candidate.activation_bytes)  # weights
        # Places of choices among the rows are exchanged once, before the forward pass's rows.
        both = 2 * sent + network.time_all_to_all(group, choices * EXCHANGE_INDEX_BYTES)
        return both, both if facts.shape.is_block_end_read else sent
    tokens = candidate.count_sent_rows(experts.experts_per_token) / experts.experts_per_token
    tokens /= spread
    sequence_group = groups["tp"] if candidate.layout.sequence_parallel and spread == 1 else None
    seconds = candidate.engine.time_expert_exchange(
        network, group, experts, tokens, per_row, sequence_group
    )
    return seconds, seconds


def _get_tensor_overlap(layout: Layout) -> float:
    """Return the share of a layer's tensor-parallel communication that may overlap with its
    products; the first part of it does not."""
    if layout.async_tensor_parallel == "chunked":
        return 1.0 - 1.0 / MAX_TENSOR_CHUNKS
    return 1.0 - 1.0 / layout.tp if layout.async_tensor_parallel == "fused" else 0.0


def _get_expert_overlap(candidate: Candidate, network: NetworkModel) -> float:
    """Return the share of expert communication that may overlap with compute, which depends on
    whether it leaves a domain."""
    layout = candidate.layout
    reach = layout.ep * layout.tp
    is_within_domain = network.cluster.count_ranks_per_domain(reach, 1) == reach
    efficiency = network.efficiency
    return efficiency.near_expert_overlap if is_within_domain else efficiency.expert_overlap


@dataclass(frozen=True)
class DataTraffic:
    """Seconds of the data-parallel communication of one pipeline rank. `gather_seconds` and
    `reduce_seconds` cover all its parameters once, `first_gather_seconds` and `last_reduce_seconds`
    the exposed parts: the first gather and the last reduction. `replica_reduce_seconds` is the
    reduction of shards over dp_replicate, once per step. `idle_share`: share of an asynchronous
    reduction in which a CPU rank's processor waits for the link. `maxima_seconds`: the exchange of
    maxima before the first gather of codes, once per step."""

    gather_seconds: float = 0.0
    reduce_seconds: float = 0.0
    first_gather_seconds: float = 0.0
    last_reduce_seconds: float = 0.0
    replica_reduce_seconds: float = 0.0
    idle_share: float = 0.0
    maxima_seconds: float = 0.0
    backward_gather_share: float = 1.0
    """Share of the groups that are gathered for a backward pass."""


def compute_data_traffic(
    parts: tuple[ParameterElements, ParameterElements, ParameterElements],
    num_groups: int,
    candidate: Candidate,
    network: NetworkModel,
    groups: dict[str, StridedGroup],
) -> DataTraffic:
    """Compute gathers and reductions of a rank's parameters, given those of all its layers, of
    one group of them, and of embedding and head."""
    layout = candidate.layout
    layers, group, ends = parts
    layer_size = candidate.get_gather_bytes(layers)
    end_size = candidate.get_gather_bytes(ends)
    reduce_size = candidate.reduce_bytes
    all_ranks = StridedGroup(layout.dp_replicate * layout.fsdp, groups["fsdp"].stride)
    if candidate.engine.has_late_sums(layout.zero_stage):
        gather_seconds = network.time_all_gather(
            groups["fsdp"], layers.local * layer_size + ends.local * end_size
        )
        sum_seconds = network.time_all_reduce(all_ranks, (layers.local + ends.local) * reduce_size)
        return DataTraffic(gather_seconds, sum_seconds, gather_seconds, sum_seconds)
    if layout.zero_stage == 0 or layout.fsdp == 1:
        num_bytes = (layers.local + ends.local) * reduce_size
        total = network.time_all_reduce(all_ranks, num_bytes)
        buckets = max(1.0, num_bytes / layout.bucket_size_bytes)
        total += (total > 0) * (
            buckets * network.data_handoff_seconds + (buckets - 1) * network.handoff_seconds
        )
        if layout.pp > 1 and layout.zero_stage == 0 and candidate.engine.sums_whole_stages:
            # Nothing is left to compute when the last stage's sum begins.
            buckets = count_stages_per_rank(layout.schedule, layout.virtual_stages)
        return DataTraffic(
            reduce_seconds=total,
            last_reduce_seconds=total / buckets,
            idle_share=network.get_idle_share("all_reduce", all_ranks, num_bytes),
        )

    def time_calls(
        elements: ParameterElements, num_calls: float, size: float, collective: str
    ) -> float:
        call = getattr(network, f"time_{collective}")
        dense = (elements.local - elements.expert_local) * size / num_calls
        expert = elements.expert_local * size / num_calls
        seconds = 0.0
        for name, num_bytes in (("fsdp", dense), ("efsdp", expert)):
            call_seconds = float(call(groups[name], num_bytes))
            if call_seconds > 0:
                hops = network.efficiency.data_hop_seconds * (groups[name].num_ranks - 1)
                seconds += num_calls * (call_seconds + hops + network.data_handoff_seconds)
        if min(dense, expert) > 0 and groups["efsdp"] == groups["fsdp"] and seconds > 0:
            # One call covers both, so the handoff occurs once.
            seconds -= num_calls * (network.data_handoff_seconds + network.handoff_seconds)
        return seconds

    num_calls_per_pass = max(1, num_groups)
    return DataTraffic(
        gather_seconds=time_calls(layers, num_calls_per_pass, layer_size, "all_gather")
        + time_calls(ends, 1, end_size, "all_gather"),
        reduce_seconds=time_calls(layers, num_calls_per_pass, reduce_size, "reduce_scatter")
        + time_calls(ends, 1, reduce_size, "reduce_scatter"),
        first_gather_seconds=time_calls(ends, 1, end_size, "all_gather")
        + time_calls(group, 1, layer_size, "all_gather"),
        last_reduce_seconds=time_calls(ends, 1, reduce_size, "reduce_scatter"),
        replica_reduce_seconds=network.time_all_reduce(
            groups["dp_replicate"], (layers.sharded + ends.sharded) * reduce_size
        ),
    )


def compute_owner_traffic(
    parts: tuple[ParameterElements, ParameterElements, ParameterElements],
    num_tensors: int,
    candidate: Candidate,
    network: NetworkModel,
    groups: dict[str, StridedGroup],
) -> DataTraffic:
    """Compute broadcasts of parameters from the ranks that update them, and reductions of gradients
    to these ranks; arguments as of `compute_data_traffic`. `num_tensors`: those of all layers."""
    layers, _, ends = parts
    num_calls = max(1, min(groups["fsdp"].num_ranks, num_tensors))
    weight_bytes = layers.local * candidate.get_gather_bytes(layers)
    weight_bytes += ends.local * candidate.get_gather_bytes(ends)
    gradient_bytes = (layers.local + ends.local) * candidate.reduce_bytes
    gather_seconds = network.time_owner_calls(groups["fsdp"], weight_bytes, num_calls)
    reduce_seconds = network.time_owner_calls(groups["fsdp"], gradient_bytes, num_calls)
    return DataTraffic(
        gather_seconds=gather_seconds,
        reduce_seconds=reduce_seconds,
        first_gather_seconds=gather_seconds,
        last_reduce_seconds=reduce_seconds / num_calls,
        replica_reduce_seconds=network.time_all_reduce(
            groups["dp_replicate"], (layers.sharded + ends.sharded) * candidate.reduce_bytes
        ),
    )
