"""What the ranks tell each other once per step beside the gradients: who was asked to stop, and how much memory each holds."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from shardwright.train.ranks import RankEnvironment


@dataclass(frozen=True)
class Minutes:
    """What came out of a meeting, equal on every rank."""

    stop: bool
    memory_bytes: tuple[int, ...]


class Meeting:
    """A few numbers from every rank to every rank, over gloo: nothing waits for an accelerator."""

    def __init__(self, ranks: RankEnvironment, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self._group = dist.new_group(backend="gloo") if ranks.world_size > 1 and device.type == "cuda" else None
        self._process = psutil.Process()

    def hold(self, *, stop: bool) -> Minutes:
        """One all-gather of two numbers."""
        memory = self.memory_bytes()
        if self.ranks.world_size == 1:
            return Minutes(stop, (memory,))
        mine = torch.tensor([int(stop), memory], dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(self.ranks.world_size)]
        dist.all_gather(everyone, mine, group=self._group)
        return Minutes(any(bool(row[0]) for row in everyone), tuple(int(row[1]) for row in everyone))

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
