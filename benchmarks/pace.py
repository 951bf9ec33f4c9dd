"""The clock of a rank: contenders call it after every step; it times blocks of steps on the
parent's command.

A contender stays alive between blocks, so that the parent can time all contenders of a comparison
in turn (A B C A B C ...) and a slow minute of the machine hits them alike. While it waits for a
command it holds memory but takes no processor time.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.allocated import Allocated


class Pace:
    """Times blocks of optimizer steps.

    Args:
        commands: one line per block: the number of steps to run, with `memory` behind it or not, or
        `stop`. replies: one JSON line per block. barrier: returns when all ranks have come here and
        the device is idle. device: `cpu` or `cuda`; decides which memory is read.
    """

    def __init__(
        self, commands: TextIO, replies: TextIO, barrier: Callable[[], None], device: str
    ) -> None:
        self._commands = commands
        self._replies = replies
        self._barrier = barrier
        self._device = device
        self._remaining = 0
        self._losses: list[float | torch.Tensor] = []
        self._started = self._cpu_started = 0.0
        self._allocated: Allocated | None = None
        self.details: dict[str, Any] = {}
        self.held_bytes: Callable[[], int] | None = None
        """Bytes of tensors between steps, where the contender tells them: then a block can be asked
        for its peak.
        """

    def begin(self) -> bool:
        """Wait for the first command; to be called once, right before the first step. False:
        stop.
        """
        self._reply({"ready": True, "start_up": self._memory(), "details": self.details})
        return self._next_block()

    def step_done(self, loss: float | torch.Tensor) -> bool:
        """Count a step; at the end of a block report and wait. `loss`: this rank's mean token loss.
        False: stop.
        """
        self._losses.append(loss)
        self._remaining -= 1
        if self._remaining > 0:
            return True
        self._barrier()
        seconds = time.perf_counter() - self._started
        cpu_seconds = time.process_time() - self._cpu_started
        losses = [float(loss) for loss in self._losses]
        reply = {"seconds": seconds, "cpu_seconds": cpu_seconds, "losses": losses} | self._memory()
        if self._allocated is not None:
            assert self.held_bytes is not None
            reply["peak_tensor_bytes"] = self.held_bytes() + self._allocated.end()
            self._allocated = None
        self._reply(reply)
        return self._next_block()

    def _next_block(self) -> bool:
        command = self._commands.readline().strip()
        if command in ("", "stop"):
            return False
        steps, _, word = command.partition(" ")
        self._remaining = int(steps)
        self._losses = []
        self._barrier()
        self._reset_memory()
        if word == "memory":
            self._allocated = Allocated()
        self._started = time.perf_counter()
        self._cpu_started = time.process_time()
        return True

    def _reply(self, message: dict[str, Any]) -> None:
        self._replies.write(json.dumps(message) + "\n")
        self._replies.flush()

    def _memory(self) -> dict[str, int]:
        memory = {"peak_rss_bytes": high_water_bytes()}
        if self._device == "cuda":
            memory |= {
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            }
        return memory

    def _reset_memory(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text(
                "5"
            )  # resets VmHWM to what is resident now (proc(5))
        except OSError:
            self.details["high_water_since"] = (
                "start of the process: this kernel does not let it be reset"
            )
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()


def high_water_bytes() -> int:
    """High-water mark of this process's resident memory in bytes (VmHWM), shared libraries
    included.
    """
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if (
        found is None
    ):  # a kernel without VmHWM (gVisor): the closest that POSIX offers, in KiB on Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(found.group(1)) * 1024
