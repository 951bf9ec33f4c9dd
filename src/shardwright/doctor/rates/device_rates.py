"""Rates of one device: matrix products, attention, copies within its memory and to its host.

Legend: M rows (tokens), N output columns, K input columns; B sequences, T tokens of a row,
H query heads, J key-value heads, E head_dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.nn.functional as F

from shardwright.doctor.probe_budget import ComputeMaximum
from shardwright.hardware import AttentionRate, MatmulRate
from shardwright.hardware.measured_profile import compute_attention_flops
from shardwright.units import MIB_BYTES

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

SQUARE_SIDES = {"cpu": (128, 256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
"""Sides of square products. Devices reach their best rate at the last one, well below 1 s."""
_MEASURED_SECONDS = 0.2
"""Approximate seconds of the rounds of one measurement."""
_MAX_SQUARE_SECONDS = 0.5
TRIAL_FLOPS = {"cpu": 2e7, "cuda": 1e11}
"""FLOPs of the attention that is measured first."""


MatmulShape = tuple[str, int, int, int]
"""Precision, m, n and k of a matrix product."""


@dataclass(frozen=True)
class CopyRate:
    """Rate of a copy: `memory` and `host memory` (bytes read plus written), or to or from pinned
    host memory."""

    kind: str
    num_bytes: int
    bytes_per_second: float


@dataclass(frozen=True)
class AttentionWorkload:
    """Causal attention to measure: rows, tokens of a row, and heads."""

    precision: str
    num_rows: int
    row_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def flops(self) -> float:
        """FLOPs of a forward pass."""
        return compute_attention_flops(
            self.num_rows * self.row_tokens, self.row_tokens, 2 * self.num_heads * self.head_dim
        )


def list_precisions(device: torch.device) -> tuple[str, ...]:
    """List the precisions in which products are measured."""
    return ("fp32", "bf16") if device.type == "cpu" else ("fp32", "tf32", "bf16", "fp16")


def time_squares(
    precision: str, device: torch.device, compute_maximum: ComputeMaximum
) -> Iterator[MatmulRate]:
    """Yield rates of growing square products, until the next takes too long on any rank."""
    call_seconds = 0.0
    for side in SQUARE_SIDES[device.type]:
        if call_seconds and compute_maximum(8 * call_seconds) > _MAX_SQUARE_SECONDS:
            return
        rate = time_matmul(precision, side, side, side, device)
        call_seconds = 2.0 * side**3 / rate.flops_per_second
        yield rate


def reduce_matmul(m: int, n: int, k: int, max_flops: float) -> tuple[int, int, int]:
    """Reduce the rows, then the columns of a product to at most `max_flops`.

    >>> reduce_matmul(1024, 512, 256, 1e9), reduce_matmul(1024, 512, 256, 1e8)
    ((1024, 512, 256), (381, 512, 256))
    """
    rows = min(m, max(1, int(max_flops / (2.0 * n * k))))
    columns = min(n, max(1, int(max_flops / (2.0 * rows * k))))
    return rows, columns, k


def format_matmul(shape: MatmulShape) -> str:
    """Format a product.

    >>> format_matmul(("bf16", 1024, 512, 192))
    'bf16 1024 x 512 x 192'
    """
    precision, *sides = shape
    return f"{precision} {' x '.join(map(str, sides))}"


def format_attention(workload: AttentionWorkload) -> str:
    """Format attention over some rows."""
    return f"{workload.precision} {workload.num_rows} x {workload.row_tokens} tokens"


def compute_attention_seconds(flops: float, rate: AttentionRate) -> float:
    """Compute the seconds of a forward pass of `flops` and its backward pass."""
    return flops / rate.forward_flops_per_second + 2.5 * flops / rate.backward_flops_per_second


def reduce_attention(workload: AttentionWorkload, max_flops: float) -> AttentionWorkload:
    """Reduce the rows, then the heads of attention to at most `max_flops` if possible.

    The row length stays, because the rate depends on it.
    """
    num_rows = max(1, min(workload.num_rows, int(max_flops / replace(workload, num_rows=1).flops)))
    reduced = replace(workload, num_rows=num_rows)
    while (
        reduced.flops > max_flops and reduced.num_kv_heads % 2 == 0 and reduced.num_heads % 2 == 0
    ):
        reduced = replace(
            reduced, num_heads=reduced.num_heads // 2, num_kv_heads=reduced.num_kv_heads // 2
        )
    return reduced


def time_matmul(precision: str, m: int, n: int, k: int, device: torch.device) -> MatmulRate:
    """Measure the best rate of [m, k] x [k, n]."""
    dtype = DTYPES[precision]
    a_MK = torch.randn(m, k, device=device).to(dtype)
    b_KN = torch.randn(k, n, device=device).to(dtype)
    out_MN = torch.empty(m, n, device=device, dtype=dtype)
    with _set_matmul_precision(precision):
        best = measure_median_seconds(
            lambda: torch.mm(a_MK, b_KN, out=out_MN), device, seconds=_MEASURED_SECONDS
        )
    return MatmulRate(precision, m, n, k, 2.0 * m * n * k / best)


def time_attention(
    workload: AttentionWorkload, device: torch.device, *, seconds: float = _MEASURED_SECONDS
) -> AttentionRate | None:
    """Measure the best rates of causal attention in both passes; None if out of memory."""
    shape = (workload.num_rows, workload.row_tokens)

    def draw_heads(num_heads: int) -> torch.Tensor:
        # The heads of a token are adjacent in memory, as after a projection.
        x_BTHE = torch.randn(*shape, num_heads, workload.head_dim, device=device).to(
            DTYPES[workload.precision]
        )
        return x_BTHE.transpose(1, 2)

    gradient_BHTE = draw_heads(workload.num_heads)
    q_BHTE, k_BJTE, v_BJTE = (
        draw_heads(num).requires_grad_()
        for num in (workload.num_heads, workload.num_kv_heads, workload.num_kv_heads)
    )
    grouped = workload.num_heads != workload.num_kv_heads

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q_BHTE, k_BJTE, v_BJTE, is_causal=True, enable_gqa=grouped
        )

    try:
        with _set_matmul_precision(workload.precision):
            forward = measure_median_seconds(attend, device, seconds=seconds)
            out_BHTE = attend()
            inputs = (q_BHTE, k_BJTE, v_BJTE)
            backward = measure_median_seconds(
                lambda: torch.autograd.grad(out_BHTE, inputs, gradient_BHTE, retain_graph=True),
                device,
                seconds=seconds,
            )
    except torch.OutOfMemoryError:  # no plan can use rows that do not fit
        return None
    return AttentionRate(
        workload.precision,
        workload.row_tokens,
        workload.head_dim,
        workload.flops / forward,
        2.5 * workload.flops / backward,
    )


@contextmanager
def _set_matmul_precision(precision: str) -> Iterator[None]:
    """Use TF32 for `tf32` products and full fp32 for others, whatever the current setting."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def measure_median_seconds(
    work: Callable[[], object], device: torch.device, *, seconds: float
) -> float:
    """Measure the median seconds of a call; several rounds take about `seconds` together.

    Work that takes `seconds` or more is called twice, once to warm up. CUDA events exclude the
    host's time.
    """
    work()
    first = _time_round(work, device, 1)
    if first >= seconds:
        return first
    calls = max(1, int(seconds / 5 / max(first, 1e-7)))
    rounds = 5 if first * 5 < 2 * seconds else 3
    return median(_time_round(work, device, calls) for _ in range(rounds)) / calls


