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
    experts               k N (2 D + 3 F) c   rows sent to k experts, and their results reordered;
                          + 8 N E             router
    post norm             S D c               its input

Recomputation: `full` saves the block's input, S D c. `selective` saves that and the results of
matmuls and attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.layout.saved_results import ResultName
from shardwright.planner.candidate import Candidate
from shardwright.planner.engine_model import BlockBytes
from shardwright.planner.memory.attention_activations import (
    compute_attention_bytes,
)
from shardwright.planner.memory.backward_peak import (
    compute_deferred_bytes,
    compute_forward_end_bytes,
    compute_peak_gradient_bytes,
)
from shardwright.planner.memory.block_tensors import (
    build_block_tensors,
    compute_branch_output_bytes,
)
from shardwright.planner.memory.block_weights import (
    compute_adapter_input_bytes,
    compute_adapter_result_bytes,
    compute_deferred_input_bytes,
    compute_scaled_output_bytes,
    find_frozen_products,
    get_weight_bytes,
)
from shardwright.planner.memory.feed_forward_activations import (
    compute_feed_forward_bytes,
    count_saved_index_bytes,
)
from shardwright.planner.memory.forward_temporaries import (
    compute_forward_temporaries,
    compute_repeated_bytes,
)
from shardwright.planner.memory.quantisation import (
    compute_widening_bytes,
    count_unsaved_bytes,
)
from shardwright.planner.model_costs import LayerKind, ModelFacts, get_layer_recompute


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer and one micro-batch: `saved_bytes` until its backward pass,
    `recomputed_bytes` during it (0 without recomputation), and `gradient_bytes` at the peak of
    its backward pass."""

    saved_bytes: float
    recomputed_bytes: float
    gradient_bytes: float
    deferred_bytes: float = 0.0
    """Bytes that remain after its backward pass until the gradients of its weights are computed,
    where a schedule defers them."""
    deferring_gradient_bytes: float = 0.0
    """Those of `gradient_bytes` where they are deferred."""
    quantising_bytes: float = 0.0
    """Bytes besides saved ones where the forward pass quantises its last operands, uncompiled."""

    @property
    def total_bytes(self) -> float:
        """Bytes at the peak of the layer's backward pass."""
        return self.saved_bytes + self.recomputed_bytes + self.gradient_bytes


