"""Sizes of one layer's tensors on a rank, from which the peak of its backward pass follows."""

from __future__ import annotations

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.attention_activations import (
    compute_tile_gradient_bytes,
    has_saved_scores,
)
from shardwright.planner.memory.backward_peak import (
    BlockTensorBytes,
    compute_norm_gradient_bytes,
)
from shardwright.planner.memory.block_weights import (
    count_product_elements,
    find_frozen_products,
    get_weight_bytes,
)
from shardwright.planner.memory.quantisation import compute_block_temporaries
from shardwright.planner.model_costs import LayerKind, ModelFacts


def build_block_tensors(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, *, is_repeated: bool
) -> BlockTensorBytes:
    """Build the tensor sizes from which the peak of a block's backward pass follows."""
    shape = facts.shape
    layout = candidate.layout
    size = candidate.activation_bytes
    tokens = candidate.micro_batch_tokens
    stream = candidate.residual_tokens * shape.hidden_size * size
    gathered = compute_branch_output_bytes(candidate, facts)
    experts = shape.experts if kind.shape.sparse else None
    gated = shape.is_gated or experts is not None
    rows = float(tokens)
    width = float(shape.intermediate_size)
    if experts is not None:
        rows = candidate.count_sent_rows(experts.experts_per_token)
        width = float(experts.intermediate_size)
    inner = rows * width / layout.tp * size
    heads = shape.num_heads / layout.tp
    scores = 0.0
    if has_saved_scores(facts, candidate, kind.shape.window):
        # Gradients of the fp32 weights, before and after the softmax. The weights' copy in a
        # narrower compute precision is freed by then.
        scores = tokens * heads * candidate.sequence_length
        scores *= 2 * max(size, 4) - (size if size < 4 else 0)
    fused = shape.norm == "layer" or candidate.has_fused_norms or candidate.has_fused_functions
    return BlockTensorBytes(
        stream=stream,
        gathered=gathered,
        inner=inner,
        is_gated=gated,
        routed=0.0 if experts is None else rows * shape.hidden_size * size,
        should_gather_gradient=layout.tp > 1 and layout.sequence_parallel,
        queries=tokens * shape.query_width / layout.tp * size,
        keys=tokens * shape.head_dim * max(1.0, shape.num_kv_heads / layout.tp) * size,
        scores=scores,
        tile_gradients=compute_tile_gradient_bytes(facts, candidate, kind.shape.window),
        norm_gradient=compute_norm_gradient_bytes(stream, size, is_fused=fused),
        is_gate_fused=candidate.has_fused_functions,
        has_post_norms=shape.names.post_mlp_norm is not None,
        is_repeated=is_repeated,
        num_expert_parts=candidate.num_expert_parts if layout.ep > 1 else 0,
        exchanged=0.0
        if experts is None or not candidate.has_rows_per_rank
        else candidate.count_exchanged_rows(experts) * shape.hidden_size * size,
        unpadded=0.0
        if experts is None or not candidate.has_padding
        else tokens * experts.experts_per_token * shape.hidden_size * size,
        is_pipelined=layout.tp > 1 and layout.async_tensor_parallel in ("chunked", "fused"),
        is_deferred=False,
        is_adapted=candidate.adapter is not None,
        elements=count_product_elements(facts, kind, candidate),
        trained_elements=count_product_elements(facts, kind, candidate, should_skip_frozen=True),
        frozen_products=find_frozen_products(kind, candidate),
        is_router_frozen=kind.is_frozen("router"),
        weight_bytes=get_weight_bytes(candidate, is_deferred=False),
        temporaries=compute_block_temporaries(facts, kind, candidate),
    )


def compute_branch_output_bytes(candidate: Candidate, facts: ModelFacts) -> float:
    """Compute the bytes of a row-parallel matmul's result before the reduction over ranks."""
    return candidate.micro_batch_tokens * facts.shape.hidden_size * candidate.activation_bytes
