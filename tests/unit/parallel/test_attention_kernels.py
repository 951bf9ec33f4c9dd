"""Attention kernels agree with each other, also for queries without a visible key.

Legend: B sequences, H query heads, K key/value heads, L queries, S keys, E head_dim.
"""

from __future__ import annotations

import pytest
import torch

from shardwright.model.dropout import Dropout
from shardwright.parallel.context import explicit_kernel, tile_kernels
from shardwright.parallel.context.attention_kernels import (
    AttentionKernel,
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


def check_kernels_agree(
    kernel: AttentionKernel, explicit: ExplicitKernel, tile: TileInputs
) -> None:
    d_out = draw_tensor(*tile.q_BHLE.shape[:3], tile.v_BKSV.shape[-1]) - 1
    whole = PartialAttention(torch.randn_like(d_out), draw_tensor(*tile.q_BHLE.shape[:3]) + 3)
    for found, expected in zip(
        (*kernel.forward(tile), *kernel.backward(d_out, tile, whole)),
        (*explicit.forward(tile), *explicit.backward(d_out, tile, whole)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("causal", [True, False])
def test_fused_and_explicit_kernels_agree(causal: bool) -> None:
    size = 5 if causal else 7
    q = draw_tensor(2, 4, 5, 8)
    k = draw_tensor(2, 2, size, 8)
    v = draw_tensor(2, 2, size, 8) + 1
    visibility = (
        TileVisibility(True, None, slice(0, 5), torch.arange(5))
        if causal
        else make_visibility_with_empty_rows()
    )
    check_kernels_agree(CpuFlashKernel(), ExplicitKernel(), TileInputs(q, k, v, visibility, SCORES))


def test_bf16_is_merged_in_fp32() -> None:
    q, k, v = (draw_tensor(2, 4, 5, 8, dtype=torch.bfloat16) for _ in range(3))
    visibility = TileVisibility(True, None, slice(0, 5), torch.arange(5))
    for kernel in (CpuFlashKernel(), ExplicitKernel()):
        part = kernel.forward(TileInputs(q, k, v, visibility, SCORES))
        assert (part.out_BHLV.dtype, part.lse_BHL.dtype) == (torch.bfloat16, torch.float32)
        merged = PartialAttention(torch.zeros(2, 4, 5, 8), torch.zeros(2, 4, 5))
        merge_partial(merged, part)
        assert merged.out_BHLV.dtype == torch.float32


def choose(
    q: torch.Tensor, v: torch.Tensor, scores: ScoreSettings, *, is_explicit: bool = False
) -> AttentionKernel:
    visibility = make_visibility_with_empty_rows()
    return choose_kernel(TileInputs(q, q, v, visibility, scores), is_explicit=is_explicit)


def test_the_fused_kernel_is_chosen_if_it_computes_the_same() -> None:
    q = draw_tensor(1, 2, 4, 8)
    v = draw_tensor(1, 2, 4, 8)
    dropout = Dropout(torch.zeros(1, 4, dtype=torch.int32))
    assert isinstance(choose(q, v, SCORES), CpuFlashKernel)
    assert isinstance(choose(q, v, SCORES, is_explicit=True), ExplicitKernel)
    assert isinstance(choose(q, v[..., :4], SCORES), ExplicitKernel)
    assert isinstance(choose(q, v, ScoreSettings(0.4, soft_cap=2.0)), ExplicitKernel)
    assert isinstance(choose(q, v, ScoreSettings(0.4, None, dropout, 0.1)), ExplicitKernel)


def test_every_choice_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    tile_kernels._log_choice.cache_clear()
    q = draw_tensor(1, 2, 4, 8)
    with caplog.at_level("INFO"):
        for _ in range(2):
            choose(q, q, SCORES)
            choose(q, q[..., :4], SCORES)
            choose(q, q, ScoreSettings(0.4, soft_cap=2.0))
    assert [record.getMessage() for record in caplog.records] == [
        "attention over parts of the keys: flash attention (on a CPU)",
        "attention over parts of the keys: eager attention (values are 4 wide and keys 8)",
        "attention over parts of the keys: eager attention (soft caps have no fused kernel over "
        "parts of the keys)",
    ]


@pytest.mark.parametrize("block_queries", [1, 2, 3])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_of_queries_compute_the_whole_tile(
    causal: bool, soft_cap: float | None, block_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Largest scores of 2 rows, 4 heads and all keys, in float64; dropout by place in the row."""
    size = 5 if causal else 7
    visibility = (
        TileVisibility(True, None, slice(2, 7), torch.arange(5))
        if causal
        else make_visibility_with_empty_rows()._replace(query_slice=slice(2, 7))
    )
    keys = torch.arange(18, dtype=torch.int32).view(2, 9)
    tile = TileInputs(
        draw_tensor(2, 4, 5, 8),
        draw_tensor(2, 2, size, 8),
        draw_tensor(2, 2, size, 8),
        visibility,
        ScoreSettings(0.4, soft_cap, Dropout(keys), 0.3),
    )
    whole = ExplicitKernel()
    expected = whole.forward(tile)
    row = PartialAttention(draw_tensor(2, 4, 5, 8), draw_tensor(2, 4, 5) + 3)
    d_out = draw_tensor(2, 4, 5, 8)
    gradients = whole.backward(d_out, tile, row)
    monkeypatch.setattr(explicit_kernel, "MAX_SCORE_BYTES", 2 * 4 * size * 8 * block_queries)
    largest = 0
    exp = torch.exp

    def watch(scores: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, scores.numel())
        return exp(scores)

    monkeypatch.setattr(torch, "exp", watch)
    found = (*whole.forward(tile), *whole.backward(d_out, tile, row))
    assert 0 < largest <= 2 * 4 * size * block_queries
    for part, whole_part in zip(found, (*expected, *gradients), strict=True):
        torch.testing.assert_close(part, whole_part, rtol=1e-12, atol=1e-14)
