"""Time that a rank waits in blocking communication, by the kind of parallelism it serves.

    data        gradients reduced over replicas; ZeRO's gathers and reduce-scatters
    tensor      all-reduces, gathers and scatters of tensor parallelism
    context     keys and values, or heads, exchanged between ranks that share a row
    expert      rows sent to experts and back
    pipeline    hidden states and their gradients between stages, and the schedule's bubbles
    world       sums over several of these at once: token counts, norms

On a CPU a collective blocks the process and is timed by the clock. On CUDA it blocks the
computing stream: a pair of events measures the exposed communication there, costs the host some
microseconds, and waits for nothing. Communication during computation (DDP's buckets, FSDP2's
reduce-scatter on CUDA) is not counted until the backward pass has ended; `train.step` counts
that wait as `reduction`.

Nothing is measured outside of `use_timer`, or inside a compiled graph, where no Python runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwright.parallel.direct_collectives import ShardAllocation, reduce_scatter_single

PARALLELISMS = ("data", "tensor", "context", "expert", "pipeline", "world")
"""Kinds of parallelism, in the order in which ranks send their times to each other."""

_Timestamp = float | torch.cuda.Event


class CommunicationTimer:
    """Waits of one rank since `reset`, one at a time."""

    def __init__(
        self, device: torch.device, parallelism_of_group: Mapping[dist.ProcessGroup, str]
    ) -> None:
        """Build a timer without waits.

        Args:
            parallelism_of_group: kind of parallelism of each process group, from
                `Mesh.map_groups_to_parallelisms`; other groups count as `world`.
        """
        self._is_cuda = device.type == "cuda"
        self._parallelism_of_group = parallelism_of_group
        self._spans: list[tuple[str, _Timestamp, _Timestamp]] = []
        self._spare_events: list[torch.cuda.Event] = []
        self._wait_start: _Timestamp | None = None

    def reset(self) -> None:
        """Discard the waits of the last step."""
        for _, began, ended in self._spans:
            if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
                self._spare_events += (began, ended)
        self._spans.clear()
        self._wait_start = None

    def begin_wait(self) -> None:
        """Start a wait."""
        self._wait_start = self._take_timestamp()

    def end_wait(self, group_or_parallelism: dist.ProcessGroup | str) -> None:
        """End the wait, if one was started."""
        if self._wait_start is not None:
            parallelism = (
                group_or_parallelism
                if isinstance(group_or_parallelism, str)
                else self._parallelism_of_group.get(group_or_parallelism, "world")
            )
            self.add(parallelism, self._wait_start, self._take_timestamp())
            self._wait_start = None

    @contextmanager
    def pause_wait(self, parallelism: str) -> Iterator[None]:
        """Leave the block out of the wait that has been started, if there is one."""
        is_waiting = self._wait_start is not None
        self.end_wait(parallelism)
        try:
            yield
        finally:
            if is_waiting:
                self.begin_wait()

    def add(self, parallelism: str, start: _Timestamp, end: _Timestamp) -> None:
        """Add a wait that was timed elsewhere."""
        self._spans.append((parallelism, start, end))

    def seconds(self) -> dict[str, float]:
        """Return the seconds waited since `reset`, by kind of parallelism.

        On CUDA the stream must have been synchronised.
        """
        total = dict.fromkeys(PARALLELISMS, 0.0)
        for parallelism, began, ended in self._spans:
            if isinstance(began, torch.cuda.Event):
                assert isinstance(ended, torch.cuda.Event)
                total[parallelism] += began.elapsed_time(ended) / 1000.0
            else:
                assert isinstance(ended, float)
                total[parallelism] += ended - began
        return total

    def _take_timestamp(self) -> _Timestamp:
        if not self._is_cuda:
            return time.perf_counter()
        event = (
            self._spare_events.pop() if self._spare_events else torch.cuda.Event(enable_timing=True)
        )
        event.record()
        return event


_current_timer: CommunicationTimer | None = None
"""Timer of this process.

