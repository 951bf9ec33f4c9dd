"""Bytes that one layer's attention saves for its backward pass.

The table is in `planner.memory.activations`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.architecture.attention_kernel import (
    AttentionKernelName,
    AttentionRequirements,
    KernelSupport,
    choose_attention_kernel,
    find_flash_limit,
)
from shardwright.layout.context_method import ContextMethod, choose_context_method
from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.block_weights import find_frozen_products
from shardwright.planner.model_costs import LayerKind, ModelFacts


def resolve_context_method(facts: ModelFacts, candidate: Candidate) -> ContextMethod:
    """Return the context-parallel method, with `auto` resolved by the trainer's rule."""
    if candidate.layout.cp_method != "auto":
        return candidate.layout.cp_method
    return choose_context_method(candidate.layout, facts.shape, candidate.sequence_length).method


def choose_planned_kernel(
    facts: ModelFacts, candidate: Candidate, window: int | None
) -> AttentionKernelName:
    """Return the cached attention kernel of layers with a window, by the decoder's rule.

    Ranks that share rows compute tiles with other kernels, which add sinks to their results.
    """
    has_tiles = _has_tiles(facts, candidate)
    key = (
        window,
        has_tiles,
        candidate.sequence_length,
        candidate.document_tokens is not None,
        candidate.flash_attention,
        candidate.has_masked_kernels,
        candidate.compute_precision,
        candidate.attention,
    )
    kernel = facts.kernel_cache.get(key)
    if kernel is None:
        kernel = _choose_kernel(facts, candidate, window, has_tiles=has_tiles)
        facts.kernel_cache[key] = kernel
    return kernel


def _has_tiles(facts: ModelFacts, candidate: Candidate) -> bool:
    """Return True if attention is computed in tiles of the rows that ranks share."""
    return candidate.layout.cp > 1 and not (
        candidate.has_masked_kernels and resolve_context_method(facts, candidate) == "ulysses"
    )


def has_saved_scores(facts: ModelFacts, candidate: Candidate, window: int | None) -> bool:
    """Return True if the backward pass reads the softmax of attention again.

    Tiles save the log-sum-exp and compute their scores again.
    """
    if candidate.engine.has_ordered_frees and _has_tiles(facts, candidate):
        return False
    return choose_planned_kernel(facts, candidate, window) == "explicit"


def compute_tile_bytes(
    facts: ModelFacts, candidate: Candidate, window: int | None, *, is_backward: bool
) -> float:
    """Compute the bytes that a pass needs to compute the tiles of rows that ranks share: the
    largest tile's scores without a fused kernel, and gathered keys and values."""
    gathered = _compute_gathered_bytes(facts, candidate, is_backward=is_backward)
    is_explicit = choose_planned_kernel(facts, candidate, window) == "explicit"
    if not is_explicit or has_saved_scores(facts, candidate, window):
        return gathered
    tokens = candidate.sequence_length / candidate.layout.cp
    method = resolve_context_method(facts, candidate)
    # With `all_gather` the half of a rank's tokens in the last chunk see all others at once.
    keys = {
        "ring": tokens,
        "all_gather": (candidate.sequence_length - tokens / 2) / 2,
        "ulysses": float(candidate.sequence_length),
    }[method]
    heads = facts.shape.num_heads / candidate.layout.tp
    size = candidate.activation_bytes
    # Scores, shifted scores and softmax in fp32. Backward: scores, softmax, its gradient, and that
    # of the scores before and after its scale in fp32; softmax and gradient in the compute
    # precision. A soft cap adds its slope.
    num_wide = (5.0 if is_backward else 3.0) + (facts.shape.attention_soft_cap is not None)
    cast = 2 * size if is_backward and size < 4 else 0
    scores = candidate.micro_batch_tokens * heads * keys * (num_wide * max(size, 4) + cast)
    return gathered + scores


def _gathers_keys(facts: ModelFacts, candidate: Candidate) -> bool:
    return candidate.layout.cp > 1 and resolve_context_method(facts, candidate) == "all_gather"


