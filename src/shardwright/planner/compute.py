"""Seconds that one layer, the embedding and the loss take on one rank for one micro-batch, from products, attention and bytes.
Torch-free.

Legend: N tokens of the micro-batch on this rank, S in its residual stream, D hidden, F feed-forward width, Q and K widths of
queries and
of keys, c bytes per activation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.hardware import Cluster
from shardwright.planner.activations import micro_batch_tokens, residual_tokens
from shardwright.planner.candidate import Candidate
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.facts import LayerKind, ModelFacts, Product

_PEAKS = {"fp8": "fp8", "nvfp4": "fp4"}
_OPERATIONS_FORWARD, _OPERATIONS_BACKWARD = 22, 40
"""Operations of one block that the host starts one by one, in eager mode."""
_COMPILED_OPERATIONS_SHARE = 0.5


@dataclass(frozen=True)
class LayerSeconds:
    """Of one layer and one micro-batch. `weight_gradient` is the part of `backward` that makes gradients of weights, which a
    schedule may do later; `recompute` comes before the backward pass."""

    forward: float
    backward: float
    recompute: float
    weight_gradient: float
    attention_forward: float
    attention_backward: float
    host_forward: float = 0.0
    host_backward: float = 0.0
    """What the host needs to start the operations of a pass, traffic's included; 0 where the passes hold it already."""

    @property
    def total(self) -> float:
        """Forward, recomputation and backward."""
        return self.forward + self.recompute + self.backward

    def awaiting_host(self, traffic_forward: float, traffic_backward: float) -> LayerSeconds:
        """The same on a device that waits for its host, where products and so many seconds of exposed traffic are done earlier."""
        forward = max(self.forward, self.host_forward - traffic_forward)
        backward = max(self.backward, self.host_backward - traffic_backward)
        again = max(self.recompute, forward) if self.recompute >= self.forward else self.recompute
        return replace(self, forward=forward, backward=backward, recompute=again)


class Rates:
    """What a device achieves in a candidate's precision: products by shape, bytes, attention. Look-ups are kept."""

    def __init__(self, cluster: Cluster, efficiency: Efficiency, precision: str) -> None:
        accelerator = cluster.accelerator
        self.cluster, self.efficiency = cluster, efficiency
        self.precision = _PEAKS.get(precision, precision)
        self.peak = accelerator.peak(self.precision)
        self.attention_precision = "bf16" if precision in _PEAKS else self.precision
        self.attention_peak = accelerator.peak(self.attention_precision)
        share = efficiency.matmul_share_by_precision.get(precision, efficiency.matmul_share)
        self.product_rate = self.peak * share
        self.bytes_per_second = accelerator.memory_bytes_per_second * efficiency.memory_share
        self.update_bytes_per_second = accelerator.memory_bytes_per_second * efficiency.optimizer_share
        if cluster.profile is not None:
            # A measured copy is what bytes can do: no share of it is lost again.
            self.bytes_per_second = cluster.profile.memory_bytes_per_second
            self.update_bytes_per_second = cluster.profile.memory_bytes_per_second
        self.operand_bytes = {"fp8": 1, "fp4": 1, "fp32": 4, "fp64": 8}.get(self.precision, 2)
        self.narrow = precision in _PEAKS
        """Whether blocks multiply in fewer bits than the head and all else, which stay in bf16."""
        self._wide = Rates(cluster, efficiency, "bf16") if self.narrow else self
        self._products: dict[tuple[float, float, float], float] = {}

    def product(self, m: float, n: float, k: float, *, wide: bool = False) -> float:
        """Seconds of [m, k] x [k, n]; `wide` in bf16 where blocks multiply in fewer bits."""
        if wide and self.narrow:
            return self._wide.product(m, n, k)
        key = (m, n, k)
        found = self._products.get(key)
        if found is None:
            found = self._products[key] = self._product(m, n, k)
        return found

    def _product(self, m: float, n: float, k: float) -> float:
        if m <= 0 or n <= 0 or k <= 0:
            return 0.0
        efficiency = self.efficiency
        rate = None
        if self.cluster.profile is not None:
            rate = self.cluster.profile.matmul_flops_per_second(
                self.precision, max(1, round(m)), max(1, round(n)), max(1, round(k))
            )
        if rate is None:
            rate = self.product_rate * m / (m + efficiency.m_half) * n / (n + efficiency.n_half) * k / (k + efficiency.k_half)
        read = self.operand_bytes * (m * k + k * n + m * n) / self.bytes_per_second
        return max(2.0 * m * n * k / rate, read, efficiency.kernel_seconds)

    def fitting(self, *widths: float) -> float:
        """Share of a product's rate that these widths of matrices reach, by how well they fill tiles; 1 where it was measured."""
        if self.cluster.profile is not None:
            return 1.0
        if any(width % 8 for width in widths):
            return self.efficiency.odd_share
        return self.efficiency.uneven_share if any(width % 64 for width in widths) else 1.0

    def moved(self, num_bytes: float) -> float:
        """Seconds to read and write so many bytes."""
        return num_bytes / self.bytes_per_second

    def elementwise(self, num_bytes: float, tokens: float, width: int, *, backward: bool) -> float:
        """Seconds of operations between products that read and write so many bytes, on tensors of `tokens` x `width`; at a copy's
        pace where nothing was measured."""
        profile, rate = self.cluster.profile, None
        if profile is not None:
            rate = profile.elementwise_bytes_per_second(self.attention_precision, max(1, round(tokens)), width, backward=backward)
        return num_bytes / (self.bytes_per_second if rate is None else rate)

    def attention(self, flops: float, row_tokens: float, head_dim: int, *, backward: bool) -> float:
        """Seconds of the fused kernel for so many FLOPs."""
        efficiency, rate = self.efficiency, None
        if self.cluster.profile is not None:
            rate = self.cluster.profile.attention_flops_per_second(
                self.attention_precision, row_tokens, head_dim, backward=backward
            )
        if rate is None:
            share = efficiency.attention_backward_share if backward else efficiency.attention_forward_share
            rate = self.attention_peak * share * row_tokens / (row_tokens + efficiency.attention_half_tokens)
        return max(flops / rate, efficiency.kernel_seconds)


