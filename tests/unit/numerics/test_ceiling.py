"""The measured matrix-product ceiling."""

from __future__ import annotations

import time

import pytest
import torch

from shardwright.numerics.ceiling import measure_matmul_flops_per_second


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ceiling_is_no_less_than_a_product_timed_here(dtype: torch.dtype) -> None:
    ceiling = measure_matmul_flops_per_second(torch.device("cpu"), dtype)
    a = torch.randn(256, 256).to(dtype)
    began = time.perf_counter()
    for _ in range(3):
        a @ a
    rate = 3 * 2 * 256**3 / (time.perf_counter() - began)
    assert ceiling > rate / 30  # the machine may be busy with other work; a wrong unit would be off by far more
    assert 1e8 < ceiling < 1e16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ceiling_is_measured_once_and_quickly(dtype: torch.dtype) -> None:
    measure_matmul_flops_per_second.cache_clear()
    began = time.perf_counter()
    first = measure_matmul_flops_per_second(torch.device("cpu"), dtype)
    # Half a second on a quiet machine. Products of 1024 x 1024 in fp16 take minutes on CPUs that have no instructions for it.
    assert time.perf_counter() - began < 30.0
    assert measure_matmul_flops_per_second(torch.device("cpu"), dtype) == first
    assert measure_matmul_flops_per_second.cache_info().misses == 1
