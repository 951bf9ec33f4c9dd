"""Dropout whose mask is a function of the token, never of the rank, the micro-batch or the moment.

Every decision is an integer hash of (seed, step, site, layer, global sample index, position, feature). Two layouts that
see the same samples therefore drop the same activations, and recomputation repeats them without saved random states.

Legend: B sequences, T tokens, S keys, H heads, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Site(IntEnum):
    """Where in the decoder a mask is used; part of the hash."""

    EMBEDDING = 1
    ATTENTION = 2
    ATTENTION_OUT = 3
    FEED_FORWARD = 4


@dataclass(frozen=True)
class DropoutKey:
    """What one micro-batch's masks depend on: the run's seed, the optimizer step, and its samples' global indices `[B]`."""

    seed: int
    step: int
    sample_indices_B: Tensor


_MASK32 = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """Integer hash of 32 bits to 32 bits that flips about half of them for one flipped input bit.

    Chris Wellons' lowbias32 (github.com/skeeto/hash-prospector), on int64 tensors that hold values below 2^32.
    """
    x = (x ^ (x >> 16)) * 0x7FEB352D & _MASK32
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK32
    return x ^ (x >> 16)


@dataclass(frozen=True)
class Dropout:
    """The masks of one forward pass; `keys_BT` hashes seed, step, sample and place in the row."""

    keys_BT: Tensor

    @staticmethod
    def of(key: DropoutKey, num_tokens: int, device: torch.device) -> Dropout:
        """Hash what all sites share."""
        samples = key.sample_indices_B.to(device=device, dtype=torch.int64)
        state = _mix(torch.full_like(samples, key.seed & _MASK32))
        for part in (key.seed >> 32 & _MASK32, key.step & _MASK32, key.step >> 32 & _MASK32):
            state = _mix(state ^ part)
        state = _mix(state ^ (samples & _MASK32))
        state = _mix(state ^ (samples >> 32 & _MASK32))
        places = torch.arange(num_tokens, device=device, dtype=torch.int64)
        return Dropout(_mix(state[:, None] ^ _mix(places + 0x9E3779B9 & _MASK32)))

    def drop(self, x_BTD: Tensor, rate: float, site: Site, layer: int) -> Tensor:
        """Zero each feature of each token with probability `rate`, scale the others by 1 / (1 - rate)."""
        keys = _mix(self.keys_BT ^ (site * 0x10001 + layer * 0x3C6EF372 & _MASK32))
        features = torch.arange(x_BTD.shape[-1], device=x_BTD.device, dtype=torch.int64)
        return _apply(x_BTD, _mix(keys[..., None] ^ _mix(features)), rate)

    def drop_attention(self, weights_BHTS: Tensor, rate: float, site: Site, layer: int) -> Tensor:
        """The same for attention weights: one decision for each sample, head, query and key."""
        keys = _mix(self.keys_BT ^ (site * 0x10001 + layer * 0x3C6EF372 & _MASK32))
        heads = torch.arange(weights_BHTS.shape[1], device=weights_BHTS.device, dtype=torch.int64)
        places = torch.arange(weights_BHTS.shape[3], device=weights_BHTS.device, dtype=torch.int64)
        keys_BHT = _mix(keys[:, None, :] ^ _mix(heads)[:, None])
        return _apply(weights_BHTS, _mix(keys_BHT[..., None] ^ _mix(places)), rate)


def _apply(x: Tensor, hashed: Tensor, rate: float) -> Tensor:
    threshold = round(rate * 2**32)
    return torch.where(hashed >= threshold, x / (1.0 - rate), 0.0)
