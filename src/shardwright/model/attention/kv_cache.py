"""Cache of keys and values of preceding tokens, for generation.

Legend: B sequences, S cached tokens, T new tokens, K key/value heads, E head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.architecture import ModelShape


class KeyValueCache:
    """Key-value cache of up to `max_tokens` tokens for every layer.

    `Decoder.forward(..., cache=...)` appends to it and increases `num_tokens`, the number of cached
    tokens. For latent attention it has the latents and the keys' shared rotated part. Under
    tensor parallelism it has this rank's heads.

    longrope chooses its factors by `max_tokens`, because a document's rotation must not change
    during generation: pass the length of prompt and continuation together.
    """

    def __init__(
        self,
        shape: ModelShape,
        batch_size: int,
        max_tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        tensor_degree: int = 1,
    ) -> None:
        num_heads, key_width, value_width = shape.cache_widths
        size = (shape.num_layers, batch_size, max(1, num_heads // tensor_degree), max_tokens)
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._keys = torch.empty(*size, key_width, dtype=dtype, device=device)
        self._values = torch.empty(*size, value_width, dtype=dtype, device=device)

    def extend(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Append one layer's keys and values; return all of the layer, `[B, K, S + T, E]`."""
        end = self.num_tokens + k_BKTE.shape[2]
        assert end <= self.max_tokens, "the cache was built for fewer tokens"
        self._keys[layer, :, :, self.num_tokens : end] = k_BKTE
        self._values[layer, :, :, self.num_tokens : end] = v_BKTE
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]
