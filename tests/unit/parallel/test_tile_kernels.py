"""cuDNN's attention over tiles: its arguments, its choice, and rows made of its parts.

A CPU has no cuDNN. Its operators are registered here with eager attention over the numbers that
they get, and with the shapes of torch's own rules.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from shardwright.parallel.context import tile_kernels
from shardwright.parallel.context.attention_kernels import (
    CudaFlashKernel,
    PartialAttention,
    ScoreSettings,
    TileInputs,
    TileVisibility,
)
from shardwright.parallel.context.block_mask import RowChunks
from shardwright.parallel.context.explicit_kernel import ExplicitKernel
from shardwright.parallel.context.ring_attention import (
    RowAttentionSettings,
    RowRanks,
    compute_row_gradients,
    compute_row_output,
)
from shardwright.parallel.context.tile_kernels import CudnnKernel, agrees_with_flash, choose_kernel

SCORES = ScoreSettings(scale=0.3)
RANDOM = torch.Generator().manual_seed(4)
CALLS: list[str] = []
LSE_OFFSETS = [0.0]
"""Added to the log-sum-exp of cuDNN's operator."""


def make_visibility(is_causal: bool, num_queries: int, num_keys: int) -> TileVisibility:
    return TileVisibility(is_causal, None, slice(0, num_queries), torch.arange(num_keys))


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: Any) -> Any:
    CALLS.append(f"{name} {tuple(k.shape)}")
    visibility = make_visibility(is_causal, q.shape[2], k.shape[2])
    return ExplicitKernel().forward(TileInputs(q, k, v, visibility, ScoreSettings(scale)))


def differentiate(
    name: str, d_out: Tensor, inputs: Any, row: PartialAttention, is_causal: bool, scale: Any
) -> Any:
    q, k, _ = inputs
    CALLS.append(f"{name} backward {tuple(k.shape)}")
    assert d_out.is_contiguous()
    assert row.out_BHLV.is_contiguous()
    assert row.out_BHLV.dtype == q.dtype
    visibility = make_visibility(is_causal, q.shape[2], k.shape[2])
    return ExplicitKernel().backward(
        d_out, TileInputs(*inputs, visibility, ScoreSettings(scale)), row
    )


def run_cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    has_lse: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float,
) -> tuple[Any, ...]:
    assert (bias, has_lse, dropout) == (None, True, 0.0)
    part = attend("cudnn", q, k, v, is_causal, scale)
    seed = torch.zeros((), dtype=torch.int64)
    lse = part.lse_BHL.unsqueeze(-1) + LSE_OFFSETS[0]
    none = torch.empty(0)
    return part.out_BHLV, lse, none, none, q.shape[2], k.shape[2], seed, seed, none


def run_cudnn_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
    scale: float,
) -> tuple[Any, ...]:
    _seed, _offset, bias, *_starts, num_queries, num_keys, dropout, is_causal = options
    assert (bias, dropout) == (None, 0.0)
    assert (num_queries, num_keys) == (q.shape[2], k.shape[2])
    assert lse.shape == (*q.shape[:3], 1)
    assert lse.is_contiguous()
    row = PartialAttention(out, lse.squeeze(-1))
    return tuple(differentiate("cudnn", d_out, (q, k, v), row, is_causal, scale))


def run_flash(
    q: Tensor, k: Tensor, v: Tensor, _dropout: float = 0.0, is_causal: bool = False, *, scale: float
) -> tuple[Any, ...]:
    part = attend("flash", q, k, v, is_causal, scale)
    none = torch.empty(0)
    return *part, none, none, q.shape[2], k.shape[2], none, none, none


def run_flash_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
    scale: float,
) -> tuple[Any, ...]:
    row = PartialAttention(out, lse)
    return tuple(differentiate("flash", d_out, (q, k, v), row, options[5], scale))


