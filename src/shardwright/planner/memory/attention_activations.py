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
    has_tiles = candidate.layout.cp > 1 and not (
        candidate.has_masked_kernels and resolve_context_method(facts, candidate) == "ulysses"
    )
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
    has_mask = has_dense_mask(facts, candidate, kind.shape.window)
    # The only CUDA kernel that takes a mask does not support grouped heads: keys and values
    # are repeated to Q.
    attended_keys = queries if has_mask else keys
    if candidate.layout.cp > 1 and resolve_context_method(facts, candidate) == "all_gather":
        attended_keys *= candidate.layout.cp
    saved = (2 * queries + 2 * attended_keys) * size + 4 * heads
    if shape.names.qkv is not None:
        # Views of the fused result keep all of it alive next to the rotated queries and
        # keys.
        saved += (queries + keys) * size if kind.shape.rope is not None else 0.0
    saved += tensors.rotary * (queries + keys) * size
    if candidate.layout.cp > 1 and resolve_context_method(facts, candidate) != "all_gather":
        saved += tensors.ring_outputs * queries * size
    if shape.qk_norm is not None:
        # Sharded over tensor-parallel ranks, a norm of all heads saves its input in fp32, and that
        # times the scale for the gradient of its weight.
        is_sharded = shape.qk_norm == "full" and tp > 1 and candidate.engine.has_ordered_frees
        num_wide = 1 if kind.has_frozen_qk_norms else 2
        saved += (queries + keys) * (num_wide * max(size, 4) if is_sharded else size)
    matmul_results = (2 * queries + 2 * keys) * size + 4 * heads
    saved *= tokens
    matmul_results *= tokens
    kernel = choose_planned_kernel(facts, candidate, kind.shape.window)
    if kernel == "flex" and shape.attention_sinks:
        saved += tokens * (queries * size + 2 * 4 * heads)
    score_bytes = score_products = 0.0
    if kernel == "explicit":
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
    output = tokens * (queries * size + 4 * heads)
    gradients = tokens * (2 * queries + 2 * keys) * size
    return AttentionBytes(saved, matmul_results, gradients, output, score_bytes, score_products)


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
