"""Recording of the collectives that this process enters, and of its waits, in its heartbeat.

Wraps the methods of torch's process groups, through which all collectives go: those of FSDP2,
DDP and our own. Wrappers of our functions would miss the former, and torch's flight recorder is
readable only by its own rank, which fails if that rank is stopped. On CUDA that recorder is read
as well (`nccl_records.py`), because it knows the state of the device. A call costs a few
microseconds (measured in docs/decisions/0045-watchdog.md). Waits inside C++ (DDP's buckets at the
end of the backward pass, CUDA streams) are not recorded, only their collectives.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.watchdog.heartbeat import (
    NCCL_PIPE_STEM,
    OPERATIONS,
    CommunicationChannel,
    HeartbeatWriter,
    build_channel,
)
from shardwright.watchdog.nccl_records import RECORD_STEM

logger = logging.getLogger("shardwright")

_OPERATION_OF_METHOD = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
}
"""Methods of torch's ProcessGroup -> operation; not all exist in every torch version."""

_UNEVEN_OPERATIONS = ("all_to_all", "barrier", "gather", "scatter")
"""Operations whose ranks may have different numbers of elements."""


_NCCL_VARIABLES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
"""Variables that torch renamed -> former name. Both are set: some versions make the pipe only if
the former one is."""
_was_enabled = False
"""True once this process has enabled NCCL's flight recorder."""
_MIN_NCCL_HEARTBEAT_SECONDS = 480
"""Torch's default for the time after which it aborts a process whose NCCL thread hangs."""


def enable_nccl_flight_recorder(
    heartbeat: HeartbeatWriter, hang_reports: Path, timeout_seconds: float = 0.0
) -> None:
    """Enable NCCL's flight recorder, which knows the operations started on the device.

    Sets environment variables, so it must run before NCCL creates groups; values set by the
    user stay. NCCL writes the record to `hang_reports` when the watchdog writes to the pipe next to
    the heartbeat (`watchdog.monitor`), and when a collective times out.

    Args:
        timeout_seconds: Longest timeout of the collectives. Torch must not abort the process
            before the watchdog, which acts at nine tenths of it.
    """
    global _was_enabled
    if _was_enabled:
        # Torch makes the pipe for the first group of a process (`local_id_` 0), and its buffer
        # still has the operations of the former generation.
        logger.warning(
            "this process outlives a generation: hangs are diagnosed from its heartbeat, "
            "without NCCL's record"
        )
    _was_enabled = True
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", "2000"),
        ("TORCH_FR_DUMP_TEMP_FILE", str(hang_reports / RECORD_STEM)),
        # Without times NCCL does not record whether the device has started an operation.
        ("TORCH_NCCL_ENABLE_TIMING", "1"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(heartbeat.folder / NCCL_PIPE_STEM)),
        (
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
            str(max(_MIN_NCCL_HEARTBEAT_SECONDS, math.ceil(timeout_seconds))),
        ),
    ):
        former = _NCCL_VARIABLES.get(name, name)
        chosen = os.environ.get(name) or os.environ.get(former) or value
        os.environ[name] = os.environ[former] = chosen


RecordCollective = Callable[[dist.ProcessGroup, str, int], None]
"""Records that this process enters a collective: its group, operation and number of elements."""


@contextmanager
def record_collectives(
    heartbeat: HeartbeatWriter,
    hang_reports: Path,
    *,
    timeout_seconds: float = 0.0,
    observe_others: Callable[[RecordCollective], AbstractContextManager[None]] | None = None,
) -> Iterator[None]:
    """Record this process's collectives in `heartbeat`, and NCCL's record in `hang_reports`.

    Args:
        timeout_seconds: As in `enable_nccl_flight_recorder`.
        observe_others: context in which the function that it is given is called for each collective
            that no method of a process group runs.
    """
    if torch.cuda.is_available():
        enable_nccl_flight_recorder(heartbeat, hang_reports, timeout_seconds)
    # From the class's dict: getattr returns another object than the one to restore.
    former = {
        name: vars(dist.ProcessGroup)[name]
        for name in _OPERATION_OF_METHOD
        if name in vars(dist.ProcessGroup)
    }
    former_wait = vars(dist.Work)["wait"]
    wait_for = dist.Work.wait
    channels: dict[tuple[str, int, int], CommunicationChannel] = {}
    for name in former:
        setattr(
            dist.ProcessGroup,
            name,
            _wrap_method(
                heartbeat, channels, _OPERATION_OF_METHOD[name], getattr(dist.ProcessGroup, name)
            ),
        )

    def wait(work: dist.Work, *arguments: Any, **options: Any) -> Any:
        heartbeat.record_wait(is_waiting=True)
        result = wait_for(work, *arguments, **options)
        heartbeat.record_wait(is_waiting=False)  # not after an error: the watchdog needs the wait
        return result

    def record(group: dist.ProcessGroup, operation: str, num_elements: int) -> None:
        channel = _find_channel(channels, group)
        heartbeat.record_collective(channel, OPERATIONS.index(operation), num_elements)

    dist.Work.wait = wait  # type: ignore[method-assign, assignment]
    try:
        with observe_others(record) if observe_others is not None else nullcontext():
            yield
    finally:
        dist.Work.wait = former_wait  # type: ignore[method-assign]
        for name, method in former.items():
            setattr(dist.ProcessGroup, name, method)


def _wrap_method(
    heartbeat: HeartbeatWriter,
    channels: dict[tuple[str, int, int], CommunicationChannel],
    operation: str,
    method: Callable[..., Any],
) -> Callable[..., Any]:
    number = OPERATIONS.index(operation)
    even = operation not in _UNEVEN_OPERATIONS
    paired = operation in ("send", "recv")

    def enter(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> Any:
        pair = None
        if paired:
            peer = int(arguments[1])
            pair = (group.rank(), peer) if operation == "send" else (peer, group.rank())
        channel = _find_channel(channels, group, pair)
        heartbeat.record_collective(channel, number, _count_elements(arguments) if even else 0)
        return method(group, *arguments, **options)

    return enter


def _find_channel(
    channels: dict[tuple[str, int, int], CommunicationChannel],
    group: dist.ProcessGroup,
    pair: tuple[int, int] | None = None,
) -> CommunicationChannel:
    """Return the channel of a group's collectives, or of the messages of a pair of its ranks."""
    key = (group.group_name, *(pair or (-1, -1)))
    channel = channels.get(key)
    if channel is None:
        ranks = dist.get_process_group_ranks(group)
        named = None if pair is None else (ranks[pair[0]], ranks[pair[1]])
        channel = channels[key] = build_channel(group.group_name, ranks, pair=named)
    return channel


def _count_elements(arguments: Sequence[Any]) -> int:
    """Count the elements of the first tensor of a collective's arguments."""
    first: Any = arguments[0] if arguments else None
    while isinstance(first, list | tuple):
        if not first:
            return 0
        first = first[0]
    return first.numel() if isinstance(first, torch.Tensor) else 0