def get_layer_activations(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> LayerActivations:
    """Return the cached activation bytes of one layer of a kind for one micro-batch."""
    layout = candidate.layout
    key = (
        kind.slot,
        kind.saved_results,
        layout.tp,
        layout.cp,
        layout.sequence_parallel,
        layout.async_tensor_parallel,
        layout.expert_dispatch,
        layout.expert_row_limit,
        layout.cp_method,
        candidate.micro_batch_size,
        candidate.sequence_length,
        candidate.recompute,
        candidate.precision,
        candidate.document_tokens,
        candidate.flash_attention,
        candidate.attention,
        candidate.has_masked_kernels,
        candidate.has_fused_norms,
        candidate.has_wide_products,
        candidate.has_fused_functions,
        candidate.compile,
        candidate.adapter,
        candidate.has_bf16_masters,
        candidate.expert_load,
        candidate.engine,
        layout.ep if kind.shape.sparse else 1,
        layout.dp_replicate * layout.fsdp > 1,
        candidate.is_sharded,
        candidate.is_deferring,
        candidate.gradient_accumulation_steps > 1,
        candidate.working_weights,
        candidate.parameter_offload,
        candidate.scaled_shares
        and (candidate.scaled_shares, layout.fsdp, layout.ep, candidate.gathers_each_pass),
    )
    if not kind.has_backward:
        return _NO_ACTIVATIONS
    cached = facts.activation_cache.get(key)
    if cached is None:
        cached = _compute_layer_activations(facts, kind, candidate)
        if _has_large_temporaries(candidate):
            quantising = compute_forward_temporaries(facts, kind, candidate)
            cached = replace(cached, quantising_bytes=quantising)
        facts.activation_cache[key] = cached
    assert isinstance(cached, LayerActivations)
    return cached


_NO_ACTIVATIONS = LayerActivations(0.0, 0.0, 0.0)
"""Those of layers through which no gradient passes."""


def compute_quantising_bytes(facts: ModelFacts, candidate: Candidate) -> float:
    """Compute the bytes besides saved tensors where the last forward pass quantises operands, or
    an earlier layer that needs more, before later ones have saved any. The layers of a pipeline's
    stage count as if each were the last."""
    if not _has_large_temporaries(candidate):
        return 0.0
    layers = [get_layer_activations(facts, kind, candidate) for kind in facts.kinds]
    if candidate.layout.pp > 1 or candidate.activation_offload != "none":
        return max(layer.quantising_bytes for layer in layers)
    of_slot = {kind.slot: layer for kind, layer in zip(facts.kinds, layers, strict=True)}
    found = later = 0.0
    for slot in reversed(facts.slot_of_layer):
        found = max(found, of_slot[slot].quantising_bytes - later)
        later += of_slot[slot].saved_bytes
    return found


def _has_large_temporaries(candidate: Candidate) -> bool:
    """Return True if products quantise operands, scale their outputs by norms of rows, or drop
    inputs of adapters."""
    adapter = candidate.adapter
    return candidate.quantised_shares is not None or (
        adapter is not None and (adapter.has_magnitudes or adapter.has_dropout)
    )


def _compute_layer_activations(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> LayerActivations:
    shape = facts.shape
    engine = candidate.engine
    tensors = engine.count_saved_tensors(candidate.adapted_roles)
    size = candidate.activation_bytes
    residual = candidate.residual_tokens * shape.hidden_size * size
    matmul_input = _compute_column_input_bytes(candidate, facts)
    attention = compute_attention_bytes(facts, kind, candidate)
    inner, inner_matmuls, inner_gradients = compute_feed_forward_bytes(facts, kind, candidate)
    frozen = find_frozen_products(kind, candidate)
    num_post_norms, total = _compute_norm_bytes(facts, kind, candidate)
    unsaved_inputs = matmul_input * (
        ("projections" in frozen) + ("up" in frozen and not kind.shape.sparse)
    )
    total += tensors.column_inputs * matmul_input - unsaved_inputs
    dropped = 0.0
    if kind.shape.sparse:
        experts = shape.experts
        total += engine.compute_router_input_bytes(
            candidate.micro_batch_tokens * shape.hidden_size * max(size, 4),
            matmul_input,
            has_shared_expert=experts is not None
            and experts.shared_intermediate_size > 0
            and "up" not in frozen,
            is_half_precision=size < 4,
            is_frozen=candidate.adapter is not None or kind.is_frozen("router"),
        )
    elif tensors.dropped_inner:
        inner_tokens = candidate.micro_batch_tokens * shape.intermediate_size
        dropped = tensors.dropped_inner * (inner_tokens / candidate.layout.tp * size)
    total += attention.saved + inner - dropped + compute_adapter_input_bytes(facts, kind, candidate)
    total += compute_scaled_output_bytes(facts, kind, candidate)
    mode = get_layer_recompute(kind, candidate.recompute)
    tensors_of_block = build_block_tensors(facts, kind, candidate, is_repeated=mode != "none")
    gradients = engine.compute_block_gradient_bytes(
        tensors_of_block, max(inner_gradients, attention.gradients)
    )
    deferred = (0.0, 0.0)
    if candidate.is_deferring:
        deferring_block = replace(
            tensors_of_block,
            is_deferred=True,
            weight_bytes=get_weight_bytes(candidate, is_deferred=True),
        )
        deferred = (
            compute_deferred_bytes(deferring_block)
            + compute_deferred_input_bytes(facts, kind, candidate),
            compute_peak_gradient_bytes(deferring_block),
        )
    if mode == "none":
        total -= count_unsaved_bytes(facts, kind, candidate)
        return LayerActivations(total, 0.0, gradients, *deferred)
    indices = count_saved_index_bytes(facts, kind, candidate)
    if mode == "mixed":
        assert kind.saved_results is not None
        results = compute_result_bytes(facts, kind, candidate)
        saved_sizes = {name: results.get(name, 0.0) for name in kind.saved_results}
        saved = residual + indices + sum(saved_sizes.values())
        # Only a norm reads the result of a branch's last product again. Otherwise it is freed as
        # soon as the block has run again, and no part of `total`.
        if num_post_norms == 0:
            saved_sizes |= {"attention_out": 0.0, "down": 0.0}
        experts = shape.experts if kind.shape.sparse and size < 4 else None
        if "gathered" in saved_sizes and experts and not experts.shared_intermediate_size:
            saved_sizes["gathered"] -= matmul_input * _is_gathered(candidate)  # no product saves it
        if "gathered" in saved_sizes:
            saved_sizes["gathered"] -= unsaved_inputs
        # Nor is the product of queries and keys, of which only the softmax is saved.
        repeated = total - residual - indices - sum(saved_sizes.values())
        repeated += attention.score_products * ("attention" in saved_sizes)
        return LayerActivations(saved, max(0.0, repeated), gradients, *deferred)
    if candidate.recompute == "full":
        saved = residual + indices
        return LayerActivations(saved, total - saved, gradients, *deferred)
    communication, released = _compute_communicated_bytes(facts, kind, candidate)
    adapter_results = compute_adapter_result_bytes(facts, kind, candidate)
    saved, recomputed = engine.compute_selective_bytes(
        BlockBytes(
            total,
            residual,
            attention.matmul_results + inner_matmuls,
            compute_branch_output_bytes(candidate, facts),
            attention.output,
            attention.scores,
            communication,
            released,
            adapter_results,
            compute_widening_bytes(facts, kind, candidate),
        ),
        is_fp4=candidate.precision == "nvfp4",
        is_compiled=candidate.compile,
    )
    if compute_widening_bytes(facts, kind, candidate):
        repeated = (
            total
            - inner
            + compute_repeated_bytes(facts, kind, candidate, tensors_of_block, inner, inner_matmuls)
        )
        recomputed = max(recomputed, repeated - saved - gradients)
    if adapter_results:
        # The end of the forward pass, next to all results of products, may be larger.
        ending = compute_forward_end_bytes(tensors_of_block)
        recomputed = max(recomputed, ending - gradients)
    if indices:
        saved += indices
        recomputed -= indices
        if candidate.layout.tp == 1:  # the weighted sum is no product
            saved -= compute_branch_output_bytes(candidate, facts)
    return LayerActivations(saved, recomputed, gradients, *deferred)


def _compute_norm_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[int, float]:
    """Return the number of norms after a branch, and the bytes that a layer's norms save."""
    shape = facts.shape
    size = candidate.activation_bytes
    tensors = candidate.engine.count_saved_tensors(candidate.adapted_roles)
    stream = candidate.residual_tokens
    residual = stream * shape.hidden_size * size
    num_pre_norms = sum(
        name is not None for name in (shape.names.pre_attention_norm, shape.names.pre_mlp_norm)
    )
    num_post_norms = kind.num_norms - num_pre_norms
    if shape.parallel_residual:
        num_pre_norms = min(num_pre_norms, 1)  # the norms of both branches share one input
    # PyTorch's kernel takes the input in the precision of the weight, which is fp32 with an offset.
    has_copies = shape.norm_offset != 0.0 and candidate.has_fused_norms
    fp32_factor = max(size, 4) / size if has_copies and not candidate.has_fused_functions else 1.0
    return num_post_norms, (
        (tensors.norm - 1.0) * num_pre_norms + num_post_norms
    ) * residual * fp32_factor + 4 * kind.num_norms * stream


def _compute_communicated_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[float | None, float]:
    """Return bytes of results of tensor-parallel communication that `selective` keeps, None
    without tensor parallelism, and the part that is freed when the block has run again."""
    if candidate.layout.tp == 1:
        return None, 0.0
    results = compute_result_bytes(facts, kind, candidate)
    released = sum(results.get(name, 0.0) for name in ("gathered", "attention_out"))
    stream = candidate.residual_tokens * facts.shape.hidden_size * candidate.activation_bytes
    released += stream * facts.shape.is_block_end_read
    if kind.shape.sparse and not candidate.has_rows_per_rank:
        # The weighted sum of the experts' results.
        return released + compute_branch_output_bytes(candidate, facts), released
    return released, released


def compute_result_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> dict[ResultName, float]:
    """Compute the bytes of one layer's results, by name; names that it does not compute are
    missing. Exact for attention within a rank's own rows, and for an even load of experts."""
    attention = compute_attention_bytes(facts, kind, candidate)
    branch_output = compute_branch_output_bytes(candidate, facts)
    # Under tensor parallelism the sum over ranks is kept in place of this rank's product.
    stream = candidate.residual_tokens * facts.shape.hidden_size * candidate.activation_bytes
    results: dict[ResultName, float] = {
        "attention": attention.output + attention.score_products,
        "projections": attention.matmul_results - attention.output - attention.score_products,
        "attention_out": stream,
    }
    if _is_gathered(candidate):
        results["gathered"] = 2.0 * branch_output
    _, inner_products, _ = compute_feed_forward_bytes(facts, kind, candidate)
    experts = facts.shape.experts if kind.shape.sparse else None
    if experts is None:
        is_end_saved = candidate.layout.tp == 1 or facts.shape.is_block_end_read
        return results | {"gate_up": inner_products, "down": stream if is_end_saved else 0.0}
    tokens = candidate.micro_batch_tokens
    size = candidate.activation_bytes
    shared = 2.0 * tokens * experts.shared_intermediate_size / candidate.layout.tp * size
    results["experts"] = inner_products - shared
    return results | ({"gate_up": shared, "down": branch_output} if shared else {})


def _compute_column_input_bytes(candidate: Candidate, facts: ModelFacts) -> float:
    """Compute the bytes of the saved input of column-parallel matmuls."""
    is_gathered = candidate.engine.should_save_gathered_sequence or candidate.layout.tp == 1
    tokens = candidate.micro_batch_tokens if is_gathered else candidate.residual_tokens
    return tokens * facts.shape.hidden_size * candidate.activation_bytes


def _is_gathered(candidate: Candidate) -> bool:
    """Return True if sequence parallelism gathers the inputs of a block's branches."""
    return candidate.layout.tp > 1 and candidate.layout.sequence_parallel
