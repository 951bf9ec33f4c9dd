"""Bytes that the first layer through which a gradient passes saves less than equal layers.

Nothing below its first trained matrix needs a gradient, so autograd saves nothing there.
"""

from __future__ import annotations

from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.activations import get_layer_activations
from shardwright.planner.memory.attention_activations import compute_attention_bytes
from shardwright.planner.memory.backward_peak import Products
from shardwright.planner.memory.block_weights import (
    DOWN_ROLES,
    UP_ROLES,
    compute_adapter_input_bytes,
    count_product_elements,
    find_frozen_products,
    has_own_inputs,
    list_adapter_inputs,
)
from shardwright.planner.model_costs import LayerKind, ModelFacts, get_layer_recompute


def find_first_layer(facts: ModelFacts) -> int | None:
    """Find the first layer of the model through which a gradient passes."""
    for layer, slot in enumerate(facts.slot_of_layer):
        if facts.kinds[slot].has_backward:
            return layer
    return None


def compute_unsaved_bytes(facts: ModelFacts, candidate: Candidate) -> float:
    """Compute the bytes that a micro-batch saves less in the first layer with a gradient.

    0 if the embedding or a norm of the layer is trained, or the layer is recomputed: then it saves
    its input or its results in any case. Of layers with parallel branches, and of experts, only the
    input of the first norm counts.
    """
    found = _find_first_roles(facts, candidate)
    if found is None:
        return 0.0
    kind, roles = found
    size = candidate.activation_bytes
    shape = facts.shape
    stream = candidate.residual_tokens * shape.hidden_size * size
    norms = stream * (shape.names.pre_attention_norm is not None)
    others = roles.difference(("attention_out",), UP_ROLES, DOWN_ROLES)
    if others or shape.parallel_residual:
        return norms + _compute_mask_bytes(facts, kind, candidate, "projections")
    attention = compute_attention_bytes(facts, kind, candidate)
    if "attention_out" in roles:
        is_output_saved = "attention_out" not in find_frozen_products(kind, candidate)
        queries = candidate.micro_batch_tokens * shape.query_width / candidate.layout.tp * size
        norms += _compute_mask_bytes(facts, kind, candidate, "attention_out")
        return norms + attention.saved - is_output_saved * queries
    norms += stream * (shape.names.pre_mlp_norm is not None)
    if kind.shape.sparse or roles.intersection(UP_ROLES):
        return norms + attention.saved + _compute_mask_bytes(facts, kind, candidate, "up")
    inner = candidate.micro_batch_tokens * shape.intermediate_size / candidate.layout.tp * size
    saved = compute_adapter_input_bytes(facts, kind, candidate)
    saved -= _compute_mask_bytes(facts, kind, candidate, "down")
    saved += inner * ("down" not in find_frozen_products(kind, candidate))
    return get_layer_activations(facts, kind, candidate).saved_bytes - saved


def count_unread_elements(facts: ModelFacts, candidate: Candidate) -> float:
    """Count the elements of the matrices of the first layer with a gradient that compute no
    gradient of their input: up to its first trained one, which computes that of its weight."""
    found = _find_first_roles(facts, candidate)
    if found is None:
        return 0.0
    kind, roles = found
    elements = count_product_elements(facts, kind, candidate)
    unread = elements.projections
    others = roles.difference(("attention_out",), UP_ROLES, DOWN_ROLES)
    if others or facts.shape.parallel_residual:
        return unread
    unread += elements.attention_out
    if "attention_out" in roles or kind.shape.sparse:
        return unread
    return unread + elements.up + elements.down * roles.isdisjoint(UP_ROLES)


def _find_first_roles(
    facts: ModelFacts, candidate: Candidate
) -> tuple[LayerKind, frozenset[str]] | None:
    """Find the first layer with a gradient and the roles that are trained in it. None if it saves
    as much as others."""
    layer = find_first_layer(facts)
    has_trained_embedding = candidate.adapter is None and facts.is_embedding_trained
    if layer is None or has_trained_embedding or not candidate.engine.has_ordered_frees:
        return None
    kind = facts.kinds[facts.slot_of_layer[layer]]
    if get_layer_recompute(kind, candidate.recompute) != "none":
        return None
    roles = _list_trained_roles(facts, kind, candidate)
    return None if "norm" in roles else (kind, roles)


def _list_trained_roles(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> frozenset[str]:
    """List the roles of a layer's parameters that are trained, or have adapters."""
    if candidate.adapter is not None:
        return frozenset(candidate.adapter.roles)
    return frozenset(spec.role for spec in facts.trained_parameters if spec.layer == kind.slot)


def _compute_mask_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, products: Products
) -> float:
    """Compute the bytes of masks of dropout before adapters of these products, which only the
    gradient of their input reads."""
    if candidate.adapter is None or not has_own_inputs(candidate):
        return 0.0
    inputs = list_adapter_inputs(facts, kind, candidate, candidate.adapter)
    return sum(width for reader, width in inputs if reader == products)
