"""Attention over a row whose tokens are on several ranks: keys and values are exchanged.

`ring` passes them from rank to rank and overlaps each transfer with attention over those
already received; in the backward pass the gradients of keys and values follow one step behind
them and return to their rank after a full round. `all_gather` fetches all of them at once,
overlapped with attention over the rank's own tokens. Both are one autograd function that saves
the rank's own queries, keys, values and output.

Source: Liu et al. 2023, Ring Attention (arXiv 2310.01889); zigzag order: Zhu 2024,
ring-flash-attention; all-gather: Llama Team 2024, The Llama 3 Herd of Models (arXiv
2407.21783), section 3.3.2.

Legend: B sequences, H query heads, K key/value heads, L tokens of this rank, S keys of some
ranks, T tokens of the row, E head_dim, V value width, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.parallel.comm_timing import time_wait
from shardwright.parallel.context.attention_kernels import (
    AttentionKernel,
    PartialAttention,
    ScoreSettings,
    TileInputs,
    merge_partial,
)
from shardwright.parallel.context.block_mask import AttentionTile, RowChunks
from shardwright.parallel.context.tile_kernels import choose_kernel
from shardwright.parallel.direct_collectives import all_gather_single, reduce_scatter_single

KeyValuePair = tuple[Tensor, Tensor]


class RowRanks:
    """Ranks that share the tokens of rows, and how they exchange keys and values.

    Attributes:
        group: context-parallel ranks; None for one rank that has the whole row.
        is_all_gather: fetch all keys and values at once instead of passing them around a ring.
        name: identifies equal ranks of this process; compiled code finds them by it.
    """

    by_name: ClassVar[dict[str, RowRanks]] = {}

    def __init__(self, group: dist.ProcessGroup | None, is_all_gather: bool = False) -> None:
        self.group = group
        self.is_all_gather = is_all_gather
        self.name = f"{None if group is None else group.group_name} {is_all_gather}"
        self.by_name[self.name] = self

    @property
    def rank(self) -> int:
        """This rank's position in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)


@dataclass(frozen=True, eq=False)
class RowAttentionSettings:
    """Settings of one layer's attention over rows that ranks share, for one forward pass.

    Attributes:
        window: tokens that a token sees, itself included; None for all preceding tokens.
        is_explicit: use no fused kernels.
    """

    ranks: RowRanks
    row_chunks: RowChunks
    scores: ScoreSettings
    window: int | None = None
    is_explicit: bool = False


def compute_row_output(
    q_BHLE: Tensor,
    k_BKLE: Tensor,
    v_BKLV: Tensor,
    sinks_H: Tensor | None,
    settings: RowAttentionSettings,
) -> tuple[Tensor, Tensor]:
    """Compute the output, in the queries' dtype, and the log-sum-exp of this rank's tokens."""
    wide = torch.promote_types(q_BHLE.dtype, torch.float32)
    out_BHLV = q_BHLE.new_empty((*q_BHLE.shape[:3], v_BKLV.shape[3]), dtype=wide)
    lse_BHL = q_BHLE.new_empty(q_BHLE.shape[:3], dtype=wide)
    for key_values in _iterate_key_values(k_BKLE, v_BKLV, settings):
        _attend(q_BHLE, key_values, settings, PartialAttention(out_BHLV, lse_BHL))
    if sinks_H is not None:
        with_sink_BHL = torch.logaddexp(lse_BHL, sinks_H.to(wide)[:, None])
        out_BHLV, lse_BHL = (
            out_BHLV * torch.exp(lse_BHL - with_sink_BHL)[..., None],
            with_sink_BHL,
        )
    return out_BHLV.to(q_BHLE.dtype), lse_BHL


