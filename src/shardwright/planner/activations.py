"""Bytes that the forward pass leaves for the backward pass, by operation, as the model's code saves them. Torch-free.

Legend of the formulas: N tokens of a micro-batch on this rank (its part of the rows under context parallelism), S of them in the
residual stream (N, or N / tp under sequence parallelism), D hidden, F feed-forward width, Q query width, K width of keys (or
values), H heads, c bytes per activation, tp the tensor-parallel degree. Q, K, F and H are those of the rank.

    operation           keeps                                                why
    norm                S D c                                                its input, which is the residual stream
    column products     N D c                                                their common input: the norm's output, gathered over tp
                                                                             under sequence parallelism
    rotation            nothing                                              it is undone by turning back
    q and k norms       N (Q + K) c                                          their inputs
    attention           N (2 Q + 2 K) c + 4 N H                              q, k, v and its output (the last product's input as
                                                                             well), and a log-sum-exp in fp32
      spelled out       N T H (c + 4 + c), a soft cap N T H c more           weights in fp32, cast, and what a soft cap bends
    gated feed-forward  3 N F c                                              gate and up (the activation is computed again), and
                                                                             their product, the last product's input
    plain feed-forward  2 N F c                                              before and after the activation
    experts             k times N (3 D + 3 F) c, router 8 N E                rows sent to k experts, in, out, in order
    norm after          S D c                                                its input

Recomputation: `full` keeps the block's input, S D c. `selective` keeps that and the results of products and attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.layout.context import ContextMethod, choose_context_method
from shardwright.planner.backward import BlockWidths, norm_gradient, widest_gradients
from shardwright.planner.candidate import Candidate
from shardwright.planner.facts import LayerKind, ModelFacts


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer and one micro-batch: `kept` until its backward pass, `rebuilt` during it (nothing without recompute),
    `gradients` in flight at the widest point of its backward pass."""

    kept: float
    rebuilt: float
    gradients: float


def micro_batch_tokens(candidate: Candidate) -> int:
    """Tokens of one micro-batch on one rank."""
    return candidate.micro_batch_size * candidate.sequence_length // candidate.layout.cp


def context_method(facts: ModelFacts, candidate: Candidate) -> ContextMethod:
    """What the candidate's `cp_method` comes to, by the engine's rule."""
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


def residual_tokens(candidate: Candidate) -> float:
    """Tokens whose residual stream a rank holds."""
    layout = candidate.layout
    return micro_batch_tokens(candidate) / (layout.tp if layout.sequence_parallel else 1)


def layer_activations(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> LayerActivations:
    """What one layer of a kind keeps for one micro-batch."""
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
        candidate.fused_norms,
        candidate.compile,
        candidate.adapter if candidate.engine.frozen_drops_inputs else None,
        candidate.engine,
    )
    found = facts.activations.get(key)
    if found is None:
        found = facts.activations[key] = _layer_activations(facts, kind, candidate)
    assert isinstance(found, LayerActivations)
    return found


