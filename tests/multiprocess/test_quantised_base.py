"""Adapters on a 4-bit base: gradients against one process, bytes per rank, and known bugs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwright.architecture import ParameterSpec, read_recipe_shape
from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout, Shard
from shardwright.model import Decoder
from shardwright.model.products import nf4
from shardwright.model.products.nf4 import read_packed_slice
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics import get_local_tensor
from shardwright.parallel import apply_layout, build_mesh
from shardwright.placement import parameter_layouts
from shardwright.plans import BatchPlan, build_plan
from shardwright.verification import reference
from shardwright.verification.cases import VERIFICATION_DTYPES, VerificationCase
from shardwright.verification.cell import MutationContext
from tests.multiprocess.adapter_cells import AdapterCell, verify_adapter_cell
from tests.multiprocess.assertions import assert_clean, assert_detected
from tests.multiprocess.pool import RankPool

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 40, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 64,
}  # fmt: skip
"""Rows of 40 elements end within a block; rows that two ranks share have 128."""
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 24, "moe_intermediate_size": 128,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "norm_topk_prob": True,
}  # fmt: skip
ZBV = Layout(pp=2, schedule="zbv", virtual_stages=2)


NF4 = {"rank": 3, "quantize": "nf4"}

CELLS = [
    AdapterCell(LLAMA, NF4, Layout(dp_shard=2, zero_stage=3), VerificationCase(2, "full")),
    AdapterCell(LLAMA, NF4 | {"kind": "dora"}, Layout(tp=2), VerificationCase(2)),
    AdapterCell(
        MOE, NF4, Layout(dp_shard=2, ep=2, tp=2, zero_stage=3), VerificationCase(1, documents=False)
    ),
]
LONG_CELLS = [
    AdapterCell(LLAMA, NF4, Layout(dp_replicate=2), VerificationCase(1, "selective")),
    AdapterCell(LLAMA, NF4 | {"dropout": 0.1}, Layout(cp=2, zero_stage=2), VerificationCase(2)),
    AdapterCell(
        LLAMA | {"num_hidden_layers": 4}, NF4 | {"targets": ("q_proj",)}, ZBV, VerificationCase(4)
    ),
    AdapterCell(
        LLAMA,
        NF4,
        Layout(dp_shard=2, tp=2, zero_stage=1, sequence_parallel=False),
        VerificationCase(2),
    ),
    AdapterCell(
        LLAMA,
        NF4 | {"kind": "dora"},
        Layout(dp_replicate=2, dp_shard=2, zero_stage=3),
        VerificationCase(2),
    ),
    AdapterCell(
        MOE, NF4 | {"kind": "rslora"}, Layout(dp_shard=2, ep=2), VerificationCase(2, "full")
    ),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_adapters_on_a_quantised_base(ranks: RankPool, cell: AdapterCell) -> None:
    assert_clean(verify_adapter_cell(ranks, cell, ("float32",)))


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS + LONG_CELLS, ids=str)
def test_adapters_on_a_quantised_base_under_every_layout(
    ranks: RankPool, cell: AdapterCell
) -> None:
    assert_clean(verify_adapter_cell(ranks, cell, VERIFICATION_DTYPES))


@contextmanager
def quantise_after_sharding() -> Iterator[None]:
    """Quantise after sharding, so that blocks start at shard boundaries."""
    original = reference.read_packed_slice

    def read_shifted(matrix: ParameterSpec, narrow: Any, read: Any) -> Tensor:
        whole = original(matrix, narrow, read)
        return whole.roll(1, -1) if narrow[-1][0] else whole

    with mock.patch.object(reference, "read_packed_slice", read_shifted):
        yield


@contextmanager
def shard_bytes_without_sections() -> Iterator[None]:
    """Shard all bytes as one run, so that a rank has codes of its columns and scales of
    others'.
    """

    def build_shard(matrix: ParameterSpec, parallel: Any, shape: Any, degree: int) -> Shard | None:
        shard = parameter_layouts._build_tensor_shard(matrix, parallel, shape, degree)
        return (
            None
            if shard is None
            else replace(
                shard, sections=() if shard.dim == len(matrix.shape) - 1 else shard.sections
            )
        )

    with mock.patch.object(parameter_layouts, "_build_packed_shard", build_shard):
        yield


@pytest.mark.parametrize("mutation", [quantise_after_sharding, shard_bytes_without_sections])
def test_the_verifier_detects_another_base(ranks: RankPool, mutation: MutationContext) -> None:
    assert_detected(
        verify_adapter_cell(
            ranks,
            AdapterCell(LLAMA, NF4, Layout(tp=2), VerificationCase(1, documents=False)),
            ("float32",),
            mutation,
        ),
        "gradient",
    )


def measure_packed_weights(cell: AdapterCell) -> tuple[int, int, dict[str, Tensor], float]:
    """Return this rank's bytes of frozen projections, their elements in the whole model, the
    gathered matrices, and the loss in bf16.
    """
    shape = read_recipe_shape(cell.recipe)
    with torch.device("meta"):
        decoder = Decoder(shape, compute_dtype=torch.bfloat16)
    specs = {spec.name: spec for spec in shape.list_parameters()}

    def fill(name: str, bounds: Any) -> Tensor:
        matrix = specs[name].packed_matrix
        if matrix is None:
            return initialise_parameter(replace(specs[name]), 3, dtype=torch.float32, narrow=bounds)
        return read_packed_slice(
            matrix,
            bounds,
            lambda _name, rows: initialise_parameter(matrix, 3, dtype=torch.float32, narrow=rows),
        )

    plan = build_plan(
        decoder.shape,
        cell.layout,
        BatchPlan(8, 1, 1, cell.layout.data_ranks),
        PrecisionSection(kind="bf16"),
    )
    model = apply_layout(
        decoder, plan, build_mesh(cell.layout, "cpu"), torch.device("cpu"), read_slice=fill
    )
    packed = {
        name: parameter
        for name, parameter in model.named_parameters()
        if specs[name].packed_matrix is not None
    }
    assert all(
        parameter.dtype == torch.uint8 and not parameter.requires_grad
        for parameter in packed.values()
    )
    num_bytes = sum(get_local_tensor(parameter).numel() for parameter in packed.values())
    num_elements = sum(
        spec.packed_matrix.num_elements for spec in specs.values() if spec.packed_matrix is not None
    )
    whole = {
        name: nf4.unpack(
            model.gather_parameter(name).to(torch.uint8),
            spec.packed_matrix.shape[-1],
            torch.float32,
        )
        for name, spec in specs.items()
        if spec.packed_matrix is not None
    }
    ids_BT = torch.arange(8)[None]
    loss = model.module(ids_BT, labels_BT=ids_BT)
    return num_bytes, num_elements, whole, loss.item()


@pytest.mark.parametrize("layout", [Layout(dp_shard=2, zero_stage=3), Layout(tp=2)], ids=str)
def test_ranks_hold_their_share_of_four_bits_of_the_same_base(
    ranks: RankPool, layout: Layout
) -> None:
    cell = AdapterCell(LLAMA | {"hidden_size": 64}, NF4, layout, VerificationCase(1))
    _, num_elements, expected, loss = measure_packed_weights(cell._replace(layout=Layout()))
    for num_bytes, _, whole, sharded_loss in ranks.run(2, measure_packed_weights, cell):
        assert num_bytes * 8 / num_elements == 4.5 / 2
        assert sharded_loss == pytest.approx(loss, rel=0.0 if layout.tp == 1 else 0.01)
        assert all(torch.equal(expected[name], whole[name]) for name in expected)
