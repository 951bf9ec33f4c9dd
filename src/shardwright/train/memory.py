"""Out-of-memory errors, reported by the rank that ran out and with the plan's prediction."""

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

_SIGNS = (
    "can't allocate memory",
    "out of memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "can't start new thread",
)
"""Messages of torch's CPU allocator, CUDA, the system and C++ in exceptions of other types."""


@contextmanager
def telling_of_memory(checked: Checked, rank: int, device: torch.device) -> Iterator[None]:
    """Convert out-of-memory errors of the block to `OutOfMemory`.

    Raises:
        OutOfMemory: With the plan's prediction and the memory that this process uses.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_want_of_memory(error):
            raise
        message = first_line(str(error)) or type(error).__name__
        snapshot = save_snapshot(RunFolder.of(checked.recipe).path, rank, device)
        raise OutOfMemory(
            f"rank {rank} ran out of memory ({message}). "
            f"{_predicted(checked)}; {_held(device)}. {cheapest_fit(checked)}"
            + (f". Snapshot of its memory: {snapshot}" if snapshot else "")
        ) from error


def is_want_of_memory(error: BaseException) -> bool:
    """Return True if an exception means that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(sign in str(error) for sign in _SIGNS)


def _predicted(checked: Checked) -> str:
    parts = forecast_memory(checked)
    breakdown = ", ".join(
        f"{name} {format_bytes(value)}"
        for name, value in (
            ("weights", parts.weights),
            ("gradients", parts.gradients),
            ("optimizer", parts.optimizer),
            ("activations", parts.activations + parts.logits + parts.gathered + parts.workspaces),
        )
    )
    total = format_bytes(parts.live)
    return f"The plan predicted {total} of tensors on the fullest rank ({breakdown})"


def _held(device: torch.device) -> str:
    if device.type == "cuda":
        allocated = format_bytes(torch.cuda.memory_allocated(device))
        reserved = format_bytes(torch.cuda.memory_reserved(device))
        return f"{allocated} were allocated and {reserved} reserved on {device}"
    pages = (
        int(Path("/proc/self/statm").read_text().split()[1])
        if Path("/proc/self/statm").exists()
        else 0
    )
    resident = format_bytes(pages * resource.getpagesize())
    return f"this process had {resident} resident, including Python and its libraries"
