"""Record of a rank's collectives, in order: kind, ranks of the group, bytes.

A `TorchDispatchMode` sees c10d's operators, functional collectives and those of
`parallel.direct_collectives`, in forward and backward passes, from every caller: FSDP2, DDP's hooks
and our own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CollectiveOperation = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
    "barrier",
]

COLLECTIVE_NAMESPACES = (
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "shardwright_collectives",
)


@dataclass(frozen=True)
class Collective:
    """One call of one rank.

    `num_bytes` is the size of the reduced tensor, of all gathered parts, of all parts before a
    reduce-scatter, of this rank's input of an all-to-all, or of the message. `sent_bytes` is
    what this rank sends, with ring algorithms. `peer` is the other rank of a send or receive.
    """

    kind: CollectiveOperation
    ranks: tuple[int, ...]
    num_bytes: int
    dtype: str
    sent_bytes: float
    peer: int | None = None


class CollectiveRecorder(TorchDispatchMode):
    """Mode that records the collectives of this thread.

    >>> with CollectiveRecorder() as recorder:
    ...     _ = torch.ones(2) + 1
    >>> recorder.collectives
    []
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.record(func, args)
        return result

    def record(self, func: Any, args: Any) -> None:
        """Record an operator if it is a collective; for modes that run operators themselves."""
        if func.namespace in COLLECTIVE_NAMESPACES:
            collective = parse_operator(func.name().partition("::")[2].partition(".")[0], args)
            if collective is not None:
                self.collectives.append(collective)


def parse_operator(name: str, args: Sequence[Any]) -> Collective | None:
    """Describe an operator of c10d as a collective; None if it moves no data (wait, wrap).

    Raises:
        AssertionError: the operator is unknown, so the recorded bytes would be wrong.
    """
    if name in _IGNORED_OPERATORS:
        return None
    assert name in _PARSERS, f"unknown collective {name}"
    return _PARSERS[name](args)


_IGNORED_OPERATORS = {"wait_tensor", "_wrap_tensor_autograd", "monitored_barrier_"}


def _build_ring_parser(
    kind: CollectiveOperation,
    list_tensors: Callable[[Sequence[Any], int], Sequence[Tensor]],
    num_passes: float = 1.0,
) -> Callable[[Sequence[Any]], Collective]:
    """Build the parser of a collective in which each rank sends all parts of a buffer but its own.

    Args:
        list_tensors: returns the tensors of the buffer from the arguments and the group's size.
        num_passes: passes of the buffer over the ring.
    """

    def parse(args: Sequence[Any]) -> Collective:
        ranks = _find_group_ranks(args)
        sent_share = num_passes * ((len(ranks) - 1) / len(ranks))
        return _build_collective(kind, ranks, list_tensors(args, len(ranks)), sent_share)

    return parse


def _flatten_tensors(lists: Sequence[Any]) -> list[Tensor]:
    return [part for parts in lists for part in _list_tensors(parts)]


def _build_all_to_all(tensor: Tensor, splits: Sequence[int], ranks: tuple[int, ...]) -> Collective:
    total_bytes = tensor.numel() * tensor.element_size()
    sent_bytes = float(total_bytes - _compute_local_bytes(tensor, splits, ranks))
    return Collective("all_to_all", ranks, total_bytes, _format_dtype(tensor), sent_bytes)


def _parse_all_to_all_base(args: Sequence[Any]) -> Collective:
    return _build_all_to_all(args[1], args[4], _find_group_ranks(args))


def _parse_all_to_all_functional(args: Sequence[Any]) -> Collective:
    return _build_all_to_all(args[0], args[2], _find_group_ranks(args))


def _compute_local_bytes(tensor: Tensor, splits: Sequence[int], ranks: tuple[int, ...]) -> int:
    """Compute the bytes of an all-to-all that this rank keeps."""
    row_bytes = tensor[0].numel() * tensor.element_size() if tensor.numel() else 0
    if not splits:
        return tensor.shape[0] // len(ranks) * row_bytes
    return int(splits[ranks.index(dist.get_rank())]) * row_bytes


