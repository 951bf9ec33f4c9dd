"""Rates that a calibration orders, quickest first, within its time; what does not fit is an omission.

Every rank makes the same measurements, because all numbers that decide are agreed.
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
"""What repeated calls of a short problem take, its preparation included."""

Rate = TypeVar("Rate")
Found = Iterator[Rate | Omission]


@dataclass(frozen=True)
class TimeLimit:
    """What some measurements may take."""

    budget: Budget
    """Of all together."""
    call_seconds: float
    """Of one call; a problem that would take longer is reduced."""
    most_call_seconds: float
    """Of one call that cannot be reduced."""


def time_products(
    shapes: Sequence[matmul.Shape],
    measured: Sequence[MatmulRate],
    seconds_per_flop: Mapping[str, float],
    device: torch.device,
    limit: TimeLimit,
) -> Found[MatmulRate]:
    """Yield the rates of products, with fewer rows where one would take too long.

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
            names = matmul.name_shape(shape), matmul.name_shape(reduced)
            yield Omission("products", names[0], predict_seconds(shape), names[1])


def time_attention(ordered: Sequence[matmul.Rows], device: torch.device, limit: TimeLimit) -> Found[AttentionRate]:
    """Yield the rates of attention, over fewer rows where they would take too long.

    Each rate predicts the next, of more FLOPs. The first is that of a small trial.
    """
    for precision in dict.fromkeys(rows.precision for rows in ordered):
        wanted = [rows for rows in ordered if rows.precision == precision]
        shortest = min(wanted, key=lambda rows: rows.row_tokens)
        trial = matmul.reduce_rows(shortest, matmul.TRIAL_FLOPS[device.type])
        rate = matmul.time_attention(trial, device, seconds=0.02)
        for rows in sorted(wanted, key=lambda rows: rows.flops):
            # Where not even the trial fits the device, one second a FLOP is more than any limit.
            mine = 1.0 if rate is None else matmul.attention_seconds(1.0, rate)
            seconds_per_flop = limit.budget.agree(mine)
            reduced = matmul.reduce_rows(rows, limit.call_seconds / seconds_per_flop)
            call_seconds = reduced.flops * seconds_per_flop
            # Two calls forward and two backward, and one more that backward starts from.
            is_affordable = limit.budget.affords(2 * _ROUNDS_SECONDS + 3 * call_seconds)
            if not is_affordable or call_seconds > limit.most_call_seconds:
                yield Omission("attention", matmul.name_rows(rows), rows.flops * seconds_per_flop)
                continue
            found = matmul.time_attention(reduced, device)
            if found is not None:
                yield found
                rate = found


def time_elementwise(ordered: Sequence[tuple[str, int, int]], device: torch.device, limit: TimeLimit) -> Found[ElementwiseRate]:
    """Yield the rates of tensors (precision, tokens, width), with fewer tokens where they take too long."""
    for precision, tokens, width in ordered:
        few = min(tokens, max(1, elementwise.TRIAL_ELEMENTS // width))
        trial = elementwise.time_elementwise(precision, few, width, device, seconds=0.02)
        token_seconds = limit.budget.agree(elementwise.call_seconds(trial) / few)
        reduced = min(tokens, max(1, int(limit.call_seconds / token_seconds)))
        wanted, seconds = f"{precision} {tokens} x {width}", tokens * token_seconds
        # Two calls, and the tensors that are drawn for them.
        if not limit.budget.affords(_ROUNDS_SECONDS + 4 * reduced * token_seconds):
            yield Omission("elementwise", wanted, seconds)
            continue
        yield elementwise.time_elementwise(precision, reduced, width, device)
        if reduced < tokens:
            yield Omission("elementwise", wanted, seconds, f"{precision} {reduced} x {width}")
