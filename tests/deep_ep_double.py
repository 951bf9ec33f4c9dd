"""Stand-in for the package DeepEP, over torch's collectives, so that ranks without GPUs can run it.

It does what the package documents for ranks of one node, and has its signatures. Read in
deepseek-ai/DeepEP: `deep_ep/buffer.py` of version 1.2.1, `deep_ep/buffers/legacy.py`,
`docs/legacy.md` and `tests/legacy/test_intranode.py` of version 2.1.0. No run has shown that the
package behaves so. It differs where ranks on CPUs must: rows and weights may have any dtype.

What is received contains NaN until the event of an asynchronous call is awaited.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_Handle = tuple[Tensor, ...]


class EventOverlap:
    """Event whose wait delivers what a call has received."""

    def __init__(self, deliver: Callable[[], None] = lambda: None) -> None:
        self._deliver = deliver

    def current_stream_wait(self) -> None:
        """Deliver the tensors."""
        _observers[-1]("wait")
        self._deliver()


class Config:
    """Sizes of a kernel's buffers."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return some bytes for rows of this size."""
        return hidden_bytes * num_ranks


class Buffer:
    """Exchange of tokens between the ranks of a group."""

    num_sms = 20

    def __init__(
        self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0
    ) -> None:
        assert num_nvl_bytes > 0
        assert num_rdma_bytes == 0
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.group_size = group.size()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a config for this number of ranks."""
        assert num_ranks in (2, 4, 8)
        return Config()

    get_combine_config = get_dispatch_config

    @staticmethod
    def capture() -> EventOverlap:
        """Return the event of what was launched before."""
        return EventOverlap()

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Count the tokens of each rank and expert; -1 is no choice."""
        assert topk_idx.dtype == torch.int64
        assert int(topk_idx.max()) < num_experts
        chosen_NE = topk_idx.new_zeros(topk_idx.shape[0], num_experts + 1)
        chosen_NE.scatter_(1, topk_idx.where(topk_idx >= 0, num_experts), 1)
        chosen_NE = chosen_NE[:, :-1]
        is_in_rank_NP = chosen_NE.unflatten(1, (self.group_size, -1)).any(2)
        return (
            is_in_rank_NP.sum(0, dtype=torch.int32),
            None,
            chosen_NE.sum(0, dtype=torch.int32),
            is_in_rank_NP,
            EventOverlap(),
        )

    def dispatch(
        self,
        x: Tensor,
        handle: _Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        """Send each token to the ranks of its experts, or to those of a handle."""
        self._check_call(x, previous_event, async_finish, allocate_on_comm_stream)
        assert x.shape[1] * x.element_size() % 32 == 0
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            _observers[-1]("dispatch")
            *_, source_V, is_in_rank_NP, _ = handle
            (rows_VD,) = self._send(is_in_rank_NP, source_V.shape[0], x)
            received, event = _hide([rows_VD], is_async=async_finish)
            return received[0], None, None, None, None, event
        _observers[-1]("plan")
        assert topk_idx is not None
        assert topk_weights is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_weights.is_contiguous()
        assert topk_weights.dtype in (torch.float32, torch.float64)
        counts_P = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(counts_P, num_tokens_per_rank, group=self.group)
        num_received = int(counts_P.sum())
        sources_N = torch.arange(x.shape[0], dtype=torch.int32)
        rows_VD, choices_VK, weights_VK, source_V1 = self._send(
            is_token_in_rank, num_received, x, topk_idx, topk_weights, sources_N[:, None]
        )
        num_local = num_tokens_per_expert.shape[0] // self.group_size
        choices_VK = choices_VK - num_local * self.group.rank()
        is_other_VK = (choices_VK < 0) | (choices_VK >= num_local)
        choices_VK = choices_VK.masked_fill(is_other_VK, -1)
        weights_VK = weights_VK.masked_fill(is_other_VK, 0.0)
        counts = [int((choices_VK == expert).sum()) for expert in range(num_local)]
        channels = torch.zeros(self.group_size, self.num_sms // 2, dtype=torch.int32)
        new_handle = (
            counts_P.expand(self.group_size, -1).contiguous(),
            channels,
            channels.clone(),
            source_V1[:, 0].contiguous(),
            is_token_in_rank,
            is_token_in_rank.to(torch.int32),
        )
        received, event = _hide([rows_VD, choices_VK, weights_VK], is_async=async_finish)
        return *received, counts, new_handle, event

    def combine(
        self,
        x: Tensor,
        handle: _Handle,
        topk_weights: Tensor | None = None,
        bias: Tensor | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Return one row, and weights, for each token received; add those of a token."""
        self._check_call(x, previous_event, async_finish, allocate_on_comm_stream)
        _observers[-1]("combine")
        counts_PP, *_, source_V, is_in_rank_NP, _ = handle
        assert x.shape[0] == source_V.shape[0]
        sent: list[int] = counts_PP[0].tolist()
        received: list[int] = is_in_rank_NP.sum(0).tolist()
        places_S = is_in_rank_NP.t().nonzero()[:, 1]
        sums = []
        for rows_VX in (x, topk_weights):
            if rows_VX is None:
                continue
            assert rows_VX.is_contiguous()
            rows_SX = rows_VX.new_empty(sum(received), rows_VX.shape[1])
            dist.all_to_all_single(rows_SX, rows_VX, received, sent, group=self.group)
            empty_NX = rows_VX.new_zeros(is_in_rank_NP.shape[0], rows_VX.shape[1])
            sums.append(empty_NX.index_add_(0, places_S, rows_SX))
        results, event = _hide(sums, is_async=async_finish)
        return results[0], None if topk_weights is None else results[1], event

    def _check_call(
        self, x: Tensor, event: EventOverlap | None, is_async: bool, on_stream: bool
    ) -> None:
        assert x.dim() == 2
        assert x.is_contiguous()
        assert not on_stream or (is_async and event is not None)

    def _send(self, is_in_rank_NP: Tensor, num_received: int, *rows: Tensor) -> list[Tensor]:
        """Send the rows of each rank's tokens to it."""
        tokens_S = is_in_rank_NP.t().nonzero()[:, 1]
        sent_P = is_in_rank_NP.sum(0)
        received_P = torch.empty_like(sent_P)
        dist.all_to_all_single(received_P, sent_P, group=self.group)
        results = []
        for rows_NX in rows:
            results.append(rows_NX.new_empty(num_received, rows_NX.shape[1]))
            dist.all_to_all_single(
                results[-1],
                rows_NX[tokens_S],
                received_P.tolist(),
                sent_P.tolist(),
                group=self.group,
            )
        return results


def _hide(tensors: list[Tensor], *, is_async: bool) -> tuple[list[Tensor], EventOverlap]:
    """Return tensors of NaN, or of -1, and the event that fills them if the call does not wait."""
    if not is_async:
        return tensors, EventOverlap()
    hidden = [
        torch.full_like(tensor, float("nan") if tensor.is_floating_point() else -1)
        for tensor in tensors
    ]

    def deliver() -> None:
        for target, source in zip(hidden, tensors, strict=True):
            target.copy_(source)

    return hidden, EventOverlap(deliver)


def build_package() -> ModuleType:
    """Build the module `deep_ep`."""
    package = ModuleType("deep_ep")
    vars(package).update(Buffer=Buffer, EventOverlap=EventOverlap, Config=Config)
    return package


_Observer = Callable[[str], object]
_observers: list[_Observer] = []


@contextmanager
def install(observe: _Observer = lambda _call: None) -> Iterator[None]:
    """Let this process import the stand-in as `deep_ep`.

    `observe` is called with `plan`, `dispatch`, `combine` or `wait`.
    """
    installed = sys.modules.get("deep_ep")
    sys.modules["deep_ep"] = build_package()
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.pop()
        del sys.modules["deep_ep"]
        if installed is not None:
            sys.modules["deep_ep"] = installed
