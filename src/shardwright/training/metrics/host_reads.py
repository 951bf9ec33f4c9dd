"""Reads of numbers on a device, several in one copy, because the host waits for each copy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def read_together(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Read tensors of one device in one copy, in fp64: the host waits for the device once.

    Integers are exact up to 2^53.

    Returns:
        The elements of each tensor, flattened.
    """
    return _split(_concatenate(tensors).tolist(), tensors)


class PendingRead:
    """Read of tensors on CUDA as `read_together`, with a wait for what was launched before it.

    The host can launch more before it waits, which the device computes meanwhile.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        flat = _concatenate(tensors)
        self._tensors = tensors
        self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        self._host.copy_(flat, non_blocking=True)
        self._copied = torch.cuda.current_stream(flat.device).record_event()

    def wait(self) -> list[list[float]]:
        """Wait for the copy; return the elements of each tensor, flattened."""
        self._copied.synchronize()
        return _split(self._host.tolist(), self._tensors)


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors])


def _split(values: list[float], tensors: Sequence[Tensor]) -> list[list[float]]:
    ends = list(accumulate(tensor.numel() for tensor in tensors))
    return [values[end - each.numel() : end] for each, end in zip(tensors, ends, strict=True)]
