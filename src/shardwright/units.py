"""Formatting of bytes, seconds, counts and rates for output; values elsewhere use base units."""

from __future__ import annotations

GIB_BYTES = 1024**3
MIB_BYTES = 1024**2


def format_bytes(num_bytes: float) -> str:
    """Format bytes in binary units, with three significant digits.

    >>> format_bytes(1536 * 1024**2)
    '1.50 GiB'
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_count(value: float) -> str:
    """Format a number with a decimal multiple, as a letter.

    >>> format_count(1_234_567)
    '1.23M'
    """
    size = float(value)
    for unit in ("", "k", "M", "B"):
        if abs(size) < 1000:
            return f"{size:.0f}" if not unit else f"{size:.3g}{unit}"
        size /= 1000
    return f"{size:.3g}T"


def format_items(count: int, noun: str) -> str:
    """Format a number of things, with a plural that ends in `s` or `es`.

    >>> format_items(1, "rank"), format_items(0, "rank"), format_items(1200, "micro-batch")
    ('1 rank', '0 ranks', '1,200 micro-batches')
    """
    plural = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{plural}"


def format_seconds(seconds: float) -> str:
    """Format a duration in the units that people use.

    >>> format_seconds(3725), format_seconds(0.0123), format_seconds(75)
    ('1h 02m', '12.3 ms', '1m 15s')
    """
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h {minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}h"


def format_flops_per_second(flops_per_second: float) -> str:
    """Format a rate in PFLOP/s, TFLOP/s, GFLOP/s or MFLOP/s.

    >>> format_flops_per_second(7.9e14)
    '790 TFLOP/s'
    """
    for scale, unit in ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s")):
        if flops_per_second >= scale:
            return f"{flops_per_second / scale:.3g} {unit}"
    return f"{flops_per_second / 1e6:.3g} MFLOP/s"
