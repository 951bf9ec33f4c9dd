"""Rotary embeddings: equal to complex products, in every precision, forward and backward."""

from __future__ import annotations

import pytest
import torch

from shardwright.architecture import RopeShape
from shardwright.model.attention.rope import (
    compute_inverse_frequencies,
    compute_rope_tables,
    rotate,
)


def compute_tables(
    rotary_dim: int, tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    return compute_rope_tables(RopeShape(1e4, rotary_dim), torch.arange(tokens)[None], None, dtype)


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_pairs_rotate_like_complex_numbers(rotary_dim: int) -> None:
    x_BTHE = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    cos, sin = compute_tables(rotary_dim, 5, torch.float64)
    half = rotary_dim // 2
    pairs = (
        torch.complex(x_BTHE[..., :half], x_BTHE[..., half:rotary_dim])
        * torch.complex(cos, sin)[:, :, None]
    )
    expected = torch.cat([pairs.real, pairs.imag, x_BTHE[..., rotary_dim:]], dim=-1)
    torch.testing.assert_close(rotate(x_BTHE, cos, sin), expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_gradient_is_the_inverse_rotation(rotary_dim: int) -> None:
    x_BTHE = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = compute_tables(rotary_dim, 5, torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (x_BTHE,))


def test_rotation_of_a_slice_does_not_change_its_input() -> None:
    fused = torch.randn(2, 5, 3, 24)
    before = fused.clone()
    cos, sin = compute_tables(8, 5, torch.float32)
    rotated = rotate(fused[..., :8], cos, sin)
    assert torch.equal(fused, before)
    torch.testing.assert_close(rotated, rotate(fused[..., :8].contiguous(), cos, sin))


def test_bf16_is_rounded_once() -> None:
    x_BTHE = torch.randn(1, 50, 2, 16).bfloat16()
    cos, sin = compute_tables(16, 50, torch.float32)
    exact = rotate(x_BTHE.float(), cos, sin).bfloat16()
    assert torch.equal(rotate(x_BTHE, cos, sin), exact)


def test_tables_are_computed_in_fp64() -> None:
    """At position 100000 an angle computed in fp32 is off by up to 4e-3."""
    rope = RopeShape(1e4, 64)
    positions = torch.tensor([[100_000]])
    cos, _ = compute_rope_tables(rope, positions, None, torch.float32)
    exact = (positions.double() * compute_inverse_frequencies(rope)).cos()
    assert (cos[0].double() - exact).abs().max() < 1e-7


def test_longrope_chooses_by_the_length_of_each_document() -> None:
    rope = RopeShape(
        1e4,
        4,
        "longrope",
        original_max_position_embeddings=10,
        short_factors=(1.0, 1.0),
        long_factors=(2.0, 3.0),
        factor=2.0,
    )
    positions = torch.tensor([[3, 3]])
    cos, _ = compute_rope_tables(rope, positions, torch.tensor([[10, 11]]), torch.float64)
    short = torch.tensor([3.0, 3.0 * 1e4**-0.5], dtype=torch.float64)
    torch.testing.assert_close(cos[0, 0], short.cos())
    torch.testing.assert_close(cos[0, 1], (short / torch.tensor([2.0, 3.0])).cos())
