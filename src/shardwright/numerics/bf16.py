"""Measured speed of bf16 products on this device, and the choice of `precision: auto` from it.

CPUs without avx512_bf16, AMX or similar instructions emulate bf16 products, some a hundred
times slower than fp32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch

from shardwright.plans import PrecisionChoice

_SIZES = (256, 512, 1024, 2048)
_DECISIVE_RATIO = 4.0
"""If one dtype is this many times faster, no larger size is measured: emulation shows at once.
"""
_MIN_TIMED_SECONDS = 2e-3
"""Above this duration the start of the threads is negligible, so a larger size adds nothing."""
_NATIVE_CAPABILITY = (8, 0)
"""First CUDA compute capability whose tensor cores multiply bf16."""


@cache
def measure_bf16_ratio(device: torch.device) -> float:
    """Measure the speed of bf16 products on this device, as a multiple of fp32's.

    Below 1 bf16 is slower; 0.03 is usual where it is emulated. Measured once per process, in 20
    to 100 milliseconds; on a CPU by the processor time of one thread, so that other programs do
    not matter.
    """
    ratio = math.nan
    with _use_one_thread() if device.type == "cpu" else nullcontext():
        for size in _SIZES:
            fp32 = _time_products(size, device, torch.float32)
            bf16 = _time_products(size, device, torch.bfloat16)
            ratio = fp32 / bf16
            is_decisive = not 1 / _DECISIVE_RATIO < ratio < _DECISIVE_RATIO
            if is_decisive or max(fp32, bf16) > _MIN_TIMED_SECONDS:
                break
    return ratio


@contextmanager
def _use_one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _time_products(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """Time the products of a linear layer, forward and backward; the best of three rounds.

    All three products are timed because they differ by a factor of ten where bf16 is emulated.
    """
    x, weight = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    forward = _time_best(lambda: x @ weight.t(), device)
    input_gradient = _time_best(lambda: x @ weight, device)
    return forward + input_gradient + _time_best(lambda: x.t() @ weight, device)


def _time_best(work: Callable[[], object], device: torch.device) -> float:
    best = math.inf
    read_clock = time.thread_time if device.type == "cpu" else time.perf_counter
    for num_runs in range(4):  # the first one warms up
        if num_runs >= 2 and best > _MIN_TIMED_SECONDS:
            break
        start = read_clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, read_clock() - start)
    return best


def choose_precision(device: torch.device) -> PrecisionChoice:
    """Resolve `precision: auto`: bf16 if the device multiplies it natively, otherwise fp32."""
    if device.type == "cuda":
        return _choose_on_cuda(device)
    ratio = measure_bf16_ratio(device)
    if ratio > 1.0:
        where = f"on this {device.type.upper()}"
        return PrecisionChoice(
            "bf16", f"bf16 products are {ratio:.2g} times as fast as fp32 {where}"
        )
    return PrecisionChoice("fp32", describe_emulation(device, ratio))


def _choose_on_cuda(device: torch.device) -> PrecisionChoice:
    name = torch.cuda.get_device_name(device)
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None:  # ROCm's architecture numbers are not CUDA's
        return PrecisionChoice("bf16", f"{name} multiplies bf16 natively")
    device_text = f"{name} (compute capability {capability[0]}.{capability[1]})"
    if capability >= _NATIVE_CAPABILITY:
        return PrecisionChoice("bf16", f"{device_text} multiplies bf16 natively")
    return PrecisionChoice("fp32", f"{device_text} has no bf16 units")


def describe_emulation(device: torch.device, ratio: float) -> str:
    """Describe why bf16 is slow on a device, from the ratio of `measure_bf16_ratio`."""
    return f"bf16 is emulated on this {device.type.upper()}, {1 / ratio:.2g} times slower than fp32"


def build_bf16_warning(device: torch.device) -> str | None:
    """Build the warning for a device that multiplies bf16 more slowly than fp32, else None."""
    if choose_precision(device).kind == "bf16":
        return None
    ratio = measure_bf16_ratio(device)
    if ratio >= 1.0:  # a GPU without bf16 units may still gain from moving half the bytes
        return None
    emulation = describe_emulation(device, ratio)
    return f"{emulation}; training still uses bf16, as the recipe or the run requires"