def _parse_send(args: Sequence[Any]) -> Collective:
    ranks = _find_group_ranks(args)
    return _build_collective("send", ranks, _list_tensors(args[0]), 1.0, ranks[args[2]])


def _parse_recv(args: Sequence[Any]) -> Collective:
    ranks = _find_group_ranks(args)
    return _build_collective("recv", ranks, _list_tensors(args[0]), 0.0, ranks[args[2]])


def _parse_barrier(args: Sequence[Any]) -> Collective:
    return Collective("barrier", _find_group_ranks(args), 0, "", 0.0)


_parse_all_reduce = _build_ring_parser(
    "all_reduce", lambda args, _size: _list_tensors(args[0]), 2.0
)
_parse_all_gather = _build_ring_parser("all_gather", lambda args, _size: _list_tensors(args[0]))
_parse_all_gather_functional = _build_ring_parser(
    "all_gather", lambda args, size: _list_tensors(args[0]) * size
)
_parse_reduce_scatter = _build_ring_parser(
    "reduce_scatter", lambda args, _size: _list_tensors(args[1])
)
_parse_broadcast = _build_ring_parser("broadcast", lambda args, _size: _list_tensors(args[0]))

_PARSERS: dict[str, Callable[[Sequence[Any]], Collective]] = {
    "allreduce_": _parse_all_reduce,
    "allreduce_coalesced_": _parse_all_reduce,
    "all_reduce": _parse_all_reduce,
    "all_reduce_": _parse_all_reduce,
    "all_reduce_coalesced": _parse_all_reduce,
    "_allgather_base_": _parse_all_gather,
    "allgather_into_tensor_coalesced_": _parse_all_gather,
    "allgather_": _build_ring_parser("all_gather", lambda args, _size: _flatten_tensors(args[0])),
    "all_gather_by_messages": _parse_all_gather,
    "all_gather_into_tensor": _parse_all_gather_functional,
    "_reduce_scatter_base_": _parse_reduce_scatter,
    "reduce_scatter_by_messages": _parse_reduce_scatter,
    "reduce_scatter_tensor_coalesced_": _parse_reduce_scatter,
    "reduce_scatter_": _build_ring_parser(
        "reduce_scatter", lambda args, _size: _flatten_tensors(args[1])
    ),
    "reduce_scatter_tensor": _build_ring_parser(
        "reduce_scatter", lambda args, _size: _list_tensors(args[0])
    ),
    "alltoall_base_": _parse_all_to_all_base,
    "all_to_all_single": _parse_all_to_all_functional,
    "broadcast_": _parse_broadcast,
    "broadcast": _parse_broadcast,
    "send": _parse_send,
    "recv_": _parse_recv,
    "barrier": _parse_barrier,
}


def _build_collective(
    kind: CollectiveOperation,
    ranks: tuple[int, ...],
    tensors: Sequence[Tensor],
    sent_share: float,
    peer: int | None = None,
) -> Collective:
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return Collective(
        kind,
        ranks,
        num_bytes,
        _format_dtype(tensors[0]) if tensors else "",
        num_bytes * sent_share,
        peer,
    )


def _list_tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _format_dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _find_group_ranks(args: Sequence[Any]) -> tuple[int, ...]:
    """Find the group among an operator's arguments, as object or as name in last place."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(value)
            except RuntimeError:
                continue  # the reduction operation is a ScriptObject too
            return tuple(dist.get_process_group_ranks(group))
    return tuple(
        dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(args[-1]))
    )


def sum_bytes_by_axis(
    collectives: Iterable[Collective], find_axis: Callable[[tuple[int, ...]], str]
) -> dict[tuple[str, CollectiveOperation], float]:
    """Sum the bytes that this rank sent, by mesh axis and kind."""
    totals: dict[tuple[str, CollectiveOperation], float] = {}
    for call in collectives:
        key = (find_axis(call.ranks), call.kind)
        totals[key] = totals.get(key, 0.0) + call.sent_bytes
    return totals
