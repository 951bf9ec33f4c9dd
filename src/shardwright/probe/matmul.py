"""Rates of one device: products by precision and shape, attention by the length of rows, copies within its memory, copies from and
to its host.

Legend: M rows (tokens), N columns out, K columns in; B sequences, T tokens of a row, H query heads, J key/value heads, E head_dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shardwright.errors import InputError
from shardwright.hardware import AttentionRate, MatmulRate, find_link
from shardwright.hardware.load import find_accelerator
from shardwright.hardware.profile import attention_flops
from shardwright.probe.finding import Finding, graded, name_ranks
from shardwright.probe.outliers import find_odd, limits_for
from shardwright.units import MIB_BYTES, format_flops_per_second

SECTION = "rates"

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_SHARE_WARN, _SHARE_FAIL = 0.6, 0.3
"""Of the data sheet's peak. Large square products reach 70 to 85% of it on a healthy GPU."""
_COPY_WARN, _COPY_FAIL = 0.6, 0.3


@dataclass(frozen=True)
class CopyRate:
    """`kind`: within the device (bytes read plus written), to it from pinned host memory, or from it."""

    kind: str
    num_bytes: int
    bytes_per_second: float


@dataclass(frozen=True)
class Rows:
    """Causal attention that is tried: so many rows of so many tokens, and the heads of each."""

    precision: str
    num_rows: int
    row_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def flops(self) -> float:
        """Of a forward pass."""
        return attention_flops(self.num_rows * self.row_tokens, self.row_tokens, 2 * self.num_heads * self.head_dim)


def precisions_of(device: torch.device) -> tuple[str, ...]:
    """What products are tried in."""
    return ("fp32", "bf16") if device.type == "cpu" else ("fp32", "tf32", "bf16", "fp16")


def usual_size(device: torch.device) -> int:
    """Side of a square product that a device of this kind runs at its best rate, in a fraction of a second."""
    return 1024 if device.type == "cpu" else 8192


def time_product(precision: str, m: int, n: int, k: int, device: torch.device, *, seconds: float = 0.2) -> MatmulRate:
    """The best rate of [m, k] x [k, n] among rounds of about a fifth of `seconds` each, at least three of them."""
    dtype = DTYPES[precision]
    a_MK, b_KN = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
    out_MN = torch.empty(m, n, device=device, dtype=dtype)
    with _products_in(precision):
        best = best_seconds(lambda: torch.mm(a_MK, b_KN, out=out_MN), device, seconds=seconds)
    return MatmulRate(precision, m, n, k, 2.0 * m * n * k / best)


def time_attention(rows: Rows, device: torch.device, *, seconds: float = 0.2) -> AttentionRate | None:
    """The best rates of causal attention as the decoder calls it, forward and backward; None where it does not fit the device."""
    shape = (rows.num_rows, rows.row_tokens)

    def draw(num_heads: int) -> torch.Tensor:
        # Heads lie beside each other in memory, as a projection leaves them.
        x_BTHE = torch.randn(*shape, num_heads, rows.head_dim, device=device).to(DTYPES[rows.precision])
        return x_BTHE.transpose(1, 2)

    gradient_BHTE = draw(rows.num_heads)
    q_BHTE, k_BJTE, v_BJTE = (draw(num).requires_grad_() for num in (rows.num_heads, rows.num_kv_heads, rows.num_kv_heads))
    grouped = rows.num_heads != rows.num_kv_heads

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(q_BHTE, k_BJTE, v_BJTE, is_causal=True, enable_gqa=grouped)

    try:
        with _products_in(rows.precision):
            forward = best_seconds(attend, device, seconds=seconds)
            out_BHTE = attend()
            inputs = (q_BHTE, k_BJTE, v_BJTE)
            backward = best_seconds(
                lambda: torch.autograd.grad(out_BHTE, inputs, gradient_BHTE, retain_graph=True), device, seconds=seconds
            )
    except torch.OutOfMemoryError:  # rows too long for the device are none that a plan could have
        return None
    return AttentionRate(rows.precision, rows.row_tokens, rows.head_dim, rows.flops / forward, 2.5 * rows.flops / backward)


