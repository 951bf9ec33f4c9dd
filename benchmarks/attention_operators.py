"""Record the attention operators that a step runs, as the profiler sees them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_NAMESPACES = ("aten::", "torch_attn::", "flash_attn", "shardwright::")
"""Operators; what an engine or an annotation adds has other names."""
_KERNELS = {
    "cudnn_attention": "cuDNN",
    "flash_attention": "flash",
    "flash_attn": "flash",
    "efficient_attention": "efficient",
    "flex_attention": "flex",
    "attention_math": "math",
    "varlen": "varlen",
    "overrideable": "overrideable",
}
"""Part of an operator's name -> name of its kernel on the page."""


class AttentionRecorder:
    """Profiler from the construction until `end`, of the attention operators in between.

    It sees the thread that constructs it and those of its backward passes. Triton's kernels are
    events of the device, so that one of FlexAttention is seen on CUDA.
    """

    def __init__(self, device_type: str) -> None:
        activities = [ProfilerActivity.CPU]
        if device_type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._device_type = device_type
        self._profile: Any = profile(activities=activities, acc_events=True)
        self._profile.__enter__()

    def end(self) -> dict[str, list[str]]:
        """Wait for the device and stop; return the names of the operators, and of the kernels that
        they are."""
        if self._device_type == "cuda":
            torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)
        operators = select_attention(event.key for event in self._profile.key_averages())
        return {
            "attention_operators": operators,
            "attention_kernels": name_kernels(operators),
        }


def select_attention(names: Iterable[str]) -> list[str]:
    """Select the names of attention operators and of FlexAttention's generated kernels.

    >>> select_attention(["aten::mm", "aten::_cudnn_attention_forward", "triton_flex_attention"])
    ['aten::_cudnn_attention_forward', 'triton_flex_attention']
    """
    return sorted(
        {
            name
            for name in names
            if "flex_attention" in name
            or (name.startswith(_NAMESPACES) and ("attention" in name or "attn" in name))
        }
    )


def name_kernels(operators: Iterable[str]) -> list[str]:
    """Name the kernels of attention operators; those that call another one have none.

    >>> name_kernels(["aten::scaled_dot_product_attention", "aten::_cudnn_attention_forward"])
    ['cuDNN']
    """
    lowered = [operator.lower() for operator in operators]
    return sorted(
        {
            kernel
            for part, kernel in _KERNELS.items()
            if any(part in operator for operator in lowered)
        }
    )
