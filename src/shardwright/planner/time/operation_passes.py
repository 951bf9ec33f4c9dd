"""Reads and writes of tensors by separate operations of adapters, norms, rotary embeddings."""

from __future__ import annotations

from typing import NamedTuple


class AdapterPasses(NamedTuple):
    """Times that an adapter's operations read or write tensors of its matrix's input and output
    widths, in each pass. Its own matrices are too narrow to count."""

    forward_inputs: float
    forward_outputs: float
    backward_inputs: float
    backward_outputs: float
    forward_operations: int
    """Operations that the host launches for one matrix's adapter."""
    backward_operations: int


SEPARATE_ADAPTER_PASSES = AdapterPasses(1, 6, 5, 4, 4, 6)
"""Separate operations. Forward: the input is read; the second matmul's result is written, scaled,
and added to the matrix's output. Backward: the scaled gradient is written and read by two
matmuls, the input is read by a third, and its gradient is written and added."""
OWN_ADAPTER_PASSES = AdapterPasses(1, 4, 5, 2, 4, 6)
"""The same in this engine, which scales the narrow result between both matmuls."""


class ElementwisePasses(NamedTuple):
    """Reads and writes of a tensor by the operations of an RMS norm (tensors of the model's width),
    and of a rotary embedding (queries and keys), in the compute precision."""

    norm_forward: int = 2
    norm_backward: int = 4
    rotary_forward: int = 3
    rotary_backward: int = 3
    sequence_copies: int = 0
    """Copies of all rows at each collective of sequence parallelism, which put the ranks' parts of
    several sequences in order."""
    gradient_copies: int = 0
    """Copies of a gradient before its sum, without sequence parallelism."""
    is_exact: bool = False
    """True if every operation is counted, so that a trainer's fusion can only move fewer bytes."""


FEW_PASSES = ElementwisePasses()
"""Norms of one operation, and rotary embeddings that read, rotate and write once."""
OWN_PASSES = ElementwisePasses(sequence_copies=1, gradient_copies=1)
"""The same in this engine, whose rows are `[sequences, positions, width]`, and which sums a copy
of a gradient that may also be added elsewhere."""