def _compute_gathered_bytes(facts: ModelFacts, candidate: Candidate, *, is_backward: bool) -> float:
    """Compute the bytes of keys and values of whole rows, and of their gradients in fp32."""
    shape = facts.shape
    is_latent = shape.latent is not None
    if not _gathers_keys(facts, candidate) or is_latent or not candidate.engine.has_ordered_frees:
        return 0.0
    width = shape.head_dim * max(1.0, shape.num_kv_heads / candidate.layout.tp)
    size = candidate.activation_bytes
    tokens = candidate.micro_batch_tokens
    # As they arrive by rank, and in the order of the row.
    row_bytes = 2.0 * size
    own_bytes = 0.0
    if is_backward:
        wide = max(size, 4)
        row_bytes = max(row_bytes + wide, 2.0 * wide)  # gradients are sorted by rank again
        own_bytes = (shape.query_width / candidate.layout.tp + 2 * width) * wide
    return tokens * (2 * candidate.layout.cp * width * row_bytes + own_bytes)


def _choose_kernel(
    facts: ModelFacts, candidate: Candidate, window: int | None, *, has_tiles: bool
) -> AttentionKernelName:
    shape = facts.shape
    needs = AttentionRequirements(
        window=window if window is not None and window < candidate.sequence_length else None,
        is_packed=candidate.document_tokens is not None,
        soft_cap=shape.attention_soft_cap,
        has_sinks=shape.attention_sinks and not has_tiles,
    )
    if not candidate.flash_attention:
        return "explicit"
    if has_tiles or not candidate.has_masked_kernels:
        return choose_attention_kernel(needs, _NO_MASKED_KERNELS).kernel
    dtype = {"fp64": "float64", "fp32": "float32", "fp16": "float16"}.get(
        candidate.compute_precision, "bfloat16"
    )
    support = KernelSupport(
        find_flash_limit(dtype, shape.head_dim),
        "no float64" if dtype == "float64" else None,
    )
    return choose_attention_kernel(needs, support, candidate.attention).kernel


_NO_MASKED_KERNELS = KernelSupport("not on this device", "not on this device")


def has_dense_mask(facts: ModelFacts, candidate: Candidate, window: int | None) -> bool:
    """Return True if attention has a dense mask: of documents, padding, or a sliding window."""
    is_masked = (
        candidate.document_tokens is not None
        or candidate.engine.has_padding_mask
        or (window is not None and window < candidate.sequence_length)
    )
    return is_masked and choose_planned_kernel(facts, candidate, window) in ("sdpa", "explicit")


@dataclass(frozen=True)
class AttentionBytes:
    """Bytes of one layer's attention: all saved tensors, the results of matmuls and attention
    among them, gradients in flight, and the kernel's output with its log-sum-exp."""

    saved: float
    matmul_results: float
    gradients: float
    output: float
    scores: float = 0.0
    """Those of scores and their softmax among the saved ones, without a fused kernel."""
    score_products: float = 0.0
    """The result of the product of queries and keys, without a fused kernel."""


