"""Per-step synchronisation of all ranks: stop requests, memory and step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from shardwright.launch.rank_environment import RankEnvironment
from shardwright.parallel.clock_sync import ClockOffset, SharedClock, estimate_clock_offset
from shardwright.parallel.mesh import get_host_group


@dataclass(frozen=True)
class StepSync:
    """Result of a synchronisation. Identical on all ranks."""

    should_stop: bool
    memory_bytes: tuple[int, ...]
    step_seconds: tuple[float, ...] = ()
    """Time of the last step, per rank."""
    own_seconds: tuple[float, ...] = ()
    """Time of the last step without waiting for other ranks, per rank."""


class RankSync:
    """Exchange of a few numbers between all ranks over gloo; never waits for an accelerator."""

    def __init__(self, rank_environment: RankEnvironment, device: torch.device) -> None:
        self.rank_environment = rank_environment
        self.device = device
        self._group = get_host_group() if rank_environment.world_size > 1 else None
        self._process = psutil.Process()

    def synchronise_step(
        self, *, should_stop: bool, step_seconds: float = 0.0, own_seconds: float = 0.0
    ) -> StepSync:
        """All-gather stop flag, memory and times of the step."""
        rows = self.gather(
            [float(should_stop), float(self.measure_memory_bytes()), step_seconds, own_seconds]
        )
        stops, memory, steps, owns = zip(*rows, strict=True)
        return StepSync(any(stops), tuple(map(int, memory)), steps, owns)

    def gather(self, values: Sequence[float], *, is_ragged: bool = False) -> list[list[float]]:
        """Gather every rank's numbers in rank order, in fp64 (integers are exact up to 2^53).

        Args:
            values: Numbers of this rank.
            is_ragged: True if ranks may have different counts of numbers.
        """
        if self.rank_environment.world_size == 1:
            return [list(values)]
        lengths = [len(values)] * self.rank_environment.world_size
        if is_ragged:
            lengths = [int(row[0]) for row in self.gather([len(values)])]
        local = torch.zeros(max(lengths), dtype=torch.float64)
        local[: len(values)] = torch.tensor(list(values), dtype=torch.float64)
        gathered = [torch.empty_like(local) for _ in lengths]
        dist.all_gather(gathered, local, group=self._group)
        return [row[:length].tolist() for row, length in zip(gathered, lengths, strict=True)]

    def synchronise_clock(self) -> SharedClock:
        """Measure this rank's offset from rank 0's clock. Collective."""
        offset = None
        if self.rank_environment.world_size > 1:
            assert dist.group.WORLD is not None
            offset = estimate_clock_offset(
                dist.group.WORLD.get_group_store(),
                self.rank_environment.rank,
                self.rank_environment.world_size,
            )
        return SharedClock.from_wall_clock(offset or ClockOffset())

    def any_rank(self, value: bool) -> bool:
        """Return True if `value` is True on any rank. Collective."""
        if self.rank_environment.world_size == 1:
            return value
        flag = torch.tensor([int(value)], dtype=torch.int64)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.any_rank(False)

    def measure_memory_bytes(self) -> int:
        """Return the peak allocated bytes on CUDA, or the current resident bytes on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return int(self._process.memory_info().rss)
