"""Seconds of one layer, the embedding and the loss on one rank for one micro-batch.

Each is a sum of matmul, attention and memory time. Legend: N tokens of the micro-batch on this
rank, S of them in its residual stream, D hidden size, F feed-forward width, Q and K widths of
queries and of keys, c bytes per activation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.hardware import Cluster
from shardwright.planner.activations import count_micro_batch_tokens, count_residual_tokens
from shardwright.planner.candidate import Candidate
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.model_costs import LayerKind, Matmul, ModelFacts

_PEAK_PRECISIONS = {"fp8": "fp8", "nvfp4": "fp4"}
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
    host_forward: float = 0.0
    host_backward: float = 0.0
    """Seconds that the host needs to launch the operations of a pass, communication included. 0
    if the passes include them."""

    @property
    def total(self) -> float:
        """Seconds of forward, recomputation and backward."""
        return self.forward + self.recompute + self.backward

    def apply_host_delay(self, traffic_forward: float, traffic_backward: float) -> LayerSeconds:
        """Extend the passes to the host's launch time if it exceeds compute and exposed
        communication."""
        forward = max(self.forward, self.host_forward - traffic_forward)
        backward = max(self.backward, self.host_backward - traffic_backward)
        recompute = (
            max(self.recompute, forward) if self.recompute >= self.forward else self.recompute
        )
        return replace(self, forward=forward, backward=backward, recompute=recompute)


class DeviceRates:
    """Rates of a device in a candidate's precision: matmuls by shape, memory, attention. Caches
    matmul times."""

    def __init__(self, cluster: Cluster, efficiency: Efficiency, precision: str) -> None:
        accelerator = cluster.accelerator
        self.cluster = cluster
        self.efficiency = efficiency
        self.precision = _PEAK_PRECISIONS.get(precision, precision)
        self.peak_flops_per_second = accelerator.get_peak_flops_per_second(self.precision)
        self.attention_precision = "bf16" if precision in _PEAK_PRECISIONS else self.precision
        self.attention_peak_flops_per_second = accelerator.get_peak_flops_per_second(
            self.attention_precision
        )
        share = efficiency.matmul_share_by_precision.get(precision, efficiency.matmul_share)
        self.matmul_flops_per_second = self.peak_flops_per_second * share
        self.bytes_per_second = accelerator.memory_bytes_per_second * efficiency.memory_share
        self.update_bytes_per_second = (
            accelerator.memory_bytes_per_second * efficiency.optimizer_share
        )
        if cluster.profile is not None:
            # A measured copy rate needs no efficiency factor.
            self.bytes_per_second = cluster.profile.memory_bytes_per_second
            self.update_bytes_per_second = cluster.profile.memory_bytes_per_second
        self.operand_bytes = {"fp8": 1, "fp4": 1, "fp32": 4, "fp64": 8}.get(self.precision, 2)
        self.is_low_precision = precision in _PEAK_PRECISIONS
        """True if blocks multiply in fewer bits than the head and everything else, which stay
        in bf16."""
        self._high_precision = (
            DeviceRates(cluster, efficiency, "bf16") if self.is_low_precision else self
        )
        self._matmul_cache: dict[tuple[float, float, float], float] = {}

    def time_matmul(
        self, m: float, n: float, k: float, *, is_high_precision: bool = False
    ) -> float:
        """Return seconds of [m, k] x [k, n]. `is_high_precision` uses bf16 where blocks multiply in
        fewer bits."""
        if is_high_precision and self.is_low_precision:
            return self._high_precision.time_matmul(m, n, k)
        key = (m, n, k)
        seconds = self._matmul_cache.get(key)
        if seconds is None:
            seconds = self._matmul_cache[key] = self._time_matmul(m, n, k)
        return seconds

    def _time_matmul(self, m: float, n: float, k: float) -> float:
        if m <= 0 or n <= 0 or k <= 0:
            return 0.0
        efficiency = self.efficiency
        rate = None
        if self.cluster.profile is not None:
            rate = self.cluster.profile.find_matmul_flops_per_second(
                self.precision, max(1, round(m)), max(1, round(n)), max(1, round(k))
            )
        if rate is None:
            rate = (
                self.matmul_flops_per_second
                * m
                / (m + efficiency.m_half)
                * n
                / (n + efficiency.n_half)
                * k
                / (k + efficiency.k_half)
            )
        memory_seconds = self.operand_bytes * (m * k + k * n + m * n) / self.bytes_per_second
        return max(2.0 * m * n * k / rate, memory_seconds, efficiency.kernel_seconds)

    def compute_tile_share(self, *widths: float) -> float:
        """Return the share of the matmul rate at these matrix widths, by how well they fill
        tiles. 1 with a measured profile."""
        if self.cluster.profile is not None:
            return 1.0
        if any(width % 8 for width in widths):
            return self.efficiency.odd_share
        return self.efficiency.uneven_share if any(width % 64 for width in widths) else 1.0

    def time_copy(self, num_bytes: float) -> float:
        """Return seconds to read and write `num_bytes` in total."""
        return num_bytes / self.bytes_per_second

    def time_elementwise(
        self, num_bytes: float, tokens: float, width: int, *, is_backward: bool
    ) -> float:
        """Return seconds of elementwise operations that read and write `num_bytes`, on tensors
        of `tokens` x `width`.

        Without a measurement the rate is that of a copy.
        """
        profile = self.cluster.profile
        rate = None
        if profile is not None:
            rate = profile.find_elementwise_bytes_per_second(
                self.attention_precision, max(1, round(tokens)), width, is_backward=is_backward
            )
        return num_bytes / (self.bytes_per_second if rate is None else rate)

    def time_attention(
        self, flops: float, row_tokens: float, head_dim: int, *, is_backward: bool
    ) -> float:
        """Return seconds of the fused attention kernel for `flops`."""
        efficiency = self.efficiency
        rate = None
        if self.cluster.profile is not None:
            rate = self.cluster.profile.find_attention_flops_per_second(
                self.attention_precision, row_tokens, head_dim, is_backward=is_backward
            )
        if rate is None:
            share = (
                efficiency.attention_backward_share
                if is_backward
                else efficiency.attention_forward_share
            )
            rate = (
                self.attention_peak_flops_per_second
                * share
                * row_tokens
                / (row_tokens + efficiency.attention_half_tokens)
            )
        return max(flops / rate, efficiency.kernel_seconds)


def compute_layer_seconds(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, rates: DeviceRates
) -> LayerSeconds:
    """Compute the seconds of one layer of a kind, without communication and weight movement
    (`count_weight_traffic_bytes`)."""
    efficiency = rates.efficiency
    forward = inputs = weights = 0.0
    for product, rows in _list_matmuls(facts, kind, candidate):
        product_forward, input_gradient, weight_gradient = _time_matmul_passes(
            product, rows, candidate, rates
        )
        num_calls = _count_matmul_calls(facts, kind, product, candidate)
        if product in kind.expert_matmuls:
            num_calls /= efficiency.expert_share
        forward += num_calls * product_forward
        inputs += num_calls * input_gradient
        weights += num_calls * weight_gradient
    if candidate.adapter is not None:
        weights = 0.0  # frozen matrices take no gradient
    attention_forward, attention_backward = _time_attention_passes(facts, kind, candidate, rates)
    moved_forward, moved_backward = _count_elementwise_bytes(facts, kind, candidate)
    moved_share = efficiency.bytes_share * (
        efficiency.compiled_bytes_share if candidate.compile else 1.0
    )
    moved_forward *= moved_share
    moved_backward *= moved_share
    stream_shape = count_residual_tokens(candidate), facts.shape.hidden_size
    elementwise_forward = rates.time_elementwise(moved_forward, *stream_shape, is_backward=False)
    quantised_forward, quantised_backward = (
        _count_quantisation_bytes(facts, kind, candidate) if rates.is_low_precision else (0.0, 0.0)
    )
    forward += attention_forward + elementwise_forward + rates.time_copy(quantised_forward)
    backward = (
        inputs
        + weights
        + attention_backward
        + rates.time_elementwise(moved_backward, *stream_shape, is_backward=True)
    )
    backward += rates.time_copy(quantised_backward)
    if kind.shape.sparse and efficiency.routing_seconds:
        routing = efficiency.routing_seconds * _count_dispatched_rows(facts, candidate)
        forward += routing / 2
        backward += routing / 2
    adapted_forward, adapted_backward = _count_adapter_bytes(facts, kind, candidate)
    forward += rates.time_copy(adapted_forward * moved_share)
    backward += rates.time_copy(adapted_backward * moved_share)
    dequantisation = rates.time_copy(_count_dequantisation_bytes(facts, kind, candidate))
    forward += dequantisation
    backward += dequantisation
    host = efficiency.host_seconds * (_COMPILED_OPERATIONS_SHARE if candidate.compile else 1.0)
    sparse = efficiency.sparse_operations if kind.shape.sparse else 1.0
    host_forward = host * sparse * _NUM_FORWARD_OPERATIONS
    host_backward = host * sparse * _NUM_BACKWARD_OPERATIONS
    if efficiency.runs_on_host:
        forward += host_forward
        backward += host_backward
        host_forward = host_backward = 0.0
    recompute = {"none": 0.0, "full": forward, "selective": elementwise_forward}[
        candidate.recompute
    ]
    return LayerSeconds(
        forward,
        backward,
        recompute,
        weights,
        attention_forward,
        attention_backward,
        host_forward,
        host_backward,
    )


def count_expert_tensor_ranks(candidate: Candidate) -> int:
    """Return over how many tensor-parallel ranks whole experts are distributed. 1 if each
    expert is sharded instead."""
    return candidate.layout.tp if candidate.conventions.has_unsharded_experts else 1


def _count_dispatched_rows(facts: ModelFacts, candidate: Candidate) -> float:
    """Count the rows that the rank sends to experts, equal to those it receives."""
    experts = facts.shape.experts
    assert experts is not None
    return (
        count_micro_batch_tokens(candidate)
        * experts.experts_per_token
        / count_expert_tensor_ranks(candidate)
    )


def _list_matmuls(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> list[tuple[Matmul, float]]:
    """List the matmuls of a layer with their rows on this rank."""
    tokens = count_micro_batch_tokens(candidate)
    products: list[tuple[Matmul, float]] = [(product, float(tokens)) for product in kind.matmuls]
    if kind.expert_matmuls:
        experts = facts.shape.experts
        assert experts is not None
        local_experts = experts.num_experts / candidate.layout.ep
        # Rows of all ranks that share the experts, spread evenly over the local ones. If
        # tensor-parallel ranks hold whole experts, each rank has fewer experts with the same
        # number of rows each.
        rows = tokens * experts.experts_per_token / local_experts
        products += [(product, rows) for product in kind.expert_matmuls]
    return products


def _count_matmul_calls(
    facts: ModelFacts, kind: LayerKind, matmul: Matmul, candidate: Candidate
) -> float:
    """Count the matmuls of this shape on the rank: one per local expert, otherwise 1."""
    if matmul not in kind.expert_matmuls:
        return 1.0
    experts = facts.shape.experts
    assert experts is not None
    return experts.num_experts / (candidate.layout.ep * count_expert_tensor_ranks(candidate))


def _time_matmul_passes(
    matmul: Matmul, rows: float, candidate: Candidate, rates: DeviceRates
) -> tuple[float, float, float]:
    """Return seconds of the matmul, of its input's gradient, and of its weight's gradient."""
    tp = candidate.layout.tp
    num_in = float(matmul.num_inputs)
    num_out = float(matmul.num_outputs)
    if (
        matmul.sharding in ("expert_columns", "expert_rows")
        and count_expert_tensor_ranks(candidate) > 1
    ):
        tp = 1
    if matmul.sharding in ("columns", "vocabulary", "expert_columns"):
        num_out /= tp
    elif matmul.sharding in ("rows", "expert_rows"):
        num_in /= tp
    # Most frameworks pad the vocabulary, whatever size a table states.
    share = 1.0 if matmul.sharding == "vocabulary" else rates.compute_tile_share(num_in, num_out)
    wide = matmul.role in ("head", "router")
    return (
        rates.time_matmul(rows, num_out, num_in, is_high_precision=wide) / share,
        rates.time_matmul(rows, num_in, num_out, is_high_precision=wide) / share,
        rates.time_matmul(num_out, num_in, rows, is_high_precision=wide) / share,
    )


def _time_attention_passes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate, rates: DeviceRates
) -> tuple[float, float]:
    shape = facts.shape
    tokens = count_micro_batch_tokens(candidate)
    row_tokens = candidate.document_tokens or candidate.sequence_length
    row_tokens = min(row_tokens, candidate.sequence_length)
    widths = (shape.query_width + shape.value_width) / candidate.layout.tp
    score_bytes = candidate.conventions.score_bytes
    if shape.attention_soft_cap is not None or not candidate.flash_attention:
        # Not fused: full rows of scores, moved about ten times in fp32 and the compute
        # precision, or as the framework's fused softmax moves them.
        scores = tokens * candidate.sequence_length * shape.num_heads / candidate.layout.tp
        flops = 2.0 * widths * tokens * candidate.sequence_length
        moved = scores * (
            8 + 6 * candidate.activation_bytes if score_bytes is None else score_bytes
        )
        rate = (
            rates.matmul_flops_per_second
            * 0.6
            * (rates.compute_tile_share(shape.head_dim) if shape.head_dim % 8 else 1.0)
        )
        return flops / rate + rates.time_copy(moved), 2.0 * flops / rate + rates.time_copy(
            1.5 * moved
        )
    flops = 2.0 * widths * tokens * facts.compute_mean_visible_keys(kind, row_tokens)
    forward = rates.time_attention(flops, row_tokens, shape.head_dim, is_backward=False)
    return forward, rates.time_attention(2.5 * flops, row_tokens, shape.head_dim, is_backward=True)


def _count_elementwise_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[float, float]:
    """Count bytes that a layer's elementwise operations read and write, forward and backward,
    as the model implements them.

    A norm reads and writes S D (backward: reads twice, writes once, and once more for the
    weight). A residual sum moves 3 S D, rotary embeddings 3 N (Q + K), a gate 5 N F, and 11 N F
    backward.
    """
    shape = facts.shape
    size = candidate.activation_bytes
    tp = candidate.layout.tp
    tokens = count_micro_batch_tokens(candidate)
    stream = count_residual_tokens(candidate)
    width = stream * shape.hidden_size
    heads = tokens * (shape.query_width + shape.kv_width) / tp
    experts = shape.experts if kind.shape.sparse else None
    inner = tokens * shape.intermediate_size / tp
    dispatched = 0.0
    if experts is not None:
        rows = tokens * experts.experts_per_token
        inner = (rows * experts.intermediate_size + tokens * experts.shared_intermediate_size) / tp
        # Rows are gathered, weighted and added back.
        dispatched = _count_dispatched_rows(facts, candidate) * shape.hidden_size
        if experts.expert_bias:
            # Biases added to rows and a clamped gate are separate operations: forward they read
            # and write about nine tensors of the inner width, backward twice as many, and two
            # of the model's width.
            dispatched += dispatched / 3
            inner += rows * experts.intermediate_size / tp * 1.8
    gated = shape.is_gated or experts is not None
    forward = (
        width * (2 * kind.num_norms + 6) + 3 * heads + inner * (5 if gated else 2) + 6 * dispatched
    )
    backward = (
        width * (4 * kind.num_norms + 4) + 3 * heads + inner * (11 if gated else 3) + 8 * dispatched
    )
    return forward * size, backward * size


def _count_adapter_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[float, float]:
    """Count bytes that adapters move beside their matrices, forward and backward. Their matmuls
    are so narrow that they are memory-bound.

    Forward: the input is read; the second matmul's result is written, scaled, and added to the
    matrix's output. Backward: the scaled gradient is written and read by two matmuls, the input
    is read by a third, and its gradient is written and added.
    """
    adapter = candidate.adapter
    tp = candidate.layout.tp
    if adapter is None:
        return 0.0, 0.0
    forward = backward = 0.0
    for product, rows in _list_matmuls(facts, kind, candidate):
        if product.role not in adapter.roles:
            continue
        rows *= _count_matmul_calls(facts, kind, product, candidate)
        num_in = (
            rows * product.num_inputs / (tp if product.sharding in ("rows", "expert_rows") else 1)
        )
        num_out = (
            rows
            * product.num_outputs
            / (tp if product.sharding in ("columns", "expert_columns") else 1)
        )
        forward += num_in + 6 * num_out
        backward += 5 * num_in + 4 * num_out
    return forward * candidate.activation_bytes, backward * candidate.activation_bytes


_DEQUANTISATION_BYTES = 6.0
"""Bytes moved per NF4 weight of a matmul: 4 bits read, looked up and written, scaled by scales
that are quantised too."""


def _count_dequantisation_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Count bytes moved in one pass through a layer to dequantise all of its frozen NF4
    matrices (QLoRA)."""
    adapter = candidate.adapter
    if adapter is None or not adapter.quantised:
        return 0.0
    elements = sum(
        float(product.num_inputs * product.num_outputs)
        * _count_matmul_calls(facts, kind, product, candidate)
        for product in (*kind.matmuls, *kind.expert_matmuls)
        if product.role not in adapter.unquantised
    )
    return elements / candidate.layout.tp * _DEQUANTISATION_BYTES


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


