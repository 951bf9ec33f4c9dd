"""Keys and values of the tokens already seen, for generation.

Legend: B sequences, S tokens held, T new tokens, K key/value heads, E head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.architecture import ModelShape


class KeyValueCache:
    """Room for `max_tokens` tokens of every layer; `Decoder.forward(..., cache=...)` fills it and moves `length` on.

    Latent attention keeps latents and the keys' shared rotated part in the place of keys and values.

    Its heads are those of this rank, where they lie over several.

    longrope chooses its factors by `max_tokens`: a document must not change its rotation half way. Give it what the text
    is going to be, prompt and continuation together.
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
        self.length = 0
        self._keys = torch.empty(*size, key_width, dtype=dtype, device=device)
        self._values = torch.empty(*size, value_width, dtype=dtype, device=device)

    def extend(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Hold one layer's new keys and values; returns all of them, `[B, K, S + T, E]`."""
        end = self.length + k_BKTE.shape[2]
        assert end <= self.max_tokens, "the cache was built for fewer tokens"
        self._keys[layer, :, :, self.length : end] = k_BKTE
        self._values[layer, :, :, self.length : end] = v_BKTE
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]
