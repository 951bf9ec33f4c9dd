"""Adapters in the decoder: they start without effect, compute the update of the paper, and can be
disabled.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.architecture import (
    AdapterShape,
    ModelShape,
    NormalInit,
    ParameterSpec,
    RowNormsInit,
    UniformInit,
    read_config,
)
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.config.adapter_section import AdapterSection
from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.model import Decoder
from shardwright.model.lora import compute_row_norms, initialise_adapter, merge_adapter
from shardwright.model.products.linear import Linear
from shardwright.model.weight_init import initialise_parameter
from shardwright.parallel import apply_layout
from shardwright.plans import BatchPlan, build_plan
from tests.reference.cases import CASES

FAMILIES = (
    "llama-one-kv-head-tied",
    "gpt2",
    "phi3",
    "gpt_neox",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
)


def build_initialised(shape: ModelShape) -> Decoder:
    """Build a decoder with its initial values."""
    values: dict[str, Tensor] = {}

    def read(name: str, bounds: Any) -> Tensor:
        return values[name][tuple(slice(start, start + length) for start, length in bounds)]

    decoder = Decoder(shape)
    for spec in shape.list_parameters():
        in_out = spec.adapted_matrix is not None and shape.is_in_out(spec.adapted_matrix)
        values[spec.name] = initialise_adapter(
            spec, 0, None, dtype=torch.float32, read_matrix=read, in_out=in_out
        )
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(values[name])
    return decoder


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_adapters_start_as_the_base_model(name: str, kind: str) -> None:
    base = read_config(CASES[name])
    exclude = ("experts.*",) if kind == "dora" and base.experts else ()
    section = AdapterSection.model_validate({"kind": kind, "rank": 4, "exclude": exclude})
    shape = add_adapters(base, section)
    adapted = build_initialised(shape)
    assert [(n, tuple(p.shape)) for n, p in adapted.named_parameters()] == [
        (s.name, s.shape) for s in shape.list_parameters()
    ]
    assert {n for n, p in adapted.named_parameters() if p.requires_grad} == {
        s.name for s in shape.list_parameters() if s.adapter_part
    }
    ids_BT = torch.randint(0, base.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = build_initialised(base)(ids_BT)
        output = adapted(ids_BT)
        assert torch.equal(output, expected) or (
            kind == "dora" and torch.allclose(output, expected, rtol=1e-6, atol=1e-6)
        )
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
        assert not torch.allclose(adapted(ids_BT), expected)
        with adapted.without_adapters():
            assert torch.equal(adapted(ids_BT), expected)
        assert not torch.allclose(adapted(ids_BT), expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_a_product_equals_that_of_the_merged_matrix(kind: Any, transposed: bool) -> None:
    adapters = AdapterShape(kind, rank=3, alpha=2.0, modules=frozenset())
    linear = Linear(5, 7, bias=True, transposed=transposed)
    linear.add_adapter(adapters, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x_ND = torch.randn(4, 5, generator=generator)
    weight_FD = linear.weight.t() if transposed else linear.weight
    update_FD = (
        linear.lora_B.weight
        @ linear.lora_A.weight
        * (2.0 / 3.0 if kind != "rslora" else 2.0 / 3.0**0.5)
    )
    expected_FD = weight_FD + update_FD
    if kind == "dora":
        expected_FD = (
            linear.lora_magnitude_vector[:, None]
            * expected_FD
            / expected_FD.norm(dim=1, keepdim=True)
        )
    assert linear.bias is not None
    torch.testing.assert_close(linear(x_ND), x_ND @ expected_FD.t() + linear.bias)
    parameters = {"lora_A": linear.lora_A.weight, "lora_B": linear.lora_B.weight} | dict(
        linear.named_parameters()
    )
    merged = merge_adapter(linear.weight, parameters.__getitem__, adapters, in_out=transposed)
    torch.testing.assert_close(merged, expected_FD.t() if transposed else expected_FD)


def test_a_slice_of_the_initial_values_is_initialised_alone() -> None:
    spec = ParameterSpec("lora_A", (9, 700), "query", 0, UniformInit(0.5))
    whole = initialise_parameter(spec, 3, dtype=torch.float32)
    assert torch.equal(
        initialise_parameter(spec, 3, dtype=torch.float32, narrow=[(2, 5), (300, 333)]),
        whole[2:7, 300:633],
    )
    assert -0.5 <= float(whole.min()) < -0.49
    assert 0.49 < float(whole.max()) <= 0.5
    assert abs(float(whole.mean())) < 0.02
    matrix = ParameterSpec("weight", (9, 700), "query", 0, NormalInit(1.0))
    magnitude = ParameterSpec(
        "lengths",
        (9,),
        "query",
        0,
        RowNormsInit(),
        adapter_part="lora_magnitude_vector",
        adapted_matrix=matrix,
    )
    values = initialise_parameter(matrix, 0, dtype=torch.float32)

    def read(_name: str, bounds: Any) -> Tensor:
        return values[tuple(slice(start, start + length) for start, length in bounds)]

    lengths_of_rows = initialise_adapter(
        magnitude, 0, [(4, 3)], dtype=torch.float32, read_matrix=read, in_out=False
    )
    assert torch.equal(lengths_of_rows, compute_row_norms(values)[4:7])


def test_frozen_parameters_have_the_compute_precision() -> None:
    shape = add_adapters(read_config(CASES["mixtral"]), AdapterSection(rank=2))
    with torch.device("meta"):
        decoder = Decoder(shape, compute_dtype=torch.bfloat16)
    plan = build_plan(shape, Layout(), BatchPlan(8, 1, 1, 1), PrecisionSection(kind="bf16"), "none")
    model = apply_layout(
        decoder,
        plan,
        None,
        torch.device("cpu"),
        read_slice=lambda _name, narrow: torch.ones([n for _, n in narrow]),
    )
    for (_, parameter), spec in zip(model.named_parameters(), shape.list_parameters(), strict=True):
        is_fp32 = spec.adapter_part is not None or len(spec.shape) == 1 or spec.role == "router"
        assert parameter.dtype == (torch.float32 if is_fp32 else torch.bfloat16), spec.name
        assert parameter.requires_grad == (spec.adapter_part is not None)
