"""Axes of charts: pixel positions, round tick values and their text."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class AxisScale:
    """Linear or logarithmic map from a range of values to a range of pixels."""

    low: float
    high: float
    start_pixel: float
    """Pixel position of the value `low`."""
    end_pixel: float
    """Pixel position of the value `high`."""
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel position of a value, which may be outside the range."""
        if self.is_log:
            share = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start_pixel + share * (self.end_pixel - self.start_pixel)


_MARGIN_SHARE = 0.04
"""Margin at each end of an axis, as a share of the range."""


def pad_range(low: float, high: float, *, is_log: bool = False) -> tuple[float, float]:
    """Extend a range by a margin; a range of one value gets a width.

    >>> pad_range(2.0, 2.0)
    (1.9, 2.1)
    """
    if is_log:
        low = low if low > 0 else min(high, 1.0) * 1e-6 or 1e-6
        high = max(high, low)
        factor = (high / low) ** _MARGIN_SHARE if high > low else 1.5
        return low / factor, high * factor
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value up to rounding
        half = abs(low) * 0.05 or 0.5
        return low - half, low + half
    margin = _MARGIN_SHARE * (high - low)
    return low - margin, high + margin


def find_ticks(
    low: float, high: float, num_ticks: int, *, is_log: bool = False, is_whole: bool = False
) -> list[float]:
    """Return about `num_ticks` round values inside the range, with `is_whole` integers.

    >>> find_ticks(0, 1000, 5), find_ticks(1e-4, 1e-2, 3, is_log=True)
    ([0.0, 200.0, 400.0, 600.0, 800.0, 1000.0], [0.0001, 0.001, 0.01])
    >>> find_ticks(1, 20, 8), find_ticks(1, 20, 8, is_whole=True)
    ([2.5, 5.0, 7.5, 10.0, 12.5, 15.0, 17.5, 20.0], [5.0, 10.0, 15.0, 20.0])
    """
    if is_log and high / low >= 3:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for mantissas in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
            ticks = [float(f"{m}e{d}") for d in decades for m in mantissas]
            ticks = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
            if len(ticks) <= num_ticks + 1:
                return ticks
        return ticks[:: math.ceil(len(ticks) / num_ticks)]
    rough = (high - low) / max(1, num_ticks)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    steps = [m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999]
    step = next((size for size in steps if not is_whole or size == round(size) > 0), 1.0)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    decimals = max(0, 2 - math.floor(math.log10(step)))
    return [
        round(index * step, decimals) + 0.0 for index in range(first, last + 1)
    ]  # + 0.0 avoids minus zero


def format_ticks(ticks: list[float]) -> list[str]:
    """Format all ticks of an axis in one style; thousands as k, M, B.

    >>> format_ticks([0.0, 12500.0, 25000.0]), format_ticks([1e-5, 1e-3])
    (['0', '12.5k', '25k'], ['1e-5', '1e-3'])
    >>> format_ticks([0.0, 0.5, 1.0]), format_ticks([0.0, 0.001, 0.002])
    (['0', '0.5', '1'], ['0', '0.001', '0.002'])
    """
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if 1000 <= largest < 10_000 and all(tick == round(tick) for tick in ticks):
        return [f"{tick:,.0f}" for tick in ticks]
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if largest >= scale:
            return [f"{tick / scale:g}{letter}" if tick else "0" for tick in ticks]
    if any(0 < abs(tick) < 1e-3 - 1e-12 for tick in ticks):
        return [_format_small(tick) for tick in ticks]
    return [f"{tick:.6g}" for tick in ticks]


def _format_small(tick: float) -> str:
    """Format a tick of an axis with values below 0.001, with an exponent if below 0.01."""
    if tick == 0 or abs(tick) >= 1e-2:
        return f"{tick:.6g}"
    mantissa, _, exponent = f"{tick:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def format_axis_value(value: float) -> str:
    """Format a value with four digits for readers of a chart.

    >>> format_axis_value(1.23456), format_axis_value(123456.0), format_axis_value(0.000123456)
    ('1.235', '123,456', '0.0001235')
    """
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
