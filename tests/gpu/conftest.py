"""Device and models of the GPU tests.

Every test runs once per device. `[cpu]` belongs to `make test`: it rehearses the test without a GPU
on a smaller model. `[cuda]` has the marker `gpu`, runs in `make gpu`, and skips without CUDA. On a
CPU build of torch `make test` runs it too, on the device of `tests/hostcuda`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from benchmarks.allocated import measure_allocated_bytes

from shardwright.architecture import ModelShape, read_config
from shardwright.numerics.determinism import CUBLAS_VARIABLE

os.environ.setdefault(CUBLAS_VARIABLE, ":4096:8")  # cuBLAS reads it once, when CUDA starts

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 509,
    "hidden_size": 256,
    "intermediate_size": 448,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}
"""Head width 64 and grouped heads, as the flash kernels need them."""
SMALLER_LLAMA = LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
"""Model for CPUs, many of which emulate bf16 products 30 to 100 times slower than fp32."""
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(scope="session", params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


def is_gpu(device: torch.device) -> bool:
    """Return True on a GPU; False on a CPU, and on the test device, which is no faster."""
    return device.type == "cuda" and bool(torch.version.cuda or torch.version.hip)


@pytest.fixture
def config(device: torch.device) -> dict[str, Any]:
    """The config.json of a small Llama."""
    return LLAMA if is_gpu(device) else SMALLER_LLAMA


@pytest.fixture
def shape(config: dict[str, Any]) -> ModelShape:
    """A small Llama."""
    return read_config(config)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Compute fp32 products in fp32, not TF32, independently of earlier tests."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def measure_peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Return the peak of the bytes that `work` allocates beyond those at its start."""
    gc.collect()  # memory freed by a later collection must not offset allocations
    if device.type == "cpu":
        return measure_allocated_bytes(work)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return torch.cuda.max_memory_allocated(device) - before
