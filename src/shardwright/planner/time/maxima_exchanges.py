"""Exchanges in which ranks agree on the maxima that scales follow from."""

from __future__ import annotations

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.model_costs import LayerKind, ModelFacts, get_layer_recompute
from shardwright.planner.time.communication import NetworkModel, StridedGroup
from shardwright.planner.time.memory_traffic import compute_local_sides, list_matmuls


def compute_maxima_seconds(
    facts: ModelFacts,
    kind: LayerKind,
    candidate: Candidate,
    network: NetworkModel,
    group: StridedGroup,
) -> tuple[float, float]:
    """Compute the seconds of a layer's exchanges, forward and backward."""
    forward, backward = (
        sum(share * network.time_all_reduce(group, size) for share, size in exchanges)
        for exchanges in list_maxima_exchanges(facts, kind, candidate)
    )
    return forward, backward


def list_maxima_exchanges(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """List the exchanges of maxima of a layer and micro-batch, forward and backward.

    Recomputation repeats none. Maxima of weights are one exchange of a stage per step, of which a
    layer and a micro-batch have their share; of offloaded weights, one in each product.

    Returns:
        For each exchange, the share of it, and its bytes.
    """
    shares = candidate.quantised_shares
    forward: list[tuple[float, float]] = []
    backward: list[tuple[float, float]] = []
    if shares is None or shares.spanning is None or candidate.layout.tp == 1:
        return forward, backward
    spanning = shares.spanning
    output_weights: list[tuple[float, float]] = []
    gradient_weights: list[tuple[float, float]] = []
    for product, rows in list_matmuls(facts, kind, candidate):
        is_columns = product.sharding in ("columns", "expert_columns")
        if not is_columns and product.sharding not in ("rows", "expert_rows"):
            continue
        share = shares.get_share(product.role)
        num_matrices = facts.count_local_matrices(kind, product, candidate.layout.ep)
        size = 4.0 * (rows * num_matrices if spanning.operands == "rows" else 1.0)
        (backward if is_columns else forward).append((share, size))
        is_trained = candidate.adapter is None and product.is_trained
        if spanning.operands == "tensors" and is_trained:
            backward.append((shares.get_weight_gradient_share(product.role), size))
        num_out, num_in = compute_local_sides(product, candidate)
        if spanning.output == "tensors" or not is_columns:
            num_scales = 1.0 if spanning.output == "tensors" else num_out
            output_weights.append((share, 4.0 * num_scales * num_matrices))
        if spanning.input_gradient == "tensors" or is_columns:
            num_scales = 1.0 if spanning.input_gradient == "tensors" else num_in
            gradient_weights.append((share, 4.0 * num_scales * num_matrices))
    if candidate.parameter_offload != "none":
        return forward + output_weights, backward + gradient_weights
    num_layers = facts.shape.num_layers / candidate.layout.pp
    num_passes = num_layers * candidate.gradient_accumulation_steps
    size = sum(share * size for share, size in output_weights + gradient_weights)
    forward.append((1.0 / num_passes, size * num_layers))
    return forward, backward


def compute_shard_maxima_seconds(
    facts: ModelFacts,
    load: StageLoad,
    candidate: Candidate,
    network: NetworkModel,
    group: StridedGroup,
) -> float:
    """Compute the seconds per step in which ZeRO's ranks agree on the maxima of matrices whose
    codes they gather; two scales per weight are counted. Under tp, it is the exchange above."""
    shares = candidate.quantised_shares
    if shares is None or shares.code_gathers is None or candidate.layout.tp > 1:
        return 0.0
    if not shares.code_gathers.has_agreed_maxima:
        return 0.0
    num_weights = sum(
        count * len(kind.matmuls)
        for kind, count in zip(facts.kinds, load.layers, strict=True)
        if candidate.gathers_codes(
            is_recomputed=get_layer_recompute(kind, candidate.recompute) != "none"
        )
    )
    return network.time_all_reduce(group, 8.0 * num_weights) if num_weights else 0.0
