"""Seconds of one layer, the embedding and the loss on one rank for one micro-batch.

Each is a sum of matmul, attention and memory time (`planner.time.memory_traffic`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.architecture.flop_count import EXPERT_ROLES
from shardwright.layout.saved_results import ResultName
from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.attention_activations import (
    choose_planned_kernel,
    get_attended_value_dim,
    has_dense_mask,
)
from shardwright.planner.model_costs import LayerKind, Matmul, ModelFacts, get_layer_recompute
from shardwright.planner.rates.device_rates import DeviceRates
from shardwright.planner.time.layer_matmuls import get_layer_matmul_seconds, time_matmul_passes
from shardwright.planner.time.memory_traffic import (
    count_adapter_bytes,
    count_adapter_operations,
    count_collective_copy_bytes,
    count_dequantisation_bytes,
    count_dispatched_rows,
    count_elementwise_bytes,
    count_matmul_calls,
    count_quantisation_bytes,
    count_repeated_quantisation_bytes,
    count_separate_bytes,
    count_weight_quantisation_bytes,
    get_elementwise_passes,
    list_matmuls,
)
from shardwright.schedule.registry import has_split_backward

_NUM_FORWARD_OPERATIONS = 22
_NUM_BACKWARD_OPERATIONS = 40
"""Operations of one block, forward and backward, that the host launches in eager mode."""
_COMPILED_OPERATIONS_SHARE = 0.5


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer and one micro-batch. `weight_gradient` is the part of `backward` for
    weight gradients, which a schedule may defer. `recompute` comes before the backward pass."""

    forward: float
    backward: float
    recompute: float
    weight_gradient: float
    attention_forward: float
    attention_backward: float
    experts_forward: float = 0.0
    """Products of experts, of which `experts_backward` has both gradients."""
    experts_backward: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0
    """Seconds that the host needs to launch the operations of a pass, communication included. 0
    if the passes include them."""

    @property
    def total(self) -> float:
        """Seconds of forward, recomputation and backward."""
        return self.forward + self.recompute + self.backward

    def drop_backward(self) -> LayerSeconds:
        """Return the seconds of the forward pass alone."""
        return LayerSeconds(
            self.forward,
            backward=0.0,
            recompute=0.0,
            weight_gradient=0.0,
            attention_forward=self.attention_forward,
            attention_backward=0.0,
            experts_forward=self.experts_forward,
            host_forward=self.host_forward,
        )

    def apply_host_delay(self, traffic_forward: float, traffic_backward: float) -> LayerSeconds:
        """Extend the passes to the host's launch time if it exceeds compute and exposed
        communication."""
        forward = max(self.forward, self.host_forward - traffic_forward)
        recompute = self.recompute
        if self.recompute >= self.forward:  # with its part of the backward pass's communication
            recompute = max(self.recompute, forward)
            traffic_backward = max(0.0, traffic_backward - traffic_forward)
        backward = max(self.backward, self.host_backward - traffic_backward)
        if forward == self.forward and backward == self.backward and recompute == self.recompute:
            return self
        return replace(self, forward=forward, backward=backward, recompute=recompute)


