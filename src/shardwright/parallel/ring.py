"""Attention over a row that lies on several ranks: queries stay, keys and values come by.

`ring` passes them from rank to rank, and computes on those that are here while the next are under way; going back, the gradients
of keys and values travel one step behind them and come home after a full round. `all_gather` fetches all of them at once, behind
the block of the rank's own tokens. Both are one autograd function that keeps the rank's own queries, keys, values and output.

Source: Liu et al. 2023, Ring Attention (arXiv 2310.01889); zigzag order: Zhu 2024, ring-flash-attention; all-gather: Llama Team
2024, The Llama 3 Herd of Models (arXiv 2407.21783), section 3.3.2.

Legend: B sequences, H query heads, K key/value heads, L tokens of this rank, S keys of some ranks, T tokens of the row, E head_dim,
V value width, R ranks.
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
    """What one layer's attention over the ranks of a group does in one forward pass.

    Attributes:
        group: None is one rank, which has the whole row.
        chunks: of each rank of the group.
        gather: fetch all keys and values at once, and do not pass them round.
        window: tokens that a token sees, itself included; None is all before it.
        explicit: no fused kernels.
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
        """This rank's number in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)


def attend_row(q_BHLE: Tensor, k_BKLE: Tensor, v_BKLV: Tensor, sinks_H: Tensor | None, how: RowAttention) -> Tensor:
    """Attention of this rank's queries over the whole row, `[B, H, L, V]`; `sinks_H` takes part and gives nothing."""
    out: Tensor = _RowAttention.apply(q_BHLE, k_BKLE, v_BKLV, sinks_H, how)
    return out


class _RowAttention(torch.autograd.Function):
    """Keeps what a flash kernel keeps: inputs, output, log-sum-exp, all of this rank's queries and tokens only."""

    @staticmethod
    def forward(ctx: Any, q_BHLE: Tensor, k_BKLE: Tensor, v_BKLV: Tensor, sinks_H: Tensor | None, how: RowAttention) -> Tensor:
        wide = torch.promote_types(q_BHLE.dtype, torch.float32)
        out_BHLV = q_BHLE.new_empty((*q_BHLE.shape[:3], v_BKLV.shape[3]), dtype=wide)
        lse_BHL = q_BHLE.new_empty(q_BHLE.shape[:3], dtype=wide)
        for arrived in _arrivals(k_BKLE, v_BKLV, how):
            _attend(q_BHLE, arrived, how, Partial(out_BHLV, lse_BHL))
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
            sunk_BHL = torch.exp(sinks_H.to(lse_BHL.dtype)[:, None] - lse_BHL)
            d_sinks_H = -(sunk_BHL * delta_BHL).sum((0, 2)).to(sinks_H.dtype)
        back = _Backward(d_out_BHLV.contiguous(), q_BHLE, Partial(out_BHLV, lse_BHL), ctx.how)
        d_k_BKLE, d_v_BKLV = (_gather_backward if ctx.how.gather else _ring_backward)(back, k_BKLE, v_BKLV)
        return back.d_q_BHLE.to(q_BHLE.dtype), d_k_BKLE.to(k_BKLE.dtype), d_v_BKLV.to(v_BKLV.dtype), d_sinks_H, None


class Arrived(NamedTuple):
    """Keys and values that are here, their places, and what this rank's queries see of them."""

    k_BKSE: Tensor
    v_BKSV: Tensor
    places_S: Tensor
    blocks: list[Block]


def _arrivals(k_BKLE: Tensor, v_BKLV: Tensor, how: RowAttention) -> Iterator[Arrived]:
    """Keys and values as they come, the rank's own first. What comes next is under way while what is here is computed on."""
    rank, row, here = how.rank, how.row, (k_BKLE, v_BKLV)
    own, device = how.chunks[rank], k_BKLE.device
    if how.gather and how.group is not None:
        gathering = _Gather(here, how.group)
        yield Arrived(*here, row.places(own, device), row.own_blocks(own, own, how.window))
        everything = tuple(range(sum(map(len, how.chunks))))
        k_BKTE, v_BKTV = (_in_row_order(stacked, how.chunks) for stacked in gathering.wait())
        yield Arrived(k_BKTE, v_BKTV, row.places(everything, device), row.other_blocks(own, everything, how.window))
        return
    for step in range(len(how.chunks)):
        passing = None
        if step < len(how.chunks) - 1:
            assert how.group is not None
            passing = _Pass(here, how.group)
        chunks = how.chunks[rank - step]  # of the rank that is `step` before this one
        yield Arrived(*here, row.places(chunks, device), row.blocks(own, chunks, how.window))
        if passing is not None:
            here = passing.wait()


def _attend(q_BHLE: Tensor, arrived: Arrived, how: RowAttention, into: Partial) -> None:
    """Take the keys that have arrived into the output and its log-sum-exp."""
    for block in arrived.blocks:
        seen, kernel = _prepare(q_BHLE, arrived, block, how)
        q, k, v = q_BHLE[:, :, block.queries], arrived.k_BKSE[:, :, block.keys], arrived.v_BKSV[:, :, block.keys]
        part = kernel.forward(q, k, v, seen, how.scores)
        target = Partial(into.out_BHLV[:, :, block.queries], into.lse_BHL[:, :, block.queries])
        if block.own:
            target.out_BHLV.copy_(part.out_BHLV)
            target.lse_BHL.copy_(part.lse_BHL)
        else:
            merge(target, part)


def _prepare(q_BHLE: Tensor, arrived: Arrived, block: Block, how: RowAttention) -> tuple[Seen, Kernel]:
    own_places_L = how.row.places(how.chunks[how.rank], q_BHLE.device)
    seen = how.row.seen(block, own_places_L, arrived.places_S, how.window)
    masked = seen.visible_BLS is not None
    return seen, choose_kernel(q_BHLE, arrived.v_BKSV, how.scores, masked=masked, explicit=how.explicit)


