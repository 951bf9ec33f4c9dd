"""Out-of-memory errors, reported by the rank that ran out and with the plan's prediction."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from shardwright.checkpoint.run_folder import RunFolder
from shardwright.errors import OutOfMemory
from shardwright.launch.rank_outcome import extract_first_line
from shardwright.train.oom_advice import save_memory_snapshot, suggest_cheapest_fit
from shardwright.train.run_checks import ValidatedRun
from shardwright.train.run_prediction import predict_training_memory
from shardwright.units import format_bytes

_OOM_MESSAGES = (
    "can't allocate memory",
    "out of memory",
    "Cannot allocate memory",
    "std::bad_alloc",
    "can't start new thread",
)
"""Messages of torch's CPU allocator, CUDA, the system and C++ in exceptions of other types."""


@contextmanager
def convert_oom_errors(
    validated_run: ValidatedRun, rank: int, device: torch.device
) -> Iterator[None]:
    """Convert out-of-memory errors of the block to `OutOfMemory`.

    Raises:
        OutOfMemory: With the plan's prediction and the memory that this process uses.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        message = extract_first_line(str(error)) or type(error).__name__
        snapshot = save_memory_snapshot(
            RunFolder.from_recipe(validated_run.recipe).path, rank, device
        )
        raise OutOfMemory(
            f"rank {rank} ran out of memory ({message}). "
            f"{_describe_prediction(validated_run)}; {_describe_usage(device)}. {suggest_cheapest_fit(validated_run)}"
            + (f". Snapshot of its memory: {snapshot}" if snapshot else "")
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception means that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(sign in str(error) for sign in _OOM_MESSAGES)


def _describe_prediction(validated_run: ValidatedRun) -> str:
    parts = predict_training_memory(validated_run)
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


def _describe_usage(device: torch.device) -> str:
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
