"""Codes found by one look-up: those of torchao's binary search, at every threshold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwright.optim import exact_operations
from shardwright.optim.code_places import find_codes
from shardwright.optim.quantised_update import build_places, build_tables

CPU = torch.device("cpu")


def draw(smallest: float) -> Tensor:
    """Draw numbers of all magnitudes."""
    generator = torch.Generator().manual_seed(3)
    uniform, exponents = (torch.rand(300_000, generator=generator) for _ in range(2))
    sizes = torch.cat([uniform, 10.0 ** (-40 * exponents)])
    return torch.cat([sizes, -sizes]) if smallest < 0 else sizes


@pytest.mark.parametrize("kind", ["signed", "unsigned"])
def test_codes_are_torchaos_at_every_threshold(kind: str) -> None:
    torchao = pytest.importorskip("torchao.optim.quant_utils", reason="`lowbit` is missing")
    table = getattr(build_tables(CPU), kind)
    places = getattr(build_places(CPU), kind)
    smallest = min(float(table[0]), 0.0)
    # Between neighbouring values of the table, the code changes close to the middle.
    middles = (table[1:].double() + table[:-1].double()).div(2).float()
    bits = middles.view(torch.int32)
    around = torch.cat([(bits + step).view(torch.float32) for step in range(-64, 65)])
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-38, -1e-38])
    values = torch.cat([table, around, edges, draw(smallest)]).clamp(smallest, 1.0)
    expected = torchao.quantize_8bit_with_qmap(values, table)
    assert torch.equal(find_codes(values, places), expected)
    num_changes = expected[len(table) : len(table) + len(around)].view(129, 255).diff(dim=0) != 0
    assert int(num_changes.sum()) == 255  # `around` has every threshold with its neighbours


def test_quotients_of_blocks_are_the_nearest_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of fp32 numbers are exact in fp64, and so are the remainders of a division."""
    monkeypatch.setattr(
        exact_operations,
        "multiply_add",
        lambda a, b, c: (a.double() * b.double() + c.double()).float(),
    )
    largest = torch.finfo(torch.float32).max
    exponents = torch.linspace(-12, 38, 2000, dtype=torch.float64)
    noise = torch.rand(2000, generator=torch.Generator().manual_seed(4)) + 0.5
    scales = (10.0**exponents * noise).clamp(1e-12, largest).float()
    scales = torch.cat([scales, torch.tensor([largest, torch.inf])])
    fractions = draw(-1.0)[:: 600_000 // 499]
    values = fractions * scales.clamp(max=largest)[:, None]
    found = exact_operations.divide_blocks(values, scales)
    expected = values / scales[:, None]
    is_small = expected.abs() < 2.0**-30
    assert torch.equal(found[~is_small], expected[~is_small])
    assert float(found[is_small].abs().max()) < 2.0**-29