def compute_attention_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> AttentionBytes:
    """Compute the bytes of one layer's attention for one micro-batch."""
    shape = facts.shape
    size = candidate.activation_bytes
    tensors = candidate.engine.count_saved_tensors(candidate.adapted_roles)
    tp = candidate.layout.tp
    tokens = candidate.micro_batch_tokens
    if shape.latent is not None:
        return _compute_latent_attention_bytes(facts, candidate)
    queries = shape.query_width / tp
    keys = shape.head_dim * max(1.0, shape.num_kv_heads / tp)
    heads = shape.num_heads / tp
    kernel = choose_planned_kernel(facts, candidate, kind.shape.window)
    has_scores = has_saved_scores(facts, candidate, kind.shape.window)
    has_mask = has_dense_mask(facts, candidate, kind.shape.window)
    if kernel == "explicit" and not has_scores:
        has_mask = False  # tiles multiply by the keys of a group without repeating them
    # The only CUDA kernel that takes a mask does not support grouped heads: keys and values
    # are repeated to Q.
    attended_keys = queries if has_mask else keys
    # Ours gathers keys and values again in the backward pass.
    saves_gathered = _gathers_keys(facts, candidate) and not candidate.engine.has_ordered_frees
    if saves_gathered:
        attended_keys *= candidate.layout.cp
    saved = (2 * queries + 2 * attended_keys) * size + 4 * heads
    if shape.names.qkv is not None:
        # Views of the fused result keep all of it alive next to the rotated queries and
        # keys.
        saved += (queries + keys) * size if kind.shape.rope is not None else 0.0
    saved += tensors.rotary * (queries + keys) * size
    if candidate.layout.cp > 1 and not saves_gathered:
        saved += tensors.ring_outputs * queries * size
    if shape.qk_norm is not None:
        saved += (queries + keys) * _get_qk_norm_bytes(facts, kind, candidate)
    matmul_results = (2 * queries + 2 * keys) * size + 4 * heads
    saved *= tokens
    matmul_results *= tokens
    if kernel == "flex" and shape.attention_sinks:
        saved += tokens * (queries * size + 2 * 4 * heads)
    score_bytes = score_products = 0.0
    if has_scores:
        scores = tokens * heads * candidate.sequence_length
        # Weights in fp32 and cast, keys repeated. `selective` saves the results of both
        # matmuls too.
        cast = size if size < 4 else 0
        soft_cap = size if shape.attention_soft_cap is not None else 0
        score_bytes = scores * (max(size, 4) + cast + soft_cap)
        saved += score_bytes + 2 * tokens * (queries - attended_keys) * size
        # Only its product reads the output again.
        if "attention_out" in find_frozen_products(kind, candidate):
            saved -= tokens * queries * size
        score_products = scores * size
        matmul_results += score_products
    elif kernel == "explicit":
        score_products = _compute_tile_products(facts, candidate)
        matmul_results += score_products
    output = tokens * (queries * size + 4 * heads)
    gradients = tokens * (2 * queries + 2 * keys) * size
    return AttentionBytes(saved, matmul_results, gradients, output, score_bytes, score_products)


def _get_qk_norm_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Return the bytes that a norm of queries and keys saves per element.

    Sharded over tensor-parallel ranks, a norm of all heads saves its input in fp32, and that times
    the scale for the gradient of its weight.
    """
    is_sharded = facts.shape.qk_norm == "full" and candidate.layout.tp > 1
    if not is_sharded or not candidate.engine.has_ordered_frees:
        return candidate.activation_bytes
    return (1 if kind.has_frozen_qk_norms else 2) * max(candidate.activation_bytes, 4)


def _compute_tile_products(facts: ModelFacts, candidate: Candidate) -> float:
    """Compute the bytes of all tiles' products of queries and keys, which `selective` saves.

    Later tokens of other ranks are in no tile, unless a rank has the whole row.
    """
    seen_tokens: float = candidate.sequence_length
    if resolve_context_method(facts, candidate) != "ulysses":
        seen_tokens = (seen_tokens + seen_tokens / candidate.layout.cp) / 2
    heads = facts.shape.num_heads / candidate.layout.tp
    return candidate.micro_batch_tokens * heads * seen_tokens * candidate.activation_bytes


def _compute_latent_attention_bytes(facts: ModelFacts, candidate: Candidate) -> AttentionBytes:
    """Compute the bytes of latent attention: latents (before and after their norms), full
    queries and keys, values and the output."""
    shape = facts.shape
    size = candidate.activation_bytes
    tp = candidate.layout.tp
    latent = shape.latent
    assert latent is not None
    tokens = candidate.micro_batch_tokens
    heads = shape.num_heads / tp
    head_dim = latent.nope_dim + latent.rope_dim
    latents = 2 * (latent.query_rank or 0) + 2 * latent.key_value_rank + latent.rope_dim
    # Non-rotary keys, and values: the result of one matmul.
    expanded = heads * (latent.nope_dim + latent.value_dim)
    # Output, and concatenated queries and keys.
    attended = heads * (2 * head_dim + latent.value_dim)
    saved = tokens * ((latents + expanded + attended) * size + 4 * heads)
    matmul_results = (
        (latent.query_rank or 0)
        + latent.key_value_rank
        + latent.rope_dim
        + heads * head_dim
        + expanded
        + heads * latent.value_dim
    )
    output = tokens * heads * (latent.value_dim * size + 4)
    return AttentionBytes(
        saved, tokens * (matmul_results * size + 4 * heads), tokens * attended * size, output
    )