def _count_quantisation_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[float, float]:
    """Count bytes moved to quantise a layer's operands: inputs in the forward pass, output
    gradients in the backward pass.

    Weights are quantised once per step and not counted.
    """
    tp = candidate.layout.tp
    forward = backward = 0.0
    for product, rows in _list_matmuls(facts, kind, candidate):
        if product.role == "router":
            continue
        elements = rows * _count_matmul_calls(facts, kind, product, candidate)
        width_in = float(product.num_inputs)
        width_out = float(product.num_outputs)
        is_unsharded = (
            product.sharding.startswith("expert") and count_expert_tensor_ranks(candidate) > 1
        )
        if not is_unsharded and product.sharding in ("columns", "expert_columns"):
            width_out /= tp
        elif not is_unsharded and product.sharding in ("rows", "expert_rows"):
            width_in /= tp
        if product.role in _QUANTISING_ROLES or product.sharding.startswith("expert"):
            forward += elements * width_in
        backward += elements * width_out
    return forward * _QUANTISATION_BYTES, backward * _QUANTISATION_BYTES


def count_weight_traffic_bytes(
    facts: ModelFacts, kind: LayerKind, candidate: Candidate
) -> tuple[float, float]:
    """Count bytes moved for weights rather than tokens: casts at use, copies from gathers and
    to reductions, sums of gradients."""
    layout = candidate.layout
    size = candidate.activation_bytes
    master = candidate.master_bytes
    if candidate.adapter is not None:
        return 0.0, 0.0
    elements = facts.count_elements(layout).layers[kind.slot]
    gradient_bytes = (
        master
        if candidate.conventions.gradient_bytes is None
        else candidate.conventions.gradient_bytes
    )
    if layout.zero_stage >= 1 and layout.fsdp > 1:
        if layout.zero_stage == 3:
            return elements.local * 2 * size, elements.local * (3 * size + master)
        return 0.0, elements.local * (size + gradient_bytes)
    if (
        candidate.conventions.weight_bytes is None
        and candidate.conventions.should_cast_at_use
        and size != master
    ):
        return elements.local_matrices * (master + size), elements.local_matrices * (
            size + 3 * master
        )
    return 0.0, elements.local * 2 * master