@contextmanager
def _products_in(precision: str) -> Iterator[None]:
    """fp32 products in fp32, and TF32's in TF32, whatever was set before."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def best_seconds(work: Callable[[], object], device: torch.device, *, seconds: float) -> float:
    """Least seconds of one call of `work` over five rounds; CUDA's by its own events, so that the host's part is left out."""
    work()
    first = _round_seconds(work, device, 1)
    calls = max(1, int(seconds / 5 / max(first, 1e-7)))
    rounds = 5 if first * 5 < 2 * seconds else 3
    return min(_round_seconds(work, device, calls) for _ in range(rounds)) / calls


def _round_seconds(work: Callable[[], object], device: torch.device, calls: int) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return time.perf_counter() - began


def time_copies(device: torch.device, *, seconds: float = 0.2) -> list[CopyRate]:
    """Within the device, and on CUDA to and from pinned host memory; buffers are larger than any cache."""
    cuda = device.type == "cuda"
    num_bytes = (1024 if cuda else 64) * MIB_BYTES
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    best = best_seconds(lambda: target.copy_(source), device, seconds=seconds)
    found = [CopyRate("memory", num_bytes, 2 * num_bytes / best)]
    if cuda:
        pinned = torch.ones(256 * MIB_BYTES, dtype=torch.uint8, pin_memory=True)
        part = target[: pinned.numel()]
        for kind, work in (
            ("to device", lambda: part.copy_(pinned, non_blocking=True)),
            ("from device", lambda: pinned.copy_(part, non_blocking=True)),
        ):
            best = best_seconds(work, device, seconds=seconds)
            found.append(CopyRate(kind, pinned.numel(), pinned.numel() / best))
    return found


def judge_products(rates: Mapping[int, Sequence[MatmulRate]], device_kind: str, names: Mapping[int, str]) -> list[Finding]:
    """Rates by rank: each precision against the data sheet where the device is known, and the ranks against each other."""
    findings = []
    for precision in dict.fromkeys(rate.precision for found in rates.values() for rate in found):
        by_rank = {
            rank: max(rate.flops_per_second for rate in found if rate.precision == precision)
            for rank, found in rates.items()
            if any(rate.precision == precision for rate in found)
        }
        slowest, fastest = min(by_rank.values()), max(by_rank.values())
        told = format_flops_per_second(slowest) + (f" to {format_flops_per_second(fastest)}" if fastest > 1.02 * slowest else "")
        peak = _peak(names[min(names)], precision) if device_kind == "cuda" else None
        verdict, remedy = graded(1.0, warn=_SHARE_WARN, fail=_SHARE_FAIL), ""
        if peak is not None:
            told += f", {fastest / peak:.0%} of the data sheet's {format_flops_per_second(peak)}"
            verdict = graded(fastest / peak, warn=_SHARE_WARN, fail=_SHARE_FAIL)
            remedy = "Clocks, power limit or another process: nvidia-smi -q -d CLOCK,POWER,PERFORMANCE"
        numbers = {"flops_per_second": dict(by_rank), "peak_flops_per_second": peak}
        findings.append(Finding(SECTION, f"products, {precision}", verdict, told, remedy, numbers))
        findings += judge_ranks(by_rank, device_kind, f"products, {precision}", format_flops_per_second)
    return findings


def judge_ranks(by_rank: Mapping[int, float], device_kind: str, what: str, show: Callable[[float], str]) -> list[Finding]:
    """Ranks that are slower than the others, each by its name; nothing where none is."""
    found = []
    for odd in find_odd(by_rank, limits_for(device_kind)):
        told = f"{show(odd.rate)}, {odd.share:.0%} of the other ranks' median {show(odd.others)}"
        remedy = f"Every step waits for {name_ranks([odd.key])}: look at its device and what else runs there, or leave its node out"
        numbers = {"rank": odd.key, "rate": odd.rate, "others": odd.others}
        found.append(Finding(SECTION, f"{what}: slow {name_ranks([odd.key])}", odd.verdict, told, remedy, numbers))
    return found


def judge_copies(
    rates: Mapping[int, Sequence[CopyRate]], device_kind: str, names: Mapping[int, str], pcie_generation: int | None
) -> list[Finding]:
    """Copies by rank against what the memory or the bus can do, where that is known, and ranks against each other."""
    findings = []
    for kind in dict.fromkeys(rate.kind for found in rates.values() for rate in found):
        by_rank = {rank: rate.bytes_per_second for rank, found in rates.items() for rate in found if rate.kind == kind}
        told, verdict, remedy = f"{_spread(by_rank)}", graded(1.0, warn=_COPY_WARN, fail=_COPY_FAIL), ""
        peak = None
        if device_kind == "cuda":
            peak = _memory_peak(names[min(names)]) if kind == "memory" else _bus_peak(pcie_generation)
        if peak is not None:
            share = max(by_rank.values()) / peak
            told += f", {share:.0%} of {_gigabytes(peak)}"
            verdict = graded(share, warn=_COPY_WARN, fail=_COPY_FAIL)
            remedy = "Another process, or a device on a narrow or far slot: nvidia-smi topo -m, lspci -vv"
        what = "memory bandwidth" if kind == "memory" else f"copies {kind}"
        numbers = {"bytes_per_second": dict(by_rank), "peak_bytes_per_second": peak}
        findings.append(Finding(SECTION, what, verdict, told, remedy, numbers))
        findings += judge_ranks(by_rank, device_kind, what, _gigabytes)
    return findings


def _spread(by_rank: Mapping[int, float]) -> str:
    slowest, fastest = min(by_rank.values()), max(by_rank.values())
    return _gigabytes(slowest) + (f" to {_gigabytes(fastest)}" if fastest > 1.02 * slowest else "")


def _gigabytes(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def _peak(name: str, precision: str) -> float | None:
    try:
        return find_accelerator(name).peak(precision)
    except InputError:
        return None


def _memory_peak(name: str) -> float | None:
    try:
        return find_accelerator(name).memory_bytes_per_second
    except InputError:
        return None


def _bus_peak(generation: int | None) -> float | None:
    try:
        return None if generation is None else find_link(f"pcie{generation}", 1).bytes_per_second
    except InputError:
        return None
