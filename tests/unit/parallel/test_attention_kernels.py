"""Attention kernels agree with each other, also for queries without a visible key.

Legend: B sequences, H query heads, K key/value heads, L queries, S keys, E head_dim.
"""

from __future__ import annotations

import pytest
import torch

from shardwright.model.dropout import Dropout
from shardwright.parallel.context.attention_kernels import (
    CpuFlashKernel,
    PartialAttention,
    ScoreSettings,
    TileInputs,
    TileVisibility,
    merge_partial,
)
from shardwright.parallel.context.explicit_kernel import ExplicitKernel
from shardwright.parallel.context.tile_kernels import choose_kernel

SCORES = ScoreSettings(scale=0.4)
RANDOM = torch.Generator().manual_seed(4)


def draw_tensor(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=RANDOM, dtype=torch.float64).to(dtype)


def make_visibility_with_empty_rows() -> TileVisibility:
    visible = torch.rand(2, 5, 7, generator=torch.Generator().manual_seed(1)) < 0.5
    visible[0, 3] = visible[1, 0] = False
    return TileVisibility(False, visible, slice(0, 5), torch.arange(7))


@pytest.mark.parametrize("kernel", [CpuFlashKernel(), ExplicitKernel()])
def test_a_query_without_visible_keys_contributes_nothing(
    kernel: CpuFlashKernel | ExplicitKernel,
) -> None:
    q = draw_tensor(2, 4, 5, 8)
    k = draw_tensor(2, 2, 7, 8)
    v = draw_tensor(2, 2, 7, 8)
    visibility = make_visibility_with_empty_rows()
    part = kernel.forward(TileInputs(q, k, v, visibility, SCORES))
    for row, query in ((0, 3), (1, 0)):
        assert torch.equal(
            part.lse_BHL[row, :, query], torch.full((4,), float("-inf"), dtype=torch.float64)
        )
        assert not part.out_BHLV[row, :, query].any()
    merged = PartialAttention(draw_tensor(2, 4, 5, 8), draw_tensor(2, 4, 5))
    before = merged.out_BHLV.clone()
    merge_partial(merged, part)
    assert torch.equal(merged.out_BHLV[0, :, 3], before[0, :, 3])
    gradients = kernel.backward(
        draw_tensor(2, 4, 5, 8), TileInputs(q, k, v, visibility, SCORES), merged
    )
    assert not gradients.q_BHLE[0, :, 3].any()
    assert all(part.isfinite().all() for part in gradients)


@pytest.mark.parametrize("causal", [True, False])
def test_fused_and_explicit_kernels_agree(causal: bool) -> None:
    size = 5 if causal else 7
    q = draw_tensor(2, 4, 5, 8)
    k = draw_tensor(2, 2, size, 8)
    v = draw_tensor(2, 2, size, 8) + 1
    d_out = draw_tensor(2, 4, 5, 8) - 1
    visibility = (
        TileVisibility(True, None, slice(0, 5), torch.arange(5))
        if causal
        else make_visibility_with_empty_rows()
    )
    whole = PartialAttention(draw_tensor(2, 4, 5, 8), draw_tensor(2, 4, 5) + 3)
    for fused_results, explicit_results in (
        (
            CpuFlashKernel().forward(TileInputs(q, k, v, visibility, SCORES)),
            ExplicitKernel().forward(TileInputs(q, k, v, visibility, SCORES)),
        ),
        (
            CpuFlashKernel().backward(d_out, TileInputs(q, k, v, visibility, SCORES), whole),
            ExplicitKernel().backward(d_out, TileInputs(q, k, v, visibility, SCORES), whole),
        ),
    ):
        for fused, explicit in zip(fused_results, explicit_results, strict=True):
            torch.testing.assert_close(fused, explicit, rtol=1e-12, atol=1e-14)


def test_bf16_is_merged_in_fp32() -> None:
    q, k, v = (draw_tensor(2, 4, 5, 8, dtype=torch.bfloat16) for _ in range(3))
    visibility = TileVisibility(True, None, slice(0, 5), torch.arange(5))
    for kernel in (CpuFlashKernel(), ExplicitKernel()):
        part = kernel.forward(TileInputs(q, k, v, visibility, SCORES))
        assert (part.out_BHLV.dtype, part.lse_BHL.dtype) == (torch.bfloat16, torch.float32)
        merged = PartialAttention(torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5))
        merge_partial(merged, part)
        assert merged.out_BHLV.dtype == torch.float32


def test_the_fused_kernel_is_chosen_if_it_computes_the_same() -> None:
    q = draw_tensor(1, 2, 4, 8)
    v = draw_tensor(1, 2, 4, 8)
    dropout = Dropout(torch.zeros(1, 4, dtype=torch.int32))
    assert isinstance(choose_kernel(q, v, SCORES, has_mask=True, is_explicit=False), CpuFlashKernel)
    assert isinstance(choose_kernel(q, v, SCORES, has_mask=False, is_explicit=True), ExplicitKernel)
    assert isinstance(
        choose_kernel(q, v[..., :4], SCORES, has_mask=False, is_explicit=False), ExplicitKernel
    )
    assert isinstance(
        choose_kernel(q, v, ScoreSettings(0.4, soft_cap=2.0), has_mask=False, is_explicit=False),
        ExplicitKernel,
    )
    assert isinstance(
        choose_kernel(
            q, v, ScoreSettings(0.4, None, dropout, 0.1), has_mask=False, is_explicit=False
        ),
        ExplicitKernel,
    )
