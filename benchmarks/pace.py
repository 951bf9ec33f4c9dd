"""Timer of a rank: contenders call it after every step; it times blocks of steps on the parent's
command.

A contender stays alive between blocks, so that the parent can time all contenders of a comparison
in turn (A B C A B C ...) and a slow minute of the machine affects all of them. While it waits for a
command it occupies memory but uses no processor time.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from benchmarks.allocated import AllocationCounter

if TYPE_CHECKING:
    from benchmarks.attention_operators import AttentionRecorder
    from benchmarks.host_waits import HostWaitCounter


class Pace:
    """Timer of blocks of optimizer steps.

    Args:
        commands: one line per block: the number of steps, optionally with `memory`, `waits` or
            `attention`, or `stop`.
        replies: one JSON line per block.
        barrier: returns when all ranks have called it and the device is idle.
        device: `cpu` or `cuda`; decides which memory is measured.
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
        self._start_seconds = self._cpu_start_seconds = 0.0
        self._allocation_counter: AllocationCounter | None = None
        self._wait_counter: HostWaitCounter | None = None
        self._attention_recorder: AttentionRecorder | None = None
        self.attention: list[str] = []
        """Attention kernels that the contender says it takes, each perhaps with its reason."""
        self.details: dict[str, Any] = {}
        self.build_start_seconds = time.perf_counter()
        self.count_resident_bytes: Callable[[], int] | None = None
        """Function that counts tensor bytes between steps. Blocks with `memory` need it."""

    def begin(self) -> bool:
        """Wait for the first command; call this once, right before the first step.

        Return False to stop.
        """
        self.details["build_seconds"] = time.perf_counter() - self.build_start_seconds
        self._reply({"ready": True, "start_up": self._read_memory(), "details": self.details})
        return self._next_block()

    def step_done(self, loss: float | torch.Tensor) -> bool:
        """Count a step; at the end of a block report and wait. `loss`: this rank's mean token loss.

        Return False to stop.
        """
        self._losses.append(loss)
        self._remaining -= 1
        if self._remaining > 0:
            return True
        num_waits = None if self._wait_counter is None else self._wait_counter.end()
        self._barrier()
        seconds = time.perf_counter() - self._start_seconds
        cpu_seconds = time.process_time() - self._cpu_start_seconds
        losses = [float(loss) for loss in self._losses]
        reply = {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "losses": losses,
            "graph_breaks": count_graph_breaks(),
            "compiled_graphs": count_compiled_graphs(),
            "attention": self.attention,
            "num_waits": num_waits,
        } | self._read_memory()
        if self._attention_recorder is not None:
            reply |= self._attention_recorder.end()
            self._attention_recorder = None
        if self._allocation_counter is not None:
            assert self.count_resident_bytes is not None
            reply["peak_tensor_bytes"] = (
                self.count_resident_bytes() + self._allocation_counter.end()
            )
            self._allocation_counter = None
        self._reply(reply)
        return self._next_block()

    def _next_block(self) -> bool:
        command = self._commands.readline().strip()
        if command in ("", "stop"):
            return False
        steps, _, option = command.partition(" ")
        self._remaining = int(steps)
        self._losses = []
        self._barrier()
        self._reset_memory()
        if option == "memory":
            self._allocation_counter = AllocationCounter()
        self._wait_counter = None
        if option == "waits" and self._device == "cuda":
            from benchmarks.host_waits import HostWaitCounter  # its imports take memory

            self._wait_counter = HostWaitCounter()
        if option == "attention":
            from benchmarks.attention_operators import AttentionRecorder

            self._attention_recorder = AttentionRecorder(self._device)
        self._start_seconds = time.perf_counter()
        self._cpu_start_seconds = time.process_time()
        return True

    def _reply(self, message: dict[str, Any]) -> None:
        self._replies.write(json.dumps(message) + "\n")
        self._replies.flush()

    def _read_memory(self) -> dict[str, int]:
        memory = {"peak_rss_bytes": read_peak_rss_bytes()}
        if self._device == "cuda":
            memory |= {
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
                "free_bytes": torch.cuda.mem_get_info()[0],
            }
        return memory

    def _reset_memory(self) -> None:
        try:
            # Resets VmHWM to the resident size (proc(5)).
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.details["high_water_since"] = "start of the process: this kernel cannot reset it"
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()


def forget_graph_breaks() -> None:
    """Count graph breaks from now on, without those of earlier runs of this process."""
    module = sys.modules.get("torch._dynamo.utils")
    if module is not None:
        module.counters["graph_break"].clear()


def count_graph_breaks() -> int:
    """Count the places where torch.compile has broken a graph in this process."""
    module = sys.modules.get("torch._dynamo.utils")
    return 0 if module is None else sum(module.counters["graph_break"].values())


def count_compiled_graphs() -> dict[str, int]:
    """Count the graphs that Inductor took from its cache on disk, and those that it compiled."""
    module = sys.modules.get("torch._dynamo.utils")
    counts = {} if module is None else module.counters["inductor"]
    return {
        "cached": counts.get("fxgraph_cache_hit", 0),
        "new": counts.get("fxgraph_cache_miss", 0) + counts.get("fxgraph_cache_bypass", 0),
    }


def read_peak_rss_bytes() -> int:
    """Return the high-water mark of this process's resident memory in bytes (VmHWM), with shared
    libraries.
    """
    match = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if (
        match is None
    ):  # a kernel without VmHWM (gVisor): the closest figure of POSIX, in KiB on Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(match.group(1)) * 1024
