"""Dropout whose masks depend on the token, not on rank, micro-batch or time.

Every decision is an integer hash of (seed, step, site, layer, global sample index, index in the
row, feature or head and key). So all layouts drop the same activations of a sample, and
recomputation repeats them without saved random states. torch's generators are not used.

Legend: B sequences, T tokens, S keys, H heads, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from shardwright.architecture import ModelShape
from shardwright.hashing import combine_bits, hash_numbers, mix_bits, to_int32
from shardwright.model.tensor_parallel_hooks import TensorParallelHooks


class DropoutSite(IntEnum):
    """Place in the decoder at which a mask is applied; part of the hash."""

    EMBEDDING = 1
    ATTENTION = 2
    ATTENTION_OUT = 3
    FEED_FORWARD = 4
    ADAPTER = 5
    NOISE = 6


def has_dropout(shape: ModelShape) -> bool:
    """Return True if training zeroes activations of the model at random."""
    adapter_rate = 0.0 if shape.adapters is None else shape.adapters.dropout
    rates = (shape.embedding_dropout, shape.attention_dropout, shape.residual_dropout, adapter_rate)
    return any(rate > 0.0 for rate in rates)


@dataclass(frozen=True)
class DropoutKey:
    """Inputs of one micro-batch's masks: seed, optimizer step, global sample indices `[B]`."""

    seed: int
    step: int
    sample_indices_B: Tensor


@dataclass(frozen=True)
class Dropout:
    """Masks of one forward pass or one layer; `keys_BT` hashes their inputs so far.

    `row_keys_BT` are the keys of all tokens of the rows, for attention whose queries are not
    this rank's own tokens (context parallelism by heads).
    """

    keys_BT: Tensor
    row_keys_BT: Tensor | None = None

    @staticmethod
    def from_key(key: DropoutKey, token_indices_T: Tensor, device: torch.device) -> Dropout:
        """Hash seed, step, sample indices (64 bits each) and token indices (32 bits)."""
        samples_B = key.sample_indices_B.to(device=device, dtype=torch.int64)
        state_B = hash_numbers(key.seed, key.step)
        for part_B in (samples_B, samples_B >> 32):
            state_B = mix_bits(state_B ^ _to_int32_tensor(part_B))
        return Dropout(
            combine_bits(state_B[:, None], token_indices_T.to(device=device, dtype=torch.int32) + 1)
        )

    def select_local_tokens(self, tensor_parallel: TensorParallelHooks | None) -> Dropout:
        """Select the masks of this rank's tokens of the residual stream."""
        return (
            self
            if tensor_parallel is None
            else Dropout(tensor_parallel.select_local_tokens(self.keys_BT))
        )

    def select_layer(self, index: int) -> Dropout:
        """Derive the masks of layer `index`."""
        number = to_int32(index + 1)
        return Dropout(
            mix_bits(self.keys_BT ^ number),
            None if self.row_keys_BT is None else mix_bits(self.row_keys_BT ^ number),
        )

    def drop(self, x_BTD: Tensor, rate: float, site: DropoutSite) -> Tensor:
        """Zero each feature of each token with probability `rate`; divide others by 1 -
        rate.
        """
        keys_BT = mix_bits(self.keys_BT ^ site.value)
        return _apply_mask(
            x_BTD,
            combine_bits(keys_BT[..., None], _make_indices(x_BTD.shape[-1], x_BTD.device)),
            rate,
        )

    def add_noise(self, x_BTD: Tensor, bound: float) -> Tensor:
        """Add a uniform number from [-size, size) to each feature of each token."""
        keys_BT = mix_bits(self.keys_BT ^ DropoutSite.NOISE.value)
        hashed_BTD = combine_bits(keys_BT[..., None], _make_indices(x_BTD.shape[-1], x_BTD.device))
        return x_BTD + (hashed_BTD.to(torch.float32) * (bound * 2.0**-31)).to(x_BTD.dtype)

    def drop_adapter(
        self, x_BTD: Tensor, rate: float, number: int, *, first_feature: int = 0
    ) -> Tensor:
        """Apply `drop` to the inputs of a layer's adapter `number`.

        `first_feature` is the index, in the whole model, of this rank's first input feature.
        """
        keys_BT = mix_bits(
            mix_bits(self.keys_BT ^ DropoutSite.ADAPTER.value) ^ to_int32(number + 1)
        )
        return _apply_mask(
            x_BTD,
            combine_bits(
                keys_BT[..., None], _make_indices(x_BTD.shape[-1], x_BTD.device, first_feature)
            ),
            rate,
        )

    def drop_attention(
        self,
        weights_BHTS: Tensor,
        rate: float,
        *,
        first_head: int = 0,
        key_indices_S: Tensor | None = None,
    ) -> Tensor:
        """Apply dropout to attention weights: one decision per sample, head, query and key.

        Args:
            first_head: index in the whole model of the first head of `weights_BHTS`.
            key_indices_S: indices of the keys in the row; None for 0, 1, 2...
        """
        _, num_heads, _, num_keys = weights_BHTS.shape
        device = weights_BHTS.device
        keys_BT = mix_bits(self.keys_BT ^ DropoutSite.ATTENTION.value)
        keys_BHT = combine_bits(
            keys_BT[:, None], _make_indices(num_heads, device, first_head)[:, None]
        )
        indices_S = (
            _make_indices(num_keys, device)
            if key_indices_S is None
            else key_indices_S.to(torch.int32) + 1
        )
        return _apply_mask(weights_BHTS, combine_bits(keys_BHT[..., None], indices_S), rate)


def _make_indices(count: int, device: torch.device, first: int = 0) -> Tensor:
    return torch.arange(first + 1, first + count + 1, dtype=torch.int32, device=device)


def _to_int32_tensor(values: Tensor) -> Tensor:
    """Return the low 32 bits of int64 values as int32."""
    low = values & 0xFFFFFFFF
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)


def _apply_mask(x: Tensor, hashed: Tensor, rate: float) -> Tensor:
    dropped = hashed < to_int32(round(rate * 2**32) + 2**31)
    return (x / (1.0 - rate)).masked_fill(dropped, 0.0)