def compute_end_seconds(
    facts: ModelFacts, candidate: Candidate, rates: DeviceRates
) -> tuple[float, float]:
    """Compute seconds per micro-batch of the embedding (forward and backward), and of the final
    norm, the head and the loss.

    The chunked loss computes its gradients in the forward pass: three matmuls, and about 30
    bytes moved per logit.
    """
    shape = facts.shape
    size = candidate.activation_bytes
    tp = candidate.layout.tp
    tokens = count_micro_batch_tokens(candidate)
    vocab = shape.vocab_size / tp
    embedding = rates.time_copy(tokens * shape.hidden_size * (3 * size + 4))
    if candidate.adapter is None:
        embedding += rates.time_copy(vocab * shape.hidden_size * 4)
    chunk = min(candidate.loss_chunk_tokens or tokens, tokens)
    num_chunks = tokens / chunk
    forward, dx, dw = (
        seconds * num_chunks for seconds in _time_matmul_passes(facts.head, chunk, candidate, rates)
    )
    if candidate.adapter is not None:
        dw = 0.0
    moved = tokens * vocab * (18 + 6 * size)
    if candidate.adapter is None and candidate.loss_chunk_tokens is not None:
        moved += num_chunks * vocab * shape.hidden_size * (2 * size + 8)
    return embedding, forward + dx + dw + rates.time_copy(moved)


def compute_update_seconds(num_elements: float, candidate: Candidate, rates: DeviceRates) -> float:
    """Compute seconds of norm, clip and update of the trained parameters on a rank: 40 bytes
    each with AdamW's two moments.

    For Muon only memory traffic is counted, without the orthogonalisation's matmuls and
    communication.
    """
    per_element = {
        "adamw": 40.0,
        "adamw_8bit": 28.0,
        "adafactor": 36.0,
        "muon": 44.0,
        "sgd": 24.0,
        "sgd_momentum": 32.0,
    }[candidate.optimizer]
    return num_elements * per_element * candidate.master_bytes / 4 / rates.update_bytes_per_second
