"""Formatting of bytes, seconds, counts and rates for output; values elsewhere use base units."""

from __future__ import annotations

import re
from fractions import Fraction

GIB_BYTES = 1024**3
MIB_BYTES = 1024**2

SIZE_PATTERN = r"^\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB)\s*$"
_BYTES_OF_UNIT = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for base, suffix in ((1000, "B"), (1024, "iB"))
    for power, letter in enumerate("KMGT", start=1)
}


def parse_bytes(text: str) -> int:
    """Parse a number with a unit, decimal (`MB`) or binary (`MiB`), to bytes.

    >>> parse_bytes("64MiB"), parse_bytes("1.5 GiB"), parse_bytes("10GB")
    (67108864, 1610612736, 10000000000)

    Raises:
        ValueError: The text has another form, or is not a whole number of bytes. The unit is
            required, because `64M` could be either.
    """
    match = re.match(SIZE_PATTERN, text)
    if match is None:
        raise ValueError(
            "as text it must be a number with a unit: B, kB, MB, GB, TB (powers of 1000), KiB, "
            "MiB, GiB or TiB (powers of 1024), e.g. 64MiB"
        )
    unit = match[2][0].upper() + match[2][1:]
    num_bytes = Fraction(match[1]) * _BYTES_OF_UNIT[unit]
    if num_bytes.denominator != 1:
        raise ValueError(
            f"{float(num_bytes):,.2f} bytes are not a whole number; use a smaller unit"
        )
    return int(num_bytes)


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


def format_bytes_per_second(bytes_per_second: float) -> str:
    """Format a rate in GB/s or MB/s, powers of 1000.

    >>> format_bytes_per_second(1.28e9), format_bytes_per_second(5.88e8)
    ('1.28 GB/s', '588 MB/s')
    """
    if bytes_per_second >= 999.5e6:  # which rounds to 1000 MB/s
        return f"{bytes_per_second / 1e9:.3g} GB/s"
    return f"{bytes_per_second / 1e6:.3g} MB/s"


def format_flops_per_second(flops_per_second: float) -> str:
    """Format a rate in PFLOP/s, TFLOP/s, GFLOP/s or MFLOP/s.

    >>> format_flops_per_second(7.9e14)
    '790 TFLOP/s'
    """
    for scale, unit in ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s")):
        if flops_per_second >= scale:
            return f"{flops_per_second / scale:.3g} {unit}"
    return f"{flops_per_second / 1e6:.3g} MFLOP/s"