def _time_round(work: Callable[[], object], device: torch.device, num_calls: int) -> float:
    if device.type == "cuda":
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(num_calls):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    start_seconds = time.perf_counter()
    for _ in range(num_calls):
        work()
    return time.perf_counter() - start_seconds


def time_copies(device: torch.device) -> list[CopyRate]:
    """Measure copies within the device and, on CUDA, within and to and from host memory.

    Buffers are larger than any cache.
    """
    is_cuda = device.type == "cuda"
    num_bytes = (1024 if is_cuda else 64) * MIB_BYTES
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    best = measure_median_seconds(lambda: target.copy_(source), device, seconds=_MEASURED_SECONDS)
    rates = [CopyRate("memory", num_bytes, 2 * num_bytes / best)]
    if is_cuda:
        pinned = torch.ones(256 * MIB_BYTES, dtype=torch.uint8, pin_memory=True)
        part = target[: pinned.numel()]
        for kind, work in (
            ("to device", lambda: part.copy_(pinned, non_blocking=True)),
            ("from device", lambda: pinned.copy_(part, non_blocking=True)),
        ):
            best = measure_median_seconds(work, device, seconds=_MEASURED_SECONDS)
            rates.append(CopyRate(kind, pinned.numel(), pinned.numel() / best))
        copied = torch.empty_like(pinned, device="cpu")
        best = measure_median_seconds(
            lambda: copied.copy_(pinned), torch.device("cpu"), seconds=_MEASURED_SECONDS
        )
        rates.append(CopyRate("host memory", pinned.numel(), 2 * pinned.numel() / best))
    return rates
