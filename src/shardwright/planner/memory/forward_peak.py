"""Peak memory of a block's forward pass that saves nothing: no gradient passes through it.

A block that saves its tensors has its peak in the backward pass (`backward_peak`). Here tensors are
freed when the function that computed them ends, so the largest ones at a time are those of
attention or of the feed-forward, with their input and result, next to the residual stream.
"""

from __future__ import annotations

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.activations import build_block_tensors
from shardwright.planner.memory.attention_activations import compute_attention_bytes
from shardwright.planner.memory.backward_peak import BlockTensorBytes
from shardwright.planner.memory.block_weights import count_largest_matrix
from shardwright.planner.memory.feed_forward_activations import compute_feed_forward_bytes
from shardwright.planner.memory.parameter_memory import casts_weights
from shardwright.planner.model_costs import LayerKind, ModelFacts, get_layer_recompute


def compute_forward_peak_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Compute the bytes that one layer's forward pass allocates at most, with its input, and with
    the cast of a weight. An upper bound for layers with experts."""
    block = build_block_tensors(facts, kind, candidate, is_repeated=False)
    attention = compute_attention_bytes(facts, kind, candidate)
    # Recomputation keeps results of products until the block ends, whether it is needed or not.
    kept = 0.0
    if get_layer_recompute(kind, candidate.recompute) in ("selective", "mixed"):
        _, products, _ = compute_feed_forward_bytes(facts, kind, candidate)
        kept = attention.matmul_results + 2.0 * block.gathered + products
        kept += block.should_gather_gradient * (block.gathered + block.stream)
    # The norm's output, gathered under sequence parallelism, and the result, which is then reduced.
    outside = (1.0 + 2.0 * block.should_gather_gradient) * block.stream + 2.0 * block.gathered
    in_attention = attention.saved + attention.score_products + block.queries + block.keys
    num_streams = 1.0 + facts.shape.parallel_residual
    peak = outside + max(in_attention, num_streams * block.stream + _compute_inner_bytes(block))
    if block.routed:
        kept = max(0.0, kept - block.routed)
    else:
        kept = max(0.0, kept - block.gathered - (1.0 + block.is_gated) * block.inner)
    cast = 0.0
    if casts_weights(candidate):
        size = candidate.engine.get_gather_bytes(candidate.activation_bytes)
        cast = count_largest_matrix(facts, kind, candidate) * size
    return peak + kept + cast


def _compute_inner_bytes(block: BlockTensorBytes) -> float:
    """Compute the bytes within the feed-forward: its projections and their product, or rows of
    experts as they are sent, sorted and returned."""
    if not block.routed:
        return (3.0 if block.is_gated else 2.0) * block.inner
    return 3.0 * block.inner + 2.0 * max(block.routed, block.unpadded) + 2.0 * block.exchanged
