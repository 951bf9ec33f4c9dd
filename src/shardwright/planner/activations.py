"""Bytes that the forward pass saves for the backward pass, by operation.

Legend: N tokens of a micro-batch on this rank (its part of the rows under context parallelism),
S tokens in the residual stream (N, or N / tp under sequence parallelism), T tokens of a row, D
hidden size, F feed-forward width, Q query width, K width of keys (or values), H heads, E
experts, c bytes per activation, tp the tensor-parallel degree. Q, K, F and H are those of the
rank.

    operation             saved               notes
    norm                  S D c               its input, the residual stream
    column matmuls        N D c               their shared input: the norm's output, gathered
                                              over tp under sequence parallelism
    rotary embedding      0                   the backward pass applies the inverse rotation
    q and k norms         N (Q + K) c         their inputs
    attention             N (2 Q + 2 K) c     q, k, v and the output (also the input of the
                          + 4 N H             output projection); log-sum-exp in fp32
      not fused           + N T H (4 + c)     weights, fp32 and cast; N T H c more if soft-capped
    gated feed-forward    3 N F c             gate and up (the activation is recomputed), and
                                              their product, the input of the down projection
    ungated feed-forward  2 N F c             before and after the activation
    experts               k N (3 D + 3 F) c   rows sent to k experts: input, output, reordered;
                          + 8 N E             router
    post norm             S D c               its input

Recomputation: `full` saves the block's input, S D c. `selective` saves that and the results of
matmuls and attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.layout.context_method import ContextMethod, choose_context_method
from shardwright.planner.backward_peak import (
    BlockTensorBytes,
    compute_norm_gradient_bytes,
    compute_peak_gradient_bytes,
)
from shardwright.planner.candidate import Candidate
from shardwright.planner.model_costs import LayerKind, ModelFacts


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer and one micro-batch: `kept` until its backward pass, `recomputed_bytes`
    during it (0 without recomputation), and `gradient_bytes` at the peak of its backward pass."""

    saved_bytes: float
    recomputed_bytes: float
    gradient_bytes: float


def count_micro_batch_tokens(candidate: Candidate) -> int:
    """Count the tokens of one micro-batch on one rank."""
    return candidate.micro_batch_size * candidate.sequence_length // candidate.layout.cp


def resolve_context_method(facts: ModelFacts, candidate: Candidate) -> ContextMethod:
    """Return the context-parallel method, with `auto` resolved by the trainer's rule."""
    if candidate.layout.cp_method != "auto":
        return candidate.layout.cp_method
    shape = facts.shape
    return choose_context_method(
        candidate.layout,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        windows=tuple(layer.window for layer in shape.layers),
        sequence_length=candidate.sequence_length,
    ).method


def count_residual_tokens(candidate: Candidate) -> float:
    """Count the tokens of the residual stream on one rank."""
    layout = candidate.layout
    return count_micro_batch_tokens(candidate) / (layout.tp if layout.sequence_parallel else 1)


