"""The widest point of a block's backward pass, operation by operation: what gradients take beyond what they let go of. Torch-free.

An operation's gradient is made while what it kept is there, which goes when it is done. In order, from the block's output to its
input, in bytes: r of the residual stream on this rank, n of all its tokens at model width, f of feed-forward width, q and k of
queries and of keys, e of rows sent to experts (0 without), w what a norm's gradient takes.

    operation       there meanwhile                                           gone by then
    down product    r, e, f; n where sequence parallelism gathers it          nothing
    gate            r, f of its output, f of each input, f in between         f, e
    no gate         r, f of its output, f of its input                        f
    up product      r, 2 n, and with a gate f                                 3 f with a gate, 2 f without, e
    norm            2 r, w                                                    the same, and n
    attention       r, 2 q, 2 k, its scores' where they are spelled out       the same, and r
"""

from __future__ import annotations

from dataclasses import dataclass

_WIDE_TENSORS = 4
"""Of the stream's width that a norm's gradient takes in fp32 where no kernel makes it at once."""


@dataclass(frozen=True)
class BlockWidths:
    """Bytes of one tensor of each width in a block on this rank; `routed` of rows sent to experts, `scores` of the gradients of
    attention that is spelled out, `norm` what a norm's gradient takes."""

    stream: float
    gathered: float
    inner: float
    gated: bool
    routed: float
    gathers: bool
    """Whether the gradient of a branch's output is gathered over tensor-parallel ranks."""
    queries: float
    keys: float
    scores: float
    norm: float


def norm_gradient(stream: float, activation_bytes: int, *, fused: bool) -> float:
    """Bytes that a norm's gradient takes beside that of its output: one tensor of its width, or four in fp32."""
    return stream if fused else _WIDE_TENSORS * stream * max(activation_bytes, 4) / activation_bytes


def widest_gradients(widths: BlockWidths) -> float:
    """Bytes beside all that the block keeps (or has rebuilt), at the widest point of its backward pass."""
    stream, inner = widths.stream, widths.inner
    branch = widths.gathered if widths.gathers else 0.0
    down = stream + branch + widths.routed + inner
    activation = stream + (3.0 if widths.gated else 1.0) * inner - widths.routed
    gone = (3.0 if widths.gated else 2.0) * inner + widths.routed
    up = stream + 2.0 * widths.gathered + (inner if widths.gated else 0.0) - gone
    norm = 2.0 * stream + widths.norm - gone - widths.gathered
    # The other branch begins when the norm's output and the stream between the two are gone as well.
    gone += widths.gathered + stream
    attention = stream + branch + 2.0 * (widths.queries + widths.keys) + widths.scores - gone
    return max(down, activation, up, norm, attention)
