"""Blocks of attention: the device's fused kernels (output, log-sum-exp, gradients) against
eager attention in fp64.

Legend: B sequences, H query heads, K key/value heads, L queries, S keys, E head_dim.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.parallel.context.attention_kernels import (
    CpuFlashKernel,
    CudaEfficientKernel,
    CudaFlashKernel,
    PartialAttention,
    ScoreSettings,
    TileInputs,
    TileVisibility,
)
from shardwright.parallel.context.block_mask import RowChunks
from shardwright.parallel.context.explicit_kernel import ExplicitKernel
from shardwright.parallel.context.ring_attention import RowAttentionSettings, RowRanks
from shardwright.parallel.context.row_attention import attend_row
from shardwright.parallel.context.tile_kernels import CudnnKernel, choose_kernel

SCORES = ScoreSettings(scale=0.125)
RANDOM = torch.Generator().manual_seed(4)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def draw(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=RANDOM).to(device=device, dtype=dtype)


def compute_distance(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).detach().norm() / expected.detach().norm())


def make_visibility(
    device: torch.device, kind: str, num_queries: int, num_keys: int
) -> TileVisibility:
    visible = None
    if kind == "masked":
        visible = (
            torch.rand(2, num_queries, num_keys, generator=torch.Generator().manual_seed(1)).to(
                device
            )
            < 0.5
        )
        visible[0, 3] = False  # attends to no key
    return TileVisibility(
        kind == "causal", visible, slice(0, num_queries), torch.arange(num_keys, device=device)
    )


CUDA_BLOCKS: list[tuple[Any, torch.dtype, str]] = [
    (CudaFlashKernel(), torch.bfloat16, "causal"),
    (CudaFlashKernel(), torch.bfloat16, "full"),
    (CudaFlashKernel(), torch.float16, "causal"),
    (CudnnKernel(), torch.bfloat16, "causal"),
    (CudnnKernel(), torch.bfloat16, "full"),
    (CudnnKernel(), torch.float16, "causal"),
    (CudaEfficientKernel(), torch.float32, "causal"),
    (CudaEfficientKernel(), torch.float32, "full"),
    (CudaEfficientKernel(), torch.float32, "masked"),
    (CudaEfficientKernel(), torch.bfloat16, "masked"),
]
CPU_BLOCKS: list[tuple[Any, torch.dtype, str]] = [
    (CpuFlashKernel(), torch.bfloat16, "causal"),
    (CpuFlashKernel(), torch.float32, "causal"),
    (CpuFlashKernel(), torch.float32, "full"),
    (CpuFlashKernel(), torch.float32, "masked"),
]


@pytest.mark.parametrize(
    ("device", "kernel", "dtype", "kind"),
    [
        *(pytest.param("cuda", *block, marks=pytest.mark.gpu) for block in CUDA_BLOCKS),
        *(pytest.param("cpu", *block) for block in CPU_BLOCKS),
    ],
    indirect=["device"],
)
def test_a_block_equals_explicit_products(
    device: torch.device, kernel: Any, dtype: torch.dtype, kind: str
) -> None:
    if isinstance(kernel, CudnnKernel) and not torch.backends.cudnn.is_available():
        pytest.skip("this PyTorch has no cuDNN")
    num_queries = 50  # no multiple of the alignment of kernels
    num_keys = 50 if kind == "causal" else 83
    q, k, v = (
        draw(device, dtype, 2, heads, size, 64)
        for heads, size in ((4, num_queries), (2, num_keys), (2, num_keys))
    )
    d_out = draw(device, dtype, 2, 4, num_queries, 64)
    visibility = make_visibility(device, kind, num_queries, num_keys)
    exact = ExplicitKernel()
    tile = TileInputs(q, k, v, visibility, SCORES)
    exact_tile = TileInputs(q.double(), k.double(), v.double(), visibility, SCORES)
    expected_block = exact.forward(exact_tile)
    got = kernel.forward(tile)
    assert compute_distance(got.out_BHLV, expected_block.out_BHLV) < TOLERANCE[dtype]
    finite = expected_block.lse_BHL.isfinite()
    assert torch.equal(got.lse_BHL.isfinite(), finite)
    assert compute_distance(got.lse_BHL[finite], expected_block.lse_BHL[finite]) < TOLERANCE[dtype]
    # As one block of a longer row, whose log-sum-exp is larger and whose output differs.
    whole = PartialAttention(
        (expected_block.out_BHLV * 0.7).to(dtype),
        expected_block.lse_BHL.clamp(min=0.0).float() + 0.5,
    )
    exact_whole = PartialAttention(whole.out_BHLV.double(), whole.lse_BHL.double())
    expected_gradients = exact.backward(d_out.double(), exact_tile, exact_whole)
    for got_gradient, expected in zip(
        kernel.backward(d_out, tile, whole), expected_gradients, strict=True
    ):
        assert compute_distance(got_gradient, expected) < 3 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("documents", [False, True])
def test_a_row_on_one_rank_equals_dense_attention(
    device: torch.device, dtype: torch.dtype, documents: bool
) -> None:
    q, k, v = (draw(device, dtype, 2, heads, 96, 64) for heads in (4, 2, 2))
    leaves = [part.requires_grad_() for part in (q, k, v)]
    ids_BT = (torch.arange(96, device=device) // 31).expand(2, -1) if documents else None
    settings = RowAttentionSettings(
        RowRanks(None), RowChunks.from_documents(96, ((0, 1, 2, 3),), ids_BT), SCORES
    )
    got = attend_row(q, k, v, None, settings)
    exact = [part.detach().double().requires_grad_() for part in leaves]
    visible = torch.ones(96, 96, dtype=torch.bool, device=device).tril()
    if ids_BT is not None:
        visible = visible & (ids_BT[0, :, None] == ids_BT[0])
    expected_block = torch.nn.functional.scaled_dot_product_attention(
        *exact, visible, scale=0.125, enable_gqa=True
    )
    assert compute_distance(got, expected_block) < TOLERANCE[dtype]
    d_out = draw(device, dtype, 2, 4, 96, 64)
    for got_gradient, expected in zip(
        torch.autograd.grad(got, leaves, d_out),
        torch.autograd.grad(expected_block, exact, d_out.double()),
        strict=True,
    ):
        assert compute_distance(got_gradient, expected) < 3 * TOLERANCE[dtype]


@pytest.mark.parametrize(("kernel", "dtype", "kind"), CUDA_BLOCKS)
def test_cuda_kernels_return_the_shapes_of_explicit_products(
    kernel: Any, dtype: torch.dtype, kind: str
) -> None:
    """Without a GPU: the operators' shape rules accept our arguments on the meta device."""
    meta = torch.device("meta")
    num_queries = 50
    num_keys = 50 if kind == "causal" else 83
    q, k, v = (
        draw(meta, dtype, 2, heads, size, 64)
        for heads, size in ((4, num_queries), (2, num_keys), (2, num_keys))
    )
    d_out = draw(meta, dtype, 2, 4, num_queries, 64)
    visibility = make_visibility(meta, kind, num_queries, num_keys)
    tile = TileInputs(q, k, v, visibility, SCORES)
    whole = kernel.forward(tile)
    expected_block = ExplicitKernel().forward(tile)
    for got_gradient, expected in zip(
        (*whole, *kernel.backward(d_out, tile, whole)),
        (*expected_block, *ExplicitKernel().backward(d_out, tile, expected_block)),
        strict=True,
    ):
        assert (got_gradient.shape, got_gradient.dtype) == (expected.shape, expected.dtype)


