"""Attention over ranks and its dense reference, which `test_context_attention` compares.

Legend: B sequences, T tokens, H query heads, K key/value heads, E head_dim.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout.context_method import assign_chunks
from shardwright.model.dropout import Dropout, DropoutKey
from shardwright.parallel.context import ring_attention
from shardwright.parallel.context.attention_kernels import CpuFlashKernel, ScoreSettings
from shardwright.parallel.context.block_mask import RowChunks
from shardwright.parallel.context.ring_attention import RowAttentionSettings, RowRanks
from shardwright.parallel.context.row_attention import attend_row
from shardwright.parallel.context.row_split import assign_chunks_by_work, count_visible_keys
from shardwright.parallel.context.ulysses import exchange_to_heads, exchange_to_tokens
from shardwright.rehearsal.collective_recorder import CollectiveRecorder

RATE = 0.25


NUM_CHUNKS_BY_WORK = 12


@dataclass(frozen=True)
class Sample:
    """Sizes and options of one attention."""

    tokens: int = 24
    heads: int = 4
    kv_heads: int = 2
    window: int | None = None
    soft_cap: float | None = None
    documents: bool = False
    broken: bool = False
    dropout: bool = False
    sinks: bool = False
    explicit: bool = False
    by_work: bool = False
    value_width: int = 8
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        changed = [
            f"{name}={value}"
            for name, value in vars(self).items()
            if value != getattr(Sample(), name)
        ]
        return ",".join(changed) or "plain"

    def draw_inputs(self) -> tuple[Tensor, ...]:
        """Return q, k, v, sinks, and the gradient of the output."""
        random = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, dtype=torch.float64).to(self.dtype)

        q = draw(2, self.heads, self.tokens, 8)
        k = draw(2, self.kv_heads, self.tokens, 8)
        v = draw(2, self.kv_heads, self.tokens, self.value_width)
        sinks = draw(self.heads)
        return q, k, v, sinks, draw(2, self.heads, self.tokens, self.value_width)

    def document_ids(self) -> Tensor | None:
        """Return the document of each token, or None.

        Documents of the first row end within a chunk, span several chunks and end with one; the
        second row is one document or, if `broken`, has short ones.
        """
        if not self.documents:
            return None
        ends = torch.tensor([1, 4, self.tokens // 2, self.tokens // 2 + 7])
        first = torch.bucketize(torch.arange(self.tokens), ends, right=True)
        second = torch.arange(self.tokens) // 3 if self.broken else torch.zeros_like(first)
        return torch.stack((first, second))

    def scores(self, positions: Tensor, first_head: int = 0) -> ScoreSettings:
        dropout = (
            Dropout.from_key(DropoutKey(1, 2, torch.tensor([5, 9])), positions, torch.device("cpu"))
            if self.dropout
            else None
        )
        return ScoreSettings(0.3, self.soft_cap, dropout, RATE if self.dropout else 0.0, first_head)


def compute_dense(sample: Sample) -> list[Tensor]:
    """Return output, dq, dk, dv, dsinks by the plain definition, in float64."""
    q, k, v, sinks, d_out = (part.double() for part in sample.draw_inputs())
    leaves = [part.requires_grad_() for part in (q, k, v, sinks)]
    group = sample.heads // sample.kv_heads
    scores = 0.3 * q @ k.repeat_interleave(group, 1).transpose(-1, -2)
    if sample.soft_cap is not None:
        scores = sample.soft_cap * torch.tanh(scores / sample.soft_cap)
    visible = torch.ones(sample.tokens, sample.tokens, dtype=torch.bool).tril()
    if sample.window is not None:
        visible = visible.triu(1 - sample.window)
    visible = visible[None, None]
    ids = sample.document_ids()
    if ids is not None:
        visible = visible & (ids[:, None, :, None] == ids[:, None, None, :])
    scores = scores.masked_fill(~visible, float("-inf"))
    if sample.sinks:
        sink = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    if sample.dropout:
        dropout = sample.scores(torch.arange(sample.tokens)).dropout
        assert dropout is not None
        weights = dropout.drop_attention(weights, RATE)
    out = weights @ v.repeat_interleave(group, 1)
    gradients = torch.autograd.grad(out, leaves[: 3 + sample.sinks], d_out)
    return [out.detach(), *gradients]


def compute_on_ranks(sample: Sample, method: str) -> list[Tensor]:
    """Return the same tensors, computed on all ranks and joined in row order."""
    group = dist.group.WORLD
    assert group is not None
    degree = group.size()
    chunks = assign_chunks(method, degree)  # type: ignore[arg-type]
    ids_BT = sample.document_ids()
    if sample.by_work:
        assert ids_BT is not None
        work_C = count_visible_keys(ids_BT.numpy(), (sample.window,), NUM_CHUNKS_BY_WORK)
        by_work = assign_chunks_by_work(work_C, degree)
        assert by_work != chunks
        chunks = by_work
    row = RowChunks.from_documents(sample.tokens, chunks, ids_BT)
    positions = row.token_indices(chunks[dist.get_rank()], torch.device("cpu"))
    q, k, v, sinks, d_out = sample.draw_inputs()
    leaves = [part[:, :, positions].requires_grad_() for part in (q, k, v)] + [
        sinks.requires_grad_()
    ]
    out = _attend(sample, method, leaves, group, row, chunks, positions)
    gradients = torch.autograd.grad(out, leaves[: 3 + sample.sinks], d_out[:, :, positions])
    results = []
    for part in (out.detach(), *gradients[:3]):
        whole = part.new_zeros(*part.shape[:2], sample.tokens, part.shape[3])
        whole[:, :, positions] = part
        dist.all_reduce(whole)
        results.append(whole)
    for gradient in gradients[3:]:
        dist.all_reduce(gradient)
        results.append(gradient)
    return results


def _attend(
    sample: Sample,
    method: str,
    leaves: list[Tensor],
    group: Any,
    row: RowChunks,
    chunks: Any,
    positions: Tensor,
) -> Tensor:
    q, k, v, sinks = leaves
    settings = RowAttentionSettings(
        RowRanks(group, method == "all_gather"),
        row,
        sample.scores(positions),
        sample.window,
        is_explicit=sample.explicit,
    )
    if method != "ulysses":
        return attend_row(q, k, v, sinks if sample.sinks else None, settings)
    heads = sample.heads // group.size()
    first = heads * dist.get_rank()
    whole = RowChunks.from_documents(sample.tokens, ((0,),), sample.document_ids())
    settings = replace(
        settings,
        ranks=RowRanks(None),
        row_chunks=whole,
        scores=sample.scores(torch.arange(sample.tokens), first),
    )
    own_sinks = sinks[first : first + heads] if sample.sinks else None
    return exchange_to_tokens(
        attend_row(*exchange_to_heads((q, k, v), group), own_sinks, settings), group
    )


def record_order(method: str) -> list[str]:
    """Return the order of sends, computations and waits of forward and backward, repetitions
    omitted.
    """
    log: list[str] = []
    passes = 0

    class LoggedWork:
        def __init__(self, works: list[Any], number: int) -> None:
            self.works = works
            self.number = number

        def wait(self) -> None:
            log.append(f"wait {self.number}")
            for work in self.works:
                work.wait()

    def send(operations: list[Any], original: Any = dist.batch_isend_irecv) -> list[LoggedWork]:
        nonlocal passes
        log.append(f"send {passes}")
        passes += 1
        return [LoggedWork(original(operations), passes - 1)]

    def gather(
        *arguments: Any, original: Any = ring_attention.all_gather_single, **options: Any
    ) -> LoggedWork:
        nonlocal passes
        first = not log or not log[-1].startswith("send")  # keys and values are one pass
        passes += first
        log.append(f"send {passes - 1}")
        return LoggedWork([original(*arguments, **options)], passes - 1)

    def scatter(
        *arguments: Any, original: Any = ring_attention.reduce_scatter_single, **options: Any
    ) -> None:
        log.append("reduce-scatter")
        original(*arguments, **options)

    def log_calls(name: str) -> Any:
        original = getattr(CpuFlashKernel, name)

        def log_call(self: CpuFlashKernel, *arguments: Any) -> Any:
            log.append("compute")
            return original(self, *arguments)

        return patch.object(CpuFlashKernel, name, log_call)

    parts = []
    with (
        patch.object(dist, "batch_isend_irecv", send),
        patch.object(ring_attention, "all_gather_single", gather),
        patch.object(ring_attention, "reduce_scatter_single", scatter),
        log_calls("forward"),
        log_calls("backward"),
    ):
        out = _attend_on_rank(Sample(), method)
        parts.append(list(log))
        log.clear()
        out.sum().backward()
        parts.append(list(log))
    return [", ".join(word for word, _ in groupby(part)) for part in parts]


def measure_traffic(sample: Sample, method: str) -> list[dict[str, float]]:
    """Return bytes that a rank sends, by collective, forward and backward."""
    parts = []
    with CollectiveRecorder() as forward:
        out = _attend_on_rank(sample, method)
    with CollectiveRecorder() as backward:
        out.sum().backward()
    for recorder in (forward, backward):
        sent_bytes: dict[str, float] = defaultdict(float)
        for call in recorder.collectives:
            if call.kind != "recv":
                sent_bytes[call.kind] += call.sent_bytes
        parts.append(dict(sent_bytes))
    return parts


def count_blocks(sample: Sample) -> int:
    """Count the blocks that a rank computes in a forward pass."""
    with patch.object(
        CpuFlashKernel, "forward", autospec=True, side_effect=CpuFlashKernel.forward
    ) as forward:
        _attend_on_rank(sample, "ring")
    return forward.call_count


def _attend_on_rank(sample: Sample, method: str) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    chunks = assign_chunks(method, group.size())  # type: ignore[arg-type]
    row = RowChunks.from_documents(sample.tokens, chunks, None)
    positions = row.token_indices(chunks[dist.get_rank()], torch.device("cpu"))
    leaves = [part[:, :, positions].requires_grad_() for part in sample.draw_inputs()[:3]] + [
        torch.zeros(sample.heads)
    ]
    return _attend(sample, method, leaves, group, row, chunks, positions)
