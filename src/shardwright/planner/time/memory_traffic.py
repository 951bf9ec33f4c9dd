"""Bytes that one layer's operations move through memory, and the matmuls with their rows.

Legend: N tokens of the micro-batch on this rank, S of them in its residual stream, D hidden
size, F feed-forward width, Q and K widths of queries and of keys.
"""

from __future__ import annotations

from shardwright.placement import has_whole_block_shards
from shardwright.planner.candidate import Candidate
from shardwright.planner.low_precision import (
    COMPILED_BYTES,
    STOCHASTIC_BYTES,
    ScaledShares,
)
from shardwright.planner.model_costs import LayerKind, Matmul, ModelFacts, get_layer_recompute
from shardwright.planner.time.operation_passes import FEW_PASSES, ElementwisePasses


def count_dispatched_rows(facts: ModelFacts, candidate: Candidate) -> float:
    """Count the rows that the busiest rank receives for its experts; with even loads, as many as
    it sends."""
    experts = facts.shape.experts
    assert experts is not None
    return candidate.count_expert_rows(
        experts.experts_per_token
    ) / candidate.engine.count_expert_tensor_ranks(candidate.layout.tp)


def list_matmuls(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> list[tuple[Matmul, float]]:
    """List the matmuls of a layer with their rows on this rank, in one call each."""
    tokens = candidate.micro_batch_tokens
    products: list[tuple[Matmul, float]] = [(product, float(tokens)) for product in kind.matmuls]
    if kind.expert_matmuls:
        experts = facts.shape.experts
        assert experts is not None
        local_experts = experts.num_experts / candidate.layout.ep
        # Rows of all ranks that share the experts, spread evenly over the local ones of the
        # busiest rank. If tensor-parallel ranks hold whole experts, each rank has fewer experts
        # with the same number of rows each.
        rows = candidate.count_expert_rows(experts.experts_per_token) / local_experts
        rows /= candidate.num_expert_parts
        products += [(product, rows) for product in kind.expert_matmuls]
    return products


def count_matmul_calls(
    facts: ModelFacts, kind: LayerKind, matmul: Matmul, candidate: Candidate
) -> float:
    """Count the matmuls of this shape on the rank: one per local expert and part, otherwise 1."""
    if matmul not in kind.expert_matmuls:
        return 1.0
    experts = facts.shape.experts
    assert experts is not None
    num_shards = candidate.layout.ep * candidate.engine.count_expert_tensor_ranks(
        candidate.layout.tp
    )
    return candidate.num_expert_parts * experts.num_experts / num_shards


def count_elementwise_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[float, float]:
    """Count bytes that a layer's elementwise operations read and write, forward and backward,
    as the model implements them.

    A norm reads and writes S D (backward: reads twice, writes once, and once more for the
    weight). A residual sum moves 3 S D, rotary embeddings 3 N (Q + K), a gate 5 N F, and 11 N F
    backward. A trainer may have other norms and rotary embeddings (`elementwise_passes`).
    """
    shape = facts.shape
    passes = get_elementwise_passes(facts, candidate)
    size = candidate.activation_bytes
    tp = candidate.layout.tp
    tokens = candidate.micro_batch_tokens
    stream = candidate.residual_tokens
    width = stream * shape.hidden_size
    heads = tokens * (shape.query_width + shape.kv_width) / tp
    experts = shape.experts if kind.shape.sparse else None
    inner = tokens * shape.intermediate_size / tp
    if experts is not None:
        rows = candidate.count_expert_rows(experts.experts_per_token)
        inner = (rows * experts.intermediate_size + tokens * experts.shared_intermediate_size) / tp
    gated = shape.is_gated or experts is not None
    forward = width * (passes.norm_forward * kind.num_norms + 6) + passes.rotary_forward * heads
    backward = width * (passes.norm_backward * kind.num_norms + 4) + passes.rotary_backward * heads
    forward += inner * (5 if gated else 2)
    backward += inner * (11 if gated else 3)
    return forward * size, backward * size


def count_collective_copy_bytes(facts: ModelFacts, candidate: Candidate) -> tuple[float, float]:
    """Count the bytes that a layer's tensor-parallel collectives read and write besides what they
    send, forward and backward.

    Under sequence parallelism four collectives in each direction put the ranks' parts of several
    sequences in order; parts of one sequence are. Without it two sums of gradients copy them.
    """
    layout = candidate.layout
    passes = candidate.engine.elementwise_passes
    copy_bytes = (
        2 * candidate.micro_batch_tokens * facts.shape.hidden_size * candidate.activation_bytes
    )
    if layout.tp == 1 or layout.async_tensor_parallel != "none":
        return 0.0, 0.0
    if not layout.sequence_parallel:
        return 0.0, 2 * passes.gradient_copies * copy_bytes
    num_copies = 4 * passes.sequence_copies if candidate.micro_batch_size > 1 else 0
    return num_copies * copy_bytes, num_copies * copy_bytes


def get_elementwise_passes(facts: ModelFacts, candidate: Candidate) -> ElementwisePasses:
    """Return the passes of a candidate's norms and rotary embeddings."""
    if candidate.compile or facts.shape.norm == "layer":
        return FEW_PASSES
    return candidate.engine.elementwise_passes


def count_separate_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[float, float]:
    """Count bytes of a sparse layer's operations that no trainer's fusion combines with others,
    forward and backward: rows move to their experts and back."""
    experts = facts.shape.experts
    if experts is None or not kind.shape.sparse:
        return 0.0, 0.0
    # Rows are gathered, weighted and added back.
    dispatched = count_dispatched_rows(facts, candidate) * facts.shape.hidden_size
    forward = 6 * dispatched
    backward = 8 * dispatched
    if experts.expert_bias:
        # Biases added to rows and a clamped gate are separate operations: forward they read and
        # write about nine tensors of the inner width, backward twice as many, and two of the
        # model's width.
        rows = candidate.count_expert_rows(experts.experts_per_token)
        inner = rows * experts.intermediate_size / candidate.layout.tp * 1.8
        forward += 2 * dispatched + 5 * inner
        backward += 8 / 3 * dispatched + 11 * inner
    return forward * candidate.activation_bytes, backward * candidate.activation_bytes


def count_adapter_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[float, float]:
    """Count bytes that adapters move in addition to their matrices, forward and backward. Their
    matmuls are so narrow that they are memory-bound.

    `EngineModel.adapter_passes` has the reads and writes of the engine's operations.
    """
    adapter = candidate.adapter
    tp = candidate.layout.tp
    if adapter is None:
        return 0.0, 0.0
    passes = candidate.engine.adapter_passes
    forward = backward = 0.0
    for product, rows in list_matmuls(facts, kind, candidate):
        if product.role not in adapter.roles:
            continue
        rows *= count_matmul_calls(facts, kind, product, candidate)
        num_in = (
            rows * product.num_inputs / (tp if product.sharding in ("rows", "expert_rows") else 1)
        )
        num_out = (
            rows
            * product.num_outputs
            / (tp if product.sharding in ("columns", "expert_columns") else 1)
        )
        forward += passes.forward_inputs * num_in + passes.forward_outputs * num_out
        backward += passes.backward_inputs * num_in + passes.backward_outputs * num_out
    return forward * candidate.activation_bytes, backward * candidate.activation_bytes


def count_adapter_operations(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[float, float]:
    """Count the operations that the host launches for a layer's adapters, forward and backward."""
    adapter = candidate.adapter
    if adapter is None:
        return 0.0, 0.0
    num_matrices = sum(
        count_matmul_calls(facts, kind, product, candidate)
        for product, _ in list_matmuls(facts, kind, candidate)
        if product.role in adapter.roles
    )
    passes = candidate.engine.adapter_passes
    return num_matrices * passes.forward_operations, num_matrices * passes.backward_operations


def count_dequantisation_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Count bytes moved in one pass through a layer to dequantise all of its frozen NF4
    matrices (QLoRA)."""
    adapter = candidate.adapter
    if adapter is None or not adapter.quantised:
        return 0.0
    elements = sum(
        float(product.num_inputs * product.num_outputs)
        * count_matmul_calls(facts, kind, product, candidate)
        for product in (*kind.matmuls, *kind.expert_matmuls)
        if product.role not in adapter.unquantised
    )
    return elements / candidate.layout.tp * candidate.engine.dequantisation_bytes


_QUANTISATION_BYTES = 4.0
"""Bytes moved per element of a low-precision matmul's input: read in bf16, written once by rows
and once by columns, for the transposed matmul of the backward pass."""
_QUANTISING_ROLES = (
    "query",
    "qkv",
    "gate",
    "gate_up",
    "attention_out",
    "down",
    "query_latent",
    "key_value",
    "projection",
)
"""Roles whose input is not already quantised for an earlier matmul: keys and values share the
queries', up shares the gate's."""


def count_quantisation_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[float, float]:
    """Count bytes moved to quantise a layer's activations and gradients, in the forward and
    backward pass; `count_weight_quantisation_bytes` has weights.

    Without `scaled_shares`, these are inputs in the forward pass and output gradients in the
    backward pass: published runs quantise weights once per step.
    """
    if candidate.scaled_shares is not None:
        return _count_operand_bytes(facts, kind, candidate, candidate.scaled_shares)
    tp = candidate.layout.tp
    forward = backward = 0.0
    for product, rows in list_matmuls(facts, kind, candidate):
        if product.role == "router":
            continue
        elements = rows * count_matmul_calls(facts, kind, product, candidate)
        width_in = float(product.num_inputs)
        width_out = float(product.num_outputs)
        is_unsharded = (
            product.sharding.startswith("expert")
            and candidate.engine.count_expert_tensor_ranks(candidate.layout.tp) > 1
        )
        if not is_unsharded and product.sharding in ("columns", "expert_columns"):
            width_out /= tp
        elif not is_unsharded and product.sharding in ("rows", "expert_rows"):
            width_in /= tp
        if product.role in _QUANTISING_ROLES or product.sharding.startswith("expert"):
            forward += elements * width_in
        backward += elements * width_out
    return forward * _QUANTISATION_BYTES, backward * _QUANTISATION_BYTES


def _count_operand_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, shares: ScaledShares
) -> tuple[float, float]:
    """Count bytes moved to quantise the operands of each product except weights, as this trainer
    does."""
    element_bytes = COMPILED_BYTES if candidate.compile else shares.eager_bytes
    forward = backward = 0.0
    for product, rows in list_matmuls(facts, kind, candidate):
        num_out, num_in = compute_local_sides(product, candidate)
        elements = shares.count_operands(product.role, rows, num_out, num_in)
        num_calls = count_matmul_calls(facts, kind, product, candidate)
        num_bytes = element_bytes * num_calls
        if shares.has_stochastic_gradients and not candidate.compile:
            gradients = num_calls * shares.get_share(product.role) * rows * num_out
            backward += STOCHASTIC_BYTES * gradients
        forward += num_bytes * elements.forward
        backward += num_bytes * elements.input_gradient
        if candidate.adapter is None and product.is_trained:
            backward += num_bytes * elements.weight_gradient
    return forward, backward


def count_weight_quantisation_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[float, float]:
    """Count bytes moved to quantise a layer's weights once, for the forward and the backward pass:
    in each micro-batch, or once per step if they are working operands."""
    shares = candidate.quantised_shares
    if shares is None:
        return 0.0, 0.0
    element_bytes = COMPILED_BYTES if candidate.compile else shares.eager_bytes
    forward = backward = 0.0
    for product, _ in list_matmuls(facts, kind, candidate):
        num_out, num_in = compute_local_sides(product, candidate)
        num_bytes = element_bytes * shares.get_share(product.role) * num_out * num_in
        num_bytes *= count_matmul_calls(facts, kind, product, candidate)
        weight_shares = compute_quantised_shares(facts, kind, product, num_out, candidate)
        forward += weight_shares[0] * num_bytes
        backward += weight_shares[1] * num_bytes
    return forward, backward


def count_repeated_quantisation_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[float, float]:
    """Count bytes moved in each micro-batch to quantise a layer's weights, which recomputation of
    their products does again."""
    if candidate.has_working_operands:
        return 0.0, 0.0
    forward, backward = count_weight_quantisation_bytes(facts, kind, candidate)
    if not kind.has_backward:
        return forward, 0.0
    if get_layer_recompute(kind, candidate.recompute) in ("full", "mixed"):
        backward += forward
    return forward, backward


def compute_quantised_shares(
    facts: ModelFacts, kind: LayerKind, product: Matmul, num_out: float, candidate: Candidate
) -> tuple[float, float]:
    """Compute the share of a weight that a rank quantises in the forward and the backward pass.

    A rank quantises its shard before a gather of codes, and stage 3 gathers in both passes. That is
    never compiled, so with compiled blocks the share is that of as many compiled quantisations.
    """
    layout = candidate.layout
    is_expert = product.sharding.startswith("expert")
    num_shards = layout.fsdp // (layout.ep if is_expert else 1)
    experts = facts.shape.experts
    shape: tuple[int, ...] = (int(num_out), product.num_inputs)
    if is_expert and experts is not None:
        shape = (experts.num_experts // layout.ep, *shape)
    shares = candidate.scaled_shares
    if (
        shares is None
        or shares.code_gathers is None
        or not candidate.gathers_codes(
            is_recomputed=get_layer_recompute(kind, candidate.recompute) != "none"
        )
        or num_shards == 1
        or not has_whole_block_shards(shares.code_gathers.recipe, shape, num_shards)
    ):
        return 1.0, 1.0
    cost = shares.eager_bytes / COMPILED_BYTES if candidate.compile else 1.0
    return cost / num_shards, candidate.gathers_each_pass * cost / num_shards


def compute_local_sides(product: Matmul, candidate: Candidate) -> tuple[float, float]:
    """Return the output and input width of a product on a tensor-parallel rank."""
    tp = candidate.layout.tp
    num_out = float(product.num_outputs)
    num_in = float(product.num_inputs)
    is_expert = product.sharding in ("expert_columns", "expert_rows")
    if is_expert and candidate.engine.count_expert_tensor_ranks(tp) > 1:
        tp = 1
    if product.sharding in ("columns", "vocabulary", "expert_columns"):
        num_out /= tp
    elif product.sharding in ("rows", "expert_rows"):
        num_in /= tp
    return num_out, num_in


def has_wide_gradients(candidate: Candidate) -> bool:
    """Return True if products write gradients of replicated dense weights in fp32, on a device with
    such kernels."""
    shares = candidate.quantised_shares
    layout = candidate.layout
    return (
        candidate.engine.has_wide_gradients
        and not (layout.tp > 1 and layout.async_tensor_parallel in ("chunked", "fused"))
        and (shares is None or shares.has_fp32_gradients)
    )


def count_weight_traffic_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, *, has_wide_products: bool
) -> tuple[float, float]:
    """Count bytes moved for weights rather than tokens: casts at use, copies from gathers and
    to reductions, conversions and sums of gradients.

    Args:
        has_wide_products: kernels multiply 16-bit operands and write fp32.
    """
    layout = candidate.layout
    size = candidate.activation_bytes
    master = candidate.master_bytes
    if candidate.adapter is not None:
        return 0.0, 0.0
    elements = facts.count_elements(layout).layers[kind.slot]
    trained = facts.count_elements(layout, should_skip_frozen=True).layers[kind.slot]
    gradient_bytes = candidate.engine.get_gradient_bytes(master)
    if candidate.is_sharded:
        if layout.zero_stage == 3:
            gathered = elements.local * 2 * size
            return gathered, kind.has_backward * gathered + trained.local * (size + master)
        return 0.0, trained.local * (size + gradient_bytes)
    if not candidate.engine.has_master_weights:
        return 0.0, trained.local * 2 * master
    sum_bytes = _count_sum_bytes(candidate)
    if size == master:
        return 0.0, trained.local * sum_bytes
    cast = 0.0 if candidate.has_working_weights else elements.local_matrices * (master + size)
    matrices = trained.local_matrices
    # A product that writes fp32 writes more than the operands' precision has, and is not converted.
    is_wide = has_wide_products and has_wide_gradients(candidate)
    wide = matrices - trained.expert_local if is_wide else 0.0
    return cast, matrices * (size + master + sum_bytes) - wide * 2 * size


def _count_sum_bytes(candidate: Candidate) -> float:
    """Count bytes moved per gradient element and micro-batch to sum replicated gradients.

    The first micro-batch's gradient is kept as it is, later ones are added to it, and DDP copies
    the sum to a bucket once per step.
    """
    layout = candidate.layout
    num_additions = candidate.gradient_accumulation_steps - 1
    has_buckets = layout.pp == 1 and layout.dp_replicate * layout.fsdp > 1
    passes = 3 * num_additions + 2 * has_buckets
    return passes * candidate.master_bytes / candidate.gradient_accumulation_steps
