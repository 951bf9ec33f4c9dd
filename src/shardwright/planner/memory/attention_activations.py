"""Bytes that one layer's attention saves for its backward pass.

The table is in `planner.memory.activations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shardwright.architecture import attention_kernel
from shardwright.architecture.attention_kernel import (
    MAX_SCORE_BYTES,
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


def compute_tile_bytes(facts: ModelFacts, candidate: Candidate, window: int | None) -> float:
    """Compute the bytes that a forward pass needs to compute the tiles of rows that ranks share:
    the largest tile's scores without a fused kernel, and gathered keys and values."""
    scores = _compute_tile_scores(facts, candidate, window, is_backward=False)
    if not _gathers_keys(facts, candidate) or not candidate.engine.has_ordered_frees:
        return scores
    # As they arrive by rank, and in the order of the row.
    row_pairs = candidate.layout.cp * _count_tile_elements(facts, candidate).pairs
    return scores + 2.0 * candidate.activation_bytes * row_pairs


def compute_tile_gradient_bytes(
    facts: ModelFacts, candidate: Candidate, window: int | None
) -> float:
    """Compute the peak bytes of the backward pass of attention over rows that ranks share
    (`parallel.context.ring_attention`), beyond saved tensors and the gradient of the output. 0 if
    one kernel computes whole rows.

    That gradient is made contiguous, and those of queries, keys and values are summed over tiles in
    fp32. `ring` sends the keys and values and, a step later, their gradients: sent ones, received
    ones, those of the rank's own queries and their sum exist at once. `all_gather` keeps keys and
    values as they are sent, as they arrive and in the order of the row, and sorts the gradients of
    one of the two at a time by rank.
    """
    if not candidate.engine.has_ordered_frees or not _has_tiles(facts, candidate):
        return 0.0
    size = candidate.activation_bytes
    wide = max(size, 4)
    cp = candidate.layout.cp
    queries, pairs, outputs = _count_tile_elements(facts, candidate)
    scores = _compute_tile_scores(facts, candidate, window, is_backward=True)
    sums = size * outputs + wide * (queries + pairs)
    method = resolve_context_method(facts, candidate)
    if method == "ulysses":
        return sums + size * (queries + pairs) + scores
    if method == "ring":
        tile = size * max(queries + pairs / 2.0, queries / 2.0 + pairs)
        received = size * (1.0 + (cp > 2)) * pairs
        return sums + received + 2.0 * wide * pairs + max(wide * pairs, tile + scores)
    tile = size * (queries / 2.0 + (cp - 0.5) * pairs)
    in_tile = size * pairs + cp * (2.0 * size + wide) * pairs + tile + scores
    return sums + max(in_tile, 2.0 * wide * cp * pairs)


class _TileElements(NamedTuple):
    """Elements of a rank's own tokens: queries, keys and values together, and outputs."""

    queries: float
    pairs: float
    outputs: float


def _count_tile_elements(facts: ModelFacts, candidate: Candidate) -> _TileElements:
    shape = facts.shape
    tokens = candidate.micro_batch_tokens
    tp = candidate.layout.tp
    queries = tokens * shape.query_width / tp
    if shape.latent is None:
        min_heads = candidate.layout.cp if _exchanges_heads(facts, candidate) else 1.0
        pairs = 2.0 * tokens * shape.head_dim * max(min_heads, shape.num_kv_heads / tp)
        return _TileElements(queries, pairs, queries)
    heads = tokens * shape.num_heads / tp
    key_dim = shape.latent.nope_dim + shape.latent.rope_dim
    value_dim = get_attended_value_dim(facts, candidate)
    return _TileElements(heads * key_dim, heads * (key_dim + value_dim), heads * value_dim)


