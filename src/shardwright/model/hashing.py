"""Integer hashes of tensors, from which random decisions follow without a generator's state."""

from __future__ import annotations

import torch
from torch import Tensor


def mix_bits(x: Tensor) -> Tensor:
    """Hash 32 bits to 32 bits; one flipped input bit flips about half of the output bits.

    Source: Chris Wellons' lowbias32 (github.com/skeeto/hash-prospector). int32 products wrap
    around. `>>` extends the sign; the masks remove it. Memory: two tensors in addition to `x`.
    """
    x = _multiply_in_place((x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x), 0x7FEB352D)
    x = _multiply_in_place(x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)), to_int32(0x846CA68B))
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
    return mix_bits(keys ^ mix_bits(numbers))


def hash_numbers(*numbers: int) -> Tensor:
    """Hash integers of up to 64 bits to an int32 scalar in host memory."""
    state = torch.zeros((), dtype=torch.int32, device="cpu")
    for number in numbers:
        for part in (number, number >> 32):
            state = mix_bits(state ^ to_int32(part))
    return state


def to_int32(value: int) -> int:
    """Return the low 32 bits of `value` as a signed number."""
    value &= 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value
