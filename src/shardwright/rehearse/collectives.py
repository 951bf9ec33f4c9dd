"""Record of a rank's collectives, in order: kind, ranks of the group, bytes.

A `TorchDispatchMode` sees c10d's operators and functional collectives, in forward and backward
passes, from every caller: FSDP2, DDP's hooks and our own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Kind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
    "barrier",
]

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


@dataclass(frozen=True)
class Collective:
    """One call of one rank.

    `num_bytes` is the size of the reduced tensor, of all gathered parts, of all parts before a
    reduce-scatter, of this rank's input of an all-to-all, or of the message. `sent_bytes` is
    what this rank sends, with ring algorithms. `peer` is the other rank of a send or receive.
    """

    kind: Kind
    ranks: tuple[int, ...]
    num_bytes: int
    dtype: str
    sent_bytes: float
    peer: int | None = None


class Recorder(TorchDispatchMode):
    """Mode that records the collectives of this thread.

    >>> with Recorder() as recorder:
    ...     _ = torch.ones(2) + 1
    >>> recorder.collectives
    []
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(func, args)
        return result

    def note(self, func: Any, args: Any) -> None:
        """Record an operator if it is a collective; for modes that run operators themselves."""
        if func.namespace in NAMESPACES:
            collective = describe(func.name().partition("::")[2].partition(".")[0], args)
            if collective is not None:
                self.collectives.append(collective)


def describe(name: str, args: Sequence[Any]) -> Collective | None:
    """Describe an operator of c10d as a collective; None if it moves no data (wait, wrap).

    Raises:
        AssertionError: the operator is unknown, so the recorded bytes would be wrong.
    """
    if name in _MOVES_NOTHING:
        return None
    assert name in _READERS, f"unknown collective {name}"
    return _READERS[name](args)


_MOVES_NOTHING = {"wait_tensor", "_wrap_tensor_autograd", "monitored_barrier_"}


def _reduced(args: Sequence[Any]) -> Collective:
    ranks = _ranks(args)
    return _collective("all_reduce", ranks, _tensors(args[0]), 2.0 * _others(ranks))


def _gathered_base(args: Sequence[Any]) -> Collective:
    ranks = _ranks(args)
    return _collective("all_gather", ranks, _tensors(args[0]), _others(ranks))


def _gathered_list(args: Sequence[Any]) -> Collective:
    ranks = _ranks(args)
    return _collective(
        "all_gather", ranks, [part for parts in args[0] for part in _tensors(parts)], _others(ranks)
    )


def _gathered_functional(args: Sequence[Any]) -> Collective:
    ranks = _ranks(args)
    return _collective("all_gather", ranks, _tensors(args[0]) * len(ranks), _others(ranks))


def _scattered_base(args: Sequence[Any]) -> Collective:
    ranks = _ranks(args)
    return _collective("reduce_scatter", ranks, _tensors(args[1]), _others(ranks))


def _scattered_functional(args: Sequence[Any]) -> Collective:
    ranks = _ranks(args)
    return _collective("reduce_scatter", ranks, _tensors(args[0]), _others(ranks))


def _scattered_list(args: Sequence[Any]) -> Collective:
    ranks = _ranks(args)
    return _collective(
        "reduce_scatter",
        ranks,
        [part for parts in args[1] for part in _tensors(parts)],
        _others(ranks),
    )


def _exchanged(given: Tensor, splits: Sequence[int], ranks: tuple[int, ...]) -> Collective:
    total_bytes = given.numel() * given.element_size()
    sent_bytes = float(total_bytes - _own_share(given, splits, ranks))
    return Collective("all_to_all", ranks, total_bytes, _dtype(given), sent_bytes)


def _exchanged_base(args: Sequence[Any]) -> Collective:
    return _exchanged(args[1], args[4], _ranks(args))


def _exchanged_functional(args: Sequence[Any]) -> Collective:
    return _exchanged(args[0], args[2], _ranks(args))


def _own_share(given: Tensor, splits: Sequence[int], ranks: tuple[int, ...]) -> int:
    """Compute the bytes of an all-to-all that this rank keeps."""
    row_bytes = given[0].numel() * given.element_size() if given.numel() else 0
    if not splits:
        return given.shape[0] // len(ranks) * row_bytes
    return int(splits[ranks.index(dist.get_rank())]) * row_bytes


def _broadcast(args: Sequence[Any]) -> Collective:
    ranks = _ranks(args)
    return _collective("broadcast", ranks, _tensors(args[0]), _others(ranks))


def _sent(args: Sequence[Any]) -> Collective:
    ranks = _ranks(args)
    return _collective("send", ranks, _tensors(args[0]), 1.0, ranks[args[2]])


def _received(args: Sequence[Any]) -> Collective:
    ranks = _ranks(args)
    return _collective("recv", ranks, _tensors(args[0]), 0.0, ranks[args[2]])


def _barrier(args: Sequence[Any]) -> Collective:
    return Collective("barrier", _ranks(args), 0, "", 0.0)


_READERS: dict[str, Callable[[Sequence[Any]], Collective]] = {
    "allreduce_": _reduced,
    "allreduce_coalesced_": _reduced,
    "all_reduce": _reduced,
    "all_reduce_": _reduced,
    "all_reduce_coalesced": _reduced,
    "_allgather_base_": _gathered_base,
    "allgather_into_tensor_coalesced_": _gathered_base,
    "allgather_": _gathered_list,
    "all_gather_into_tensor": _gathered_functional,
    "_reduce_scatter_base_": _scattered_base,
    "reduce_scatter_tensor_coalesced_": _scattered_base,
    "reduce_scatter_": _scattered_list,
    "reduce_scatter_tensor": _scattered_functional,
    "alltoall_base_": _exchanged_base,
    "all_to_all_single": _exchanged_functional,
    "broadcast_": _broadcast,
    "broadcast": _broadcast,
    "send": _sent,
    "recv_": _received,
    "barrier": _barrier,
}


def _collective(
    kind: Kind,
    ranks: tuple[int, ...],
    tensors: Sequence[Tensor],
    sent_share: float,
    peer: int | None = None,
) -> Collective:
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return Collective(
        kind, ranks, num_bytes, _dtype(tensors[0]) if tensors else "", num_bytes * sent_share, peer
    )


def _others(ranks: tuple[int, ...]) -> float:
    """Compute the share of a buffer that each rank sends in a ring: all parts but its own."""
    return (len(ranks) - 1) / len(ranks)


def _tensors(given: Any) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else list(given)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _ranks(args: Sequence[Any]) -> tuple[int, ...]:
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


def bytes_by_axis(
    collectives: Iterable[Collective], axis_of: Callable[[tuple[int, ...]], str]
) -> dict[tuple[str, Kind], float]:
    """Sum the bytes that this rank sent, by mesh axis and kind."""
    totals: dict[tuple[str, Kind], float] = {}
    for call in collectives:
        key = (axis_of(call.ranks), call.kind)
        totals[key] = totals.get(key, 0.0) + call.sent_bytes
    return totals
