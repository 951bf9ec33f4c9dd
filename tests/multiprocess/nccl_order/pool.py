"""Pool of ranks that run over `OrderedProcessGroup` and whose records are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardwright.verification import local_group
from tests.multiprocess.nccl_order import process_group
from tests.multiprocess.nccl_order.order import check_order
from tests.multiprocess.nccl_order.process_group import BACKEND, OperationStuck, Record
from tests.multiprocess.pool import RankPool


class OrderedRankPool(RankPool):
    """Pool like `RankPool`, with NCCL's order.

    `run` raises `WrongOrder`, a `RankFailed`, with the operations that wait for each other.
    """

    def __init__(self, *, stuck_seconds: float = 20.0, timeout_seconds: float = 120.0) -> None:
        """Build a pool in which operations without an answer are stuck after some seconds."""
        super().__init__(timeout_seconds=timeout_seconds)
        self.stuck_seconds = stuck_seconds

    def run(
        self,
        num_ranks: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_seconds: float | None = None,
    ) -> list[Any]:
        """Run a function on all ranks, check the order, and return the results by rank."""
        if num_ranks == 1:
            return super().run(1, function, *arguments, timeout_seconds=timeout_seconds)
        answers = super().run(
            num_ranks,
            call_in_order,
            self.stuck_seconds,
            function,
            *arguments,
            timeout_seconds=timeout_seconds,
        )
        stuck = [answer for answer, _ in answers if isinstance(answer, OperationStuck)]
        try:
            check_order([record for _, record in answers])
            assert not stuck, f"stuck, but not in NCCL's order: {stuck[0]}"
        except BaseException:
            self._stop(num_ranks)  # messages may be left in its groups
            raise
        return [answer for answer, _ in answers]


def call_in_order(
    stuck_seconds: float, function: Callable[..., Any], *arguments: Any
) -> tuple[Any, Record]:
    """Call a function on one rank over `OrderedProcessGroup`.

    Returns:
        Its result, or the error of an operation that is stuck; and the record.
    """
    if dist.get_backend() != BACKEND:
        local_group.get_transport().timeout_seconds = stuck_seconds
        store = dist.distributed_c10d._get_default_store()
        rank = dist.get_rank()
        size = dist.get_world_size()
        dist.destroy_process_group()
        dist.init_process_group(
            BACKEND, store=dist.PrefixStore(BACKEND, store), rank=rank, world_size=size
        )
        dist.batch_isend_irecv = process_group.issue_batch
    process_group.record.clear()
    try:
        result = function(*arguments)
    except OperationStuck as error:
        result = OperationStuck(str(error))
    return result, list(process_group.record)
