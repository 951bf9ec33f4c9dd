"""Achieved shares of data-sheet rates: the planner's only fitted numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Efficiency:
    """Shares, seconds and sizes of one kind of accelerator under one framework. The planner's
    formulas read all of them.

    A matmul [m, k] x [k, n] runs at peak x `matmul_share` x m/(m + m_half) x n/(n + n_half) x
    k/(k + k_half), is limited by the memory rate of its operands, and takes at least
    `kernel_seconds`.
    """

    matmul_share: float = 0.80
    """Share of the dense peak that very large matmuls reach (power limits included)."""
    matmul_share_by_precision: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Different shares by precision: fp8 matmuls with their scaling reach less of their
    peak."""
    m_half: float = 256.0
    """Rows (tokens) at which a matmul reaches half of its best rate, due to partial tiles and
    waves."""
    n_half: float = 128.0
    k_half: float = 128.0
    uneven_share: float = 0.9
    """Share of the matmul rate if a width of the matrix is not a multiple of 64: partial tiles."""
    half_aligned_share: float = 0.9
    """Share of the matmul rate if a width of the matrix is a multiple of 8, not of 16."""
    odd_share: float = 0.15
    """Share of the matmul rate if a width, or the head size of attention without a fused
    kernel, is not a multiple of 8: tensor cores are not used."""
    expert_share: float = 1.0
    """Share of the matmul rate that expert matmuls reach, including routing, sorting and uneven
    sizes."""
    routing_seconds: float = 0.0
    """Seconds per row sent to an expert, both passes, for routing and sorting beyond moving the
    rows. 0 if one kernel does it."""
    sparse_operations: float = 1.6
    """Ratio of a sparse layer's operations to a dense layer's, for the host's launch time."""
    expert_launch_seconds: float = 0.0
    """Seconds between two launches by the host if it launches the products of each expert
    separately, after it has waited for the numbers of their rows. 0: one kernel."""
    attention_forward_share: float = 0.55
    """Share of the dense peak that the fused attention kernel's forward pass reaches on long
    rows."""
    attention_backward_share: float = 0.42
    attention_half_tokens: float = 256.0
    """Tokens of a causal row at which attention reaches half of its best rate. A layer with a
    window computes as many keys per token as a row of twice that length."""
    memory_share: float = 0.80
    """Share of the memory bandwidth that copies reach."""
    bytes_share: float = 1.0
    """Ratio of the bytes that the framework's kernels move to those of separate elementwise
    operations. Fusion lowers it."""
    compiled_bytes_share: float = 0.55
    """Share of the elementwise bytes that remains after the compiler has fused operations."""
    kernel_seconds: float = 4e-6
    """Minimum time of one operation on the device."""
    host_seconds: float = 7e-6
    """Minimum time between two launches by the host. A faster device waits for it."""
    runs_on_host: bool = False
    """True if the device is its own host (a CPU): launch time then adds to compute time."""
    handoff_seconds: float = 0.0
    """Seconds of host work around each data-parallel gather or reduction if nothing overlaps:
    hooks, thread handoffs, late peers. Without a measured profile."""
    handoff_share: float = 0.0
    """The same relative to the handoff that a profile measured."""
    step_share: float = 1.0
    """Share of the measured collective rate that is reached in a step. A profile measures
    collectives back to back, on mapped buffers, in the best round. In a step a CPU's buffers
    are new each time and its cores are busy."""
    intra_share: float = 0.80
    """Share of the bandwidth within a domain that large collectives reach."""
    inter_share: float = 0.80
    """Share of the bandwidth between domains that large collectives reach."""
    intra_slowdown: float = 1.0
    """Ratio of the time of traffic within a domain to its prediction, as a run measured it."""
    inter_slowdown: float = 1.0
    """The same for traffic between domains."""
    collective_seconds: float = 12e-6
    """Startup time of a collective, beyond the link's latency."""
    hop_seconds: float = 0.0
    """Seconds per further ring member of a tensor-parallel collective, beyond the link's
    latency. Networks with slow sends (EFA) add it at every hop."""
    data_hop_seconds: float = 0.0
    """Seconds per further ring member of a data-parallel gather or reduction, beyond the link's
    latency."""
    pipelined_hop_seconds: float = 0.0
    """Additional seconds per hop under pipeline parallelism: sends between stages delay the
    rings."""
    data_overlap: float = 0.90
    """Share of data-parallel gathers and reductions that may overlap with compute."""
    tensor_overlap: float = 0.0
    context_overlap: float = 0.90
    expert_overlap: float = 0.0
    """Share of expert dispatch that may overlap with compute if experts span several
    domains."""
    near_expert_overlap: float = 0.0
    """The same within one domain. Its links are so fast that most frameworks do not overlap."""
    pipeline_overlap: float = 0.0
    contention: float = 0.08
    """Relative slowdown of compute while communication overlaps: the collectives' kernels and
    memory traffic."""
    optimizer_share: float = 0.70
    """Share of the memory bandwidth that the optimizer's update reaches."""
    step_seconds: float = 5e-3
    """Seconds between steps: data, norm, logging."""
    straggler_share: float = 0.01
    """Relative step-time increase per doubling of nodes, because the slowest rank sets the
    pace."""
    reserve_share: float = 0.05
    """Memory reserved by the allocator beyond live bytes, as a share of them."""
    reserve_bytes: float = 0.3e9
    context_bytes: float = 0.9e9
    """Bytes of the device's context and libraries."""
    communicator_bytes: float = 0.25e9
    """Buffer bytes of each process group of a rank."""
    usable_share: float = 1.0
    """Share of the device's memory that a run may plan to fill."""
