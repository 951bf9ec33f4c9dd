"""Peak memory of a block's backward pass: its operations, one after another.

An operation allocates its results while its saved tensors are live, and frees these tensors and the
gradients that it read when it has finished. Products also free the cast of their weight and leave
the gradient of the weight, which some kernels first compute in the compute precision.

Bytes on this rank, from the block's output to its input: r the residual stream, n all of its tokens
at model width, f feed-forward width, q queries, k keys, e rows of experts, v rows that are sent
once per rank, w a norm's gradient, s gradients of scores if attention is not fused, t those of
tiles of rows that ranks share. `during`: allocated during the operation; `change`: of the live
bytes, when it has finished.

    operation       during        change                       freed
    post norm       w             0                            its input
    sum of experts  e             0                            results in token order
    scatter         e             0                            gradients in token order
    down            f             0; experts -e                its input
    gate            3 f           -f                           both projections
    no gate         f             -f                           its input
    up, gate        n, 2 n        n - f, -f - n                gradients; their common input
    experts' up     2 f, e        -2 f                         gradients; rows
    gather of rows  e + n         n - e                        gradients of rows
    sums of ranks   v             v
    sums of rows    e             -v                           results of experts
    copies of rows  v, n          v - e, n - v                 gradients of copies
    norm            w             -r                           its input
    residual        r             -r
    output          q             q                            nothing: attention has its input
    attention       q + 2 k + s   -2 q                         q, k, v, output
      in tiles      t             -2 q                         the same
    projections     2 n           -q - 2 k                     their common input

If sequence parallelism gathers a branch's output gradient, n is added during its first product. If
products overlap with communication, `_gather_products` describes those that share an input; tokens
are sorted by chunk, which takes a copy of each narrow tensor. If
the gradients of weights are deferred, products leave their inputs and the gradients of their
outputs, except those of experts. Products of quantised operands also allocate `ProductTemporaries`.
Products of frozen matrices have saved no input, so they free none, and defer nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwright.layout.degrees import MAX_TENSOR_CHUNKS

_NUM_FP32_NORM_TENSORS = 4
"""Number of fp32 tensors of the stream's width in a norm's backward pass without a fused
kernel."""


Products = Literal["down", "up", "attention_out", "projections"]
"""Products of a block: of the feed-forward or the experts, of attention's output, and of queries,
keys and values."""


class ProductElements(NamedTuple):
    """Elements of a block's matrices on this rank, by the product that reads them."""

    down: float = 0.0
    up: float = 0.0
    """Those of gate and up together."""
    attention_out: float = 0.0
    projections: float = 0.0


class WeightBytes(NamedTuple):
    """Bytes per element of a matrix in the backward pass; all 0 for a frozen one that is not
    quantised."""

    result: float = 0.0
    """Of the gradient that the product computes, or of a dequantised matrix."""
    converted: float = 0.0
    """Of its copy in the precision of the master weights."""
    remaining: float = 0.0
    """Of the gradient that remains. 0 if it is added to an existing one."""
    cast: float = 0.0
    """Of the weight's cast, freed with the product."""


class BlockWeightBytes(NamedTuple):
    """Bytes per element of a block's matrices."""

    dense: WeightBytes
    experts: WeightBytes


class ProductTemporaries(NamedTuple):
    """Bytes in which a product's operands are quantised in separate operations; 0 for others."""

    output: float = 0.0
    """Bytes in the forward pass."""
    input_gradient: float = 0.0
    """Bytes before the gradient of the input is allocated."""
    beside_gradient: float = 0.0
    """Bytes in addition to the gradient of the input: codes, and operands of the weight's
    gradient."""


class BlockTemporaries(NamedTuple):
    """Temporary bytes of a block's products; the largest if several share an operation."""

    down: ProductTemporaries = ProductTemporaries()
    up: ProductTemporaries = ProductTemporaries()
    attention_out: ProductTemporaries = ProductTemporaries()
    projections: ProductTemporaries = ProductTemporaries()


