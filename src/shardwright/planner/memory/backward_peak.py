"""Peak memory of a block's backward pass: gradients minus freed activations, by operation.

Each operation allocates its gradients while its saved tensors are live, and frees them when it
finishes. Bytes on this rank, from the block's output to its input: r the residual stream, n all
of its tokens at model width, f feed-forward width, q queries, k keys, e rows sent to experts (0
without), w a norm's gradient.

    operation    live beside the saved tensors                     freed by then
    down matmul  r, e, f; n if sequence parallelism gathers it     nothing
    gate         r, f of its output, f of each input, f temporary  f, e
      fused      r, f of its output, f of each input               f, e
    no gate      r, f of its output, f of its input                f
    up matmul    r, 2 n, and with a gate f                         3 f with a gate, else 2 f; e
    norm         2 r, w                                            the same, and n
    attention    r, 2 q, 2 k, gradients of scores if not fused     the same, and r
"""

from __future__ import annotations

from dataclasses import dataclass

_NUM_FP32_NORM_TENSORS = 4
"""Number of fp32 tensors of the stream's width in a norm's backward pass without a fused
kernel."""


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
    norm_gradient: float
    is_gate_fused: bool = False


def compute_norm_gradient_bytes(
    stream_bytes: float, activation_bytes: int, *, is_fused: bool
) -> float:
    """Compute the bytes of a norm's gradient beside that of its output: one tensor of its
    width, or four in fp32."""
    return (
        stream_bytes
        if is_fused
        else _NUM_FP32_NORM_TENSORS * stream_bytes * max(activation_bytes, 4) / activation_bytes
    )


def compute_peak_gradient_bytes(tensor_bytes: BlockTensorBytes) -> float:
    """Compute the peak bytes of a block's backward pass, beyond its saved or recomputed
    tensors."""
    stream = tensor_bytes.stream
    inner = tensor_bytes.inner
    branch_output = tensor_bytes.gathered if tensor_bytes.should_gather_gradient else 0.0
    at_down = stream + branch_output + tensor_bytes.routed + inner
    num_tensors = 1.0
    if tensor_bytes.is_gated:
        num_tensors = 2.0 if tensor_bytes.is_gate_fused else 3.0
    at_activation = stream + num_tensors * inner - tensor_bytes.routed
    freed = (3.0 if tensor_bytes.is_gated else 2.0) * inner + tensor_bytes.routed
    at_up = stream + 2.0 * tensor_bytes.gathered + (inner if tensor_bytes.is_gated else 0.0) - freed
    at_norm = 2.0 * stream + tensor_bytes.norm_gradient - freed - tensor_bytes.gathered
    # The attention branch begins after the norm's output and the residual between both branches
    # are freed.
    freed += tensor_bytes.gathered + stream
    at_attention = (
        stream
        + branch_output
        + 2.0 * (tensor_bytes.queries + tensor_bytes.keys)
        + tensor_bytes.scores
        - freed
    )
    return max(at_down, at_activation, at_up, at_norm, at_attention)
