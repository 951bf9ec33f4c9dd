"""Bytes of tensors that a training step holds at its peak on a CPU rank, by the profiler's
allocator events.
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
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from shardwright.parallel import (
        ParallelModel,  # other contenders' processes shall not pay for its import
    )

_MOMENT_SECONDS = 0.005


def held_bytes(model: ParallelModel, optimizer: torch.optim.Optimizer) -> int:
    """What lies on this rank between steps: weights, optimizer states, and DDP's buckets, which are
    the gradients.
    """
    parameters = [parameter for _, parameter in model.named_parameters()]
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    buckets = parameters if model.module is not model.decoder else []
    return _bytes(parameters) + _bytes(states) + _bytes(buckets)


def allocated_by(step: Callable[[], object], moment_seconds: float = _MOMENT_SECONDS) -> int:
    """The most bytes that `step` holds beyond those at its start. The step takes longer meanwhile,
    by a moment at each wait.
    """
    allocated = Allocated(moment_seconds)
    step()
    return allocated.end()


class Allocated:
    """Counts from its making on: the most bytes held beyond those of the beginning."""

    def __init__(self, moment_seconds: float = _MOMENT_SECONDS) -> None:
        self._exit_stack = ExitStack()
        self._exit_stack.enter_context(_operands_let_go(moment_seconds))
        self._profiler = self._exit_stack.enter_context(
            profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        )

    def end(self) -> int:
        """Bytes; nothing is counted any longer."""
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
def _operands_let_go(moment_seconds: float) -> Iterator[None]:
    """Hold this rank for a moment after each wait, so that what is measured is the step and not a
    race.

    Gloo's worker thread tells the waiting thread that a collective is done before it drops its own
    references to the operands; on an idle machine the step is then some kernels further, with the
    operands still counted as held. On a busy one no moment is surely long enough: of several steps
    the least counts.
    """
    wait = dist.Work.wait

    def wait_and_a_moment(work: dist.Work, *args: Any) -> bool:
        done = wait(work, *args)
        time.sleep(moment_seconds)
        return done

    with patch.object(dist.Work, "wait", wait_and_a_moment):
        yield


def _bytes(tensors: Iterable[Tensor]) -> int:
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        total += local.numel() * local.element_size()
    return total
