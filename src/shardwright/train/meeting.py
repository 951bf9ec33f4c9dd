"""What the ranks tell each other once per step beside the gradients: who was asked to stop, how much memory each holds, how long
each was at work."""

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
    """What came out of a meeting, equal on every rank."""

    stop: bool
    memory_bytes: tuple[int, ...]
    step_seconds: tuple[float, ...] = ()
    """Of the step that was just done, per rank."""
    own_seconds: tuple[float, ...] = ()
    """The same without waiting for other ranks: a rank that is slow by itself stands out, and those that wait for it do not."""


class Meeting:
    """A few numbers from every rank to every rank, over gloo: nothing waits for an accelerator."""

    def __init__(self, ranks: RankEnvironment, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self._group = dist.new_group(backend="gloo") if ranks.world_size > 1 and device.type == "cuda" else None
        self._process = psutil.Process()

    def hold(self, *, stop: bool, step_seconds: float = 0.0, own_seconds: float = 0.0) -> Minutes:
        """One all-gather of four numbers."""
        rows = self.gather([float(stop), float(self.memory_bytes()), step_seconds, own_seconds])
        stops, memory, steps, owns = zip(*rows, strict=True)
        return Minutes(any(stops), tuple(map(int, memory)), steps, owns)

    def gather(self, values: Sequence[float], *, ragged: bool = False) -> list[list[float]]:
        """Every rank's numbers, in rank order, in fp64 (whole up to 2^53). `ragged`: ranks may give different counts of them."""
        if self.ranks.world_size == 1:
            return [list(values)]
        lengths = [len(values)] * self.ranks.world_size
        if ragged:
            lengths = [int(row[0]) for row in self.gather([len(values)])]
        mine = torch.zeros(max(lengths), dtype=torch.float64)
        mine[: len(values)] = torch.tensor(list(values), dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in lengths]
        dist.all_gather(everyone, mine, group=self._group)
        return [row[:length].tolist() for row, length in zip(everyone, lengths, strict=True)]

    def agree_on_clock(self) -> SharedClock:
        """Rank 0's clock, for every rank."""
        return agree_on_clock(self.ranks.rank, self.ranks.world_size, self._group)

    def any(self, value: bool) -> bool:
        """Whether any rank says yes."""
        if self.ranks.world_size == 1:
            return value
        flag = torch.tensor([int(value)], dtype=torch.int64)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def wait(self) -> None:
        """Every rank has come this far."""
        self.any(False)

    def memory_bytes(self) -> int:
        """Peak allocated on the accelerator, resident now on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return int(self._process.memory_info().rss)
