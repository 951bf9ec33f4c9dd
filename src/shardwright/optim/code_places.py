"""Code of a number in a table of 256, found by one look-up instead of a binary search.

The leading bits of the fp32 number (sign, exponent and a few bits of the mantissa) are the index of
an entry. The numbers of an entry are neighbours, and so few that their codes differ by one at most.
An entry has the first of these codes and the trailing bits from which the second one holds, as one
integer: the sum of the entry and a number's trailing bits carries into the code exactly then. The
trailing bits of negative numbers, which descend with their bits, are inverted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_MANTISSA_BITS = 23
_LARGEST_BITS = 0x3F800000
"""Bits of 1.0, the largest magnitude."""
_MAGNITUDE = 0x7FFFFFFF
_SIGN = -1 << 31


class CodePlaces(NamedTuple):
    """Places in the fp32 numbers from -1 to 1 where codes begin."""

    entries: Tensor
    """int32, for the magnitudes of positive numbers, then for those of negative ones if any."""
    smallest_bits: int
    """Bits of the smallest magnitude with an entry; smaller ones have the same code."""
    num_trailing_bits: int
    has_negative: bool
    """True if the table has negative values. Without them, no number may be negative."""


def build_code_places(table: Tensor, quantise: Callable[[Tensor], Tensor]) -> CodePlaces:
    """Build the places of the codes that `quantise` gives, with as few entries as suffice.

    Args:
        table: values of the codes in ascending order, fp32 on the CPU.
        quantise: function from fp32 numbers to codes; it never descends.
    """
    smallest = table[table != 0].abs().min()
    has_negative = bool((table < 0).any())
    smallest_bits = int((smallest / 4).view(torch.int32)) >> _MANTISSA_BITS << _MANTISSA_BITS
    for num_trailing_bits in range(_MANTISSA_BITS, 0, -1):
        size = 1 << num_trailing_bits
        starts = torch.arange(smallest_bits, _LARGEST_BITS + size, size, dtype=torch.int32)
        ends = starts + (size - 1)
        # The first number of an entry is its smallest magnitude, or its largest if negative.
        bits = torch.cat([starts, ends | _SIGN]) if has_negative else starts
        last_bits = torch.cat([ends, starts | _SIGN]) if has_negative else ends
        first = quantise(_read_numbers(bits)).int()
        last = quantise(_read_numbers(last_bits)).int()
        if int((last - first).max()) <= 1:
            break
    entries = first << num_trailing_bits
    has_two = last > first
    bits = bits[has_two]
    direction = torch.where(bits < 0, -1, 1).int()
    # Bisection: the smallest trailing bits with the last code.
    low = torch.zeros_like(bits)
    high = torch.full_like(bits, size - 1)
    for _ in range(num_trailing_bits):
        middle = (low + high) >> 1
        is_last = quantise(_read_numbers(bits + direction * middle)).int() == last[has_two]
        low = torch.where(is_last, low, middle + 1)
        high = torch.where(is_last, middle, high)
    entries[has_two] += size - high
    return CodePlaces(entries, smallest_bits, num_trailing_bits, has_negative)


def _read_numbers(bits: Tensor) -> Tensor:
    return bits.view(torch.float32).clamp(-1.0, 1.0)


def find_codes(values: Tensor, places: CodePlaces) -> Tensor:
    """Find the codes of fp32 values from -1 to 1, as uint8."""
    entries, smallest_bits, num_trailing_bits, has_negative = places
    bits = values.view(torch.int32)
    magnitude = (bits & _MAGNITUDE).clamp(smallest_bits, _LARGEST_BITS)
    place = (magnitude - smallest_bits) >> num_trailing_bits
    trailing = magnitude
    if has_negative:
        sign = bits >> 31  # all bits of negative numbers
        place = place + (sign & (len(entries) // 2))
        trailing = magnitude ^ sign
    trailing = trailing & ((1 << num_trailing_bits) - 1)
    return ((entries[place] + trailing) >> num_trailing_bits).to(torch.uint8)