def _compute_tile_scores(
    facts: ModelFacts, candidate: Candidate, window: int | None, *, is_backward: bool
) -> float:
    """Compute the bytes of the scores of a block of queries, without a fused kernel."""
    is_explicit = choose_planned_kernel(facts, candidate, window) == "explicit"
    if not is_explicit or has_saved_scores(facts, candidate, window):
        return 0.0
    size = candidate.activation_bytes
    tokens = candidate.sequence_length / candidate.layout.cp
    method = resolve_context_method(facts, candidate)
    queries = tokens
    keys = tokens if method == "ring" else float(candidate.sequence_length)
    if method == "all_gather":  # the rank's tokens in the last chunk see all others at once
        queries = tokens / 2
        keys -= queries
    row_scores = candidate.micro_batch_size * facts.shape.num_heads / candidate.layout.tp * keys
    block_queries = max(1.0, MAX_SCORE_BYTES // (row_scores * max(size, 4)))
    scores = row_scores * min(queries, block_queries)
    sums = 0.0
    if is_backward and block_queries < queries:  # gradients of keys and values, over the blocks
        sums = max(size, 4) * _count_tile_elements(facts, candidate).pairs
        sums *= keys / tokens if method == "all_gather" else 1.0
    # Scores, shifted scores and softmax in fp32. Backward: scores, softmax, its gradient, and that
    # of the scores before and after its scale in fp32; softmax and gradient in the compute
    # precision. A soft cap adds its slope.
    num_wide = (5.0 if is_backward else 3.0) + (facts.shape.attention_soft_cap is not None)
    cast = 2 * size if is_backward and size < 4 else 0
    return scores * (num_wide * max(size, 4) + cast) + sums


def _exchanges_heads(facts: ModelFacts, candidate: Candidate) -> bool:
    """Return True if attention saves queries, keys and values that an exchange has copied."""
    has_copies = candidate.layout.cp > 1 and candidate.engine.has_ordered_frees
    return has_copies and resolve_context_method(facts, candidate) == "ulysses"


def _gathers_keys(facts: ModelFacts, candidate: Candidate) -> bool:
    return candidate.layout.cp > 1 and resolve_context_method(facts, candidate) == "all_gather"


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
        find_flash_limit(dtype, shape.head_dim, attention_kernel.get_attended_value_dim(shape)),
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
    attended_keys = _count_attended_keys(facts, candidate, queries, keys, has_mask=has_mask)
    # Ours gathers keys and values again in the backward pass.
    saves_gathered = _gathers_keys(facts, candidate) and not candidate.engine.has_ordered_frees
    if saves_gathered:
        attended_keys *= candidate.layout.cp
    saved = (2 * queries + 2 * attended_keys) * size + 4 * heads
    if shape.names.qkv is not None and not _exchanges_heads(facts, candidate):
        # Views of the fused result keep all of it alive next to the rotated queries and
        # keys.
        saved += (queries + keys) * size if kind.shape.rope is not None else 0.0
    saved += tensors.rotary * (queries + keys) * size
    is_output_read = "attention_out" not in find_frozen_products(kind, candidate)
    if candidate.layout.cp > 1 and not saves_gathered and is_output_read:
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
        if not is_output_read:  # only its product reads the output again
            saved -= tokens * queries * size
        score_products = scores * size
        matmul_results += score_products
    elif kernel == "explicit":
        score_products = _compute_tile_products(facts, candidate)
        matmul_results += score_products
    output = tokens * (queries * size + 4 * heads)
    others = (_count_tile_outputs(facts, candidate) - 1.0) * output
    output += others
    matmul_results += others
    gradients = tokens * (2 * queries + 2 * keys) * size
    return AttentionBytes(saved, matmul_results, gradients, output, score_bytes, score_products)


def _count_attended_keys(
    facts: ModelFacts, candidate: Candidate, queries: float, keys: float, *, has_mask: bool
) -> float:
    """Count the elements of keys that attention saves for each token."""
    if _exchanges_heads(facts, candidate):  # a rank has at least one head
        num_heads = facts.shape.num_kv_heads / candidate.layout.tp
        keys = facts.shape.head_dim * max(num_heads, candidate.layout.cp)
    # The only CUDA kernel that takes a mask does not support grouped heads: keys and values are
    # repeated to Q.
    return queries if has_mask else keys


def _get_qk_norm_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Return the bytes that a norm of queries and keys saves per element.

    Sharded over tensor-parallel ranks, a norm of all heads saves its input in fp32, and that times
    the scale for the gradient of its weight.
    """
    is_sharded = facts.shape.qk_norm == "full" and candidate.layout.tp > 1
    if not is_sharded or not candidate.engine.has_ordered_frees:
        return candidate.activation_bytes
    return (1 if kind.has_frozen_qk_norms else 2) * max(candidate.activation_bytes, 4)


def _count_tile_outputs(facts: ModelFacts, candidate: Candidate) -> float:
    """Count the outputs of all tiles, each of which `selective` saves, in sizes of the output.

    Of the rank with the most: all of its tokens see those of every other rank. `all_gather`
    computes the tokens of all others at once.
    """
    if not candidate.engine.has_ordered_frees or not _has_tiles(facts, candidate):
        return 1.0
    cp = float(candidate.layout.cp)
    return {"ring": cp, "all_gather": 2.0, "ulysses": 1.0}[resolve_context_method(facts, candidate)]


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
    attended_values = get_attended_value_dim(facts, candidate)
    has_padding = attended_values > latent.value_dim
    latents = 2 * (latent.query_rank or 0) + 2 * latent.key_value_rank + latent.rope_dim
    # Non-rotary keys, and values: the result of one matmul.
    expanded = heads * (latent.nope_dim + latent.value_dim)
    # Output, and concatenated queries and keys. With padding the values are a tensor of their own,
    # and the product after attention saves a copy of the output's part.
    attended = heads * (2 * head_dim + attended_values)
    values = heads * (attended_values + latent.value_dim) if has_padding else expanded
    saved = tokens * ((latents + values + attended) * size + 4 * heads)
    matmul_results = (
        (latent.query_rank or 0)
        + latent.key_value_rank
        + latent.rope_dim
        + heads * head_dim
        + expanded
        + heads * attended_values
    )
    output = tokens * heads * (attended_values * size + 4)
    return AttentionBytes(
        saved, tokens * (matmul_results * size + 4 * heads), tokens * attended * size, output
    )


def get_attended_value_dim(facts: ModelFacts, candidate: Candidate) -> int:
    """Return the features of a value head in attention; only ours pads them."""
    latent = facts.shape.latent
    if latent is not None and not candidate.engine.has_ordered_frees:
        return latent.value_dim
    return attention_kernel.get_attended_value_dim(facts.shape)
