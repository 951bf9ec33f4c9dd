"""`torch.profiler.profile`, whose kernels are the operators on tensors of the test device.

Import it after the library is loaded: it imports torch.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import ProfilerActivity

_profile = torch.profiler.profile
_STREAM = 7
"""Thread of a trace on which CUDA's default stream is shown."""
_COMPOSED = {
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm_v2"),
        *("_fused_rms_norm", "_fused_rms_norm_backward", "silu_backward"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
        *("_flash_attention_forward", "_flash_attention_backward"),
    )
}
"""Operators that one kernel of CUDA runs, and several operators of the test device."""

_WITHOUT_KERNEL = {
    f"aten::{name}"
    for name in (
        *("empty", "empty_strided", "as_strided", "resize_", "set_", "detach", "alias"),
        *("t", "transpose", "permute", "view", "reshape", "_unsafe_view", "_reshape_alias"),
        *("expand", "unsqueeze", "squeeze", "slice", "select", "narrow", "split", "unbind"),
    )
}
"""Operators that allocate memory or return a view of it."""


class DeviceProfile(_profile):
    """Profile of the host; with the activity CUDA, an operator that calls no other one is a kernel,
    which runs while the operator does."""

    def __init__(
        self, *, activities: Iterable[ProfilerActivity] | None = None, **options: Any
    ) -> None:
        self._has_device = ProfilerActivity.CUDA in (activities or [ProfilerActivity.CUDA])
        self._has_host = ProfilerActivity.CPU in (activities or [ProfilerActivity.CPU])
        super().__init__(activities=[ProfilerActivity.CPU], **options)

    def export_chrome_trace(self, path: str) -> None:
        """Write the trace, with launches and kernels."""
        super().export_chrome_trace(path)
        if not self._has_device:
            return
        is_compressed = path.endswith(".gz")
        content = Path(path).read_bytes()
        document = json.loads(gzip.decompress(content) if is_compressed else content)
        document["traceEvents"] += _list_kernels(document["traceEvents"])
        content = json.dumps(document).encode()
        Path(path).write_bytes(gzip.compress(content) if is_compressed else content)

    def key_averages(self, *arguments: Any, **options: Any) -> Any:
        """Return the averages by name: those of the host, and a second time as kernels."""
        averages = super().key_averages(*arguments, **options)
        if not self._has_device:
            return averages
        kernels = [
            SimpleNamespace(
                key=each.key,
                count=each.count,
                is_user_annotation=False,
                device_type=torch.autograd.DeviceType.CUDA,
                self_device_time_total=each.self_cpu_time_total,
            )
            for each in averages
            if _runs_on_device(each.key)
        ]
        return [*averages, *kernels] if self._has_host else kernels


def _runs_on_device(name: str) -> bool:
    return name.startswith("aten::") and name not in _WITHOUT_KERNEL


def _list_kernels(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a launch and a kernel for each operator that runs one."""
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    operators.sort(key=lambda event: (event["tid"], event["ts"], -event["dur"]))
    added = []
    thread = None
    kernel_end = 0.0
    for number, (event, following) in enumerate(
        zip(operators, [*operators[1:], None], strict=True)
    ):
        end = event["ts"] + event["dur"]
        is_inside = event["tid"] == thread and event["ts"] < kernel_end
        has_inner = (
            following is not None and following["tid"] == event["tid"] and following["ts"] < end
        )
        is_kernel = event["name"] in _COMPOSED or not has_inner
        if is_inside or not is_kernel or not _runs_on_device(event["name"]):
            continue
        thread = event["tid"]
        kernel_end = end
        common = {"ph": "X", "pid": event["pid"], "ts": event["ts"]}
        common["args"] = {"correlation": number}
        launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": thread, "dur": 0}
        kernel = {"cat": "kernel", "name": event["name"], "tid": _STREAM, "dur": event["dur"]}
        added += [common | launch, common | kernel]
    return added


def install() -> None:
    """Replace the profiler for the rest of this process."""
    torch.profiler.profile = DeviceProfile  # type: ignore[misc]