@pytest.fixture(autouse=True)
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the operators for CPU tensors, and let PyTorch prefer cuDNN's."""
    library = torch.library.Library("aten", "IMPL")
    name = "_scaled_dot_product_{}_attention{}"
    for kernel, forward, backward in (
        ("cudnn", run_cudnn, run_cudnn_backward),
        ("flash", run_flash, run_flash_backward),
    ):
        library.impl(name.format(kernel, ""), forward, "CPU", allow_override=True)
        library.impl(name.format(kernel, "_backward"), backward, "CPU", allow_override=True)
    monkeypatch.setattr(
        torch, "_fused_sdp_choice", lambda *_, **__: SDPBackend.CUDNN_ATTENTION.value
    )
    agrees_with_flash.cache_clear()
    CALLS.clear()
    yield
    agrees_with_flash.cache_clear()
    library._destroy()


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=RANDOM, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_tile_equals_explicit_products(is_causal: bool) -> None:
    q = draw(2, 4, 6, 8)
    k = draw(2, 2, 6 if is_causal else 9, 8)
    v = draw(2, 2, 6 if is_causal else 9, 8)
    visibility = make_visibility(is_causal, 6, k.shape[2])
    row = PartialAttention(draw(2, 4, 12, 8)[:, :, ::2], draw(2, 4, 12)[:, :, ::2] + 3)
    d_out = draw(2, 4, 12, 8)[:, :, ::2]
    for kernel in (CudnnKernel(), ExplicitKernel()):
        part = kernel.forward(TileInputs(q, k, v, visibility, SCORES))
        gradients = kernel.backward(d_out, TileInputs(q, k, v, visibility, SCORES), row)
        if isinstance(kernel, CudnnKernel):
            found = (*part, *gradients)
        else:
            for number, expected in enumerate((*part, *gradients)):
                torch.testing.assert_close(found[number], expected, rtol=1e-12, atol=1e-14)
    assert [f"cudnn {tuple(k.shape)}", f"cudnn backward {tuple(k.shape)}"] == CALLS


def test_a_row_of_tiles_equals_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    # The chunks of a rank are in another order than in the row, so that none is one tile.
    q, k, v = (draw(1, heads, 16, 8).requires_grad_() for heads in (4, 2, 2))
    settings = RowAttentionSettings(
        RowRanks(None), RowChunks.from_documents(16, ((2, 0, 3, 1),), None), SCORES
    )
    places_T = settings.row_chunks.token_indices((2, 0, 3, 1), q.device)
    visible_TT = places_T[:, None] >= places_T
    module = "shardwright.parallel.context.ring_attention"
    monkeypatch.setattr(f"{module}.choose_kernel", lambda *_, **__: CudnnKernel())
    expected = F.scaled_dot_product_attention(q, k, v, visible_TT, scale=0.3, enable_gqa=True)
    d_out = draw(1, 4, 16, 8)
    wanted = torch.autograd.grad(expected, (q, k, v), d_out)
    with torch.no_grad():
        out, lse = compute_row_output(q, k, v, None, settings)
        num_tiles = len(CALLS)
        gradients = compute_row_gradients(d_out, q, k, v, None, out, lse, settings)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    for found, exact in zip(gradients, wanted, strict=False):
        assert found is not None
        torch.testing.assert_close(found, exact, rtol=1e-11, atol=1e-13)
    # One call for each tile in each direction, whose key heads are not repeated.
    assert num_tiles >= 8
    assert len(CALLS) == 2 * num_tiles
    assert all(call.startswith("cudnn") and "(1, 2, " in call for call in CALLS)


def choose(dtype: torch.dtype = torch.bfloat16, *, num_groups: int = 2) -> Any:
    """Choose the kernel for a tile without a mask as on CUDA."""
    q = draw(1, 4, 6, 16, dtype=dtype)
    return tile_kernels._choose_half_precision_kernel(q, draw(1, num_groups, 6, 16), SCORES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiles_take_the_kernel_of_plain_attention(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        kernels = [choose(dtype) for _ in range(3)]
    assert {type(kernel) for kernel in kernels} == {CudnnKernel}
    assert [record.message for record in caplog.records] == [
        "context parallelism: tiles without a mask take cuDNN's attention"
    ]
    num_calls = len(CALLS)
    choose(dtype, num_groups=4)  # compared for itself
    assert len(CALLS) == 2 * num_calls
    flash = SDPBackend.FLASH_ATTENTION.value
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: flash)
    assert isinstance(choose(dtype), CudaFlashKernel)


def test_another_log_sum_exp_is_found(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.LSE_OFFSETS", [0.7])
    with caplog.at_level(logging.INFO):
        assert isinstance(choose(), CudaFlashKernel)
    assert "cuDNN's differs" in caplog.text


def test_a_kernel_that_fails_is_not_chosen(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no valid execution plans")

    monkeypatch.setattr(CudnnKernel, "backward", fail)
    with caplog.at_level(logging.INFO):
        assert isinstance(choose(), CudaFlashKernel)
    assert "no valid execution plans" in caplog.text


def test_masked_tiles_and_single_precision_are_not_cudnns() -> None:
    q = draw(1, 4, 6, 16, dtype=torch.bfloat16)
    tile = TileInputs(q, q, q, make_visibility(True, 6, 6), SCORES)
    kernel = choose_kernel(tile, is_explicit=False)
    assert not isinstance(kernel, CudnnKernel)  # on a CPU
    assert CALLS == []
