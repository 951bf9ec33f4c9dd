"""Measure the peak tensor bytes of a training step on a CPU rank by the profiler's allocator
events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import _enable_record_function
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    # Other contenders' processes must not pay for this import.
    from shardwright.parallel import ParallelModel

_PAUSE_SECONDS = 0.005


def count_resident_bytes(model: ParallelModel, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes on this rank between steps: weights and their copies in the compute
    precision, optimizer states and DDP's buckets, which hold the gradients.
    """
    parameters = [parameter for _, parameter in model.named_parameters()]
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    buckets = parameters if model.module is not model.decoder else []
    weights = model.decoder.working_weights
    copies = [] if weights is None else weights.copies
    return sum(map(_sum_bytes, (parameters, copies, states, buckets)))


def measure_allocated_bytes(
    step: Callable[[], object], pause_seconds: float = _PAUSE_SECONDS
) -> int:
    """Return the peak bytes that `step` allocates beyond those at its start.

    Each wait for a collective takes `pause_seconds` longer.
    """
    counter = AllocationCounter(pause_seconds)
    step()
    return counter.end()


class AllocationCounter:
    """Counter of the peak bytes allocated since its creation."""

    def __init__(self, pause_seconds: float = _PAUSE_SECONDS) -> None:
        self._exit_stack = ExitStack()
        self._exit_stack.enter_context(_release_operands(pause_seconds))
        self._exit_stack.enter_context(_omit_operations())
        self._profiler = self._exit_stack.enter_context(
            profile(activities=[ProfilerActivity.CPU], acc_events=True, profile_memory=True)
        )

    def end(self) -> int:
        """Stop counting; return the peak in bytes."""
        self._exit_stack.close()
        assert self._profiler.profiler is not None
        assert self._profiler.profiler.kineto_results is not None
        live = peak = 0
        for event in self._profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
        return peak


@contextmanager
def _omit_operations() -> Iterator[None]:
    """Let profilers record allocations of this thread only, no operations.

    A thread of gloo records the end of an operation after its future, for which DDP waits, is
    complete. If the profiler has stopped by then, the thread writes to freed memory.
    """
    _enable_record_function(False)
    try:
        yield
    finally:
        _enable_record_function(True)


@contextmanager
def _release_operands(pause_seconds: float) -> Iterator[None]:
    """Pause this rank after each wait, so that the measurement does not depend on a race.

    Gloo's worker thread notifies the waiting thread that a collective is complete before it drops
    its own references to the operands. On an idle machine the step has then run some kernels more
    while the operands still count. On a busy machine no pause is surely long enough: use the
    smallest result of several steps.
    """
    wait = dist.Work.wait

    def wait_and_sleep(work: dist.Work, *args: Any) -> bool:
        done = wait(work, *args)
        time.sleep(pause_seconds)
        return done

    with patch.object(dist.Work, "wait", wait_and_sleep):
        yield


def _sum_bytes(tensors: Iterable[Tensor]) -> int:
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        total += local.numel() * local.element_size()
    return total
