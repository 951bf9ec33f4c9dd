"""Bytes besides saved tensors where a layer's passes need the most for their last operations:
operands of products that are quantised, norms of adapted rows, and dropped inputs of adapters."""

from __future__ import annotations

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.backward_peak import (
    BlockTensorBytes,
    compute_last_quantisation_bytes,
)
from shardwright.planner.memory.block_tensors import (
    build_block_tensors,
    compute_branch_output_bytes,
)
from shardwright.planner.memory.feed_forward_activations import compute_feed_forward_bytes
from shardwright.planner.memory.quantisation import compute_widening_bytes
from shardwright.planner.model_costs import LayerKind, ModelFacts


def compute_forward_temporaries(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Compute `LayerActivations.quantising_bytes`."""
    block = build_block_tensors(facts, kind, candidate, is_repeated=False)
    quantising = compute_last_quantisation_bytes(block)
    if not quantising or candidate.recompute != "selective":
        return quantising
    has_dropout = candidate.adapter is not None and candidate.adapter.has_dropout
    if (
        has_dropout
        or _has_fp4_kernels(candidate)
        or compute_widening_bytes(facts, kind, candidate) > 0.0
    ):
        # Results are saved before they are multiplied by the outer scales of rows, converted to 16
        # bits, or added. The forward pass has both; a recomputation frees the first.
        _, products, _ = compute_feed_forward_bytes(facts, kind, candidate)
        quantising += products + block.inner + block.gathered
    if has_dropout:  # nor are masks saved; the input is among the temporaries
        quantising += block.inner / candidate.activation_bytes
    return quantising - _compute_ending_result_bytes(facts, kind, candidate)


def compute_repeated_bytes(
    facts: ModelFacts,
    kind: LayerKind,
    candidate: Candidate,
    block: BlockTensorBytes,
    inner: float,
    inner_matmuls: float,
) -> float:
    """Compute the bytes within a feed-forward that runs again with results in fp32, where it
    quantises the operands of its first or of its last product. Each result remains saved until its
    product runs.

    Args:
        inner: bytes that the feed-forward has saved when it has run again.
        inner_matmuls: those of its products.
    """
    ending = _compute_ending_result_bytes(facts, kind, candidate)
    before_down = inner + ending + block.temporaries.down.output
    results = inner_matmuls - block.routed
    results *= 4.0 / candidate.activation_bytes
    before_up = inner - inner_matmuls - block.inner + results + ending + block.temporaries.up.output
    return block.stream + max(before_down, before_up)


def _compute_ending_result_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Compute the bytes that `selective` saves of results of a layer's last product, if it is
    emulated or has an adapter with dropout, and what follows it. They are not allocated yet while
    its operands are quantised, or the adapter's input is dropped."""
    shares = candidate.quantised_shares
    size = candidate.activation_bytes
    branch_output = compute_branch_output_bytes(candidate, facts)
    has_dropout = candidate.adapter is not None and candidate.adapter.has_dropout
    if has_dropout and candidate.layout.tp == 1 and not kind.shape.sparse:
        return 2.0 * branch_output  # of the product and the adapter
    if shares is None or not shares.is_emulated or candidate.layout.tp > 1:
        return 0.0
    if not kind.shape.sparse:
        return branch_output * max(4, size) / size
    assert facts.shape.experts is not None
    rows = candidate.count_sent_rows(facts.shape.experts.experts_per_token)
    return rows * facts.shape.hidden_size * max(4, size) + branch_output


def _has_fp4_kernels(candidate: Candidate) -> bool:
    """Return True if kernels multiply 4-bit operands."""
    shares = candidate.quantised_shares
    return shares is not None and shares.has_4bit_operands and not shares.is_emulated