@dataclass(frozen=True)
class BlockTensorBytes:
    """Bytes of one tensor of each width in a block on this rank. `routed`: rows sent to experts.
    `scores`: score gradients of attention without a fused kernel. `norm_gradient`: a norm's
    gradient."""

    stream: float
    gathered: float
    inner: float
    is_gated: bool
    routed: float
    should_gather_gradient: bool
    """True if the gradient of a branch's output is gathered over tensor-parallel ranks."""
    queries: float
    keys: float
    scores: float
    tile_gradients: float
    """All that attention's backward pass allocates in tiles of rows that ranks share."""
    norm_gradient: float
    is_gate_fused: bool
    """True if one kernel computes the gradients of a gated activation."""
    has_post_norms: bool
    is_repeated: bool
    """True if the block's forward pass is repeated before its backward pass."""
    num_expert_parts: int
    """Number of parts in which rows are sent to experts of other ranks; 0 if none are sent."""
    exchanged: float
    """Rows that are exchanged if a token's row is sent once per rank; 0 if once per choice."""
    unpadded: float
    """Rows of tokens, if rows of padding are exchanged with them; 0 otherwise."""
    is_pipelined: bool
    """True if products of dense layers overlap with tensor-parallel communication."""
    is_deferred: bool
    """True if the gradients of weights are computed later (schedules with split backward)."""
    is_adapted: bool
    """True if products have adapters, whose gradients of inputs are added to theirs."""
    elements: ProductElements
    trained_elements: ProductElements
    """Those of matrices that are not frozen; with adapters all."""
    frozen_products: frozenset[Products]
    """Products of which all matrices are frozen."""
    is_router_frozen: bool
    """True if a frozen router has saved no input."""
    weight_bytes: BlockWeightBytes
    temporaries: BlockTemporaries

    def is_saved(self, products: Products) -> float:
        """Return 1 if products have saved their input for gradients of weights, else 0."""
        return 0.0 if products in self.frozen_products else 1.0

    def defers(self, products: Products) -> float:
        """Return 1 if gradients of weights of these products are computed later, else 0."""
        return self.is_saved(products) if self.is_deferred else 0.0


def compute_norm_gradient_bytes(
    stream_bytes: float, activation_bytes: int, *, is_fused: bool
) -> float:
    """Compute the bytes of a norm's gradient next to that of its output: one tensor of its
    width, or four in fp32."""
    return (
        stream_bytes
        if is_fused
        else _NUM_FP32_NORM_TENSORS * stream_bytes * max(activation_bytes, 4) / activation_bytes
    )


def compute_peak_gradient_bytes(tensor_bytes: BlockTensorBytes) -> float:
    """Compute the peak bytes of a block's backward pass, beyond its saved or recomputed
    tensors."""
    live = peak = tensor_bytes.stream
    if tensor_bytes.is_repeated and tensor_bytes.routed:
        # The end of the repeated forward pass: input of the feed-forward, unless parts of rows are
        # sent to other ranks, and results of experts in the order of experts, before and after the
        # exchange. The gradient is gathered before it.
        num_parts = tensor_bytes.num_expert_parts
        is_whole = num_parts == 1 and not (tensor_bytes.exchanged or tensor_bytes.unpadded)
        results = tensor_bytes.routed
        if is_whole:
            # The rows that were sent, results in the order of the rank's experts, and those that
            # have returned; before a gather the norm's output.
            results *= 3.0
            peak += tensor_bytes.should_gather_gradient * tensor_bytes.stream
        elif num_parts:
            returned = tensor_bytes.unpadded or tensor_bytes.routed
            results = (tensor_bytes.routed + returned) / num_parts
            peak -= tensor_bytes.stream
        peak += 2.0 * tensor_bytes.exchanged or results
        peak += tensor_bytes.gathered * (2.0 if tensor_bytes.should_gather_gradient else 1.0)
    if tensor_bytes.is_repeated:
        peak = max(peak, live + compute_last_quantisation_bytes(tensor_bytes))
    for operation in _list_operations(tensor_bytes):
        elements = operation.trained_elements
        temporaries = operation.temporaries
        weight = getattr(tensor_bytes.weight_bytes, operation.matrices)
        peak = max(
            peak,
            live + temporaries.input_gradient,
            live + operation.during + max(elements * weight.result, temporaries.beside_gradient),
        )
        live += operation.change - operation.elements * weight.cast
        peak = max(peak, live + elements * (weight.result + weight.converted))
        live += elements * weight.remaining
    return peak


