"""Weights of a block in its backward pass, and results of its adapters."""

from __future__ import annotations

from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate, LowRankAdapter
from shardwright.planner.memory.backward_peak import (
    BlockWeightBytes,
    ProductElements,
    Products,
    WeightBytes,
)
from shardwright.planner.model_costs import LayerKind, Matmul, ModelFacts
from shardwright.planner.time.memory_traffic import has_wide_gradients

UP_ROLES = ("gate", "up", "gate_up", "expert_gate_up")
DOWN_ROLES = ("down", "expert_down")


def count_product_elements(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, *, should_skip_frozen: bool = False
) -> ProductElements:
    """Count the elements of a layer's matrices on this rank, by the product that reads them."""
    elements: dict[str, float] = {}
    for product in (*kind.matmuls, *kind.expert_matmuls):
        if product.role != "router" and (product.is_trained or not should_skip_frozen):
            products = _find_products(product)
            elements[products] = elements.get(products, 0.0) + _count_local_elements(
                facts, kind, product, candidate.layout
            )
    return ProductElements(**elements)


def count_largest_matrix(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Count the elements of a layer's largest matrix on this rank."""
    return max(
        _count_local_elements(facts, kind, product, candidate.layout)
        for product in (*kind.matmuls, *kind.expert_matmuls)
    )


def find_frozen_products(kind: LayerKind, candidate: Candidate) -> frozenset[Products]:
    """Find the products of a layer of which all matrices are frozen, and none has an adapter that
    reads the same input: they save no input.

    Of experts and a shared one both must be. With dropout every adapter has an input of its own.
    Where gradients of weights are deferred, the first of each product counts as that of the
    product.
    """
    matrices = [
        product for product in (*kind.matmuls, *kind.expert_matmuls) if product.role != "router"
    ]
    roles = candidate.adapted_roles
    if has_own_inputs(candidate) and not candidate.is_deferring:
        roles = ()
    # Counts of saved tensors that were read from allocators have their own rule for adapters.
    if not candidate.engine.has_ordered_frees:
        roles = None
    trained = {
        _find_products(product)
        for product in matrices
        if (product.is_trained if roles is None else product.role in roles)
    }
    return frozenset(map(_find_products, matrices)) - trained


def _find_products(product: Matmul) -> Products:
    """Return the products of a block that read a matrix, which is no router's."""
    if product.role in DOWN_ROLES:
        return "down"
    if product.role in UP_ROLES:
        return "up"
    return "attention_out" if product.role == "attention_out" else "projections"


def _count_local_elements(
    facts: ModelFacts, kind: LayerKind, product: Matmul, layout: Layout
) -> float:
    elements = _count_local_outputs(product, layout.tp) * _count_local_inputs(product, layout.tp)
    return elements * facts.count_local_matrices(kind, product, layout.ep)


def get_weight_bytes(candidate: Candidate, *, is_deferred: bool) -> BlockWeightBytes:
    """Return the bytes per element of a block's matrices in its backward pass.

    Args:
        is_deferred: the gradients of weights are computed later.
    """
    is_wide = candidate.has_wide_products and has_wide_gradients(candidate)
    return BlockWeightBytes(
        dense=_get_matrix_bytes(candidate, is_deferred=is_deferred, is_wide=is_wide),
        experts=_get_matrix_bytes(candidate, is_deferred=is_deferred, is_wide=False),
    )


def _get_matrix_bytes(candidate: Candidate, *, is_deferred: bool, is_wide: bool) -> WeightBytes:
    """Return the bytes of matrices; `is_wide` if their gradients are computed in fp32."""
    size = candidate.activation_bytes
    master = candidate.master_bytes
    if candidate.adapter is not None:
        # A quantised matrix is dequantised for the product that computes the gradient of its input.
        return WeightBytes(result=size if candidate.adapter.quantised else 0.0)
    if candidate.is_sharded:
        # Gathered weights are freed after the whole block, and the gradients reduced.
        return WeightBytes(result=0.0 if is_deferred else size, remaining=size)
    cast = 0.0 if candidate.has_working_weights or size == master else size
    if is_deferred:
        return WeightBytes(cast=cast)
    layout = candidate.layout
    # DDP has no buckets for the gradients of offloaded weights.
    num_replicas = layout.dp_replicate * layout.fsdp
    has_buckets = num_replicas > 1 and not candidate.offloads_trained_weights
    is_added = candidate.gradient_accumulation_steps > 1 or has_buckets
    is_converted = size != master and not is_wide
    return WeightBytes(
        result=size if is_converted else master,
        converted=master if is_converted else 0.0,
        remaining=0.0 if is_added else master,
        cast=cast,
    )


def compute_adapter_result_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Compute the bytes of one layer's products with adapters: of rank width, and of the adapted
    matrix's output width. A product that is summed in chunks has no result of the latter."""
    adapter = candidate.adapter
    if adapter is None:
        return 0.0
    layout = candidate.layout
    is_pipelined = layout.tp > 1 and layout.async_tensor_parallel in ("chunked", "fused")
    elements = 0.0
    for product, rows in _list_adapted_products(facts, kind, candidate, adapter):
        width = float(adapter.rank)
        if not (is_pipelined and product.sharding == "rows" and product in kind.matmuls):
            width += _count_local_outputs(product, layout.tp)
        if adapter.has_magnitudes and adapter.has_dropout:
            # The matrix also multiplies what is left of the input.
            width += _count_local_outputs(product, layout.tp)
        if adapter.has_magnitudes and layout.tp > 1 and product.sharding == "rows":
            # Its gradient reads the product that is summed over ranks.
            width += _count_local_outputs(product, layout.tp)
        elements += rows * width
    return elements * candidate.activation_bytes


def compute_adapter_input_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Compute the bytes that one layer's adapters save: inputs beyond those of their matrices, and
    results of rank width."""
    adapter = candidate.adapter
    if adapter is None:
        return 0.0
    inputs = list_adapter_inputs(facts, kind, candidate, adapter)
    elements = sum(width for _, width in inputs)
    size = candidate.activation_bytes
    narrow = _count_narrow_elements(facts, kind, candidate, adapter) * size
    if not has_own_inputs(candidate):
        return elements * candidate.engine.adapter_input_bytes + narrow
    # What is left, and a mask. The input of attention's output is also saved by attention.
    by_products = dict(inputs)
    by_products.pop("attention_out", None)
    counted = sum(by_products.values()) if candidate.is_deferring else 0.0
    return elements * (size + 1.0) - counted * size + narrow


def compute_deferred_input_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Compute the bytes of inputs of one layer's adapters that remain until the gradients of
    weights are computed, beyond those of their matrices."""
    adapter = candidate.adapter
    if adapter is None:
        return 0.0
    # Input of B, and the gradient of A's output.
    elements = 2.0 * _count_narrow_elements(facts, kind, candidate, adapter)
    if has_own_inputs(candidate):
        inputs = list_adapter_inputs(facts, kind, candidate, adapter)
        elements += sum(width for _, width in inputs) - sum(dict(inputs).values())
    return elements * candidate.activation_bytes


def _count_narrow_elements(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, adapter: LowRankAdapter
) -> float:
    """Count the elements of results of A, of rank width, which are inputs of B."""
    if not candidate.engine.has_ordered_frees:
        return 0.0
    products = _list_adapted_products(facts, kind, candidate, adapter)
    return adapter.rank * sum(rows for _, rows in products)


def has_own_inputs(candidate: Candidate) -> bool:
    """Return True if every adapter saves an input of its own."""
    adapter = candidate.adapter
    return adapter is not None and adapter.has_dropout and candidate.engine.has_ordered_frees


def list_adapter_inputs(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, adapter: LowRankAdapter
) -> list[tuple[Products | None, float]]:
    """List the elements of each adapter's input, with the products that read it."""
    return [
        (
            None if product.role == "router" else _find_products(product),
            rows * _count_local_inputs(product, candidate.layout.tp),
        )
        for product, rows in _list_adapted_products(facts, kind, candidate, adapter)
    ]


def compute_scaled_output_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Compute the bytes of outputs that one layer saves to compute gradients of magnitudes: sums of
    product and adapter, before they are scaled; with dropout both apart."""
    adapter = candidate.adapter
    if adapter is None or not adapter.has_magnitudes:
        return 0.0
    elements = sum(
        rows * _count_local_outputs(product, candidate.layout.tp)
        for product, rows in _list_adapted_products(facts, kind, candidate, adapter)
    )
    return elements * candidate.activation_bytes * (1.0 + adapter.has_dropout)


def _list_adapted_products(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, adapter: LowRankAdapter
) -> list[tuple[Matmul, float]]:
    """List the products with adapters, and their rows on this rank."""
    tokens = float(candidate.micro_batch_tokens)
    adapted = [(product, tokens) for product in kind.matmuls if product.role in adapter.roles]
    if kind.expert_matmuls:
        assert facts.shape.experts is not None
        rows = candidate.count_sent_rows(facts.shape.experts.experts_per_token)
        adapted += [(each, rows) for each in kind.expert_matmuls if each.role in adapter.roles]
    return adapted


def _count_local_outputs(product: Matmul, tp: int) -> float:
    return product.num_outputs / (tp if product.sharding == "columns" else 1)


def _count_local_inputs(product: Matmul, tp: int) -> float:
    return product.num_inputs / (tp if product.sharding == "rows" else 1)
