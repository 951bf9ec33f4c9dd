"""Attention over documents of different lengths, spelled out: what torch's varlen computes.

Legend: N tokens, H query heads, K key/value heads, E head_dim.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def attend_plainly(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    bounds: list[int],
    scale: float,
    window_size: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp `[H, N]`; documents must cover all tokens.

    The window counts the tokens before and after a token; -1 is no limit.
    """
    before, after = window_size
    outputs = [q_NHE[:0]]
    sums = [q_NHE.new_zeros(q_NHE.shape[1], 0)]
    for start, end in pairwise(bounds):
        if start == end:
            continue
        q, k, v = (part[start:end].transpose(0, 1) for part in (q_NHE, k_NKE, v_NKE))
        k, v = (part.repeat_interleave(q.shape[0] // part.shape[0], dim=0) for part in (k, v))
        places = torch.arange(end - start, device=q.device)
        distance = places[:, None] - places
        visible = distance >= (-after if after >= 0 else start - end)
        if before >= 0:
            visible = visible & (distance <= before)
        scores = (q @ k.mT * scale).masked_fill(~visible, float("-inf"))
        outputs.append((torch.softmax(scores, -1) @ v).transpose(0, 1))
        sums.append(torch.logsumexp(scores, -1))
    return torch.cat(outputs), torch.cat(sums, dim=1)


class PlainVarlen:
    """Replacement of `torch.nn.attention.varlen.varlen_attn` on any device; records its calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
    ) -> Tensor:
        bounds = cu_seq_q.tolist()
        assert cu_seq_q is cu_seq_k
        assert cu_seq_q.dtype == torch.int32
        assert bounds[0] == 0
        assert bounds[-1] == query.shape[0]
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        assert max_q == max_k >= max(b - a for a, b in pairwise(bounds))
        self.calls.append(
            {"bounds": bounds, "kv_heads": key.shape[1], "window": window_size, "max": max_q}
        )
        return attend_plainly(query, key, value, bounds, scale, window_size)[0]