def test_the_fastest_exact_kernel_is_chosen(device: torch.device) -> None:
    def kernel(dtype: torch.dtype, width: int, *, masked: bool) -> Any:
        q = torch.empty(1, 2, 4, width, dtype=dtype, device=device)
        visibility = make_visibility(device, "masked" if masked else "causal", 4, 4)
        return type(choose_kernel(TileInputs(q, q, q, visibility, SCORES), is_explicit=False))

    is_cuda = device.type == "cuda"
    # cuDNN's, where PyTorch prefers it, once a comparison has found it equal to flash attention.
    fast = {CudaFlashKernel, CudnnKernel} if is_cuda else {CpuFlashKernel}
    assert kernel(torch.bfloat16, 64, masked=False) in fast
    assert kernel(torch.bfloat16, 64, masked=True) is (
        CudaEfficientKernel if is_cuda else CpuFlashKernel
    )
    assert kernel(torch.float32, 64, masked=False) is (
        CudaEfficientKernel if is_cuda else CpuFlashKernel
    )
    assert kernel(torch.float32, 12, masked=False) is (
        ExplicitKernel if is_cuda else CpuFlashKernel
    )
    assert kernel(torch.float64, 64, masked=False) is (
        ExplicitKernel if is_cuda else CpuFlashKernel
    )
