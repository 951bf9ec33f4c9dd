"""Codes of weights that are quantised once per update: those of a quantisation in each product."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from shardwright.architecture import ExpertShape, read_config
from shardwright.model.decoder import Decoder
from shardwright.model.moe import ExpertStack
from shardwright.model.products.fp8 import QuantisedMatrix
from shardwright.model.products.linear import Linear
from shardwright.model.products.operand import PRODUCT_SCALINGS, list_compiler_options
from shardwright.model.products.scaled_product import RoundingTotals, ScaledProducts
from shardwright.model.products.working_operands import (
    WorkingOperands,
    fill_operands,
    list_tensors,
)
from shardwright.model.products.working_weights import copy_weights
from shardwright.numerics.function_compiler import compile_function
from tests.reference import cases

CASES = [
    (name, is_transposed, has_experts)
    for name, is_transposed, has_experts in product(PRODUCT_SCALINGS, (False, True), (False, True))
    if not (name == "tensorwise" and has_experts)  # refused
]


def build_layer(
    name: str, *, is_transposed: bool = False, has_experts: bool = False, is_emulated: bool = True
) -> Linear | ExpertStack:
    layer: Linear | ExpertStack
    if has_experts:
        layout = "in_out" if is_transposed else "out_in"
        experts = mock.Mock(spec=ExpertShape, num_experts=2, matrix_layout=layout)
        experts.expert_bias = False
        layer = ExpertStack(experts, 128, 256)
    else:
        layer = Linear(128, 256, bias=False, transposed=is_transposed)
    nn.init.normal_(layer.weight, std=0.02, generator=torch.Generator().manual_seed(1))
    layer.scaled = ScaledProducts(PRODUCT_SCALINGS[name], name, is_emulated=is_emulated)
    return layer


def differentiate(layer: Linear | ExpertStack, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Compute an output and its gradients."""
    x = torch.randn(160, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    x.requires_grad_()
    counts = [torch.tensor([32, 128])] if isinstance(layer, ExpertStack) else []
    output = layer(x, *counts)
    output.float().square().sum().backward()
    results = [output, x.grad, layer.weight.grad]
    layer.weight.grad = None
    return [result.detach() for result in results if result is not None]


def assert_equal_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    for left, right in zip(found, expected, strict=True):
        assert left.dtype == right.dtype
        left, right = (each.contiguous().view(torch.uint8) for each in (left, right))
        assert torch.equal(left, right)


def read_bytes(operands: WorkingOperands | None) -> list[Tensor]:
    assert operands is not None
    return [tensor for operand in operands.list_sets() for tensor in list_tensors(operand)]


@pytest.mark.parametrize(("name", "is_transposed", "has_experts"), CASES)
def test_products_read_the_codes_that_they_would_compute(
    name: str, is_transposed: bool, has_experts: bool
) -> None:
    layer = build_layer(name, is_transposed=is_transposed, has_experts=has_experts)
    plain = differentiate(layer)
    plain_fp32 = differentiate(layer, torch.float32)
    weights = copy_weights(layer, torch.bfloat16)
    weights.update()
    with mock.patch.object(ScaledProducts, "quantise_weight") as quantise_weight:
        assert_equal_bits(differentiate(layer), plain)
    assert not quantise_weight.called
    assert weights.find(layer.weight) is None  # an update writes no codes
    # Products in another precision quantise the weight in it.
    assert_equal_bits(differentiate(layer, torch.float32), plain_fp32)
    layer.weight.data.mul_(-0.75)  # as fused updates, which torch does not count
    weights.mark_changed()
    weights.update()
    changed = differentiate(layer)
    assert not torch.equal(changed[0], plain[0])
    assert layer.scaled is not None
    layer.scaled.working = None
    assert_equal_bits(differentiate(layer), changed)


@pytest.mark.parametrize(("name", "is_transposed", "has_experts"), CASES)
def test_codes_take_two_bytes_in_the_order_of_the_kernels(
    name: str, is_transposed: bool, has_experts: bool
) -> None:
    layers = [
        build_layer(
            name, is_transposed=is_transposed, has_experts=has_experts, is_emulated=is_emulated
        )
        for is_emulated in (True, False)
    ]
    for layer in layers:
        copy_weights(layer, torch.bfloat16).update()
    emulated, own = (layer.scaled.working for layer in layers if layer.scaled is not None)
    assert_equal_bits(read_bytes(own), read_bytes(emulated))
    assert own is not None
    assert own.output.codes.is_contiguous()
    assert has_experts or own.input_gradient.codes.t().is_contiguous()
    for operand in own.list_sets():
        if isinstance(operand, QuantisedMatrix) and name != "mxfp8":  # its kernels read exponents
            assert operand.inverses is not None
            assert torch.equal(operand.inverses, 1.0 / operand.multipliers)
    num_sets = 1 if has_experts and name in ("blockwise", "nvfp4") else 2
    num_bytes = sum(each.codes.numel() for each in own.list_sets())
    assert num_bytes == num_sets * layers[0].weight.numel()


def test_codes_are_counted_where_they_are_written() -> None:
    layer = build_layer("tensorwise")
    assert layer.scaled is not None
    totals = layer.scaled.totals = RoundingTotals(["tensorwise"])
    totals.is_counting = True
    copy_weights(layer, torch.bfloat16).update()
    assert totals.pop_table(layer.weight.device)[0, 3] == 2 * layer.weight.numel()


def test_codes_are_written_before_their_block() -> None:
    decoder = Decoder(
        read_config(cases.CASES["llama"] | {"num_hidden_layers": 2}), compute_dtype=torch.bfloat16
    )
    events: list[str] = []
    layers = [
        each for block in decoder.blocks for each in block.modules() if isinstance(each, Linear)
    ]
    for layer in layers:
        layer.scaled = ScaledProducts(PRODUCT_SCALINGS["tensorwise"])
    for block in decoder.blocks:
        block.register_forward_pre_hook(lambda *_: events.append("block"))

    def fill(*arguments: Any) -> None:
        events.append("codes")
        fill_operands(*arguments)

    decoder.working_weights = copy_weights(decoder, torch.bfloat16, fill)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    decoder(tokens)
    codes_of_block = ["codes"] * (len(layers) // 2)
    assert events == [*codes_of_block, "block"] * 2
    decoder(tokens)
    assert events[-3:] == ["block"] * 3, "written once"
    decoder.working_weights.mark_changed(list(decoder.blocks[1].parameters()))
    decoder(tokens)
    assert events[-2 - len(codes_of_block) :] == ["block", *codes_of_block, "block"]


@pytest.mark.long  # compiles C++
@pytest.mark.parametrize("name", PRODUCT_SCALINGS)
def test_compiled_code_writes_the_same_codes(name: str) -> None:
    plain, compiled = (build_layer(name, is_emulated=False) for _ in range(2))
    fill = compile_function(fill_operands, max_graphs=8, options=list_compiler_options(name))
    copy_weights(plain, torch.bfloat16).update()
    copy_weights(compiled, torch.bfloat16, fill).update()
    assert plain.scaled is not None
    assert compiled.scaled is not None
    assert_equal_bits(read_bytes(compiled.scaled.working), read_bytes(plain.scaled.working))
