"""All-gather and reduce-scatter; on CPUs by messages between each pair of ranks.

gloo reduces and scatters by an all-reduce of a copy, and gathers into a copy. Messages go from and
to the tensors themselves: with two ranks they take about half the time and half the processor
time (docs/decisions/0253-messages-instead-of-gloos-collectives.md). Both functions have the
arguments of torch's, which they call on other devices and backends, in compiled graphs, for an
asynchronous reduce-scatter and for reductions that are not sums.

Each is one operator, so a `TorchDispatchMode` sees one collective, not its messages. These bypass
the methods of process groups, whose calls the watchdog records: it records the collective instead
(`observe_collectives`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both and deprecates the old names.
_gather_by_backend: Callable[..., dist.Work | None] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter_by_backend: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

_CPU = torch.device("cpu")
_GATHER_TAG = 1
_SCATTER_TAG = 2
"""Tags of the messages. Messages of one tag between two ranks arrive in the order of their sends,
which is that of their receives, because all ranks of a group call its collectives in one order."""


class _PendingGather(dist.Work):
    """Messages of an all-gather."""

    def __init__(self, messages: Sequence[dist.Work]) -> None:
        super().__init__()
        self._messages = messages

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the output is complete and the source may change."""
        for message in self._messages:
            message.wait()
        self._messages = ()
        return True


def all_gather_single(
    output: Tensor,
    source: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gather the ranks' tensors into `output`, in the order of the ranks.

    Args:
        output: contiguous, of the size of all sources; `source` may be this rank's part of it.

    Returns:
        With `async_op` the work to wait for, else None.
    """
    group = group or dist.group.WORLD
    assert group is not None, "torch.distributed is not initialised"
    if not _sends_messages(output, group):
        return _gather_by_backend(output, source, group=group, async_op=async_op)
    _posted.clear()
    torch.ops.shardwright_collectives.all_gather_by_messages(output, source, group.group_name)
    pending = _PendingGather(tuple(_posted))
    _posted.clear()
    if async_op:
        return pending
    pending.wait()
    return None


class ShardAllocation:
    """Allocation of FSDP2's buffers, as its own collectives allocate them."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate an input or output buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class ShardGather(ShardAllocation):
    """All-gather for `FSDPModule.set_custom_all_gather`."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the ranks' shards."""
        return all_gather_single(output_tensor, input_tensor, group, async_op)


def reduce_scatter_single(
    output: Tensor,
    source: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    is_source_free: bool = False,
) -> dist.Work | None:
    """Reduce the ranks' tensors and write this rank's part to `output`.

    Messages are added one after another to this rank's own part: first that of the rank before it,
    then that of the rank before that one, and so on.

    Args:
        source: contiguous, of the size of all ranks' outputs.
        is_source_free: `source` may be overwritten. Otherwise more than two ranks take memory of
            the size of `output`.
    """
    group = group or dist.group.WORLD
    assert group is not None, "torch.distributed is not initialised"
    # Last, because the compiler of torch 2.11 cannot trace comparisons of operations.
    if async_op or not _sends_messages(output, group) or op != dist.ReduceOp.SUM:
        return _reduce_scatter_by_backend(output, source, op=op, group=group, async_op=async_op)
    torch.ops.shardwright_collectives.reduce_scatter_by_messages(
        output, source, is_source_free, group.group_name
    )
    return None


def _sends_messages(output: Tensor, group: dist.ProcessGroup) -> bool:
    return (
        not torch.compiler.is_compiling()
        and output.device.type == "cpu"
        and output.numel() > 0
        and group.size() > 1
        and dist.get_backend(group) == dist.Backend.GLOO
    )


_observer: Callable[[dist.ProcessGroup, str, int], None] | None = None


@contextmanager
def observe_collectives(
    observer: Callable[[dist.ProcessGroup, str, int], None],
) -> Iterator[None]:
    """Call `observer` at the start of each collective by messages, while the context is open.

    Its arguments: the group, `all_gather` or `reduce_scatter`, and the elements of the output.
    """
    global _observer
    previous, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = previous


_posted: list[dist.Work] = []
"""Messages of the last all-gather, because operators return tensors only."""


def _post_gather(output: Tensor, source: Tensor, group_name: Any) -> None:
    group = _enter("all_gather", output, group_name)
    rank = group.rank()
    parts = output.view(group.size(), -1)
    own = parts[rank]
    if own.data_ptr() != source.data_ptr():
        own.copy_(source.reshape(-1))
    offsets = range(1, group.size())
    senders = [(rank - offset) % group.size() for offset in offsets]
    receivers = [(rank + offset) % group.size() for offset in offsets]
    _posted.extend(_receive(parts[sender], sender, group, _GATHER_TAG) for sender in senders)
    _posted.extend(_send(own, receiver, group, _GATHER_TAG) for receiver in receivers)


def _reduce_scatter(output: Tensor, source: Tensor, is_source_free: bool, group_name: Any) -> None:
    group = _enter("reduce_scatter", output, group_name)
    size = group.size()
    rank = group.rank()
    parts = source.view(size, -1)
    own = output.view(-1)
    buffer = None if is_source_free or size == 2 else torch.empty_like(own)
    received = own
    for offset in range(1, size):
        receiver = (rank + offset) % size
        sender = (rank - offset) % size
        receive = _receive(received, sender, group, _SCATTER_TAG)
        send = _send(parts[receiver], receiver, group, _SCATTER_TAG)
        receive.wait()
        own.add_(parts[rank] if offset == 1 else received)
        send.wait()
        # What has been sent is not read again.
        received = parts[receiver] if buffer is None else buffer


def _enter(operation: str, output: Tensor, group_name: Any) -> dist.ProcessGroup:
    group = dist.distributed_c10d._resolve_process_group(group_name)
    if _observer is not None:
        _observer(group, operation, output.numel())
    return group


def _receive(buffer: Tensor, sender: int, group: dist.ProcessGroup, tag: int) -> dist.Work:
    return _find_backend(group).recv([buffer], sender, tag)


def _send(message: Tensor, receiver: int, group: dist.ProcessGroup, tag: int) -> dist.Work:
    return _find_backend(group).send([message], receiver, tag)


def _find_backend(group: dist.ProcessGroup) -> Any:
    return group._get_backend(_CPU)  # torch's annotations lack its messages


_library = torch.library.Library("shardwright_collectives", "DEF")
_library.define("all_gather_by_messages(Tensor(a!) output, Tensor source, str group) -> ()")
_library.define(
    "reduce_scatter_by_messages(Tensor(a!) output, Tensor(b!) source, bool is_source_free,"
    " str group) -> ()"
)
_library.impl("all_gather_by_messages", _post_gather, "CPU")
_library.impl("reduce_scatter_by_messages", _reduce_scatter, "CPU")
