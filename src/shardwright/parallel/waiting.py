"""How long a rank waits for others, by the cut that the traffic serves: marks around every collective that blocks.

    data        gradients summed over copies, parameters gathered and gradients scattered by ZeRO
    tensor      sums, gathers and scatters of tensor parallelism
    context     keys and values, or heads, between the pieces of a row
    expert      rows on their way to experts and back
    pipeline    hidden states and their gradients between stages, and what the schedule leaves empty
    world       sums over several of these at once: token counts, norms

On a CPU a collective blocks the process, and its time is the clock's. On CUDA it blocks the stream that computes: a pair of events
there measures what nothing hid, costs the host some microseconds, and waits for nothing. What runs beside the computing (DDP's
buckets, FSDP2's reduce-scatter on CUDA) is no wait until the backward pass has ended; `train.step` counts that as `reduction`.

Nothing is measured outside `measuring`, and nothing inside a compiled graph, where there is no Python to mark it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# torch 2.13 renamed both and deprecates the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CUTS = ("data", "tensor", "context", "expert", "pipeline", "world")
"""In the order in which ranks tell each other."""

_Mark = float | torch.cuda.Event


class Waits:
    """The waits of one rank since `start`, one at a time (a rank waits for one thing at a time)."""

    def __init__(self, device: torch.device, cuts: Mapping[dist.ProcessGroup, str]) -> None:
        """
        Args:
            cuts: which cut a process group serves (`Mesh.cuts`); one that is not there serves several.
        """
        self._cuda = device.type == "cuda"
        self._cuts = cuts
        self._spans: list[tuple[str, _Mark, _Mark]] = []
        self._spare: list[torch.cuda.Event] = []
        self._since: _Mark | None = None

    def start(self) -> None:
        """Forget the last step."""
        for _, began, ended in self._spans:
            if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
                self._spare += (began, ended)
        self._spans.clear()
        self._since = None

    def begin(self) -> None:
        """What the rank does from here on is waiting."""
        self._since = self._mark()

    def end(self, whom: dist.ProcessGroup | str) -> None:
        """The wait is over; without a beginning there was none."""
        if self._since is not None:
            cut = whom if isinstance(whom, str) else self._cuts.get(whom, "world")
            self.add(cut, self._since, self._mark())
            self._since = None

    def add(self, cut: str, began: _Mark, ended: _Mark) -> None:
        """A wait that was timed elsewhere."""
        self._spans.append((cut, began, ended))

    def seconds(self) -> dict[str, float]:
        """Seconds waited since `start`, by cut. On CUDA the stream must have come to its end."""
        total = dict.fromkeys(CUTS, 0.0)
        for cut, began, ended in self._spans:
            if isinstance(began, torch.cuda.Event):
                assert isinstance(ended, torch.cuda.Event)
                total[cut] += began.elapsed_time(ended) / 1000.0
            else:
                assert isinstance(ended, float)
                total[cut] += ended - began
        return total

    def _mark(self) -> _Mark:
        if not self._cuda:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_current: Waits | None = None
"""Of this process; collectives are called from everywhere, and only by one step at a time."""


@contextmanager
def measuring(waits: Waits) -> Iterator[None]:
    """While the block runs, `waiting` marks in `waits`."""
    global _current
    former, _current = _current, waits
    try:
        yield
    finally:
        _current = former


class _Waiting:
    """A block that waits."""

    __slots__ = ("_waits", "_whom")

    def __init__(self, waits: Waits, whom: dist.ProcessGroup | str) -> None:
        self._waits, self._whom = waits, whom

    def __enter__(self) -> None:
        self._waits.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._waits.end(self._whom)


def waiting(whom: dist.ProcessGroup | str) -> AbstractContextManager[None]:
    """Bracket what blocks: a collective over a group, or the wait for one that was begun before. A name says the cut itself."""
    if _current is None or torch.compiler.is_compiling():
        return nullcontext()
    return _Waiting(_current, whom)


def begin_wait() -> None:
    """What follows, until `end_wait`, is waiting, but for collectives in between: each of them ends it."""
    if _current is not None:
        _current.begin()


def end_wait(cut: str) -> None:
    """The wait that `begin_wait` began is over; nothing where something else has ended it."""
    if _current is not None:
        _current.end(cut)


def mark_gathers(members: Sequence[nn.Module], *, reduces: bool) -> None:
    """Have the waits for the parameters of modules that FSDP2 wraps together marked, forward and backward.

    FSDP2 waits in hooks: before a module's forward pass (its own hook is the first of them), and when the gradient of the module's
    output has come. Ours stand on both sides of these.

    Args:
        members: as given to `fully_shard`, after it.
        reduces: mark the waits for their gradients, too: on a CPU, where these block.
    """
    for module in members:
        module.register_forward_pre_hook(_begin_forward, prepend=True)
        module.register_forward_pre_hook(_end_forward)
        module.register_forward_hook(_begin_backward, prepend=True)
        module.register_forward_hook(_end_backward)
    first = members[0]
    assert isinstance(first, FSDPModule)
    if reduces:
        scatter = _Scatter()
        first.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]  # its base class is not exported
        first.set_all_reduce_hook(scatter.after_all_reduce)


def _begin_forward(_module: nn.Module, _arguments: Any) -> None:
    begin_wait()


def _end_forward(_module: nn.Module, _arguments: Any) -> None:
    end_wait("data")


def _begin_backward(_module: nn.Module, _arguments: Any, output: Any) -> None:
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(lambda _gradient: begin_wait())


def _end_backward(_module: nn.Module, _arguments: Any, output: Any) -> None:
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(lambda _gradient: end_wait("data"))


class _Scatter:
    """FSDP2's reduce-scatter as it is, with its wait marked, and the wait for the sum over replicas that follows it."""

    _ended = 0.0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for either end."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Sum, and keep this rank's shard."""
        with waiting("data"):
            work: dist.Work | None = reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        self._ended = time.perf_counter()
        return work

    def after_all_reduce(self, _summed: Tensor) -> None:
        """Called when the sum over replicas is there; where there are none, at once."""
        if _current is not None:
            _current.add("data", self._ended, time.perf_counter())
