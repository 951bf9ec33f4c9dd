"""Rates that a calibration requests, fastest first, within its time limit.

A problem that exceeds the limit is an omission. All decisions use the maximum over the ranks,
so every rank makes the same measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from shardwright.doctor.probe_budget import Omission, TimeBudget
from shardwright.doctor.rates import device_rates, elementwise
from shardwright.hardware import AttentionRate, ElementwiseRate, MatmulRate

_ROUNDS_SECONDS = 0.25
"""Seconds of the repeated calls of a short problem, its preparation included."""

Rate = TypeVar("Rate")
RatesOrOmissions = Iterator[Rate | Omission]


@dataclass(frozen=True)
class TimeLimit:
    """Time limits of some measurements."""

    budget: TimeBudget
    """Time limit of all measurements together."""
    call_seconds: float
    """Limit of one call in seconds; longer problems are reduced."""
    max_call_seconds: float
    """Limit in seconds of a call that cannot be reduced."""


def time_products(
    shapes: Sequence[device_rates.MatmulShape],
    known_rates: Sequence[MatmulRate],
    seconds_per_flop: Mapping[str, float],
    device: torch.device,
    limit: TimeLimit,
) -> RatesOrOmissions[MatmulRate]:
    """Yield the rates of products, reduced to fewer rows if they take too long.

    Args:
        known_rates: products that need not be measured again.
        seconds_per_flop: by precision, of the largest square product; equal on all ranks.
    """
    done = {(rate.precision, rate.m, rate.n, rate.k) for rate in known_rates}

    def predict_seconds(shape: device_rates.MatmulShape) -> float:
        precision, m, n, k = shape
        return 2.0 * m * n * k * seconds_per_flop[precision]

    for shape in sorted(shapes, key=predict_seconds):
        precision, m, n, k = shape
        most_flops = limit.call_seconds / seconds_per_flop[precision]
        reduced = (precision, *device_rates.reduce_matmul(m, n, k, most_flops))
        if reduced not in done:
            if not limit.budget.can_afford(_ROUNDS_SECONDS + 2 * predict_seconds(reduced)):
                yield Omission(
                    "products", device_rates.format_matmul(shape), predict_seconds(shape)
                )
                continue
            yield device_rates.time_matmul(*reduced, device)
            done.add(reduced)
        if reduced != shape:
            name = device_rates.format_matmul(shape)
            yield Omission(
                "products", name, predict_seconds(shape), device_rates.format_matmul(reduced)
            )


def time_attention(
    requested_rows: Sequence[device_rates.AttentionWorkload], device: torch.device, limit: TimeLimit
) -> RatesOrOmissions[AttentionRate]:
    """Yield the rates of attention, reduced to fewer rows if they take too long.

    Each rate predicts the time of the next, which has more FLOPs; a small trial the first.
    """
    for precision in dict.fromkeys(rows.precision for rows in requested_rows):
        workloads = [rows for rows in requested_rows if rows.precision == precision]
        shortest = min(workloads, key=lambda rows: rows.row_tokens)
        trial = device_rates.reduce_attention(shortest, device_rates.TRIAL_FLOPS[device.type])
        rate = device_rates.time_attention(trial, device, seconds=0.02)
        for rows in sorted(workloads, key=lambda rows: rows.flops):
            # If even the trial does not fit the device, 1 s per FLOP exceeds every limit.
            rank_seconds_per_flop = (
                1.0 if rate is None else device_rates.compute_attention_seconds(1.0, rate)
            )
            seconds_per_flop = limit.budget.compute_maximum(rank_seconds_per_flop)
            reduced = device_rates.reduce_attention(rows, limit.call_seconds / seconds_per_flop)
            call_seconds = reduced.flops * seconds_per_flop
            # Two forward and two backward calls, and a forward call whose output backward uses.
            is_affordable = limit.budget.can_afford(2 * _ROUNDS_SECONDS + 3 * call_seconds)
            if not is_affordable or call_seconds > limit.max_call_seconds:
                yield Omission(
                    "attention", device_rates.format_attention(rows), rows.flops * seconds_per_flop
                )
                continue
            measured = device_rates.time_attention(reduced, device)
            if measured is not None:
                yield measured
                rate = measured


def time_elementwise(
    requested_shapes: Sequence[tuple[str, int, int]], device: torch.device, limit: TimeLimit
) -> RatesOrOmissions[ElementwiseRate]:
    """Yield the rates of tensors (precision, tokens, width), with fewer tokens if too slow."""
    for precision, tokens, width in requested_shapes:
        num_tokens = min(tokens, max(1, elementwise.TRIAL_ELEMENTS // width))
        trial = elementwise.time_elementwise(precision, num_tokens, width, device, seconds=0.02)
        token_seconds = limit.budget.compute_maximum(
            elementwise.compute_call_seconds(trial) / num_tokens
        )
        reduced = min(tokens, max(1, int(limit.call_seconds / token_seconds)))
        name = f"{precision} {tokens} x {width}"
        seconds = tokens * token_seconds
        # Two calls, and the initialisation of their tensors.
        if not limit.budget.can_afford(_ROUNDS_SECONDS + 4 * reduced * token_seconds):
            yield Omission("elementwise", name, seconds)
            continue
        yield elementwise.time_elementwise(precision, reduced, width, device)
        if reduced < tokens:
            yield Omission("elementwise", name, seconds, f"{precision} {reduced} x {width}")