def get_layer_activations(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> LayerActivations:
    """Return the cached activation bytes of one layer of a kind for one micro-batch."""
    layout = candidate.layout
    key = (
        kind.slot,
        layout.tp,
        layout.cp,
        layout.sequence_parallel,
        layout.cp_method,
        candidate.micro_batch_size,
        candidate.sequence_length,
        candidate.recompute,
        candidate.precision,
        candidate.document_tokens,
        candidate.flash_attention,
        candidate.has_fused_norms,
        candidate.compile,
        candidate.adapter if candidate.conventions.should_drop_frozen_inputs else None,
        candidate.conventions,
    )
    cached = facts.activation_cache.get(key)
    if cached is None:
        cached = facts.activation_cache[key] = _compute_layer_activations(facts, kind, candidate)
    assert isinstance(cached, LayerActivations)
    return cached


def _compute_layer_activations(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> LayerActivations:
    shape = facts.shape
    engine = candidate.conventions
    size = candidate.activation_bytes
    stream = count_residual_tokens(candidate)
    residual = stream * shape.hidden_size * size
    matmul_input = _compute_column_input_bytes(candidate, facts)
    attention = _AttentionBytes.compute(facts, kind, candidate)
    inner, inner_matmuls, inner_gradients = _compute_feed_forward_bytes(facts, kind, candidate)

    num_pre_norms = sum(
        name is not None for name in (shape.names.pre_attention_norm, shape.names.pre_mlp_norm)
    )
    num_post_norms = kind.num_norms - num_pre_norms
    if shape.parallel_residual:
        num_pre_norms = min(num_pre_norms, 1)  # the norms of both branches share one input
    # Norms that add an offset to their weight run in fp32 and save an fp32 copy of their input.
    fp32_factor = (
        max(size, 4) / size if shape.norm_offset != 0.0 and candidate.has_fused_norms else 1.0
    )
    norm_tensors = engine.num_norm_tensors
    num_inputs = 2
    dropped = 0.0
    if candidate.adapter is not None and engine.should_drop_frozen_inputs:
        roles = set(candidate.adapter.roles)
        norm_tensors = max(2.0, norm_tensors - 1.0)
        num_inputs = bool(roles & {"query", "key", "value", "qkv"}) + bool(
            roles & {"gate", "up", "gate_up"}
        )
        if "down" not in roles and not kind.shape.sparse:
            dropped = (
                count_micro_batch_tokens(candidate)
                * shape.intermediate_size
                / candidate.layout.tp
                * size
            )
    total = (
        (norm_tensors - 1.0) * num_pre_norms + num_post_norms
    ) * residual * fp32_factor + 4 * kind.num_norms * stream
    total += num_inputs * matmul_input
    if kind.shape.sparse and engine.should_track_backward_frees:
        total += _compute_router_input_bytes(facts, candidate, matmul_input)
    total += attention.saved + inner - dropped
    gradients = max(inner_gradients, attention.gradients) + 2 * residual
    if engine.should_track_backward_frees:
        gradients = _compute_peak_gradient_bytes(facts, kind, candidate)
    if candidate.recompute == "none":
        return LayerActivations(total, 0.0, gradients)
    # The block's input is saved in any case.
    if candidate.recompute == "full":
        return LayerActivations(residual, total - residual, gradients)
    # Selective: the block's input, the results of matmuls, and attention's output. Each branch
    # ends with a matmul of the residual width.
    if candidate.precision == "nvfp4" and not engine.should_save_fp4_matmuls:
        saved = residual + attention.output
        return LayerActivations(saved, max(0.0, total - saved), gradients)
    eager = None if candidate.compile else engine.eager_selective_share
    share = engine.selective_share if eager is None else eager
    saved = residual + share * (
        attention.matmul_results
        + inner_matmuls
        + 2 * _compute_branch_output_bytes(candidate, facts)
    )
    # The result of attention's output projection is freed as soon as the block runs again:
    # nothing else reads it.
    freed = (
        _compute_branch_output_bytes(candidate, facts)
        if engine.should_track_backward_frees
        else 0.0
    )
    return LayerActivations(
        saved,
        max(0.0, total - residual - freed - share * (attention.matmul_results + inner_matmuls)),
        gradients,
    )


def _compute_router_input_bytes(
    facts: ModelFacts, candidate: Candidate, matmul_input_bytes: float
) -> float:
    """Compute the bytes that a sparse layer saves of its input beyond a dense layer.

    The router saves its input in fp32. The experts save the rows sent to them instead of the
    layer's input, which only a shared expert saves in the compute precision.
    """
    fp32_input = (
        count_micro_batch_tokens(candidate)
        * facts.shape.hidden_size
        * max(candidate.activation_bytes, 4)
    )
    has_shared_expert = (
        facts.shape.experts is not None and facts.shape.experts.shared_intermediate_size > 0
    )
    return (
        fp32_input
        if has_shared_expert and candidate.activation_bytes < 4
        else 0.0
        if has_shared_expert
        else fp32_input - matmul_input_bytes
    )


def _compute_peak_gradient_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Compute the peak bytes of one block's backward pass beyond its saved activations."""
    shape = facts.shape
    layout = candidate.layout
    size = candidate.activation_bytes
    tokens = count_micro_batch_tokens(candidate)
    stream = count_residual_tokens(candidate) * shape.hidden_size * size
    gathered = _compute_branch_output_bytes(candidate, facts)
    experts = shape.experts if kind.shape.sparse else None
    gated = shape.is_gated or experts is not None
    rows = float(tokens)
    width = float(shape.intermediate_size)
    if experts is not None:
        rows = float(tokens * experts.experts_per_token)
        width = float(experts.intermediate_size)
    inner = rows * width / layout.tp * size
    heads = shape.num_heads / layout.tp
    scores = 0.0
    if shape.attention_soft_cap is not None or not candidate.flash_attention:
        # Gradients of the fp32 weights, before and after the softmax. The weights in the
        # compute precision are freed by then.
        scores = tokens * heads * candidate.sequence_length * (2 * max(size, 4) - size)
    fused = shape.norm == "layer" or candidate.has_fused_norms
    return compute_peak_gradient_bytes(
        BlockTensorBytes(
            stream=stream,
            gathered=gathered,
            inner=inner,
            is_gated=gated,
            routed=0.0 if experts is None else rows * shape.hidden_size * size,
            should_gather_gradient=layout.tp > 1 and layout.sequence_parallel,
            queries=tokens * shape.query_width / layout.tp * size,
            keys=tokens * shape.head_dim * max(1.0, shape.num_kv_heads / layout.tp) * size,
            scores=scores,
            norm_gradient=compute_norm_gradient_bytes(stream, size, is_fused=fused),
        )
    )


def compute_end_activation_bytes(facts: ModelFacts, candidate: Candidate) -> tuple[float, float]:
    """Return bytes per micro-batch saved outside the layers: by the stage with the embedding,
    and by the stage with the head.

    The embedding saves indices. The final norm saves its input. The chunked loss saves the
    gradient of the norm's output instead of the output; it is counted with the logits.
    """
    tokens = count_micro_batch_tokens(candidate)
    return 8.0 * tokens, count_residual_tokens(
        candidate
    ) * facts.shape.hidden_size * candidate.activation_bytes


def compute_logit_bytes(facts: ModelFacts, candidate: Candidate) -> tuple[float, float]:
    """Return the bytes at the loss, and the part of them that remains when the backward pass
    begins.

    Chunked loss: the logits of a chunk in the compute precision and in fp32 (twice with a soft
    cap or scale), the gradient of the hidden states, and the gradient of the head's weight in
    fp32 with one matmul result beside it. The weight gradient remains during the backward pass.
    """
    shape = facts.shape
    size = candidate.activation_bytes
    tp = candidate.layout.tp
    tokens = count_micro_batch_tokens(candidate)
    vocab = shape.vocab_size / tp
    hidden_gradient = tokens * shape.hidden_size * size
    weight = 0.0 if candidate.adapter is not None else vocab * shape.hidden_size
    if candidate.loss_chunk_tokens is None:
        vocab_on_rank = shape.vocab_size if candidate.conventions.should_gather_logits else vocab
        sharded_logit_bytes = candidate.conventions.sharded_logit_bytes if tp > 1 else None
        return tokens * vocab_on_rank * (
            candidate.conventions.logit_bytes
            if sharded_logit_bytes is None
            else sharded_logit_bytes
        ), 0.0
    chunk = min(candidate.loss_chunk_tokens, tokens)
    is_unscaled = shape.logit_scale == 1.0 and shape.final_soft_cap is None
    wide = max(size, 4)
    per_logit = wide + (size if is_unscaled or size == wide else size + wide)
    if size == wide:
        per_logit = 2 * wide
    weight_gradient = weight * (wide + (size if size != wide else 0))
    # Later the hidden states' gradient becomes that of the last layer's output, which is
    # counted there.
    sharded = candidate.layout.zero_stage >= 1 and candidate.layout.fsdp > 1
    if candidate.conventions.should_track_backward_frees:
        hidden_gradient *= 2  # every chunk also reads the hidden states
    return chunk * vocab * per_logit + hidden_gradient + weight_gradient, weight * (
        size if sharded else wide
    )


def compute_shared_table_bytes(facts: ModelFacts, candidate: Candidate) -> float:
    """Compute bytes that all layers of a micro-batch share: fp32 rotary tables, and masks where
    attention is not plainly causal."""
    shape = facts.shape
    tokens = count_micro_batch_tokens(candidate)
    rows = candidate.micro_batch_size if candidate.document_tokens is not None else 1
    tables = sum(
        2 * rows * (candidate.sequence_length / candidate.layout.cp) * (rope.rotary_dim // 2) * 4
        for rope in shape.ropes
    )
    masks = 0.0
    for window in {layer.window for layer in shape.layers}:
        if _is_masked(candidate, window):
            masks += (
                rows
                * (tokens / candidate.micro_batch_size)
                * candidate.sequence_length
                * candidate.activation_bytes
            )
    return tables + masks


def _is_masked(candidate: Candidate, window: int | None) -> bool:
    return candidate.document_tokens is not None or (
        window is not None and window < candidate.sequence_length
    )


def _compute_column_input_bytes(candidate: Candidate, facts: ModelFacts) -> float:
    """Compute the bytes of the saved input of column-parallel matmuls."""
    is_gathered = candidate.conventions.should_save_gathered_sequence or candidate.layout.tp == 1
    tokens = (
        count_micro_batch_tokens(candidate) if is_gathered else count_residual_tokens(candidate)
    )
    return tokens * facts.shape.hidden_size * candidate.activation_bytes


def _compute_branch_output_bytes(candidate: Candidate, facts: ModelFacts) -> float:
    """Compute the bytes of a row-parallel matmul's result before the tensor-parallel
    reduction."""
    return (
        count_micro_batch_tokens(candidate) * facts.shape.hidden_size * candidate.activation_bytes
    )


@dataclass(frozen=True)
class _AttentionBytes:
    """Bytes of one layer's attention: all saved tensors, the results of matmuls and attention
    among them, gradients in flight, and the kernel's output with its log-sum-exp."""

    saved: float
    matmul_results: float
    gradients: float
    output: float

    @staticmethod
    def compute(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> _AttentionBytes:
        shape = facts.shape
        size = candidate.activation_bytes
        tp = candidate.layout.tp
        tokens = count_micro_batch_tokens(candidate)
        if shape.latent is not None:
            return _compute_latent_attention_bytes(facts, candidate)
        queries = shape.query_width / tp
        keys = shape.head_dim * max(1.0, shape.num_kv_heads / tp)
        heads = shape.num_heads / tp
        has_mask = _is_masked(candidate, kind.shape.window)
        # The only CUDA kernel that takes a mask does not support grouped heads: keys and values
        # are repeated to Q.
        attended_keys = queries if has_mask else keys
        if candidate.layout.cp > 1 and resolve_context_method(facts, candidate) == "all_gather":
            attended_keys *= candidate.layout.cp
        saved = (2 * queries + 2 * attended_keys) * size + 4 * heads
        if shape.names.qkv is not None:
            # Views of the fused result keep all of it alive beside the rotated queries and
            # keys.
            saved += (queries + keys) * size if kind.shape.rope is not None else 0.0
        saved += candidate.conventions.num_rotary_tensors * (queries + keys) * size
        if (
            candidate.conventions.should_track_backward_frees
            and candidate.layout.cp > 1
            and resolve_context_method(facts, candidate) != "all_gather"
        ):
            # Ring attention saves its output in head order and in token order.
            saved += queries * size
        if shape.qk_norm is not None:
            saved += (queries + keys) * size
        matmul_results = (2 * queries + 2 * keys) * size + 4 * heads
        saved *= tokens
        matmul_results *= tokens
        if shape.attention_soft_cap is not None or not candidate.flash_attention:
            scores = tokens * heads * candidate.sequence_length
            # Weights in fp32 and cast, keys repeated. `selective` saves the results of both
            # matmuls too.
            cast = size if size < 4 else 0
            soft_cap = size if shape.attention_soft_cap is not None else 0
            saved += (
                scores * (max(size, 4) + cast + soft_cap)
                + 2 * tokens * (queries - attended_keys) * size
            )
            matmul_results += scores * size
        output = tokens * (queries * size + 4 * heads)
        return _AttentionBytes(
            saved, matmul_results, tokens * (2 * queries + 2 * keys) * size, output
        )


def _compute_latent_attention_bytes(facts: ModelFacts, candidate: Candidate) -> _AttentionBytes:
    """Compute the bytes of latent attention: latents (before and after their norms), full
    queries and keys, values and the output."""
    shape = facts.shape
    size = candidate.activation_bytes
    tp = candidate.layout.tp
    latent = shape.latent
    assert latent is not None
    tokens = count_micro_batch_tokens(candidate)
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
    return _AttentionBytes(
        saved, tokens * (matmul_results * size + 4 * heads), tokens * attended * size, output
    )


def _compute_feed_forward_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[float, float, float]:
    """Return bytes of one layer's feed-forward or experts: saved, results of matmuls among
    them, and gradients in flight."""
    shape = facts.shape
    size = candidate.activation_bytes
    engine = candidate.conventions
    tokens = count_micro_batch_tokens(candidate)
    tp = candidate.layout.tp
    experts = shape.experts if kind.shape.sparse else None
    gated = shape.is_gated or experts is not None
    tensors = engine.num_gated_tensors if gated else engine.num_ungated_tensors
    num_projections = 2.0 if gated else 1.0
    if experts is None:
        wide = tokens * shape.intermediate_size / tp * size
        return tensors * wide, num_projections * wide, (num_projections + 1) * wide
    # Rows that the rank's experts process, assuming an even load. They are saved as inputs, as
    # outputs, and in token order.
    rows = tokens * experts.experts_per_token
    wide = rows * experts.intermediate_size / tp * size
    dispatched = rows * shape.hidden_size * size
    shared = tokens * experts.shared_intermediate_size / tp * size
    router = tokens * experts.num_experts * 4
    saved = tensors * (wide + shared) + 3 * dispatched + 2 * router
    return (
        saved,
        num_projections * (wide + shared) + dispatched,
        (num_projections + 1) * wide + dispatched,
    )