def compute_deferred_bytes(tensor_bytes: BlockTensorBytes) -> float:
    """Compute the bytes from which a block computes the gradients of its weights later: inputs and
    gradients of outputs of its products, without those of experts."""
    branch_output = (
        tensor_bytes.gathered if tensor_bytes.should_gather_gradient else tensor_bytes.stream
    )
    has_output = tensor_bytes.is_saved("attention_out")
    has_up = tensor_bytes.is_saved("up")
    has_down = tensor_bytes.is_saved("down")
    projections = tensor_bytes.gathered + tensor_bytes.queries + 2.0 * tensor_bytes.keys
    projections *= tensor_bytes.is_saved("projections")
    attention = projections + has_output * tensor_bytes.queries + has_output * branch_output
    if tensor_bytes.routed:
        return attention
    num_inner = (2.0 if tensor_bytes.is_gated else 1.0) * has_up + has_down
    inner = num_inner * tensor_bytes.inner
    return attention + has_up * tensor_bytes.gathered + inner + has_down * branch_output


def compute_forward_end_bytes(tensor_bytes: BlockTensorBytes) -> float:
    """Compute the bytes at the end of a block's forward pass with adapters, next to the results of
    its products: sums of product and adapter, the product of both projections, and the
    feed-forward's input."""
    inner = (3.0 if tensor_bytes.is_gated else 2.0) * tensor_bytes.inner
    output = max(tensor_bytes.routed, tensor_bytes.gathered)
    return inner + tensor_bytes.gathered + output + tensor_bytes.stream


def compute_last_quantisation_bytes(block: BlockTensorBytes) -> float:
    """Compute the bytes next to saved tensors where a forward pass quantises the operands of its
    last product, or drops the input of its adapter: its temporaries, the feed-forward's input
    before a gather, and after it if frozen products do not save that."""
    if not block.temporaries.down.output:
        return 0.0
    unsaved = block.gathered * (1.0 - block.is_saved("up")) * (block.routed == 0.0)
    return block.temporaries.down.output + unsaved + block.should_gather_gradient * block.stream


class _Operation(NamedTuple):
    during: float
    change: float
    elements: float = 0.0
    """Elements of its weight."""
    trained_elements: float = 0.0
    temporaries: ProductTemporaries = ProductTemporaries()
    matrices: Literal["dense", "experts"] = "dense"


def _list_operations(block: BlockTensorBytes) -> Iterator[_Operation]:
    stream = block.stream
    defers_output = block.defers("attention_out")
    defers_projections = block.defers("projections")
    gathered_gradient = block.gathered if block.should_gather_gradient else 0.0
    # The gradient of a branch's output; without a norm after it, that of the residual stream.
    branch_gradient = stream if block.has_post_norms else 0.0
    after_branch = _Operation(block.norm_gradient, 0.0)
    if block.has_post_norms:
        yield after_branch
    yield from _list_expert_operations(block) if block.routed else _list_inner_operations(block)
    yield _Operation(0.0, (block.defers("down") - 1.0) * branch_gradient)
    if block.should_gather_gradient and (block.routed or not block.is_pipelined):
        yield _Operation(stream, stream - block.gathered)  # reduced and scattered
    yield _Operation(block.norm_gradient, -stream)
    yield _Operation(stream, (defers_output * (gathered_gradient == 0.0) - 1.0) * stream)
    if block.has_post_norms:
        yield after_branch
    is_explicit = block.scores > 0.0
    yield _Operation(
        gathered_gradient + (1.0 + block.is_adapted + _count_sorted(block)) * block.queries,
        defers_output * gathered_gradient
        + block.queries * (1.0 + (defers_output - block.is_saved("attention_out")) * is_explicit)
        + (defers_output - 1.0) * branch_gradient,
        block.elements.attention_out,
        block.trained_elements.attention_out,
        block.temporaries.attention_out,
    )
    projected = block.queries + 2.0 * block.keys
    # Explicit products have freed the values, and have their gradient, before those of scores.
    during = block.scores if is_explicit else max(projected, block.tile_gradients)
    yield _Operation(during, (defers_output - 2.0) * block.queries)
    if block.is_pipelined:
        yield _gather_products(block, projected, "projections")
        return
    unsaved = 1.0 - block.is_saved("projections")
    yield _Operation(
        2.0 * block.gathered,
        (defers_projections + unsaved) * block.gathered - (1.0 - defers_projections) * projected,
        block.elements.projections,
        block.trained_elements.projections,
        block.temporaries.projections,
    )