def compute_row_gradients(
    d_out_BHLV: Tensor,
    q_BHLE: Tensor,
    k_BKLE: Tensor,
    v_BKLV: Tensor,
    sinks_H: Tensor | None,
    out_BHLV: Tensor,
    lse_BHL: Tensor,
    settings: RowAttentionSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute the gradients of queries, keys, values and sinks."""
    d_sinks_H = None
    if sinks_H is not None:
        delta_BHL = (d_out_BHLV.to(lse_BHL.dtype) * out_BHLV).sum(-1)
        sink_weights_BHL = torch.exp(sinks_H.to(lse_BHL.dtype)[:, None] - lse_BHL)
        d_sinks_H = -(sink_weights_BHL * delta_BHL).sum((0, 2)).to(sinks_H.dtype)
    back = _RowBackward(
        d_out_BHLV.contiguous(), q_BHLE, PartialAttention(out_BHLV, lse_BHL), settings
    )
    compute = _gather_backward if settings.ranks.is_all_gather else _ring_backward
    d_k_BKLE, d_v_BKLV = compute(back, k_BKLE, v_BKLV)
    return (
        back.d_q_BHLE.to(q_BHLE.dtype),
        d_k_BKLE.to(k_BKLE.dtype),
        d_v_BKLV.to(v_BKLV.dtype),
        d_sinks_H,
    )


class KeyValueShard(NamedTuple):
    """Keys and values on this rank, their positions, and the tiles that its queries see."""

    k_BKSE: Tensor
    v_BKSV: Tensor
    token_indices_S: Tensor
    tiles: list[AttentionTile]


def _iterate_key_values(
    k_BKLE: Tensor, v_BKLV: Tensor, settings: RowAttentionSettings
) -> Iterator[KeyValueShard]:
    """Yield keys and values as they arrive, the rank's own first.

    The next transfer runs while the caller computes with the current one.
    """
    ranks = settings.ranks
    row = settings.row_chunks
    current = (k_BKLE, v_BKLV)
    by_rank = row.chunks_by_rank
    own = by_rank[ranks.rank]
    device = k_BKLE.device
    if ranks.is_all_gather and ranks.group is not None:
        gather = _KeyValueGather(current, ranks.group)
        yield KeyValueShard(
            *current,
            row.token_indices(own, device),
            row.list_diagonal_tiles(own, own, settings.window),
        )
        all_chunks = tuple(range(row.num_chunks))
        k_BKTE, v_BKTV = (_reorder_to_row(stacked, by_rank) for stacked in gather.wait())
        yield KeyValueShard(
            k_BKTE,
            v_BKTV,
            row.token_indices(all_chunks, device),
            row.list_off_diagonal_tiles(own, all_chunks, settings.window),
        )
        return
    for step in range(len(by_rank)):
        transfer = None
        if step < len(by_rank) - 1:
            assert ranks.group is not None
            transfer = _RingPass(current, ranks.group)
        # Chunks of the rank that is `step` positions before this one.
        chunks = by_rank[ranks.rank - step]
        yield KeyValueShard(
            *current,
            row.token_indices(chunks, device),
            row.list_tiles(own, chunks, settings.window),
        )
        if transfer is not None:
            current = transfer.wait()


def _attend(
    q_BHLE: Tensor,
    key_values: KeyValueShard,
    settings: RowAttentionSettings,
    into: PartialAttention,
) -> None:
    """Merge the attention over keys that have arrived into the output and its log-sum-exp."""
    for tile in key_values.tiles:
        inputs, kernel = _prepare_kernel(q_BHLE, key_values, tile, settings)
        part = kernel.forward(inputs)
        target = PartialAttention(*(whole[:, :, tile.query_slice] for whole in into))
        if tile.has_self_keys:
            target.out_BHLV.copy_(part.out_BHLV)
            target.lse_BHL.copy_(part.lse_BHL)
        else:
            merge_partial(target, part)


def _prepare_kernel(
    q_BHLE: Tensor, key_values: KeyValueShard, tile: AttentionTile, settings: RowAttentionSettings
) -> tuple[TileInputs, AttentionKernel]:
    row = settings.row_chunks
    own = row.chunks_by_rank[settings.ranks.rank]
    own_places_L = row.token_indices(own, q_BHLE.device)
    inputs = TileInputs(
        q_BHLE[:, :, tile.query_slice],
        key_values.k_BKSE[:, :, tile.key_slice],
        key_values.v_BKSV[:, :, tile.key_slice],
        row.build_visibility(tile, own_places_L, key_values.token_indices_S, settings.window),
        settings.scores,
    )
    return inputs, choose_kernel(inputs, is_explicit=settings.is_explicit)


class _RowBackward:
    """State of a backward pass: accumulates the gradient of the queries."""

    def __init__(
        self,
        d_out_BHLV: Tensor,
        q_BHLE: Tensor,
        row_output: PartialAttention,
        settings: RowAttentionSettings,
    ) -> None:
        self.d_out_BHLV = d_out_BHLV
        self.q_BHLE = q_BHLE
        self.row_output = row_output
        self.settings = settings
        self.d_q_BHLE = torch.zeros_like(
            q_BHLE, dtype=row_output.lse_BHL.dtype, memory_format=torch.contiguous_format
        )

    def accumulate(self, key_values: KeyValueShard) -> KeyValuePair:
        """Return the gradients of arrived keys and values due to this rank's queries.

        They are fp32 or wider.
        """
        wide = self.d_q_BHLE.dtype
        d_k_BKSE, d_v_BKSV = (
            torch.zeros_like(part, dtype=wide, memory_format=torch.contiguous_format)
            for part in key_values[:2]
        )
        for tile in key_values.tiles:
            inputs, kernel = _prepare_kernel(self.q_BHLE, key_values, tile, self.settings)
            rows = tile.query_slice
            tile_output = PartialAttention(*(whole[:, :, rows] for whole in self.row_output))
            d_q, d_k, d_v = kernel.backward(self.d_out_BHLV[:, :, rows], inputs, tile_output)
            self.d_q_BHLE[:, :, rows] += d_q
            d_k_BKSE[:, :, tile.key_slice] += d_k
            d_v_BKSV[:, :, tile.key_slice] += d_v
        return d_k_BKSE, d_v_BKSV


def _ring_backward(back: _RowBackward, k_BKLE: Tensor, v_BKLV: Tensor) -> KeyValuePair:
    """Pass keys and values around the ring again; their gradients follow one step behind.

    After the last step the gradients are back on their own rank.
    """
    group = back.settings.ranks.group
    gradients = None
    transfer = None
    for key_values in _iterate_key_values(k_BKLE, v_BKLV, back.settings):
        gradients = back.accumulate(key_values)
        if transfer is not None:
            gradients = _add_pairs(gradients, transfer.wait())
        transfer = None if group is None else _RingPass(gradients, group)
    assert gradients is not None
    return gradients if transfer is None else transfer.wait()


def _gather_backward(back: _RowBackward, k_BKLE: Tensor, v_BKLV: Tensor) -> KeyValuePair:
    """Gather keys and values again and reduce-scatter their gradients."""
    own_gradients, *others = [
        back.accumulate(key_values)
        for key_values in _iterate_key_values(k_BKLE, v_BKLV, back.settings)
    ]
    return _add_pairs(
        own_gradients,
        *(_scatter_gradients(gradients, back.settings) for gradients in others),
    )


def _add_pairs(first: KeyValuePair, *others: KeyValuePair) -> KeyValuePair:
    for k, v in others:
        first = first[0] + k, first[1] + v
    return first


class _RingPass:
    """Pending transfer to the next rank of a ring and from the previous one."""

    def __init__(self, tensors: KeyValuePair, group: dist.ProcessGroup) -> None:
        rank = dist.get_rank(group)
        num_ranks = group.size()
        self._sent = [tensor.contiguous() for tensor in tensors]  # must stay alive until sent
        self._received = [torch.empty_like(tensor) for tensor in self._sent]
        sends = [
            dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % num_ranks)
            for x in self._sent
        ]
        receives = [
            dist.P2POp(dist.irecv, x, group=group, group_peer=(rank - 1) % num_ranks)
            for x in self._received
        ]
        self._works = dist.batch_isend_irecv(sends + receives)

    def wait(self) -> KeyValuePair:
        """Return the received tensors after both transfers have completed."""
        with time_wait("context"):
            for work in self._works:
                work.wait()
        k, v = self._received
        return k, v


class _KeyValueGather:
    """Pending all-gather of keys and values, `[R, B, K, L, E]` each."""

    def __init__(self, tensors: KeyValuePair, group: dist.ProcessGroup) -> None:
        self._sent = [tensor.contiguous() for tensor in tensors]
        self._received = [tensor.new_empty((group.size(), *tensor.shape)) for tensor in tensors]
        self._works = [
            all_gather_single(gathered.flatten(0, 1), own, group=group, async_op=True)
            for gathered, own in zip(self._received, self._sent, strict=True)
        ]

    def wait(self) -> KeyValuePair:
        """Return the keys and values of all ranks, stacked by rank."""
        with time_wait("context"):
            for work in self._works:
                work.wait()
        k, v = self._received
        return k, v


def _reorder_to_row(stacked_RBKLE: Tensor, chunks: Sequence[Sequence[int]]) -> Tensor:
    """Reorder tokens that are stacked by rank into row order, `[B, K, T, E]`."""
    pieces = {
        chunk: piece
        for own_BKLE, own in zip(stacked_RBKLE, chunks, strict=True)
        for chunk, piece in zip(own, own_BKLE.chunk(len(own), dim=2), strict=True)
    }
    return torch.cat([pieces[chunk] for chunk in range(len(pieces))], dim=2)


def _scatter_gradients(gradients: KeyValuePair, settings: RowAttentionSettings) -> KeyValuePair:
    """Sum gradients of the whole row over the ranks; return those of this rank's tokens."""
    row = settings.row_chunks
    group = settings.ranks.group
    assert group is not None
    own = []
    for gradient_BKTE in gradients:
        pieces = gradient_BKTE.chunk(row.num_chunks, dim=2)
        by_rank = torch.stack(
            [torch.cat([pieces[chunk] for chunk in chunks], dim=2) for chunks in row.chunks_by_rank]
        )
        own.append(torch.empty_like(by_rank[0]))
        with time_wait("context"):
            reduce_scatter_single(own[-1], by_rank.flatten(0, 1), group=group)
    return own[0], own[1]
