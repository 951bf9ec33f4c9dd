"""Rates of one device: products by precision and shape, attention by the length of rows, copies within its memory, copies from and
to its host.

Legend: M rows (tokens), N columns out, K columns in; B sequences, T tokens of a row, H query heads, J key/value heads, E head_dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from shardwright.errors import InputError
from shardwright.hardware import AttentionRate, MatmulRate, find_link
from shardwright.hardware.load import find_accelerator
from shardwright.hardware.profile import attention_flops
from shardwright.probe.budget import Agree
from shardwright.probe.finding import Finding, graded, name_ranks, worst
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

_SIDES = {"cpu": (128, 256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
"""Sides of square products. A device reaches its best rate at the last, which takes well below a second."""
_LONGEST_SQUARE_SECONDS = 0.5
TRIAL_FLOPS = {"cpu": 2e7, "cuda": 1e11}
"""Of the attention that is tried first."""
_EMULATED = 1.5
"""Times that fp32 products are faster than 16-bit ones where these are emulated. Units for bf16 make
them faster than fp32; conversions to fp32 and back cost more than a third of a product's time."""


Shape = tuple[str, int, int, int]
"""Of a product: precision, m, n, k."""


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


def time_squares(precision: str, device: torch.device, agree: Agree) -> Iterator[MatmulRate]:
    """Yield rates of square products of growing size, until the next would take too long on any rank."""
    call_seconds = 0.0
    for side in _SIDES[device.type]:
        if call_seconds and agree(8 * call_seconds) > _LONGEST_SQUARE_SECONDS:
            return
        rate = time_product(precision, side, side, side, device)
        call_seconds = 2.0 * side**3 / rate.flops_per_second
        yield rate


def reduce_product(m: int, n: int, k: int, most_flops: float) -> tuple[int, int, int]:
    """Return the product with fewer rows, then fewer columns, so that it takes at most so many FLOPs.

    >>> reduce_product(1024, 512, 256, 1e9), reduce_product(1024, 512, 256, 1e8)
    ((1024, 512, 256), (381, 512, 256))
    """
    rows = min(m, max(1, int(most_flops / (2.0 * n * k))))
    columns = min(n, max(1, int(most_flops / (2.0 * rows * k))))
    return rows, columns, k


def name_shape(shape: Shape) -> str:
    """Return the name of a product.

    >>> name_shape(("bf16", 1024, 512, 192))
    'bf16 1024 x 512 x 192'
    """
    precision, *sides = shape
    return f"{precision} {' x '.join(map(str, sides))}"


def name_rows(rows: Rows) -> str:
    """Return the name of attention over some rows."""
    return f"{rows.precision} {rows.num_rows} x {rows.row_tokens} tokens"


def attention_seconds(flops: float, rate: AttentionRate) -> float:
    """Return the seconds of a forward pass of so many FLOPs and its backward pass."""
    return flops / rate.forward_flops_per_second + 2.5 * flops / rate.backward_flops_per_second


def reduce_rows(rows: Rows, most_flops: float) -> Rows:
    """Return attention over fewer rows, then fewer heads, with at most so many FLOPs if that is possible.

    The length of a row stays, because the rate depends on it.
    """
    num_rows = max(1, min(rows.num_rows, int(most_flops / replace(rows, num_rows=1).flops)))
    few = replace(rows, num_rows=num_rows)
    while few.flops > most_flops and few.num_kv_heads % 2 == 0 and few.num_heads % 2 == 0:
        few = replace(few, num_heads=few.num_heads // 2, num_kv_heads=few.num_kv_heads // 2)
    return few


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
    """Return the least seconds of one call in rounds that take about `seconds` together.

    Work that takes `seconds` or more is called twice, once to warm up. CUDA is timed by its own events,
    so that the host's part is left out.
    """
    work()
    first = _round_seconds(work, device, 1)
    if first >= seconds:
        return first
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
    """Judge square products by rank, each precision at the largest size that all ranks measured.

    They are compared with the data sheet where the device is known, with fp32 where they are 16-bit
    ones, and between ranks.
    """
    findings = []
    for precision in dict.fromkeys(rate.precision for found in rates.values() for rate in found):
        by_side = {
            rank: {rate.m: rate.flops_per_second for rate in found if rate.precision == precision}
            for rank, found in rates.items()
            if any(rate.precision == precision for rate in found)
        }
        side = min(max(sides) for sides in by_side.values())
        by_rank = {rank: sides[side] for rank, sides in by_side.items()}
        slowest, fastest = min(by_rank.values()), max(by_rank.values())
        value = format_flops_per_second(slowest)
        value += f" to {format_flops_per_second(fastest)}" if fastest > 1.02 * slowest else ""
        if side < max(_SIDES[device_kind]):
            value += f" ({side} x {side} x {side})"
        peak = _peak(names[min(names)], precision) if device_kind == "cuda" else None
        verdict, remedies = graded(1.0, warn=_SHARE_WARN, fail=_SHARE_FAIL), []
        if peak is not None:
            value += f", {fastest / peak:.0%} of the data sheet's {format_flops_per_second(peak)}"
            verdict = graded(fastest / peak, warn=_SHARE_WARN, fail=_SHARE_FAIL)
            if verdict != "pass":
                remedies.append("Clocks, power limit or another process: nvidia-smi -q -d CLOCK,POWER,PERFORMANCE")
        numbers: dict[str, Any] = {"flops_per_second": by_rank, "peak_flops_per_second": peak, "side": side}
        slower = _times_slower_than_fp32(rates, precision)
        if slower:
            numbers["times_slower_than_fp32"] = slower
        emulating = {rank: times for rank, times in slower.items() if times > _EMULATED}
        if emulating:
            where = "here" if len(emulating) == len(slower) else f"on {name_ranks(emulating)}"
            times = median(emulating.values())
            told = f"{times:.0f}" if times >= 10 else f"{times:.1f}"
            value = f"{precision} is emulated {where}, {told} times slower than fp32: use fp32; {value}"
            verdict = worst([verdict, "warn"])
            remedies.append("`precision: fp32` in the recipe, or --set precision=fp32")
        findings.append(Finding(SECTION, f"products, {precision}", verdict, value, "; ".join(remedies), numbers))
        findings += judge_ranks(by_rank, device_kind, f"products, {precision}", format_flops_per_second)
    return findings


def _times_slower_than_fp32(rates: Mapping[int, Sequence[MatmulRate]], precision: str) -> dict[int, float]:
    """Return by rank how many times faster fp32 is, at the largest size measured in both.

    Empty for precisions of more than 16 bits.
    """
    found: dict[int, float] = {}
    if precision not in ("bf16", "fp16"):
        return found
    for rank, of_rank in rates.items():
        wide, half = ({rate.m: rate.flops_per_second for rate in of_rank if rate.precision == name} for name in ("fp32", precision))
        shared = wide.keys() & half.keys()
        if shared:
            found[rank] = wide[max(shared)] / half[max(shared)]
    return found


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