def _list_inner_operations(block: BlockTensorBytes) -> Iterator[_Operation]:
    """List the operations of a dense feed-forward."""
    inner = block.inner
    width = block.gathered
    deferred = block.defers("up")
    unsaved = 1.0 - block.is_saved("up")
    gathered_gradient = width if block.should_gather_gradient else 0.0
    yield _Operation(
        gathered_gradient + (1.0 + block.is_adapted + _count_sorted(block)) * inner,
        block.defers("down") * (gathered_gradient + inner) + (1.0 - block.is_saved("down")) * inner,
        block.elements.down,
        block.trained_elements.down,
        block.temporaries.down,
    )
    if block.is_pipelined:
        num_gates = 1.0 if block.is_gated else 0.0
        yield _Operation((1.0 + num_gates * (1.0 if block.is_gate_fused else 2.0)) * inner, -inner)
        yield _gather_products(block, (1.0 + num_gates) * inner, "up")
        return
    if not block.is_gated:
        yield _Operation(inner, -inner)
        change = deferred * (inner + width) - inner + unsaved * width
        weights = (block.elements.up, block.trained_elements.up)
        yield _Operation(width, change, *weights, block.temporaries.up)
        return
    yield _Operation((2.0 if block.is_gate_fused else 3.0) * inner, -inner)
    half = (block.elements.up / 2, block.trained_elements.up / 2, block.temporaries.up)
    yield _Operation(width, width - (1.0 - deferred) * inner, *half)
    change = (deferred - 1.0) * (inner + width) + unsaved * width
    yield _Operation(2.0 * width, change, *half)


def _count_sorted(block: BlockTensorBytes) -> float:
    """Count the copies of a product's input gradient, or input, in the order of chunks."""
    return float(block.is_pipelined and block.should_gather_gradient)


def _gather_products(
    block: BlockTensorBytes, outputs: float, products: Literal["up", "projections"]
) -> _Operation:
    """Build the operation of products that share an input, `outputs` bytes wide together.

    The gradient of the input is summed over the ranks next to those of the weights. It ends as the
    residual stream's gradient.
    """
    width = block.gathered
    saved = block.is_saved(products) * width
    weights = (
        getattr(block.elements, products),
        getattr(block.trained_elements, products),
        getattr(block.temporaries, products),
    )
    if not block.should_gather_gradient:
        change = width if block.defers(products) else width - saved - outputs
        return _Operation(2.0 * width, change, *weights)
    product = width / MAX_TENSOR_CHUNKS
    freed = 0.0 if block.defers(products) else saved + outputs
    during = outputs + width + product + block.stream
    return _Operation(during, block.stream - freed, *weights)


def _list_expert_operations(block: BlockTensorBytes) -> Iterator[_Operation]:
    """List the operations of routed experts, whose gate and up are one product."""
    inner = block.inner
    rows = block.routed
    sent = block.exchanged
    ordered = block.unpadded or rows
    gathered = block.gathered if block.should_gather_gradient else 0.0
    exchange = _Operation(sent or 2.0 * rows, 0.0)
    if sent:
        yield _Operation(sent + gathered, sent)
        yield exchange
        yield _Operation(rows, -sent)
    else:
        yield _Operation(ordered + gathered, 0.0)
        yield _Operation(rows, rows - ordered)
        if block.num_expert_parts:
            yield exchange
    down = (block.elements.down, block.trained_elements.down, block.temporaries.down)
    change = (1.0 - block.is_saved("down")) * inner - rows
    yield _Operation((1.0 + block.is_adapted) * inner, change, *down, matrices="experts")
    yield _Operation((2.0 if block.is_gate_fused else 3.0) * inner, -inner)
    yield _Operation(2.0 * inner, 0.0)  # the gradients of gate and up become one tensor
    up = (block.elements.up, block.trained_elements.up, block.temporaries.up)
    change = (1.0 - block.is_saved("up")) * rows - 2.0 * inner
    yield _Operation((1.0 + block.is_adapted) * rows, change, *up, matrices="experts")
    if sent:
        yield _Operation(sent, sent - rows)
        yield exchange
        yield _Operation(block.gathered, block.gathered - sent)
    else:
        if block.num_expert_parts:
            yield exchange
        yield _Operation(ordered + block.gathered, block.gathered - rows)
    # The router's input is freed; it is at least as large as the dense input of a product.
    yield _Operation(block.gathered, (block.is_router_frozen - 1.0) * block.gathered)
