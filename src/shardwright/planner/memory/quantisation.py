"""Temporary memory of a block's products: in which operands are quantised, in separate operations,
and in which norms of adapted rows are computed; and inputs that compiled blocks do not save for
products of codes.

Legend: M tokens, N output features, K input features of a product on this rank.
"""

from __future__ import annotations

from shardwright.planner.candidate import Candidate, LowRankAdapter
from shardwright.planner.memory.backward_peak import BlockTemporaries, ProductTemporaries
from shardwright.planner.memory.block_weights import DOWN_ROLES, UP_ROLES
from shardwright.planner.model_costs import LayerKind, ModelFacts
from shardwright.planner.time.memory_traffic import (
    compute_local_sides,
    compute_quantised_shares,
    list_matmuls,
)

_MAX_NORM_ELEMENTS = 1 << 24
"""Elements of a matrix of whose rows norms are computed at a time (`model.lora`)."""
_UNSAVED_PARTS = {"tensors": 1.0, "rows": 0.5}
"""Part of a product's input in 16 bits that a compiled block does not save, by the extent of its
scales (docs/decisions/0241-inputs-that-compiled-8-bit-blocks-save.md)."""


def compute_block_temporaries(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> BlockTemporaries:
    """Compute the temporary bytes of a block's products; 0 if they are compiled or not quantised,
    unless outputs of adapted matrices are scaled.

    A product quantises one operand after the other, and keeps the codes of the first, a byte each.
    """
    shares = candidate.quantised_shares
    adapter = candidate.adapter
    if adapter is not None and (adapter.has_magnitudes or adapter.has_dropout):
        norms = _compute_norm_temporaries(facts, kind, candidate, adapter)
        dropout = _compute_dropout_temporaries(facts, kind, candidate, adapter)
        return BlockTemporaries(*map(max, norms, dropout))
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
        has_weight_gradient = candidate.adapter is None and product.is_trained
        has_weight_gradient &= bool(shares.get_weight_gradient_share(product.role))
        if shares.is_emulated:
            temporaries = _compute_emulated_temporaries(
                candidate, m * k, m * n, weight, has_weight_gradient=has_weight_gradient
            )
        else:
            # The weight's codes are transposed too.
            beside_gradient = m * n + weight + quantised_weight
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


def _compute_norm_temporaries(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, adapter: LowRankAdapter
) -> BlockTemporaries:
    """Compute the temporary bytes of norms of rows of W + scale x B A, which scale the output: W in
    fp32, a product B A, and next to them the outputs of the matrix and of the adapter."""
    if not adapter.has_magnitudes:
        return BlockTemporaries()
    size = candidate.activation_bytes
    wide = max(size, 4)
    found: dict[str, ProductTemporaries] = {}
    for product, rows in list_matmuls(facts, kind, candidate):
        if product.role not in adapter.roles:
            continue
        n, k = compute_local_sides(product, candidate)
        chunk = min(n * k, _MAX_NORM_ELEMENTS)
        matrix = n * k if adapter.quantised else chunk * (size < 4)
        temporaries = ProductTemporaries(output=wide * (matrix + chunk) + 2.0 * size * rows * n)
        operation = _get_operation(product.role)
        found[operation] = max(temporaries, found.get(operation, ProductTemporaries()))
    return BlockTemporaries(**found)


def _compute_dropout_temporaries(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, adapter: LowRankAdapter
) -> BlockTemporaries:
    """Compute the temporary bytes of dropout before adapters: of each element of an input 32
    random bits, itself, which the frozen product does not save, and divided by the rate; next to
    what is left and the mask."""
    found: dict[str, ProductTemporaries] = {}
    if not adapter.has_dropout or not candidate.engine.has_ordered_frees or candidate.compile:
        return BlockTemporaries()
    for product, rows in list_matmuls(facts, kind, candidate):
        if product.role in adapter.roles:
            _, num_inputs = compute_local_sides(product, candidate)
            element_bytes = 4.0 + 2.0 * candidate.activation_bytes
            temporaries = ProductTemporaries(output=element_bytes * rows * num_inputs)
            operation = _get_operation(product.role)
            found[operation] = max(temporaries, found.get(operation, ProductTemporaries()))
    return BlockTemporaries(**found)


def _compute_emulated_temporaries(
    candidate: Candidate,
    inputs: float,
    outputs: float,
    weight: float,
    *,
    has_weight_gradient: bool,
) -> ProductTemporaries:
    """Compute the temporary bytes of emulated products, from the elements of their operands.

    A product quantises one operand after the other, and dequantises both before it multiplies them:
    to fp32, by a division of the codes as fp32, and then to fp64 if it computes in that. With
    compute in bf16 the result is in fp32 next to both, and converted.
    """
    shares = candidate.quantised_shares
    assert shares is not None
    size = candidate.activation_bytes
    wide = max(4.0, size)
    dequantising = 8.0 if wide == 4.0 else 4.0 + wide

    def multiply(left: float, right: float, result: float) -> tuple[float, float]:
        """Return the bytes before the result is allocated, and those next to it."""
        codes = left + right
        before = max(
            shares.temporary_bytes * left,
            left + shares.temporary_bytes * right,
            codes + dequantising * left,
            codes + wide * left + dequantising * right,
        )
        return before, codes + wide * codes + (wide - size) * result

    output = multiply(inputs, weight, outputs)
    before_gradient, beside_gradient = multiply(outputs, weight, inputs)
    if has_weight_gradient:
        before, beside = multiply(outputs, inputs, weight)
        beside_gradient = max(beside_gradient, before, beside + size * weight)
    return ProductTemporaries(max(output), max(before_gradient, beside_gradient), beside_gradient)


def compute_widening_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Compute the bytes by which results of a layer's emulated products exceed those in 16 bits:
    the products are in fp32, and `selective` saves their results before they are converted."""
    shares = candidate.quantised_shares
    if shares is None or not shares.is_emulated or candidate.activation_bytes >= 4:
        return 0.0
    elements = 0.0
    for product, rows in list_matmuls(facts, kind, candidate):
        num_outputs, _ = compute_local_sides(product, candidate)
        num_matrices = facts.count_local_matrices(kind, product, candidate.layout.ep)
        elements += shares.get_share(product.role) * rows * num_outputs * num_matrices
    return elements * (4 - candidate.activation_bytes)


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
