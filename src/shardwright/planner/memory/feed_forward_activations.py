"""Bytes that the feed-forward, or the experts, of a layer save for the backward pass.

`activations` has the legend and the sizes by operation.
"""

from __future__ import annotations

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.block_weights import find_frozen_products
from shardwright.planner.model_costs import LayerKind, ModelFacts


def compute_feed_forward_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[float, float, float]:
    """Return bytes of one layer's feed-forward or experts: saved, results of matmuls among
    them, and gradients in flight."""
    shape = facts.shape
    size = candidate.activation_bytes
    tokens = candidate.micro_batch_tokens
    tp = candidate.layout.tp
    experts = shape.experts if kind.shape.sparse else None
    gated = shape.is_gated or experts is not None
    numbers = candidate.engine.count_saved_tensors(candidate.adapted_roles)
    tensors = numbers.gated if gated else 2.0
    num_projections = 2.0 if gated else 1.0
    frozen = find_frozen_products(kind, candidate)
    tensors -= "down" in frozen  # its input
    if experts is None:
        wide = tokens * shape.intermediate_size / tp * size
        return tensors * wide, num_projections * wide, (num_projections + 1) * wide
    # Rows that the experts of the busiest rank process. They are saved as inputs, and as outputs in
    # token order, or, if the experts' rank sums them, in the order of experts.
    rows = candidate.count_sent_rows(experts.experts_per_token)
    wide = rows * experts.intermediate_size / tp * size
    dispatched = rows * shape.hidden_size * size
    shared = tokens * experts.shared_intermediate_size / tp * size
    router = tokens * experts.num_experts * 4
    outputs = (1.0 + numbers.expert_outputs) * dispatched
    if candidate.has_rows_per_rank:
        outputs = dispatched + candidate.count_index_bytes(experts)
    elif candidate.has_padding:
        outputs = tokens * experts.experts_per_token * shape.hidden_size * size
    inputs = 0.0 if "up" in frozen else dispatched
    saved = tensors * (wide + shared) + inputs + outputs + 2 * router
    return (
        saved,
        num_projections * (wide + shared) + dispatched,
        (num_projections + 1) * wide + dispatched,
    )


def count_saved_index_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Count the bytes of the places of rows that every recomputation of a layer keeps."""
    experts = facts.shape.experts if kind.shape.sparse else None
    if experts is None or not candidate.has_rows_per_rank:
        return 0.0
    return candidate.count_index_bytes(experts)
