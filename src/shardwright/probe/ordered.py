"""Rates that a calibration requests, fastest first, within its time limit.

A problem that exceeds the limit is an omission. All decisions use the maximum over the ranks,
so every rank makes the same measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from shardwright.hardware import AttentionRate, ElementwiseRate, MatmulRate
from shardwright.probe import elementwise, matmul
from shardwright.probe.budget import Budget, Omission

_ROUNDS_SECONDS = 0.25
"""Seconds of the repeated calls of a short problem, its preparation included."""

Rate = TypeVar("Rate")
Found = Iterator[Rate | Omission]


@dataclass(frozen=True)
class TimeLimit:
    """Time limits of some measurements."""

    budget: Budget
    """Time limit of all measurements together."""
    call_seconds: float
    """Limit of one call in seconds; longer problems are reduced."""
    most_call_seconds: float
    """Limit in seconds of a call that cannot be reduced."""


def time_products(
    shapes: Sequence[matmul.Shape],
    measured: Sequence[MatmulRate],
    seconds_per_flop: Mapping[str, float],
    device: torch.device,
    limit: TimeLimit,
) -> Found[MatmulRate]:
    """Yield the rates of products, reduced to fewer rows if they take too long.

    Args:
        measured: products that need not be measured again.
        seconds_per_flop: by precision, of the largest square product; equal on all ranks.
    """
    done = {(rate.precision, rate.m, rate.n, rate.k) for rate in measured}

    def predict_seconds(shape: matmul.Shape) -> float:
        precision, m, n, k = shape
        return 2.0 * m * n * k * seconds_per_flop[precision]

    for shape in sorted(shapes, key=predict_seconds):
        precision, m, n, k = shape
        most_flops = limit.call_seconds / seconds_per_flop[precision]
        reduced = (precision, *matmul.reduce_product(m, n, k, most_flops))
        if reduced not in done:
            if not limit.budget.affords(_ROUNDS_SECONDS + 2 * predict_seconds(reduced)):
                yield Omission("products", matmul.name_shape(shape), predict_seconds(shape))
                continue
            yield matmul.time_product(*reduced, device)
            done.add(reduced)
        if reduced != shape:
            name = matmul.name_shape(shape)
            yield Omission("products", name, predict_seconds(shape), matmul.name_shape(reduced))


def time_attention(
    ordered: Sequence[matmul.Rows], device: torch.device, limit: TimeLimit
) -> Found[AttentionRate]:
    """Yield the rates of attention, reduced to fewer rows if they take too long.

    Each rate predicts the time of the next, which has more FLOPs; a small trial the first.
    """
    for precision in dict.fromkeys(rows.precision for rows in ordered):
        workloads = [rows for rows in ordered if rows.precision == precision]
        shortest = min(workloads, key=lambda rows: rows.row_tokens)
        trial = matmul.reduce_rows(shortest, matmul.TRIAL_FLOPS[device.type])
        rate = matmul.time_attention(trial, device, seconds=0.02)
        for rows in sorted(workloads, key=lambda rows: rows.flops):
            # If even the trial does not fit the device, 1 s per FLOP exceeds every limit.
            rank_seconds_per_flop = 1.0 if rate is None else matmul.attention_seconds(1.0, rate)
            seconds_per_flop = limit.budget.agree(rank_seconds_per_flop)
            reduced = matmul.reduce_rows(rows, limit.call_seconds / seconds_per_flop)
            call_seconds = reduced.flops * seconds_per_flop
            # Two forward and two backward calls, and a forward call whose output backward uses.
            is_affordable = limit.budget.affords(2 * _ROUNDS_SECONDS + 3 * call_seconds)
            if not is_affordable or call_seconds > limit.most_call_seconds:
                yield Omission("attention", matmul.name_rows(rows), rows.flops * seconds_per_flop)
                continue
            measured = matmul.time_attention(reduced, device)
            if measured is not None:
                yield measured
                rate = measured


def time_elementwise(
    ordered: Sequence[tuple[str, int, int]], device: torch.device, limit: TimeLimit
) -> Found[ElementwiseRate]:
    """Yield the rates of tensors (precision, tokens, width), with fewer tokens if too slow."""
    for precision, tokens, width in ordered:
        num_tokens = min(tokens, max(1, elementwise.TRIAL_ELEMENTS // width))
        trial = elementwise.time_elementwise(precision, num_tokens, width, device, seconds=0.02)
        token_seconds = limit.budget.agree(elementwise.call_seconds(trial) / num_tokens)
        reduced = min(tokens, max(1, int(limit.call_seconds / token_seconds)))
        name = f"{precision} {tokens} x {width}"
        seconds = tokens * token_seconds
        # Two calls, and the initialisation of their tensors.
        if not limit.budget.affords(_ROUNDS_SECONDS + 4 * reduced * token_seconds):
            yield Omission("elementwise", name, seconds)
            continue
        yield elementwise.time_elementwise(precision, reduced, width, device)
        if reduced < tokens:
            yield Omission("elementwise", name, seconds, f"{precision} {reduced} x {width}")
