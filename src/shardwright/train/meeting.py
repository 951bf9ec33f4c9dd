"""Per-step synchronisation of all ranks: stop requests, memory and step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from shardwright.train.clocks import SharedClock, agree_on_clock
from shardwright.train.ranks import RankEnvironment


@dataclass(frozen=True)
class Minutes:
    """Result of a synchronisation. Identical on all ranks."""

    stop: bool
    memory_bytes: tuple[int, ...]
    step_seconds: tuple[float, ...] = ()
    """Time of the last step, per rank."""
    own_seconds: tuple[float, ...] = ()
    """Time of the last step without waiting for other ranks, per rank."""


class Meeting:
    """Exchange of a few numbers between all ranks over gloo; never waits for an accelerator."""

    def __init__(self, ranks: RankEnvironment, device: torch.device) -> None:
        self.ranks = ranks
        self.device = device
        self._group = (
            dist.new_group(backend="gloo")
            if ranks.world_size > 1 and device.type == "cuda"
            else None
        )
        self._process = psutil.Process()

    def hold(self, *, stop: bool, step_seconds: float = 0.0, own_seconds: float = 0.0) -> Minutes:
        """All-gather stop flag, memory and times of the step."""
        rows = self.gather([float(stop), float(self.memory_bytes()), step_seconds, own_seconds])
        stops, memory, steps, owns = zip(*rows, strict=True)
        return Minutes(any(stops), tuple(map(int, memory)), steps, owns)

    def gather(self, values: Sequence[float], *, ragged: bool = False) -> list[list[float]]:
        """Gather every rank's numbers in rank order, in fp64 (integers are exact up to 2^53).

        Args:
            values: Numbers of this rank.
            ragged: True if ranks may have different counts of numbers.
        """
        if self.ranks.world_size == 1:
            return [list(values)]
        lengths = [len(values)] * self.ranks.world_size
        if ragged:
            lengths = [int(row[0]) for row in self.gather([len(values)])]
        local = torch.zeros(max(lengths), dtype=torch.float64)
        local[: len(values)] = torch.tensor(list(values), dtype=torch.float64)
        gathered = [torch.empty_like(local) for _ in lengths]
        dist.all_gather(gathered, local, group=self._group)
        return [row[:length].tolist() for row, length in zip(gathered, lengths, strict=True)]

    def agree_on_clock(self) -> SharedClock:
        """Measure this rank's offset from rank 0's clock. Collective."""
        return agree_on_clock(self.ranks.rank, self.ranks.world_size, self._group)

    def any(self, value: bool) -> bool:
        """Return True if `value` is True on any rank. Collective."""
        if self.ranks.world_size == 1:
            return value
        flag = torch.tensor([int(value)], dtype=torch.int64)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def wait(self) -> None:
        """Wait until all ranks have called this."""
        self.any(False)

    def memory_bytes(self) -> int:
        """Return the peak allocated bytes on CUDA, or the current resident bytes on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return int(self._process.memory_info().rss)