def _layer_activations(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> LayerActivations:
    shape, engine, size = facts.shape, candidate.engine, candidate.activation_bytes
    stream = residual_tokens(candidate)
    residual = stream * shape.hidden_size * size
    into_products = _column_input(candidate, facts)
    attention = _Attention.of(facts, kind, candidate)
    inner, inner_products, inner_gradients = _feed_forward(facts, kind, candidate)

    num_before = sum(name is not None for name in (shape.names.pre_attention_norm, shape.names.pre_mlp_norm))
    num_after = kind.num_norms - num_before
    if shape.parallel_residual:
        num_before = min(num_before, 1)  # both branches' norms take the same input
    # Norms that add an offset to their weight run in fp32 and keep an fp32 copy of their input.
    widened = max(size, 4) / size if shape.norm_offset != 0.0 and candidate.fused_norms else 1.0
    norm_tensors, num_inputs, dropped = engine.norm_tensors, 2, 0.0
    if candidate.adapter is not None and engine.frozen_drops_inputs:
        roles = set(candidate.adapter.roles)
        norm_tensors = max(2.0, norm_tensors - 1.0)
        num_inputs = bool(roles & {"query", "key", "value", "qkv"}) + bool(roles & {"gate", "up", "gate_up"})
        if "down" not in roles and not kind.shape.sparse:
            dropped = micro_batch_tokens(candidate) * shape.intermediate_size / candidate.layout.tp * size
    plain = ((norm_tensors - 1.0) * num_before + num_after) * residual * widened + 4 * kind.num_norms * stream
    plain += num_inputs * into_products
    if kind.shape.sparse and engine.frees_in_backward:
        plain += _router_input(facts, candidate, into_products)
    plain += attention.kept + inner - dropped
    gradients = max(inner_gradients, attention.gradients) + 2 * residual
    if engine.frees_in_backward:
        gradients = _widest_gradients(facts, kind, candidate)
    if candidate.recompute == "none":
        return LayerActivations(plain, 0.0, gradients)
    # The block's input is what is kept in any case.
    if candidate.recompute == "full":
        return LayerActivations(residual, plain - residual, gradients)
    # Selective: the block's input, results of products, attention's output; each branch ends in a product over the residual stream.
    if candidate.precision == "nvfp4" and not engine.keeps_fp4_products:
        kept = residual + attention.output
        return LayerActivations(kept, max(0.0, plain - kept), gradients)
    eager = None if candidate.compile else engine.eager_selective_share
    share = engine.selective_share if eager is None else eager
    kept = residual + share * (attention.products + inner_products + 2 * _branch_output(candidate, facts))
    # Of what is kept, attention's last product goes as soon as the block runs again: nothing else reads it.
    spent = _branch_output(candidate, facts) if engine.frees_in_backward else 0.0
    return LayerActivations(kept, max(0.0, plain - residual - spent - share * (attention.products + inner_products)), gradients)


def _router_input(facts: ModelFacts, candidate: Candidate, into_products: float) -> float:
    """Bytes that a sparse layer keeps of its input beyond what a dense one does: the router's in fp32; the experts' are the rows
    sent to them, so that only a shared expert needs it in the products' precision."""
    wide = micro_batch_tokens(candidate) * facts.shape.hidden_size * max(candidate.activation_bytes, 4)
    shared = facts.shape.experts is not None and facts.shape.experts.shared_intermediate_size > 0
    return wide if shared and candidate.activation_bytes < 4 else 0.0 if shared else wide - into_products


def _widest_gradients(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Bytes at the widest point of one block's backward pass, beside what it keeps."""
    shape, layout, size, tokens = facts.shape, candidate.layout, candidate.activation_bytes, micro_batch_tokens(candidate)
    stream, gathered = residual_tokens(candidate) * shape.hidden_size * size, _branch_output(candidate, facts)
    experts = shape.experts if kind.shape.sparse else None
    gated = shape.gated or experts is not None
    rows, width = float(tokens), float(shape.intermediate_size)
    if experts is not None:
        rows, width = float(tokens * experts.experts_per_token), float(experts.intermediate_size)
    inner = rows * width / layout.tp * size
    heads = shape.num_heads / layout.tp
    scores = 0.0
    if shape.attention_soft_cap is not None or not candidate.flash_attention:
        # The gradients of fp32 weights, before and after their softmax; the weights in the products' precision are gone by then.
        scores = tokens * heads * candidate.sequence_length * (2 * max(size, 4) - size)
    fused = shape.norm == "layer" or candidate.fused_norms
    return widest_gradients(
        BlockWidths(
            stream=stream,
            gathered=gathered,
            inner=inner,
            gated=gated,
            routed=0.0 if experts is None else rows * shape.hidden_size * size,
            gathers=layout.tp > 1 and layout.sequence_parallel,
            queries=tokens * shape.query_width / layout.tp * size,
            keys=tokens * shape.head_dim * max(1.0, shape.num_kv_heads / layout.tp) * size,
            scores=scores,
            norm=norm_gradient(stream, size, fused=fused),
        )
    )


def stage_ends(facts: ModelFacts, candidate: Candidate) -> tuple[float, float]:
    """Bytes per micro-batch kept outside the layers: by the stage with the embedding, and by the stage with the head.

    The embedding keeps indices. The final norm keeps its input; the chunked loss keeps the gradient of its output instead of
    it, which
    is counted with the logits.
    """
    tokens = micro_batch_tokens(candidate)
    return 8.0 * tokens, residual_tokens(candidate) * facts.shape.hidden_size * candidate.activation_bytes


def head_logits(facts: ModelFacts, candidate: Candidate) -> tuple[float, float]:
    """Bytes at the loss, and bytes that are left of them when the backward pass begins.

    Chunked: the logits of a chunk in the products' precision and in fp32 (twice with a bend or a scale), the gradient of the hidden
    states, and of the head's weight in fp32 with one product's worth beside it. The weight's gradient waits for the backward pass.
    """
    shape, size, tp = facts.shape, candidate.activation_bytes, candidate.layout.tp
    tokens, vocab = micro_batch_tokens(candidate), shape.vocab_size / tp
    hidden_gradient = tokens * shape.hidden_size * size
    weight = 0.0 if candidate.adapter is not None else vocab * shape.hidden_size
    if candidate.loss_chunk_tokens is None:
        seen = shape.vocab_size if candidate.engine.whole_logits else vocab
        cut = candidate.engine.cut_logit_bytes if tp > 1 else None
        return tokens * seen * (candidate.engine.logit_bytes if cut is None else cut), 0.0
    chunk = min(candidate.loss_chunk_tokens, tokens)
    plain = shape.logit_scale == 1.0 and shape.final_soft_cap is None
    wide = max(size, 4)
    per_logit = wide + (size if plain or size == wide else size + wide)
    if size == wide:
        per_logit = 2 * wide
    made = weight * (wide + (size if size != wide else 0))
    # Later the hidden states' gradient has become that of the last layer's output, which is counted there.
    sharded = candidate.layout.zero_stage >= 1 and candidate.layout.fsdp > 1
    if candidate.engine.frees_in_backward:
        hidden_gradient *= 2  # what it is the gradient of is there as well, and read by chunk after chunk
    return chunk * vocab * per_logit + hidden_gradient + made, weight * (size if sharded else wide)


def shared_tables(facts: ModelFacts, candidate: Candidate) -> float:
    """Bytes that all layers of a micro-batch share: rotation tables in fp32, and masks where plain causality does not do."""
    shape, tokens = facts.shape, micro_batch_tokens(candidate)
    rows = candidate.micro_batch_size if candidate.document_tokens is not None else 1
    tables = sum(2 * rows * (candidate.sequence_length / candidate.layout.cp) * (rope.rotary_dim // 2) * 4 for rope in shape.ropes)
    masks = 0.0
    for window in {layer.window for layer in shape.layers}:
        if _is_masked(candidate, window):
            masks += rows * (tokens / candidate.micro_batch_size) * candidate.sequence_length * candidate.activation_bytes
    return tables + masks


def _is_masked(candidate: Candidate, window: int | None) -> bool:
    return candidate.document_tokens is not None or (window is not None and window < candidate.sequence_length)


def _column_input(candidate: Candidate, facts: ModelFacts) -> float:
    """Bytes of what column-cut products take in and keep."""
    gathered = candidate.engine.keeps_gathered_sequence or candidate.layout.tp == 1
    tokens = micro_batch_tokens(candidate) if gathered else residual_tokens(candidate)
    return tokens * facts.shape.hidden_size * candidate.activation_bytes


def _branch_output(candidate: Candidate, facts: ModelFacts) -> float:
    """Bytes of a row-cut product's result, before tensor-parallel ranks sum it."""
    return micro_batch_tokens(candidate) * facts.shape.hidden_size * candidate.activation_bytes


@dataclass(frozen=True)
class _Attention:
    """Bytes of one layer's attention: all that is kept, what of it are results of products and attention, gradients in flight, and
    the output of the kernel with its log-sum-exp."""

    kept: float
    products: float
    gradients: float
    output: float

    @staticmethod
    def of(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> _Attention:
        shape, size, tp = facts.shape, candidate.activation_bytes, candidate.layout.tp
        tokens = micro_batch_tokens(candidate)
        if shape.latent is not None:
            return _latent_attention(facts, candidate)
        queries = shape.query_width / tp
        keys = shape.head_dim * max(1.0, shape.num_kv_heads / tp)
        heads = shape.num_heads / tp
        masked = _is_masked(candidate, kind.shape.window)
        # Of the CUDA kernels only the one without grouped heads takes a mask: keys and values are then repeated to Q.
        attended_keys = queries if masked else keys
        if candidate.layout.cp > 1 and context_method(facts, candidate) == "all_gather":
            attended_keys *= candidate.layout.cp
        kept = (2 * queries + 2 * attended_keys) * size + 4 * heads
        if shape.names.qkv is not None:
            # Views of one fused result keep all of it alive beside the turned queries and keys.
            kept += (queries + keys) * size if kind.shape.rope is not None else 0.0
        kept += candidate.engine.rotary_tensors * (queries + keys) * size
        if candidate.engine.frees_in_backward and candidate.layout.cp > 1 and context_method(facts, candidate) != "all_gather":
            kept += queries * size  # the output by heads, as the ring's kernel puts it together, beside that by tokens
        if shape.qk_norm is not None:
            kept += (queries + keys) * size
        products = (2 * queries + 2 * keys) * size + 4 * heads
        kept, products = kept * tokens, products * tokens
        if shape.attention_soft_cap is not None or not candidate.flash_attention:
            scores = tokens * heads * candidate.sequence_length
            # Weights in fp32 and cast, keys repeated; the results of both products are kept by `selective` as well.
            cast = size if size < 4 else 0
            bent = size if shape.attention_soft_cap is not None else 0
            kept += scores * (max(size, 4) + cast + bent) + 2 * tokens * (queries - attended_keys) * size
            products += scores * size
        output = tokens * (queries * size + 4 * heads)
        return _Attention(kept, products, tokens * (2 * queries + 2 * keys) * size, output)


def _latent_attention(facts: ModelFacts, candidate: Candidate) -> _Attention:
    """Latent attention keeps its latents (before and after their norms), whole queries and keys, values and the output."""
    shape, size, tp = facts.shape, candidate.activation_bytes, candidate.layout.tp
    latent = shape.latent
    assert latent is not None
    tokens, heads = micro_batch_tokens(candidate), shape.num_heads / tp
    head_dim = latent.nope_dim + latent.rope_dim
    latents = 2 * (latent.query_rank or 0) + 2 * latent.key_value_rank + latent.rope_dim
    made = heads * (latent.nope_dim + latent.value_dim)  # keys without position and values, as one product makes them
    attended = heads * (2 * head_dim + latent.value_dim)  # the output; queries and keys put together
    kept = tokens * ((latents + made + attended) * size + 4 * heads)
    results = (
        (latent.query_rank or 0) + latent.key_value_rank + latent.rope_dim + heads * head_dim + made + heads * latent.value_dim
    )
    output = tokens * heads * (latent.value_dim * size + 4)
    return _Attention(kept, tokens * (results * size + 4 * heads), tokens * attended * size, output)


def _feed_forward(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> tuple[float, float, float]:
    """Of one layer's feed-forward or experts: bytes kept, of them results of products, gradients in flight."""
    shape, size, engine = facts.shape, candidate.activation_bytes, candidate.engine
    tokens, tp = micro_batch_tokens(candidate), candidate.layout.tp
    experts = shape.experts if kind.shape.sparse else None
    gated = shape.gated or experts is not None
    tensors = engine.gated_tensors if gated else engine.plain_tensors
    projected = 2.0 if gated else 1.0
    if experts is None:
        wide = tokens * shape.intermediate_size / tp * size
        return tensors * wide, projected * wide, (projected + 1) * wide
    # Rows that the rank's experts take, spread evenly. They are kept going in, coming out, and in order of their tokens.
    rows = tokens * experts.experts_per_token
    wide = rows * experts.intermediate_size / tp * size
    sent = rows * shape.hidden_size * size
    shared = tokens * experts.shared_intermediate_size / tp * size
    router = tokens * experts.num_experts * 4
    kept = tensors * (wide + shared) + 3 * sent + 2 * router
    return kept, projected * (wide + shared) + sent, (projected + 1) * wide + sent
