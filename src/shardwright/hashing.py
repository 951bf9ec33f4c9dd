"""Integer hashes of tensors, from which random decisions follow without a generator's state."""

from __future__ import annotations

import torch
from torch import Tensor

_ALL_BITS = 0xFFFFFFFF


def mix_bits(x: Tensor) -> Tensor:
    """Hash 32 bits to 32 bits; one flipped input bit flips about half of the output bits.

    Source: Chris Wellons' lowbias32 (github.com/skeeto/hash-prospector). int32 products wrap
    around. `>>` extends the sign; the masks remove it. Memory: two tensors in addition to `x`.
    """
    x = (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)
    return _finish_mix(x)


def _finish_mix(x: Tensor) -> Tensor:
    """Compute all of `mix_bits` but its first step, in place. Memory: one temporary tensor."""
    x = _multiply_in_place(x, 0x7FEB352D)
    x = x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x = _multiply_in_place(x, to_int32(0x846CA68B))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _multiply_in_place(x: Tensor, factor: int) -> Tensor:
    """Multiply int32 numbers; the product, which wraps around, may replace `x`."""
    if x.is_cpu and torch.compiler.is_compiling():
        # Inductor multiplies in C++, where the overflow of an int32 is undefined: optimisers
        # assume that it does not happen, and other numbers result. Products fit into 64 bits.
        return (x.to(torch.int64) * factor).to(torch.int32)
    return x.mul_(factor)


def combine_bits(keys: Tensor, numbers: Tensor) -> Tensor:
    """Hash pairs of a key and a number; numbers are hashed first, so that neighbours differ."""
    # Not `mix_bits(x)`: callers hold their arguments while torch.compile observes frames.
    x = keys ^ mix_bits(numbers)
    return _finish_mix(x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)))


def mix_number(number: int) -> int:
    """Hash the low 32 bits of a number as `mix_bits`, to a number from 0 to 2^32 - 1."""
    number &= _ALL_BITS
    number = (number ^ (number >> 16)) * 0x7FEB352D & _ALL_BITS
    number = (number ^ (number >> 15)) * 0x846CA68B & _ALL_BITS
    return number ^ (number >> 16)


def hash_numbers(*numbers: int) -> Tensor:
    """Hash integers of up to 64 bits to an int32 scalar in host memory."""
    state = 0
    for number in numbers:
        for part in (number, number >> 32):
            state = mix_number(state ^ part)
    return torch.tensor(to_int32(state), dtype=torch.int32, device="cpu")


def to_int32(value: int) -> int:
    """Return the low 32 bits of `value` as a signed number."""
    value &= _ALL_BITS
    return value - 2**32 if value >= 2**31 else value