class _Backward:
    """A backward pass under way: the queries' gradient grows here, those of keys and values are given back as they come."""

    def __init__(self, d_out_BHLV: Tensor, q_BHLE: Tensor, whole: Partial, how: RowAttention) -> None:
        self.d_out_BHLV, self.q_BHLE, self.whole, self.how = d_out_BHLV, q_BHLE, whole, how
        self.d_q_BHLE = torch.zeros_like(q_BHLE, dtype=whole.lse_BHL.dtype, memory_format=torch.contiguous_format)

    def take(self, arrived: Arrived) -> KeysValues:
        """What this rank's queries give to the keys and values that have arrived, in fp32 at least."""
        wide = self.d_q_BHLE.dtype
        d_k_BKSE, d_v_BKSV = (torch.zeros_like(part, dtype=wide, memory_format=torch.contiguous_format) for part in arrived[:2])
        for block in arrived.blocks:
            seen, kernel = _prepare(self.q_BHLE, arrived, block, self.how)
            rows, keys = block.queries, block.keys
            whole = Partial(self.whole.out_BHLV[:, :, rows], self.whole.lse_BHL[:, :, rows])
            k, v = arrived.k_BKSE[:, :, keys], arrived.v_BKSV[:, :, keys]
            d_q, d_k, d_v = kernel.backward(
                self.d_out_BHLV[:, :, rows], self.q_BHLE[:, :, rows], k, v, whole, seen, self.how.scores
            )
            self.d_q_BHLE[:, :, rows] += d_q
            d_k_BKSE[:, :, keys] += d_k
            d_v_BKSV[:, :, keys] += d_v
        return d_k_BKSE, d_v_BKSV


def _ring_backward(back: _Backward, k_BKLE: Tensor, v_BKLV: Tensor) -> KeysValues:
    """Keys and values go round once more; what they are owed follows one step behind, and is home after the last."""
    gradients, passing = None, None
    for arrived in _arrivals(k_BKLE, v_BKLV, back.how):
        gradients = back.take(arrived)
        if passing is not None:
            gradients = _add(gradients, passing.wait())
        passing = None if back.how.group is None else _Pass(gradients, back.how.group)
    assert gradients is not None
    return gradients if passing is None else passing.wait()


def _gather_backward(back: _Backward, k_BKLE: Tensor, v_BKLV: Tensor) -> KeysValues:
    """Keys and values are fetched once more, and every rank gives what it owes them in one reduce-scatter."""
    here, *others = [back.take(arrived) for arrived in _arrivals(k_BKLE, v_BKLV, back.how)]
    return _add(here, *(_scatter(gradients, back.how) for gradients in others))


def _add(first: KeysValues, *others: KeysValues) -> KeysValues:
    for k, v in others:
        first = first[0] + k, first[1] + v
    return first


class _Pass:
    """Tensors on their way to the next rank of a ring, and those of the rank before on their way here."""

    def __init__(self, tensors: KeysValues, group: dist.ProcessGroup) -> None:
        rank, num_ranks = dist.get_rank(group), group.size()
        self._sent = [tensor.contiguous() for tensor in tensors]  # kept until they have gone
        self._received = [torch.empty_like(tensor) for tensor in self._sent]
        sends = [dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % num_ranks) for x in self._sent]
        receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=(rank - 1) % num_ranks) for x in self._received]
        self._works = dist.batch_isend_irecv(sends + receives)

    def wait(self) -> KeysValues:
        """What has come, once it has, and once this rank's own has gone."""
        with waiting("context"):
            for work in self._works:
                work.wait()
        k, v = self._received
        return k, v


class _Gather:
    """Keys and values of all ranks on their way here, `[R, B, K, L, E]` each."""

    def __init__(self, tensors: KeysValues, group: dist.ProcessGroup) -> None:
        self._sent = [tensor.contiguous() for tensor in tensors]
        self._received = [tensor.new_empty((group.size(), *tensor.shape)) for tensor in tensors]
        self._works = [
            all_gather_single(everything.flatten(0, 1), own, group=group, async_op=True)
            for everything, own in zip(self._received, self._sent, strict=True)
        ]

    def wait(self) -> KeysValues:
        """All of them, by rank."""
        with waiting("context"):
            for work in self._works:
                work.wait()
        k, v = self._received
        return k, v


def _in_row_order(stacked_RBKLE: Tensor, chunks: Sequence[Sequence[int]]) -> Tensor:
    """The row's tokens by place, `[B, K, T, E]`, from those of each rank."""
    pieces = {
        chunk: piece
        for own_BKLE, own in zip(stacked_RBKLE, chunks, strict=True)
        for chunk, piece in zip(own, own_BKLE.chunk(len(own), dim=2), strict=True)
    }
    return torch.cat([pieces[chunk] for chunk in range(len(pieces))], dim=2)


def _scatter(gradients: KeysValues, how: RowAttention) -> KeysValues:
    """The sum over ranks of gradients of the whole row: this rank's tokens of it."""
    own = []
    for gradient_BKTE in gradients:
        pieces = gradient_BKTE.chunk(sum(map(len, how.chunks)), dim=2)
        by_rank = torch.stack([torch.cat([pieces[chunk] for chunk in chunks], dim=2) for chunks in how.chunks])
        own.append(torch.empty_like(by_rank[0]))
        assert how.group is not None
        with waiting("context"):
            reduce_scatter_single(own[-1], by_rank.flatten(0, 1), group=how.group)
    return own[0], own[1]