def compute_layer_seconds(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, rates: DeviceRates
) -> LayerSeconds:
    """Compute the seconds of one layer of a kind, without communication and weight movement
    (`count_weight_traffic_bytes`)."""
    efficiency = rates.efficiency
    products = get_layer_matmul_seconds(facts, kind, candidate, rates)
    attention_forward, attention_backward = _time_attention_passes(facts, kind, candidate, rates)
    moved_share = _get_moved_share(candidate, rates)
    elementwise_forward, elementwise_backward = _time_elementwise(facts, kind, candidate, rates)
    copies_forward, copies_backward = _time_copies(facts, kind, candidate, rates)
    forward = products.forward + (attention_forward + elementwise_forward + copies_forward)
    backward = (
        products.input_gradients
        + products.weight_gradients
        + attention_backward
        + elementwise_backward
        + copies_backward
    )
    if kind.shape.sparse and efficiency.routing_seconds:
        routing = efficiency.routing_seconds * count_dispatched_rows(facts, candidate)
        forward += routing / 2
        backward += routing / 2
    adapted_forward, adapted_backward = count_adapter_bytes(facts, kind, candidate)
    # Adapters are counted operation by operation: a trainer's fusion can only move fewer bytes.
    adapted_share = min(1.0, moved_share)
    forward += rates.time_copy(adapted_forward * adapted_share)
    backward += rates.time_copy(adapted_backward * adapted_share)
    dequantisation = rates.time_copy(count_dequantisation_bytes(facts, kind, candidate))
    forward += dequantisation
    backward += dequantisation
    host = efficiency.host_seconds * (_COMPILED_OPERATIONS_SHARE if candidate.compile else 1.0)
    sparse = efficiency.sparse_operations if kind.shape.sparse else 1.0
    launches_forward, launches_backward = _time_expert_launches(facts, kind, candidate, rates)
    # The host has waited for the numbers of rows, so it does not run ahead of the forward pass.
    forward += max(0.0, launches_forward - products.experts_forward)
    adapters_forward, adapters_backward = count_adapter_operations(facts, kind, candidate)
    host_forward = host * (sparse * _NUM_FORWARD_OPERATIONS + adapters_forward) + launches_forward
    host_backward = (
        host * (sparse * _NUM_BACKWARD_OPERATIONS + adapters_backward) + launches_backward
    )
    launched_on_host = 0.0
    if efficiency.runs_on_host:
        launched_on_host = host_forward
        forward += host_forward
        backward += host_backward
        host_forward = host_backward = 0.0
    recompute = forward
    mode = get_layer_recompute(kind, candidate.recompute)
    if mode in ("selective", "mixed"):
        recompute = (
            attention_forward
            if candidate.engine.should_recompute_attention_only
            else elementwise_forward + launched_on_host
        )
    if mode == "mixed":
        avoided = _sum_avoided_seconds(facts, kind, candidate, rates)
        recompute = max(recompute, forward - avoided)
    seconds = LayerSeconds(
        forward,
        backward,
        0.0 if mode == "none" else recompute,
        products.weight_gradients,
        attention_forward,
        attention_backward,
        products.experts_forward,
        products.experts_backward,
        host_forward,
        host_backward,
    )
    return seconds if kind.has_backward else seconds.drop_backward()


def _get_moved_share(candidate: Candidate, rates: DeviceRates) -> float:
    """Return the share of the bytes of separate elementwise operations that remains if fused."""
    compiled_share = rates.efficiency.compiled_bytes_share if candidate.compile else 1.0
    return rates.efficiency.bytes_share * compiled_share


def _time_elementwise(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, rates: DeviceRates
) -> tuple[float, float]:
    """Return the seconds of a layer's elementwise operations, forward and backward."""
    fused_share = _get_moved_share(candidate, rates)
    if get_elementwise_passes(facts, candidate).is_exact:
        fused_share = min(1.0, fused_share)
    forward, backward = (
        fused * fused_share + separate * max(1.0, rates.efficiency.bytes_share)
        for fused, separate in zip(
            count_elementwise_bytes(facts, kind, candidate),
            count_separate_bytes(facts, kind, candidate),
            strict=True,
        )
    )
    shape = candidate.residual_tokens, facts.shape.hidden_size
    return (
        rates.time_elementwise(forward, *shape, is_backward=False),
        rates.time_elementwise(backward, *shape, is_backward=True),
    )


def _time_copies(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, rates: DeviceRates
) -> tuple[float, float]:
    """Return the seconds, forward and backward, in which a layer quantises operands and copies
    what collectives send."""
    copied = count_collective_copy_bytes(facts, candidate)
    quantised = 0.0, 0.0
    if rates.is_low_precision:
        quantised = count_quantisation_bytes(facts, kind, candidate)
    return rates.time_copy(quantised[0] + copied[0]), rates.time_copy(quantised[1] + copied[1])


def _time_expert_launches(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, rates: DeviceRates
) -> tuple[float, float]:
    """Return the host's seconds for operations that it launches for each expert, forward and
    backward: a product, both of its gradients, and in few bits the quantisation of each operand.

    Transformer Engine's GroupedLinear calls cuBLAS once per expert (cublaslt_gemm.cu,
    nvte_multi_tensor_gemm) and quantises once per expert.
    """
    seconds = rates.efficiency.expert_launch_seconds
    if not seconds:
        return 0.0, 0.0
    num_calls = sum(
        count_matmul_calls(facts, kind, product, candidate) for product in kind.expert_matmuls
    )
    num_quantised = num_calls if rates.is_low_precision else 0.0
    return seconds * (num_calls + num_quantised), seconds * (2 * num_calls + num_quantised)


