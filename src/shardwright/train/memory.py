"""A rank that found no more memory says so, with what the plan had predicted; its peers' lost connections are not the story."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shardwright.errors import OutOfMemory
from shardwright.train.folder import RunFolder
from shardwright.train.forecast import forecast_memory
from shardwright.train.outcome import first_line
from shardwright.train.preflight import Checked
from shardwright.train.remedy import cheapest_fit, save_snapshot
from shardwright.units import format_bytes

_SIGNS = ("can't allocate memory", "out of memory", "Cannot allocate memory", "std::bad_alloc", "can't start new thread")
"""How torch's CPU allocator, CUDA, the system and C++ say it where the exception's type does not."""


@contextmanager
def telling_of_memory(checked: Checked, rank: int, device: torch.device) -> Iterator[None]:
    """What fails in the block for want of memory is raised as such.

    Raises:
        OutOfMemory: with what the plan predicted, and what this process holds.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_want_of_memory(error):
            raise
        told = first_line(str(error)) or type(error).__name__
        snapshot = save_snapshot(RunFolder.of(checked.recipe).path, rank, device)
        raise OutOfMemory(
            f"rank {rank} ran out of memory ({told}). {_predicted(checked)}; {_held(device)}. {cheapest_fit(checked)}"
            + (f". What lay in its memory: {snapshot}" if snapshot else "")
        ) from error


def is_want_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there is no more memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(sign in str(error) for sign in _SIGNS)


def _predicted(checked: Checked) -> str:
    parts = forecast_memory(checked)
    of = ", ".join(
        f"{name} {format_bytes(value)}"
        for name, value in (
            ("weights", parts.weights),
            ("gradients", parts.gradients),
            ("optimizer", parts.optimizer),
            ("activations", parts.activations + parts.logits + parts.gathered + parts.workspaces),
        )
    )
    return f"The plan predicted {format_bytes(parts.live)} of tensors on the fullest rank ({of})"


def _held(device: torch.device) -> str:
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return f"{format_bytes(allocated)} were allocated and {format_bytes(reserved)} reserved on {device}"
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return f"this process had {format_bytes(pages * resource.getpagesize())} resident, Python and its libraries included"
