"""Memory in which the operands of a block's products are quantised, in separate operations, and
inputs that compiled blocks do not save for products of codes.

Legend: M tokens, N output features, K input features of a product on this rank.
"""

from __future__ import annotations

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.backward_peak import BlockTemporaries, ProductTemporaries
from shardwright.planner.memory.block_weights import DOWN_ROLES, UP_ROLES
from shardwright.planner.model_costs import LayerKind, ModelFacts
from shardwright.planner.time.memory_traffic import (
    compute_local_sides,
    compute_quantised_shares,
    list_matmuls,
)

_UNSAVED_PARTS = {"tensors": 1.0, "rows": 0.5}
"""Part of a product's input in 16 bits that a compiled block does not save, by the extent of its
scales (docs/decisions/0241-inputs-that-compiled-8-bit-blocks-save.md)."""


def compute_block_temporaries(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> BlockTemporaries:
    """Compute the temporary bytes of a block's products; 0 if they are compiled or not quantised.

    A product quantises one operand after the other, and keeps the codes of the first, a byte each.
    """
    shares = candidate.quantised_shares
    found: dict[str, ProductTemporaries] = {}
    if shares is None or candidate.compile:
        return BlockTemporaries()
    size = shares.temporary_bytes
    for product, rows in list_matmuls(facts, kind, candidate):
        if not shares.get_share(product.role):
            continue
        n, k = compute_local_sides(product, candidate)
        num_matrices = facts.count_local_matrices(kind, product, candidate.layout.ep)
        m = rows * num_matrices
        weight = n * k * num_matrices
        # Gathered codes and working operands are not quantised again.
        is_quantised = (
            not candidate.has_working_operands
            and compute_quantised_shares(facts, kind, product, n, candidate)[0] == 1.0
        )
        quantised_weight = weight * is_quantised
        beside_gradient = m * n + weight + quantised_weight  # the weight's codes, transposed too
        if candidate.adapter is None and shares.get_weight_gradient_share(product.role):
            beside_gradient = max(beside_gradient, size * m * n, m * n + size * m * k)
        temporaries = ProductTemporaries(
            output=max(size * m * k, m * k + size * quantised_weight),
            input_gradient=max(size * m * n, m * n + size * quantised_weight),
            beside_gradient=beside_gradient,
        )
        operation = _get_operation(product.role)
        others = found.get(operation, ProductTemporaries())
        found[operation] = ProductTemporaries(*map(max, temporaries, others))
    return BlockTemporaries(**found)


def count_unsaved_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Count the bytes of inputs that a compiled block does not save, because the gradients of its
    weights are products of codes.

    With one scale the backward pass computes values and codes again, from tensors that are saved
    anyway. With scales of columns the forward pass saves transposed codes, a byte each. Only what
    is computed between products counts: the outputs of norms and gates. It is known for dense
    blocks with a norm before each branch; others count as if they saved all inputs.
    """
    shares = candidate.quantised_shares
    names = facts.shape.names
    if (
        shares is None
        or shares.spanning is None
        or shares.has_wide_weight_gradients
        or not candidate.compile
        or candidate.is_deferring
        or candidate.adapter is not None
        or candidate.layout.tp > 1
        or kind.shape.sparse
        or facts.shape.parallel_residual
        or None in (names.pre_attention_norm, names.pre_mlp_norm)
    ):
        return 0.0
    hidden = facts.shape.hidden_size
    elements = hidden * shares.attention + (hidden + facts.shape.intermediate_size) * shares.mlp
    num_bytes = candidate.micro_batch_tokens * elements * candidate.activation_bytes
    return _UNSAVED_PARTS[shares.spanning.operands] * num_bytes


def _get_operation(role: str) -> str:
    if role in DOWN_ROLES:
        return "down"
    if role in UP_ROLES:
        return "up"
    return "attention_out" if role == "attention_out" else "projections"