def _sum_avoided_seconds(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, rates: DeviceRates
) -> float:
    """Sum the seconds of the forward pass that its recomputation avoids: of the kept results, and
    of a last product that no gradient needs."""
    assert kind.saved_results is not None
    is_end_unneeded = has_unneeded_end(facts, kind, candidate)
    return sum(
        seconds
        for name, seconds in compute_result_seconds(facts, kind, candidate, rates).items()
        if name in kind.saved_results or (name == "down" and is_end_unneeded)
    )


def has_unneeded_end(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> bool:
    """Return True if recomputation of a block ends before its last product.

    Nothing after the product needs its result for a gradient. Products of quantised weights, and
    those that defer the gradients of weights, save their inputs after they have run.
    """
    layout = candidate.layout
    return (
        not kind.shape.sparse
        and not facts.shape.is_block_end_read
        and not (candidate.adapter is not None and candidate.adapter.quantised)
        and not (layout.pp > 1 and has_split_backward(layout.schedule))
    )


def compute_result_seconds(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, rates: DeviceRates
) -> dict[ResultName, float]:
    """Compute the seconds of the matmuls and kernels of each named result of one layer."""
    seconds: dict[ResultName, float] = {
        "attention": _time_attention_passes(facts, kind, candidate, rates)[0]
    }
    for product, rows in list_matmuls(facts, kind, candidate):
        name = _find_result_name(product)
        if name is None:
            continue
        forward = time_matmul_passes(product, rows, candidate, rates)[0]
        forward *= count_matmul_calls(facts, kind, product, candidate)
        if product in kind.expert_matmuls:
            forward /= rates.efficiency.expert_share
        seconds[name] = seconds.get(name, 0.0) + forward
    return seconds


def _find_result_name(product: Matmul) -> ResultName | None:
    """Return the name of a matmul's result; None for the router's, which is always repeated."""
    if product.role in EXPERT_ROLES:
        return "experts"
    if product.role in ("gate", "up", "gate_up"):
        return "gate_up"
    if product.role == "attention_out":
        return "attention_out"
    if product.role == "down":
        return "down"
    return None if product.role == "router" else "projections"


def compute_scaled_product_seconds(
    facts: ModelFacts, candidate: Candidate, rates: DeviceRates
) -> tuple[float, float]:
    """Compute the seconds per micro-batch of all layers' products that `scaled_shares` gives
    quantised operands, at the given rates, and of quantising these operands; of working operands a
    micro-batch has its part."""
    shares = candidate.scaled_shares
    assert shares is not None
    products = moved_bytes = 0.0
    for kind in facts.kinds:
        seconds = 0.0
        for product, rows in list_matmuls(facts, kind, candidate):
            # At one precision, so that the shares only select.
            same = replace(candidate, scaled_shares=None)
            output, inputs, weights = time_matmul_passes(product, rows, same, rates)
            share = shares.get_share(product.role)
            recomputed = 2 if candidate.recompute == "full" else 1
            num_calls = count_matmul_calls(facts, kind, product, candidate)
            if not kind.has_backward:
                seconds += num_calls * share * output
                continue
            seconds += num_calls * share * (recomputed * output + inputs)
            if candidate.adapter is None and product.is_trained:
                weight_share = shares.get_weight_gradient_share(product.role)
                seconds += num_calls * weight_share * weights
        products += kind.count * seconds
        forward, backward = count_quantisation_bytes(facts, kind, candidate)
        if candidate.recompute == "full" and kind.has_backward:
            forward *= 2
        weights = sum(count_repeated_quantisation_bytes(facts, kind, candidate))
        if candidate.has_working_operands:
            once = sum(count_weight_quantisation_bytes(facts, kind, candidate))
            weights = once / candidate.gradient_accumulation_steps
        moved_bytes += kind.count * (forward + backward + weights)
    return products, rates.time_copy(moved_bytes)


def _time_attention_passes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, rates: DeviceRates
) -> tuple[float, float]:
    shape = facts.shape
    load = candidate.get_attention_load(kind.shape.window)
    tokens = float(candidate.micro_batch_tokens)
    row_tokens = candidate.document_tokens or candidate.sequence_length
    row_tokens = min(row_tokens, candidate.sequence_length)
    value_dim = get_attended_value_dim(facts, candidate)
    widths = shape.num_heads * (shape.head_dim + value_dim) / candidate.layout.tp
    if choose_planned_kernel(facts, candidate, kind.shape.window) == "explicit":
        # Not fused: full rows of scores.
        tokens *= load
        scores = tokens * candidate.sequence_length * shape.num_heads / candidate.layout.tp
        flops = 2.0 * widths * tokens * candidate.sequence_length
        moved = scores * candidate.engine.get_score_bytes(candidate.activation_bytes)
        rate = (
            rates.matmul_flops_per_second
            * 0.6
            * (rates.compute_tile_share(shape.head_dim) if shape.head_dim % 8 else 1.0)
        )
        return flops / rate + rates.time_copy(moved), 2.0 * flops / rate + rates.time_copy(
            1.5 * moved
        )
    keys = facts.compute_mean_visible_keys(kind, row_tokens)
    flops = 2.0 * widths * tokens * load * keys
    # The keys of a token with a window fill as few tiles as those of a row of twice that length.
    causal_tokens = min(row_tokens, 2.0 * keys)
    if candidate.layout.cp == 1 and has_dense_mask(facts, candidate, kind.shape.window):
        causal_tokens = candidate.sequence_length
        flops = 2.0 * widths * tokens * _count_masked_keys(candidate.sequence_length, candidate)
    return (
        rates.time_attention(flops, causal_tokens, shape.head_dim, is_backward=False),
        rates.time_attention(2.5 * flops, causal_tokens, shape.head_dim, is_backward=True),
    )


