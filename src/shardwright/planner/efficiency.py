"""How much of what data sheets promise is achieved: the planner's only fitted numbers, each with a cause that a person can name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Efficiency:
    """Shares, seconds and sizes for one kind of accelerator under one trainer. Every number is read by the planner's formulas.

    A product [m, k] x [k, n] runs at peak x `matmul_share` x m/(m + m_half) x n/(n + n_half) x k/(k + k_half), never faster
    than its
    operands can be read, and takes `kernel_seconds` at least.
    """

    matmul_share: float = 0.80
    """Of the dense peak, by very large products (power limits included)."""
    matmul_share_by_precision: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Where a precision differs: fp8's products with their scaling reach less of their peak."""
    m_half: float = 256.0
    """Rows (tokens) at which a product runs at half of its best rate; tiles and waves that are not full."""
    n_half: float = 128.0
    k_half: float = 128.0
    uneven_share: float = 0.9
    """Of a product's rate, where a width of its matrix is no multiple of 64: tiles that are not full."""
    odd_share: float = 0.15
    """Where it, or a head in attention that is spelled out, is no multiple of 8: tensor cores do not take it."""
    expert_share: float = 1.0
    """Of a product's rate, what experts' products reach with routing, sorting and uneven sizes counted in."""
    routing_seconds: float = 0.0
    """Of each row that is sent to an expert, both passes, what choosing and ordering rows takes beyond moving them: nothing where
    one kernel does it."""
    sparse_operations: float = 1.6
    """Operations of a sparse layer over those of a dense one: what the host has to start."""
    attention_forward_share: float = 0.55
    """Of the dense peak, by the fused attention kernel's forward pass on long rows."""
    attention_backward_share: float = 0.42
    attention_half_tokens: float = 256.0
    """Tokens of a row at which attention runs at half of its best rate."""
    memory_share: float = 0.80
    """Of the memory's bandwidth, by operations that only move bytes."""
    bytes_share: float = 1.0
    """Of the bytes that element-wise operations move one by one, what the trainer's kernels move: less where it fuses them."""
    compiled_bytes_share: float = 0.55
    """Of the bytes that element-wise operations move, what is left when the compiler has fused them."""
    kernel_seconds: float = 4e-6
    """Least time of one operation on the device."""
    host_seconds: float = 7e-6
    """Least time between the starts of two operations: the host's, which a device that is quicker waits for."""
    runs_on_host: bool = False
    """Whether the device is its own host (a CPU): starting operations then comes on top of doing them."""
    handoff_seconds: float = 0.0
    """Of each gather and reduction of the data ranks, what the host needs around it where nothing else runs meanwhile: hooks,
    threads that hand over, peers that come late."""
    step_share: float = 1.0
    """Of the pace at which collectives were measured, what they reach in a step. A profile's are back to back, on buffers whose
    pages are there, in the best round; in a step a CPU's buffers are new each time, and the cores at other work."""
    intra_share: float = 0.80
    """Of the link within a domain, by large collectives."""
    inter_share: float = 0.80
    """Of the link between domains."""
    collective_seconds: float = 12e-6
    """Start of a collective, beyond the link's own latency."""
    hop_seconds: float = 0.0
    """Of a tensor-parallel collective, for each further member of its ring, beyond the link's latency; a ring over a network whose
    sends are slow to start (EFA) pays it at every hop."""
    data_hop_seconds: float = 0.0
    """Of a gather or a reduction of the data ranks, for each further member of its ring, beyond the link's latency."""
    pipelined_hop_seconds: float = 0.0
    """The same on top where the ranks are also pipelined: sends between stages stand in the way of the rings."""
    congested_gpus: int = 0
    """Accelerators from which on a network no longer serves the sends of pipelines at once; 0 is never."""
    congestion_seconds: float = 0.0
    """What each micro-batch then waits between two stages; among more, half as long again."""
    limit_seconds: float = 0.0
    """What each micro-batch waits for the allocator where a run needs more than the device has: it hands back and asks again."""
    data_overlap: float = 0.90
    """Share of the traffic of gathers and reductions that may run beside compute."""
    tensor_overlap: float = 0.0
    context_overlap: float = 0.90
    expert_overlap: float = 0.0
    """Of what experts are sent where they lie over several domains."""
    near_expert_overlap: float = 0.0
    """The same within one domain, whose links are so quick that most trainers wait for it."""
    pipeline_overlap: float = 0.0
    contention: float = 0.08
    """By how much compute slows down while traffic runs beside it: the collectives' kernels and memory traffic."""
    optimizer_share: float = 0.70
    """Of the memory's bandwidth, by the optimizer's update."""
    step_seconds: float = 5e-3
    """Between steps: data, norm, logging."""
    straggler_share: float = 0.01
    """By how much a step is longer for each doubling of nodes: the slowest of many sets the pace."""
    reserve_share: float = 0.05
    """Of live bytes, what the allocator holds beyond them."""
    reserve_bytes: float = 0.3e9
    context_bytes: float = 0.9e9
    """The device's context and libraries."""
    communicator_bytes: float = 0.25e9
    """Buffers of each process group that a rank is a member of."""
    usable_share: float = 1.0
    """Of the device's memory, what a run may plan to fill."""
