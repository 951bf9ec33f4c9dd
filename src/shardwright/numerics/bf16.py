"""How fast this device multiplies bf16, measured, and what `precision: auto` therefore means on it.

CPUs without avx512_bf16, AMX or their like emulate bf16 products, some a hundred times slower than
fp32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch

from shardwright.plan import PrecisionChoice

_SIZES = (256, 512, 1024, 2048)
_DECISIVE_RATIO = 4.0
"""If one dtype is so many times faster, no larger size is measured: emulation shows at once."""
_LONG_ENOUGH_SECONDS = 2e-3
"""Products of this length outweigh the start of the threads, so that a larger size adds nothing."""
_NATIVE_CAPABILITY = (8, 0)
"""CUDA's compute capability from which on tensor cores multiply bf16."""


@cache
def measure_bf16_ratio(device: torch.device) -> float:
    """Measure the speed of bf16 products on this device, as a multiple of fp32's.

    Below 1 bf16 is slower; 0.03 is usual where it is emulated. Measured once per process, in 20 to 100
    milliseconds; on a CPU by the processor time of one thread, so that other programs do not matter.
    """
    ratio = math.nan
    with _one_thread() if device.type == "cpu" else nullcontext():
        for size in _SIZES:
            fp32 = _seconds_of_products(size, device, torch.float32)
            bf16 = _seconds_of_products(size, device, torch.bfloat16)
            ratio = fp32 / bf16
            is_decisive = not 1 / _DECISIVE_RATIO < ratio < _DECISIVE_RATIO
            if is_decisive or max(fp32, bf16) > _LONG_ENOUGH_SECONDS:
                break
    return ratio


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds_of_products(size: int, device: torch.device, dtype: torch.dtype) -> float:
    """Time the products of a linear layer, forward and both gradients; the best of three rounds.

    All three, because where bf16 is emulated they differ by a factor of ten.
    """
    x, weight = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    forward = _best_seconds(lambda: x @ weight.t(), device)
    input_gradient = _best_seconds(lambda: x @ weight, device)
    return forward + input_gradient + _best_seconds(lambda: x.t() @ weight, device)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    best, read_clock = math.inf, time.thread_time if device.type == "cpu" else time.perf_counter
    for num_runs in range(4):  # the first one warms up
        if num_runs >= 2 and best > _LONG_ENOUGH_SECONDS:
            break
        began = read_clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, read_clock() - began)
    return best


def choose_precision(device: torch.device) -> PrecisionChoice:
    """Choose what `precision: auto` means: bf16 if the device multiplies it natively, or else fp32."""
    if device.type == "cuda":
        return _choose_on_cuda(device)
    ratio = measure_bf16_ratio(device)
    if ratio > 1.0:
        where = f"on this {device.type.upper()}"
        return PrecisionChoice("bf16", f"bf16 products are {ratio:.2g} times as fast as fp32 {where}")
    return PrecisionChoice("fp32", describe_emulation(device, ratio))


def _choose_on_cuda(device: torch.device) -> PrecisionChoice:
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if torch.version.hip is not None:  # its numbers of architectures are none of CUDA's
        return PrecisionChoice("bf16", f"{name} multiplies bf16 natively")
    told = f"{name} (compute capability {capability[0]}.{capability[1]})"
    if capability >= _NATIVE_CAPABILITY:
        return PrecisionChoice("bf16", f"{told} multiplies bf16 natively")
    return PrecisionChoice("fp32", f"{told} has no bf16 units")


def describe_emulation(device: torch.device, ratio: float) -> str:
    """Why bf16 does not pay on a device, from the ratio of `measure_bf16_ratio`."""
    return f"bf16 is emulated on this {device.type.upper()}, {1 / ratio:.2g} times slower than fp32"


def caution_of_bf16(device: torch.device) -> str | None:
    """Word the warning of a device that multiplies bf16 more slowly than fp32; None for another."""
    if choose_precision(device).kind == "bf16":
        return None
    ratio = measure_bf16_ratio(device)
    if ratio >= 1.0:  # a GPU without bf16 units may still gain from moving half the bytes
        return None
    told = describe_emulation(device, ratio)
    return f"{told}: training in bf16 all the same, as the recipe or the run says"