_CPU_KEYS_PER_BLOCK = 512
_GPU_KEYS_PER_BLOCK = 128
"""Keys per block of the fused kernels that take a dense mask (torch, FlashAttentionKernel.cpp;
memory-efficient attention on CUDA)."""


def _count_masked_keys(row_tokens: int, candidate: Candidate) -> float:
    """Count the keys per token of a causal row that take as long as those of a dense mask.

    Causal order skips whole blocks of keys, and a dense mask none. Rates of causal rows contain
    the keys of a block that are computed and not visible.
    """
    block = _GPU_KEYS_PER_BLOCK if candidate.has_masked_kernels else _CPU_KEYS_PER_BLOCK
    num_blocks = -(-row_tokens // block)
    computed = sum(
        min(block, row_tokens - number * block) * min(row_tokens, (number + 1) * block)
        for number in range(num_blocks)
    )
    return (row_tokens + 1) / 2 * row_tokens * row_tokens / computed


def compute_end_seconds(
    facts: ModelFacts, candidate: Candidate, rates: DeviceRates
) -> tuple[float, float]:
    """Compute seconds per micro-batch of the embedding (forward and backward), and of the final
    norm, the head and the loss.

    The chunked loss computes its gradients in the forward pass: three matmuls, and about 30
    bytes moved per logit, or 12 in one pass of a compiled function.
    """
    shape = facts.shape
    size = candidate.activation_bytes
    tp = candidate.layout.tp
    tokens = candidate.micro_batch_tokens
    vocab = shape.vocab_size / tp
    embedding = rates.time_copy(tokens * shape.hidden_size * (3 * size + 4))
    if candidate.adapter is None and facts.is_embedding_trained:
        embedding += rates.time_copy(vocab * shape.hidden_size * 4)
    chunk = min(candidate.loss_chunk_tokens or tokens, tokens)
    num_chunks = tokens / chunk
    forward, dx, dw = (
        seconds * num_chunks for seconds in time_matmul_passes(facts.head, chunk, candidate, rates)
    )
    has_weight_gradient = candidate.adapter is None and facts.head.is_trained
    if not has_weight_gradient:
        dw = 0.0
    if not facts.has_hidden_gradient:
        dx = 0.0
    moved = tokens * vocab * (6 * size + (0 if candidate.has_fused_losses else 18))
    if has_weight_gradient and candidate.loss_chunk_tokens is not None:
        # The head's gradient is a sum over chunks in fp32. Without a kernel that adds a product of
        # 16-bit operands to it, the product is written and read.
        has_separate_products = rates.cluster.accelerator.kind == "cpu" and size < 4
        sum_bytes = 8 + 2 * size * has_separate_products
        moved += num_chunks * vocab * shape.hidden_size * sum_bytes
    return embedding, forward + dx + dw + rates.time_copy(moved)