Collectives are called from everywhere, but only one step runs at a time.
"""


@contextmanager
def use_timer(timer: CommunicationTimer) -> Iterator[None]:
    """Make `time_wait` record into `timer` while the context is open."""
    global _current_timer
    previous, _current_timer = _current_timer, timer
    try:
        yield
    finally:
        _current_timer = previous


class _TimedWait:
    """Context that records its duration as a wait."""

    __slots__ = ("_group_or_parallelism", "_timer")

    def __init__(
        self, timer: CommunicationTimer, group_or_parallelism: dist.ProcessGroup | str
    ) -> None:
        self._timer = timer
        self._group_or_parallelism = group_or_parallelism

    def __enter__(self) -> None:
        self._timer.begin_wait()

    def __exit__(self, *_: object) -> None:
        self._timer.end_wait(self._group_or_parallelism)


def time_wait(group_or_parallelism: dist.ProcessGroup | str) -> AbstractContextManager[None]:
    """Return a context that times a collective over a group, or the wait for a pending one.

    A string names the kind of parallelism itself.
    """
    if _current_timer is None or torch.compiler.is_compiling():
        return nullcontext()
    return _TimedWait(_current_timer, group_or_parallelism)


def begin_wait() -> None:
    """Start a wait that lasts until `end_wait`, or until a collective in between ends it."""
    if _current_timer is not None:
        _current_timer.begin_wait()


def end_wait(parallelism: str) -> None:
    """End the wait that `begin_wait` started, unless something else has ended it."""
    if _current_timer is not None:
        _current_timer.end_wait(parallelism)


def pause_wait(parallelism: str) -> AbstractContextManager[None]:
    """Return a context whose time does not count as the wait that `begin_wait` started.

    For work of this rank itself between `begin_wait` and `end_wait`.
    """
    return nullcontext() if _current_timer is None else _current_timer.pause_wait(parallelism)


def time_fsdp_waits(modules: Sequence[nn.Module], *, has_gradient_waits: bool) -> None:
    """Time the waits for parameters of modules that FSDP2 wraps together.

    FSDP2 waits in hooks: before a module's forward pass (its own hook is the first one), and
    when the gradient of the module's output is computed. Our hooks run before and after these.

    Args:
        modules: the modules given to `fully_shard`, after that call.
        has_gradient_waits: also time the waits for their gradients; for CPUs, where these waits
            block.
    """
    for module in modules:
        module.register_forward_pre_hook(_begin_forward_wait, prepend=True)
        module.register_forward_pre_hook(_end_forward_wait)
        module.register_forward_hook(_begin_backward_wait, prepend=True)
        module.register_forward_hook(_end_backward_wait)
    first = modules[0]
    assert isinstance(first, FSDPModule)
    if has_gradient_waits:
        scatter = _TimedReduceScatter()
        # The base class of the scatter is not exported.
        first.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]
        first.set_all_reduce_hook(scatter.after_all_reduce)


def _begin_forward_wait(_module: nn.Module, _arguments: Any) -> None:
    begin_wait()


def _end_forward_wait(_module: nn.Module, _arguments: Any) -> None:
    end_wait("data")


def _begin_backward_wait(_module: nn.Module, _arguments: Any, output: Any) -> None:
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(lambda _gradient: begin_wait())


def _end_backward_wait(_module: nn.Module, _arguments: Any, output: Any) -> None:
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(lambda _gradient: end_wait("data"))


class _TimedReduceScatter(ShardAllocation):
    """FSDP2's reduce-scatter, timed; also times the sum over replicas after it."""

    _end_seconds = 0.0

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce-scatter: sum, and keep this rank's shard."""
        with time_wait("data"):
            work = reduce_scatter_single(
                output_tensor,
                input_tensor,
                op=op,
                group=group,
                async_op=async_op,
                is_source_free=True,
            )
        self._end_seconds = time.perf_counter()
        return work

    def after_all_reduce(self, _summed: Tensor) -> None:
        """Record the wait for the sum over replicas; without replicas it ends at once."""
        if _current_timer is not None:
            _current_timer.add("data", self._end_seconds, time.perf_counter())