def layer_seconds(facts: ModelFacts, kind: LayerKind, candidate: Candidate, rates: Rates) -> LayerSeconds:
    """One layer of a kind; communication, and what moves weights rather than tokens (`weight_bytes`), left out."""
    efficiency = rates.efficiency
    forward = inputs = weights = 0.0
    for product, rows in _products(facts, kind, candidate):
        one, dx, dw = _product_seconds(product, rows, candidate, rates)
        times = _copies(facts, kind, product, candidate)
        if product in kind.expert_products:
            times /= efficiency.expert_share
        forward, inputs, weights = forward + times * one, inputs + times * dx, weights + times * dw
    if candidate.adapter is not None:
        weights = 0.0  # frozen matrices take no gradient
    attention_forward, attention_backward = _attention_seconds(facts, kind, candidate, rates)
    moved_forward, moved_backward = _moved_bytes(facts, kind, candidate)
    moved_share = efficiency.bytes_share * (efficiency.compiled_bytes_share if candidate.compile else 1.0)
    moved_forward, moved_backward = moved_forward * moved_share, moved_backward * moved_share
    tensor = residual_tokens(candidate), facts.shape.hidden_size
    light = rates.elementwise(moved_forward, *tensor, backward=False)
    quantised_forward, quantised_backward = _quantised_bytes(facts, kind, candidate) if rates.narrow else (0.0, 0.0)
    forward += attention_forward + light + rates.moved(quantised_forward)
    backward = inputs + weights + attention_backward + rates.elementwise(moved_backward, *tensor, backward=True)
    backward += rates.moved(quantised_backward)
    if kind.shape.sparse and efficiency.routing_seconds:
        routing = efficiency.routing_seconds * _sent_rows(facts, candidate)
        forward, backward = forward + routing / 2, backward + routing / 2
    adapted_forward, adapted_backward = _adapted_bytes(facts, kind, candidate)
    forward += rates.moved(adapted_forward * moved_share)
    backward += rates.moved(adapted_backward * moved_share)
    opened = rates.moved(_dequantised_bytes(facts, kind, candidate))
    forward, backward = forward + opened, backward + opened
    host = efficiency.host_seconds * (_COMPILED_OPERATIONS_SHARE if candidate.compile else 1.0)
    sparse = efficiency.sparse_operations if kind.shape.sparse else 1.0
    host_forward, host_backward = host * sparse * _OPERATIONS_FORWARD, host * sparse * _OPERATIONS_BACKWARD
    if efficiency.runs_on_host:
        forward, backward, host_forward, host_backward = forward + host_forward, backward + host_backward, 0.0, 0.0
    recompute = {"none": 0.0, "full": forward, "selective": light}[candidate.recompute]
    return LayerSeconds(forward, backward, recompute, weights, attention_forward, attention_backward, host_forward, host_backward)


