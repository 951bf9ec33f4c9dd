"""Peak memory of a block's forward pass that saves nothing: no gradient passes through it.

A block that saves its tensors has its peak in the backward pass (`backward_peak`). Here tensors are
freed when the function that computed them ends, so the largest ones at a time are those of
attention or of the feed-forward, with their input and result, next to the residual stream.
"""

from __future__ import annotations

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.attention_activations import (
    compute_attention_bytes,
    compute_tile_bytes,
)
from shardwright.planner.memory.backward_peak import BlockTensorBytes, ProductElements
from shardwright.planner.memory.block_tensors import build_block_tensors
from shardwright.planner.memory.block_weights import (
    count_largest_matrix,
    count_product_elements,
)
from shardwright.planner.memory.element_counts import count_group_elements
from shardwright.planner.memory.feed_forward_activations import compute_feed_forward_bytes
from shardwright.planner.memory.live_activations import LiveActivations
from shardwright.planner.memory.parameter_memory import (
    PersistentMemory,
    compute_gathered_bytes,
    compute_gradient_bytes_at_loss,
)
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.memory.weight_copies import casts_weights, compute_saved_cast_bytes
from shardwright.planner.model_costs import LayerKind, ModelFacts, get_layer_recompute
from shardwright.planner.prediction import MemoryParts


def list_forward_peaks(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    persistent: PersistentMemory,
    live: LiveActivations,
) -> list[MemoryParts]:
    """Return memory in the forward passes of layers through which no gradient passes, next to the
    saved tensors of other passes. Other layers have more in their backward passes.

    FSDP2 has the root's parameters, and those of one more group than in a backward pass.
    """
    kinds = [
        kind
        for kind, count in zip(facts.kinds, load.layers, strict=True)
        if count and not kind.has_backward
    ]
    if not kinds:
        return []
    num_others = max(0.0, load.num_in_flight - 1.0)
    gathered = compute_forward_gathered_bytes(facts, candidate, load, persistent, num_others)
    # Next to the output of another pass, which is being sent.
    others = live.compute_saved_bytes(num_others) + live.stage_output_bytes
    return [
        MemoryParts(
            weights=persistent.weights,
            optimizer=persistent.optimizer,
            gradients=compute_gradient_bytes_at_loss(candidate, persistent.gradients),
            activations=others + compute_forward_bytes(facts, kind, candidate),
            gathered=gathered + persistent.moved.compute_weight_bytes(2.0),
        )
        for kind in kinds
    ]


def compute_forward_gathered_bytes(
    facts: ModelFacts,
    candidate: Candidate,
    load: StageLoad,
    persistent: PersistentMemory,
    num_others: float,
) -> float:
    """Compute the bytes of gathered parameters in a forward pass, or of casts that so many other
    passes have saved."""
    parameters = persistent.parameters
    if candidate.is_sharded:
        gathered = compute_gathered_bytes(
            facts, candidate, load, parameters, should_include_root=True
        )
    else:
        gathered = compute_saved_cast_bytes(facts, candidate, load, parameters, num_others)
    if candidate.gathers_each_pass:
        size = candidate.engine.get_gather_bytes(candidate.activation_bytes)
        gathered += count_group_elements(facts, candidate, load) * size
    return gathered


def compute_forward_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Compute the bytes that one layer's forward pass allocates at most, with its input, and with
    the cast of a weight. An upper bound if rows are sent to experts of other ranks."""
    block = build_block_tensors(facts, kind, candidate, is_repeated=False)
    attention = compute_attention_bytes(facts, kind, candidate)
    # Recomputation keeps results of products until the block ends, whether it is needed or not.
    retained = products = 0.0
    if get_layer_recompute(kind, candidate.recompute) in ("selective", "mixed"):
        _, products, _ = compute_feed_forward_bytes(facts, kind, candidate)
        retained = attention.matmul_results + block.gathered
        retained += block.should_gather_gradient * (block.gathered + block.stream)
    # The norm's output, gathered under sequence parallelism, and the result, which is then reduced.
    has_norm = facts.shape.names.pre_mlp_norm is not None
    outside = (has_norm + 2.0 * block.should_gather_gradient) * block.stream + 2.0 * block.gathered
    tile_bytes = compute_tile_bytes(facts, candidate, kind.shape.window)
    in_attention = attention.saved + block.queries + block.keys
    in_attention += max(tile_bytes, attention.score_products)
    cast = 0.0
    elements = ProductElements()
    if casts_weights(candidate):
        cast = candidate.engine.get_gather_bytes(candidate.activation_bytes)
        elements = count_product_elements(facts, kind, candidate)
    in_layer = count_largest_matrix(facts, kind, candidate) * cast
    if block.routed and not block.num_expert_parts:
        in_experts = _compute_expert_bytes(facts, candidate, block, elements, cast, products)
        # The block's input, the sum with attention, its norm, and that gathered.
        streams = (2.0 + has_norm) * block.stream
        streams += block.should_gather_gradient * block.gathered
        return max(outside + in_attention + in_layer, streams + in_experts) + retained
    num_streams = 1.0 + facts.shape.parallel_residual
    peak = outside + max(in_attention, num_streams * block.stream + _compute_inner_bytes(block))
    if products:  # with the result of the last one, those that are live anyway
        retained += block.gathered + products
        live = block.routed or block.gathered + (1.0 + block.is_gated) * block.inner
        retained = max(0.0, retained - live)
    return peak + retained + in_layer


def _compute_inner_bytes(block: BlockTensorBytes) -> float:
    """Compute the bytes within the feed-forward: its projections and their product, or rows of
    experts as they are sent, sorted and returned."""
    if not block.routed:
        return (3.0 if block.is_gated else 2.0) * block.inner
    return 3.0 * block.inner + 2.0 * max(block.routed, block.unpadded) + 2.0 * block.exchanged


def _compute_expert_bytes(
    facts: ModelFacts,
    candidate: Candidate,
    block: BlockTensorBytes,
    elements: ProductElements,
    cast: float,
    products: float,
) -> float:
    """Compute the bytes within experts whose rows stay on the rank: their rows, and one after the
    other the projections, the gate, the results, and the sums of each token's.

    Args:
        elements: those of matrices whose cast takes `cast` bytes each.
        products: bytes of products that recomputation keeps; 0 if it keeps none.
    """
    experts = facts.shape.experts
    assert experts is not None
    rows = block.routed
    inner = block.inner
    shared_width = experts.shared_intermediate_size / candidate.layout.tp
    shared = candidate.micro_batch_tokens * shared_width * candidate.activation_bytes
    retained = 2.0 * inner * bool(products)
    retained_results = max(0.0, products - rows)  # those of the experts are live at the sum
    has_shared = shared > 0.0
    return max(
        rows + 2.0 * inner + elements.up * cast,
        rows + 4.0 * inner,
        2.0 * rows + inner + retained + elements.down * cast,
        rows + 3.0 * shared + has_shared * block.gathered + retained,
        2.0 * rows + (1.0 + has_shared) * block.gathered + retained_results,
    )
