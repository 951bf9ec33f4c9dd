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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwright.parallel.blocks import Kernel, Partial, Scores, Seen, choose_kernel, merge
from shardwright.parallel.collectives import all_gather_single, reduce_scatter_single
from shardwright.parallel.sight import Block, Row
from shardwright.parallel.waiting import waiting

KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class RowAttention:
    """Settings of one layer's attention over the ranks of a group, for one forward pass.

    Attributes:
        group: context-parallel ranks; None for one rank that has the whole row.
        chunks: chunk indices of each rank of the group.
        gather: fetch all keys and values at once instead of passing them around a ring.
        window: tokens that a token sees, itself included; None for all preceding tokens.
        explicit: use no fused kernels.
    """

    group: dist.ProcessGroup | None
    chunks: tuple[tuple[int, ...], ...]
    row: Row
    scores: Scores
    window: int | None = None
    gather: bool = False
    explicit: bool = False

    @property
    def rank(self) -> int:
        """This rank's position in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)


def attend_row(q_BHLE: Tensor, k_BKLE: Tensor, v_BKLV: Tensor, sinks_H: Tensor | None, how: RowAttention) -> Tensor:
    """Compute attention of this rank's queries over the whole row, `[B, H, L, V]`.

    `sinks_H` adds a term to each softmax denominator, with no value.
    """
    out: Tensor = _RowAttention.apply(q_BHLE, k_BKLE, v_BKLV, sinks_H, how)
    return out


class _RowAttention(torch.autograd.Function):
    """Autograd function that saves inputs, output and log-sum-exp of this rank's tokens only.

    A flash kernel saves the same.
    """

    @staticmethod
    def forward(ctx: Any, q_BHLE: Tensor, k_BKLE: Tensor, v_BKLV: Tensor, sinks_H: Tensor | None, how: RowAttention) -> Tensor:
        wide = torch.promote_types(q_BHLE.dtype, torch.float32)
        out_BHLV = q_BHLE.new_empty((*q_BHLE.shape[:3], v_BKLV.shape[3]), dtype=wide)
        lse_BHL = q_BHLE.new_empty(q_BHLE.shape[:3], dtype=wide)
        for key_values in _arrivals(k_BKLE, v_BKLV, how):
            _attend(q_BHLE, key_values, how, Partial(out_BHLV, lse_BHL))
        if sinks_H is not None:
            with_sink_BHL = torch.logaddexp(lse_BHL, sinks_H.to(wide)[:, None])
            out_BHLV, lse_BHL = out_BHLV * torch.exp(lse_BHL - with_sink_BHL)[..., None], with_sink_BHL
        out_BHLV = out_BHLV.to(q_BHLE.dtype)
        ctx.save_for_backward(q_BHLE, k_BKLE, v_BKLV, sinks_H, out_BHLV, lse_BHL)
        ctx.how = how
        return out_BHLV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_BHLV: Tensor) -> tuple[Tensor | None, ...]:
        q_BHLE, k_BKLE, v_BKLV, sinks_H, out_BHLV, lse_BHL = ctx.saved_tensors
        d_sinks_H = None
        if sinks_H is not None:
            delta_BHL = (d_out_BHLV.to(lse_BHL.dtype) * out_BHLV).sum(-1)
            sink_weights_BHL = torch.exp(sinks_H.to(lse_BHL.dtype)[:, None] - lse_BHL)
            d_sinks_H = -(sink_weights_BHL * delta_BHL).sum((0, 2)).to(sinks_H.dtype)
        back = _Backward(d_out_BHLV.contiguous(), q_BHLE, Partial(out_BHLV, lse_BHL), ctx.how)
        d_k_BKLE, d_v_BKLV = (_gather_backward if ctx.how.gather else _ring_backward)(back, k_BKLE, v_BKLV)
        return back.d_q_BHLE.to(q_BHLE.dtype), d_k_BKLE.to(k_BKLE.dtype), d_v_BKLV.to(v_BKLV.dtype), d_sinks_H, None


class Arrived(NamedTuple):
    """Keys and values on this rank, their positions, and the tiles that its queries see."""

    k_BKSE: Tensor
    v_BKSV: Tensor
    places_S: Tensor
    blocks: list[Block]


def _arrivals(k_BKLE: Tensor, v_BKLV: Tensor, how: RowAttention) -> Iterator[Arrived]:
    """Yield keys and values as they arrive, the rank's own first.

    The next transfer runs while the caller computes with the current one.
    """
    rank = how.rank
    row = how.row
    current = (k_BKLE, v_BKLV)
    own = how.chunks[rank]
    device = k_BKLE.device
    if how.gather and how.group is not None:
        gather = _Gather(current, how.group)
        yield Arrived(*current, row.places(own, device), row.own_blocks(own, own, how.window))
        all_chunks = tuple(range(sum(map(len, how.chunks))))
        k_BKTE, v_BKTV = (_in_row_order(stacked, how.chunks) for stacked in gather.wait())
        yield Arrived(k_BKTE, v_BKTV, row.places(all_chunks, device), row.other_blocks(own, all_chunks, how.window))
        return
    for step in range(len(how.chunks)):
        transfer = None
        if step < len(how.chunks) - 1:
            assert how.group is not None
            transfer = _Pass(current, how.group)
        # Chunks of the rank that is `step` positions before this one.
        chunks = how.chunks[rank - step]
        yield Arrived(*current, row.places(chunks, device), row.blocks(own, chunks, how.window))
        if transfer is not None:
            current = transfer.wait()


def _attend(q_BHLE: Tensor, arrived: Arrived, how: RowAttention, into: Partial) -> None:
    """Merge the attention over keys that have arrived into the output and its log-sum-exp."""
    for block in arrived.blocks:
        visibility, kernel = _prepare(q_BHLE, arrived, block, how)
        q = q_BHLE[:, :, block.queries]
        k = arrived.k_BKSE[:, :, block.keys]
        v = arrived.v_BKSV[:, :, block.keys]
        part = kernel.forward(q, k, v, visibility, how.scores)
        target = Partial(into.out_BHLV[:, :, block.queries], into.lse_BHL[:, :, block.queries])
        if block.own:
            target.out_BHLV.copy_(part.out_BHLV)
            target.lse_BHL.copy_(part.lse_BHL)
        else:
            merge(target, part)


def _prepare(q_BHLE: Tensor, arrived: Arrived, block: Block, how: RowAttention) -> tuple[Seen, Kernel]:
    own_places_L = how.row.places(how.chunks[how.rank], q_BHLE.device)
    visibility = how.row.seen(block, own_places_L, arrived.places_S, how.window)
    has_mask = visibility.visible_BLS is not None
    return visibility, choose_kernel(q_BHLE, arrived.v_BKSV, how.scores, masked=has_mask, explicit=how.explicit)


class _Backward:
    """State of a backward pass: accumulates the gradient of the queries."""

    def __init__(self, d_out_BHLV: Tensor, q_BHLE: Tensor, whole: Partial, how: RowAttention) -> None:
        self.d_out_BHLV = d_out_BHLV
        self.q_BHLE = q_BHLE
        self.whole = whole
        self.how = how
        self.d_q_BHLE = torch.zeros_like(q_BHLE, dtype=whole.lse_BHL.dtype, memory_format=torch.contiguous_format)

    def take(self, arrived: Arrived) -> KeysValues:
        """Return the gradients of arrived keys and values due to this rank's queries.

        They are fp32 or wider.
        """
        wide = self.d_q_BHLE.dtype
        d_k_BKSE, d_v_BKSV = (torch.zeros_like(part, dtype=wide, memory_format=torch.contiguous_format) for part in arrived[:2])
        for block in arrived.blocks:
            visibility, kernel = _prepare(self.q_BHLE, arrived, block, self.how)
            rows = block.queries
            keys = block.keys
            tile_output = Partial(self.whole.out_BHLV[:, :, rows], self.whole.lse_BHL[:, :, rows])
            k = arrived.k_BKSE[:, :, keys]
            v = arrived.v_BKSV[:, :, keys]
            d_q, d_k, d_v = kernel.backward(
                self.d_out_BHLV[:, :, rows], self.q_BHLE[:, :, rows], k, v, tile_output, visibility, self.how.scores
            )
            self.d_q_BHLE[:, :, rows] += d_q
            d_k_BKSE[:, :, keys] += d_k
            d_v_BKSV[:, :, keys] += d_v
        return d_k_BKSE, d_v_BKSV


def _ring_backward(back: _Backward, k_BKLE: Tensor, v_BKLV: Tensor) -> KeysValues:
    """Pass keys and values around the ring again; their gradients follow one step behind.

    After the last step the gradients are back on their own rank.
    """
    gradients = None
    transfer = None
    for key_values in _arrivals(k_BKLE, v_BKLV, back.how):
        gradients = back.take(key_values)
        if transfer is not None:
            gradients = _add(gradients, transfer.wait())
        transfer = None if back.how.group is None else _Pass(gradients, back.how.group)
    assert gradients is not None
    return gradients if transfer is None else transfer.wait()


def _gather_backward(back: _Backward, k_BKLE: Tensor, v_BKLV: Tensor) -> KeysValues:
    """Gather keys and values again and reduce-scatter their gradients."""
    own_gradients, *others = [back.take(key_values) for key_values in _arrivals(k_BKLE, v_BKLV, back.how)]
    return _add(own_gradients, *(_scatter(gradients, back.how) for gradients in others))


def _add(first: KeysValues, *others: KeysValues) -> KeysValues:
    for k, v in others:
        first = first[0] + k, first[1] + v
    return first


class _Pass:
    """Pending transfer to the next rank of a ring and from the previous one."""

    def __init__(self, tensors: KeysValues, group: dist.ProcessGroup) -> None:
        rank = dist.get_rank(group)
        num_ranks = group.size()
        self._sent = [tensor.contiguous() for tensor in tensors]  # must stay alive until sent
        self._received = [torch.empty_like(tensor) for tensor in self._sent]
        sends = [dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % num_ranks) for x in self._sent]
        receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=(rank - 1) % num_ranks) for x in self._received]
        self._works = dist.batch_isend_irecv(sends + receives)

    def wait(self) -> KeysValues:
        """Return the received tensors after both transfers have completed."""
        with waiting("context"):
            for work in self._works:
                work.wait()
        k, v = self._received
        return k, v


class _Gather:
    """Pending all-gather of keys and values, `[R, B, K, L, E]` each."""

    def __init__(self, tensors: KeysValues, group: dist.ProcessGroup) -> None:
        self._sent = [tensor.contiguous() for tensor in tensors]
        self._received = [tensor.new_empty((group.size(), *tensor.shape)) for tensor in tensors]
        self._works = [
            all_gather_single(gathered.flatten(0, 1), own, group=group, async_op=True)
            for gathered, own in zip(self._received, self._sent, strict=True)
        ]

    def wait(self) -> KeysValues:
        """Return the keys and values of all ranks, stacked by rank."""
        with waiting("context"):
            for work in self._works:
                work.wait()
        k, v = self._received
        return k, v


def _in_row_order(stacked_RBKLE: Tensor, chunks: Sequence[Sequence[int]]) -> Tensor:
    """Reorder tokens that are stacked by rank into row order, `[B, K, T, E]`."""
    pieces = {
        chunk: piece
        for own_BKLE, own in zip(stacked_RBKLE, chunks, strict=True)
        for chunk, piece in zip(own, own_BKLE.chunk(len(own), dim=2), strict=True)
    }
    return torch.cat([pieces[chunk] for chunk in range(len(pieces))], dim=2)


def _scatter(gradients: KeysValues, how: RowAttention) -> KeysValues:
    """Sum gradients of the whole row over the ranks; return those of this rank's tokens."""
    own = []
    for gradient_BKTE in gradients:
        pieces = gradient_BKTE.chunk(sum(map(len, how.chunks)), dim=2)
        by_rank = torch.stack([torch.cat([pieces[chunk] for chunk in chunks], dim=2) for chunks in how.chunks])
        own.append(torch.empty_like(by_rank[0]))
        assert how.group is not None
        with waiting("context"):
            reduce_scatter_single(own[-1], by_rank.flatten(0, 1), group=how.group)
    return own[0], own[1]
