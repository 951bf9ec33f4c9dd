"""Device and models of the GPU tests.

They skip for want of CUDA and for nothing else. SHARDWRIGHT_GPU_TESTS=cpu runs them on the CPU: a rehearsal of the tests
themselves, which what only CUDA has (its kernels, NCCL, its allocator) sits out by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardwright.architecture import ModelShape, read_config

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
"""Head width 64 and grouped heads: what the flash kernels take."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The CUDA device."""
    if os.environ.get("SHARDWRIGHT_GPU_TESTS") == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch.device("cuda", 0)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The device, for tests of what only CUDA has."""
    if device.type != "cuda":
        pytest.skip("only CUDA has this")
    return device


@pytest.fixture
def shape() -> ModelShape:
    """A small Llama."""
    return read_config(LLAMA)


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """fp32 products in fp32, not TF32, whatever ran before."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
