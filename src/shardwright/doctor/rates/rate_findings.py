"""Findings about the rates of products and copies: data sheets, emulation, slow ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

from shardwright.doctor.finding import Finding, find_worst_verdict, format_ranks, grade_share
from shardwright.doctor.outliers import choose_thresholds, find_outliers
from shardwright.doctor.rates.device_rates import SQUARE_SIDES, CopyRate
from shardwright.errors import InputError
from shardwright.hardware import MatmulRate, find_link
from shardwright.hardware.catalog_loading import find_accelerator
from shardwright.units import format_flops_per_second

SECTION = "rates"
_MATMUL_WARN_SHARE = 0.6
_MATMUL_FAIL_SHARE = 0.3
"""Share of the data sheet's peak below which products fail.

Healthy GPUs reach 70 to 85% on large square products.
"""
_COPY_WARN_SHARE = 0.6
_COPY_FAIL_SHARE = 0.3
_EMULATION_FACTOR = 1.5
"""Factor by which fp32 products must be faster for 16-bit ones to count as emulated.

Hardware for bf16 is faster than fp32; conversions to fp32 and back take more than a third of a
product's time.
"""


def judge_matmuls(
    rates: Mapping[int, Sequence[MatmulRate]], device_kind: str, names: Mapping[int, str]
) -> list[Finding]:
    """Judge square products by rank, each precision at the largest size common to all ranks.

    They are compared with the data sheet if the device is known, with fp32 if they are 16-bit,
    and between ranks.
    """
    precisions = dict.fromkeys(rate.precision for each in rates.values() for rate in each)
    return [
        finding
        for precision in precisions
        for finding in _judge_precision(precision, rates, device_kind, names)
    ]


def _judge_precision(
    precision: str,
    rates: Mapping[int, Sequence[MatmulRate]],
    device_kind: str,
    names: Mapping[int, str],
) -> list[Finding]:
    by_side = {
        rank: {rate.m: rate.flops_per_second for rate in rank_rates if rate.precision == precision}
        for rank, rank_rates in rates.items()
        if any(rate.precision == precision for rate in rank_rates)
    }
    side = min(max(sides) for sides in by_side.values())
    by_rank = {rank: sides[side] for rank, sides in by_side.items()}
    slowest = min(by_rank.values())
    fastest = max(by_rank.values())
    value = format_flops_per_second(slowest)
    value += f" to {format_flops_per_second(fastest)}" if fastest > 1.02 * slowest else ""
    if side < max(SQUARE_SIDES[device_kind]):
        value += f" ({side} x {side} x {side})"
    peak = None
    if device_kind == "cuda":
        peak = _find_peak_flops_per_second(names[min(names)], precision)
    verdict = grade_share(1.0, warn_below=_MATMUL_WARN_SHARE, fail_below=_MATMUL_FAIL_SHARE)
    remedies = []
    if peak is not None:
        value += f", {fastest / peak:.0%} of the data sheet's {format_flops_per_second(peak)}"
        verdict = grade_share(
            fastest / peak, warn_below=_MATMUL_WARN_SHARE, fail_below=_MATMUL_FAIL_SHARE
        )
        if verdict != "pass":
            remedies.append(
                "Check clocks, power limit and other processes: nvidia-smi -q -d "
                "CLOCK,POWER,PERFORMANCE"
            )
    numbers: dict[str, Any] = {
        "flops_per_second": by_rank,
        "peak_flops_per_second": peak,
        "side": side,
    }
    slower = _times_slower_than_fp32(rates, precision)
    if slower:
        numbers["times_slower_than_fp32"] = slower
    emulating_ranks = {rank: times for rank, times in slower.items() if times > _EMULATION_FACTOR}
    if emulating_ranks:
        is_everywhere = len(emulating_ranks) == len(slower)
        where = "here" if is_everywhere else f"on {format_ranks(emulating_ranks)}"
        times = median(emulating_ranks.values())
        times_text = f"{times:.0f}" if times >= 10 else f"{times:.1f}"
        value = (
            f"{precision} is emulated {where}, {times_text} times slower than fp32: use "
            f"fp32; {value}"
        )
        verdict = find_worst_verdict([verdict, "warn"])
        remedies.append("Set `precision: fp32` in the recipe, or --set precision=fp32")
    name = f"products, {precision}"
    return [
        Finding(SECTION, name, verdict, value, "; ".join(remedies), numbers),
        *judge_slow_ranks(by_rank, device_kind, name, format_flops_per_second),
    ]


def _times_slower_than_fp32(
    rates: Mapping[int, Sequence[MatmulRate]], precision: str
) -> dict[int, float]:
    """Return by rank how many times faster fp32 is, at the largest size measured in both.

    Empty for precisions of more than 16 bits.
    """
    ratios: dict[int, float] = {}
    if precision not in ("bf16", "fp16"):
        return ratios
    for rank, rank_rates in rates.items():
        fp32_rates, half_rates = (
            {rate.m: rate.flops_per_second for rate in rank_rates if rate.precision == name}
            for name in ("fp32", precision)
        )
        common = fp32_rates.keys() & half_rates.keys()
        if common:
            ratios[rank] = fp32_rates[max(common)] / half_rates[max(common)]
    return ratios


def judge_slow_ranks(
    by_rank: Mapping[int, float],
    device_kind: str,
    quantity: str,
    format_rate: Callable[[float], str],
) -> list[Finding]:
    """Report each rank that is slower than the others."""
    findings = []
    for slow in find_outliers(by_rank, choose_thresholds(device_kind)):
        value = (
            f"{format_rate(slow.rate)}, {slow.share:.0%} of the other ranks' median "
            f"{format_rate(slow.median_of_others)}"
        )
        remedy = (
            f"Every step waits for {format_ranks([slow.key])}: check its device and other "
            "processes there, or exclude its node"
        )
        numbers = {"rank": slow.key, "rate": slow.rate, "others": slow.median_of_others}
        findings.append(
            Finding(
                SECTION,
                f"{quantity}: slow {format_ranks([slow.key])}",
                slow.verdict,
                value,
                remedy,
                numbers,
            )
        )
    return findings


def judge_copies(
    rates: Mapping[int, Sequence[CopyRate]],
    device_kind: str,
    names: Mapping[int, str],
    pcie_generation: int | None,
) -> list[Finding]:
    """Judge copies by rank against the peak of memory or bus, if known, and between ranks."""
    findings = []
    for kind in dict.fromkeys(rate.kind for rank_rates in rates.values() for rate in rank_rates):
        by_rank = {
            rank: rate.bytes_per_second
            for rank, rank_rates in rates.items()
            for rate in rank_rates
            if rate.kind == kind
        }
        value = _format_range(by_rank)
        verdict = grade_share(1.0, warn_below=_COPY_WARN_SHARE, fail_below=_COPY_FAIL_SHARE)
        remedy = ""
        peak = None
        if device_kind == "cuda" and kind != "host memory":
            peak = _find_peak_bandwidth(kind, names[min(names)], pcie_generation)
        if peak is not None:
            share = max(by_rank.values()) / peak
            value += f", {share:.0%} of {_format_gigabytes_per_second(peak)}"
            verdict = grade_share(share, warn_below=_COPY_WARN_SHARE, fail_below=_COPY_FAIL_SHARE)
            remedy = (
                "Look for other processes and for a narrow or remote PCIe slot: nvidia-smi "
                "topo -m, lspci -vv"
            )
        quantity = {"memory": "memory bandwidth", "host memory": "host memory bandwidth"}.get(
            kind, f"copies {kind}"
        )
        numbers = {"bytes_per_second": dict(by_rank), "peak_bytes_per_second": peak}
        findings.append(Finding(SECTION, quantity, verdict, value, remedy, numbers))
        findings += judge_slow_ranks(by_rank, device_kind, quantity, _format_gigabytes_per_second)
    return findings


def _format_range(by_rank: Mapping[int, float]) -> str:
    slowest = min(by_rank.values())
    fastest = max(by_rank.values())
    return _format_gigabytes_per_second(slowest) + (
        f" to {_format_gigabytes_per_second(fastest)}" if fastest > 1.02 * slowest else ""
    )


def _format_gigabytes_per_second(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def _find_peak_flops_per_second(name: str, precision: str) -> float | None:
    with suppress(InputError):
        return find_accelerator(name).get_peak_flops_per_second(precision)
    return None


def _find_peak_bandwidth(kind: str, name: str, pcie_generation: int | None) -> float | None:
    with suppress(InputError):
        if kind == "memory":
            return find_accelerator(name).memory_bytes_per_second
        if pcie_generation is not None:
            return find_link(f"pcie{pcie_generation}", 1).bytes_per_second
    return None