def expert_spread(candidate: Candidate) -> int:
    """Over how many tensor-parallel ranks a trainer spreads whole experts, where another cuts each of them: 1 where it does not."""
    return candidate.layout.tp if candidate.engine.whole_experts else 1


def _sent_rows(facts: ModelFacts, candidate: Candidate) -> float:
    """Rows that the rank sends to experts, and is sent."""
    experts = facts.shape.experts
    assert experts is not None
    return micro_batch_tokens(candidate) * experts.experts_per_token / expert_spread(candidate)


def _products(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> list[tuple[Product, float]]:
    """Each product of a layer with its rows on this rank."""
    tokens = micro_batch_tokens(candidate)
    found: list[tuple[Product, float]] = [(product, float(tokens)) for product in kind.products]
    if kind.expert_products:
        experts = facts.shape.experts
        assert experts is not None
        held = experts.num_experts / candidate.layout.ep
        # Rows of all ranks that share the experts, spread evenly over those held here. Where tensor-parallel ranks hold whole
        # experts, each has fewer of them and is sent as many rows for each.
        rows = tokens * experts.experts_per_token / held
        found += [(product, rows) for product in kind.expert_products]
    return found


def _copies(facts: ModelFacts, kind: LayerKind, product: Product, candidate: Candidate) -> float:
    """How many times the rank makes a product: once per expert that it holds, and of many experts those that got a row."""
    if product not in kind.expert_products:
        return 1.0
    experts = facts.shape.experts
    assert experts is not None
    return experts.num_experts / (candidate.layout.ep * expert_spread(candidate))


def _product_seconds(product: Product, rows: float, candidate: Candidate, rates: Rates) -> tuple[float, float, float]:
    """Seconds of the product, of its input's gradient, and of its weight's."""
    tp = candidate.layout.tp
    num_in, num_out = float(product.num_in), float(product.num_out)
    if product.cut in ("expert_columns", "expert_rows") and expert_spread(candidate) > 1:
        tp = 1
    if product.cut in ("columns", "vocabulary", "expert_columns"):
        num_out /= tp
    elif product.cut in ("rows", "expert_rows"):
        num_in /= tp
    # A vocabulary is padded by most trainers, whatever a table says of it.
    share = 1.0 if product.cut == "vocabulary" else rates.fitting(num_in, num_out)
    wide = product.role in ("head", "router")
    return (
        rates.product(rows, num_out, num_in, wide=wide) / share,
        rates.product(rows, num_in, num_out, wide=wide) / share,
        rates.product(num_out, num_in, rows, wide=wide) / share,
    )


def _attention_seconds(facts: ModelFacts, kind: LayerKind, candidate: Candidate, rates: Rates) -> tuple[float, float]:
    shape, tokens = facts.shape, micro_batch_tokens(candidate)
    row = candidate.document_tokens or candidate.sequence_length
    row = min(row, candidate.sequence_length)
    widths = (shape.query_width + shape.value_width) / candidate.layout.tp
    engine_bytes = candidate.engine.score_bytes
    if shape.attention_soft_cap is not None or not candidate.flash_attention:
        # Spelled out: whole rows of scores, moved about ten times in fp32 and the compute precision, or as the trainer fuses it.
        scores = tokens * candidate.sequence_length * shape.num_heads / candidate.layout.tp
        flops = 2.0 * widths * tokens * candidate.sequence_length
        moved = scores * (8 + 6 * candidate.activation_bytes if engine_bytes is None else engine_bytes)
        rate = rates.product_rate * 0.6 * (rates.fitting(shape.head_dim) if shape.head_dim % 8 else 1.0)
        return flops / rate + rates.moved(moved), 2.0 * flops / rate + rates.moved(1.5 * moved)
    flops = 2.0 * widths * tokens * facts.visible_keys(kind, row)
    forward = rates.attention(flops, row, shape.head_dim, backward=False)
    return forward, rates.attention(2.5 * flops, row, shape.head_dim, backward=True)


def _moved_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> tuple[float, float]:
    """Bytes that a layer's element-wise operations read and write, forward and backward, written as the model writes them.

    A norm reads and writes S D (backward: reads twice, writes once, and once more for the weight); a residual sum moves 3 S D;
    rotations
    move 3 N (Q + K); a gate moves 5 N F, and 11 N F backward.
    """
    shape, size, tp = facts.shape, candidate.activation_bytes, candidate.layout.tp
    tokens, stream = micro_batch_tokens(candidate), residual_tokens(candidate)
    width = stream * shape.hidden_size
    heads = tokens * (shape.query_width + shape.kv_width) / tp
    experts = shape.experts if kind.shape.sparse else None
    inner = tokens * shape.intermediate_size / tp
    sent = 0.0
    if experts is not None:
        rows = tokens * experts.experts_per_token
        inner = (rows * experts.intermediate_size + tokens * experts.shared_intermediate_size) / tp
        sent = _sent_rows(facts, candidate) * shape.hidden_size  # gathered, weighted and added back
        if experts.expert_bias:
            # Biases added to rows and a clamped gate are operations of their own: they read and write some nine tensors of the
            # inner width going forward, twice as many coming back, and two of the model's.
            sent += sent / 3
            inner += rows * experts.intermediate_size / tp * 1.8
    gated = shape.gated or experts is not None
    forward = width * (2 * kind.num_norms + 6) + 3 * heads + inner * (5 if gated else 2) + 6 * sent
    backward = width * (4 * kind.num_norms + 4) + 3 * heads + inner * (11 if gated else 3) + 8 * sent
    return forward * size, backward * size


def _adapted_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> tuple[float, float]:
    """Bytes that adapters move beside their matrices, forward and backward. Their products are so narrow that they only read and
    write.

    Forward: the input is read, the second product written, scaled, and added to the matrix' output. Backward: the scaled gradient
    is made and read by two products, the input read by a third, and its gradient written and added.
    """
    adapter, tp = candidate.adapter, candidate.layout.tp
    if adapter is None:
        return 0.0, 0.0
    forward = backward = 0.0
    for product, rows in _products(facts, kind, candidate):
        if product.role not in adapter.roles:
            continue
        rows *= _copies(facts, kind, product, candidate)
        num_in = rows * product.num_in / (tp if product.cut in ("rows", "expert_rows") else 1)
        num_out = rows * product.num_out / (tp if product.cut in ("columns", "expert_columns") else 1)
        forward += num_in + 6 * num_out
        backward += 5 * num_in + 4 * num_out
    return forward * candidate.activation_bytes, backward * candidate.activation_bytes


_DEQUANTISED_BYTES = 6.0
"""Of each weight in NF4 that a product takes in: 4 bits read, looked up and written, scaled by what was quantised itself."""


def _dequantised_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> float:
    """Bytes that a pass through a layer moves to make wide matrices of its frozen NF4 ones (QLoRA): of all of them, every time."""
    adapter = candidate.adapter
    if adapter is None or not adapter.quantised:
        return 0.0
    elements = sum(
        float(product.num_in * product.num_out) * _copies(facts, kind, product, candidate)
        for product in (*kind.products, *kind.expert_products)
        if product.role not in adapter.unquantised
    )
    return elements / candidate.layout.tp * _DEQUANTISED_BYTES


_QUANTISED_BYTES = 4.0
"""Of each element that a product in fewer bits takes in: read in bf16, written once along its rows and once along its columns, for
the pass that transposes it."""
_FIRST_OF_INPUT = ("query", "qkv", "gate", "gate_up", "attention_out", "down", "query_latent", "key_value", "projection")
"""Roles whose input no product before them has quantised: keys and values take the queries', up the gate's."""


def _quantised_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> tuple[float, float]:
    """Bytes that a layer moves to make operands of fewer bits: inputs in the forward pass, gradients of outputs in the backward
    pass. Weights are quantised once a step and are not counted."""
    tp = candidate.layout.tp
    forward = backward = 0.0
    for product, rows in _products(facts, kind, candidate):
        if product.role == "router":
            continue
        elements = rows * _copies(facts, kind, product, candidate)
        width_in, width_out = float(product.num_in), float(product.num_out)
        whole = product.cut.startswith("expert") and expert_spread(candidate) > 1
        if not whole and product.cut in ("columns", "expert_columns"):
            width_out /= tp
        elif not whole and product.cut in ("rows", "expert_rows"):
            width_in /= tp
        if product.role in _FIRST_OF_INPUT or product.cut.startswith("expert"):
            forward += elements * width_in
        backward += elements * width_out
    return forward * _QUANTISED_BYTES, backward * _QUANTISED_BYTES


def weight_bytes(facts: ModelFacts, kind: LayerKind, candidate: Candidate) -> tuple[float, float]:
    """Bytes moved for weights rather than tokens: casts at use, copies out of gathers and into reductions, sums of gradients."""
    layout, size, master = candidate.layout, candidate.activation_bytes, candidate.master_bytes
    if candidate.adapter is not None:
        return 0.0, 0.0
    held = facts.held(layout).layers[kind.slot]
    summed = master if candidate.engine.gradient_bytes is None else candidate.engine.gradient_bytes
    if layout.zero_stage >= 1 and layout.fsdp > 1:
        if layout.zero_stage == 3:
            return held.whole * 2 * size, held.whole * (3 * size + master)
        return 0.0, held.whole * (size + summed)
    if candidate.engine.weight_bytes is None and candidate.engine.casts_at_use and size != master:
        return held.matrices * (master + size), held.matrices * (size + 3 * master)
    return 0.0, held.whole * 2 * master


def end_seconds(facts: ModelFacts, candidate: Candidate, rates: Rates) -> tuple[float, float]:
    """Seconds per micro-batch of the embedding (forward and backward), and of the final norm, the head and the loss.

    The chunked loss makes its gradients in the forward pass: three products, and about 30 bytes moved per logit.
    """
    shape, size, tp = facts.shape, candidate.activation_bytes, candidate.layout.tp
    tokens, vocab = micro_batch_tokens(candidate), shape.vocab_size / tp
    embedding = rates.moved(tokens * shape.hidden_size * (3 * size + 4))
    if candidate.adapter is None:
        embedding += rates.moved(vocab * shape.hidden_size * 4)
    chunk = min(candidate.loss_chunk_tokens or tokens, tokens)
    num_chunks = tokens / chunk
    one, dx, dw = (seconds * num_chunks for seconds in _product_seconds(facts.head, chunk, candidate, rates))
    if candidate.adapter is not None:
        dw = 0.0
    moved = tokens * vocab * (18 + 6 * size)
    if candidate.adapter is None and candidate.loss_chunk_tokens is not None:
        moved += num_chunks * vocab * shape.hidden_size * (2 * size + 8)
    return embedding, one + dx + dw + rates.moved(moved)


def update_seconds(trained_shard: float, candidate: Candidate, rates: Rates) -> float:
    """Norm, clip and update of the trained parameters that a rank owns: 40 bytes each with AdamW's two moments.

    Of Muon this is what it moves in memory; the products that make a matrix orthogonal, and their traffic, are not in it.
    """
    per_element = {"adamw": 40.0, "adamw_8bit": 28.0, "adafactor": 36.0, "muon": 44.0, "sgd": 24.0, "sgd_momentum": 32.0}[
        candidate.optimizer
    ]
    return trained_shard * per_element * candidate.master_bytes / 4 / rates.update_bytes_per_second
