"""Quantised products: under every layout the operands of one process, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright import hashing
from shardwright.architecture import read_recipe_shape
from shardwright.config.adapter_section import AdapterSection
from shardwright.config.low_precision import FP8Section
from shardwright.config.training import OptimizerSection
from shardwright.layout import Layout
from shardwright.model.products import fp8, nvfp4
from shardwright.model.products.fp8 import QuantisedMatrix, Scaling
from shardwright.optim import build_optimizer
from shardwright.parallel import low_precision
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.zero_mask import keep_zeros
from shardwright.training.step import update_parameters
from shardwright.verification.cases import VerificationCase
from shardwright.verification.verification import VerificationReport, verify
from tests.multiprocess.models import build_recipe, compute_pruned_mask
from tests.multiprocess.pool import RankPool
from tests.multiprocess.scaled_operands import (
    BROAD,
    DENSE,
    SPARSE,
    Cell,
    OperandKey,
    StepRecord,
    assemble_rows,
    build_model,
    build_section,
    record_step,
    run_cell,
)

TENSOR = Layout(tp=2)
NVFP4 = {"kind": "nvfp4", "nvfp4": {"experimental": True}}
CASES = {
    "gw_hp-zero0": (DENSE, "rowwise_with_gw_hp", Layout(dp_replicate=2), 2),
    "gw_hp-zero3": (DENSE, "rowwise_with_gw_hp", Layout(dp_shard=2, zero_stage=3), 2),
    "gw_hp-tp-sp": (DENSE, "rowwise_with_gw_hp", TENSOR, 1),
    "gw_hp-tp": (DENSE, "rowwise_with_gw_hp", Layout(tp=2, sequence_parallel=False), 2),
    "gw_hp-ring": (DENSE, "rowwise_with_gw_hp", Layout(cp=2, cp_method="ring"), 1),
    "gw_hp-zb": (DENSE, "rowwise_with_gw_hp", Layout(pp=2, schedule="zb_h1"), 4),
    "gw_hp-ep": (SPARSE, "rowwise_with_gw_hp", Layout(dp_shard=2, ep=2, zero_stage=2), 1),
    "gw_hp-experts-tp": (SPARSE, "rowwise_with_gw_hp", TENSOR, 1),
    "mxfp8-tp-sp": (DENSE, "mxfp8", TENSOR, 1),
    "mxfp8-ring": (DENSE, "mxfp8", Layout(cp=2, cp_method="ring"), 2),
    "mxfp8-zb": (DENSE, "mxfp8", Layout(pp=2, schedule="zb_h1"), 4),
    "mxfp8-ep": (SPARSE, "mxfp8", Layout(dp_shard=2, ep=2, zero_stage=3), 1),
    "blockwise-zero3": (BROAD, "blockwise", Layout(dp_shard=2, zero_stage=3), 1),
    "tensorwise-tp-sp": (DENSE, "tensorwise", TENSOR, 2),
    "tensorwise-tp-zb": (DENSE, "tensorwise", Layout(tp=2, pp=2, schedule="zb_h1"), 4),
    "rowwise-tp-sp": (DENSE, "rowwise", TENSOR, 2),
    "nvfp4-zero3": (DENSE, "nvfp4", Layout(dp_shard=2, zero_stage=3), 2),
    "nvfp4-tp-sp": (DENSE, "nvfp4", TENSOR, 1),
    "nvfp4-zb": (DENSE, "nvfp4", Layout(pp=2, schedule="zb_h1"), 4),
    "nvfp4-ep": (SPARSE, "nvfp4", Layout(dp_shard=2, ep=2, zero_stage=2), 1),
}


def build_cell(config: dict[str, Any], recipe: Any, layout: Layout, accumulation: int) -> Cell:
    return Cell(config, build_section(recipe), layout, accumulation)


_references: dict[str, tuple[dict[OperandKey, set[bytes]], StepRecord]] = {}


def compute_reference(
    ranks: RankPool, cell: Cell
) -> tuple[dict[OperandKey, set[bytes]], StepRecord]:
    """Compute one process with one micro-batch; tensorwise and rowwise with the same ones."""
    depends = cell.section.recipe in ("tensorwise", "rowwise")
    single = replace(
        cell,
        layout=Layout(),
        accumulation=cell.accumulation if depends else 1,
        recompute="none",
    )
    key = repr(single)
    if key not in _references:
        records = ranks.run(1, run_cell, single)
        _references[key] = assemble_rows(single, records), records[0]
    return _references[key]


def compare(
    cell: Cell, records: list[StepRecord], expected: dict[OperandKey, set[bytes]]
) -> list[OperandKey]:
    """Return the operands that differ from one process."""
    rows = assemble_rows(cell, records)
    assert rows.keys() == expected.keys()
    return [key for key in rows if rows[key] != expected[key]]


def assert_equals_one_process(ranks: RankPool, cell: Cell) -> None:
    expected, single = compute_reference(ranks, cell)
    records = ranks.run(cell.layout.world_size, run_cell, cell)
    assert compare(cell, records, expected) == []
    assert records[0].gradients.keys() == single.gradients.keys()
    for name, gradient in records[0].gradients.items():
        whole = single.gradients[name]
        assert (gradient - whole).norm() <= 1e-5 * whole.norm(), name
    # Dynamic scales never saturate; all operands are finite; some small values are flushed.
    totals = sum(record.counts for record in records).sum(0)
    assert totals[0] == totals[2] == 0
    assert totals[3] > 0


@pytest.mark.parametrize("name", CASES)
def test_operands_and_gradients_are_those_of_one_process(ranks: RankPool, name: str) -> None:
    assert_equals_one_process(ranks, build_cell(*CASES[name]))


@pytest.mark.parametrize(
    ("recipe", "recompute"),
    [("rowwise_with_gw_hp", "selective"), ("rowwise_with_gw_hp", "full"), ("nvfp4", "full")],
)
def test_with_recompute(ranks: RankPool, recipe: str, recompute: Any) -> None:
    cell = build_cell(DENSE, recipe, TENSOR, 1)
    assert_equals_one_process(ranks, replace(cell, recompute=recompute))


@pytest.mark.parametrize(("recipe", "quantize"), [("rowwise_with_gw_hp", "nf4"), ("nvfp4", None)])
def test_adapters_over_a_quantised_base(ranks: RankPool, recipe: str, quantize: Any) -> None:
    cell = build_cell(DENSE, recipe, Layout(dp_shard=2, tp=2, zero_stage=3), 1)
    adapters = AdapterSection(rank=4, quantize=quantize)
    assert_equals_one_process(ranks, replace(cell, adapters=adapters))


def train_pruned_model(cell: Cell, rule: Any) -> tuple[list[StepRecord], dict[str, Tensor]]:
    """Update a pruned model twice; return the records of three steps and the last weights."""
    model = build_model(replace(cell, is_pruned=True))
    optimizer = build_optimizer(
        model.named_parameters(),
        OptimizerSection(name=rule),
        learning_rate=0.1,
        weight_decay=0.1,
        model=model,
    )
    keep_zeros(model, optimizer)
    records = [record_step(cell, model)]
    for _ in range(2):
        update_parameters(model, optimizer, learning_rate=0.02, max_grad_norm=1.0)
        records.append(record_step(cell, model))
    return records, {name: model.gather_parameter(name) for name in model.layouts}


@pytest.mark.parametrize(
    ("recipe", "layout", "rule"),
    [
        ("mxfp8", Layout(dp_shard=2, zero_stage=3), "muon"),
        pytest.param("rowwise_with_gw_hp", TENSOR, "adamw", marks=pytest.mark.long),
        pytest.param("nvfp4", Layout(dp_shard=2, zero_stage=2), "muon", marks=pytest.mark.long),
    ],
)
def test_pruned_weights_stay_pruned(
    ranks: RankPool, recipe: str, layout: Layout, rule: Any
) -> None:
    cell = build_cell(DENSE, recipe, layout, 1)
    single = replace(cell, layout=Layout())
    ((expected, weights),) = ranks.run(1, train_pruned_model, single, rule)
    found = ranks.run(2, train_pruned_model, cell, rule)
    for step, record in enumerate(expected):
        records = [rank_records[step] for rank_records, _ in found]
        assert compare(cell, records, assemble_rows(single, [record])) == []
        for (name, dims, _), operands in record.operands.items():
            if dims == ("outputs", "inputs"):
                mask = compute_pruned_mask([(0, size) for size in weights[name].shape])
                assert not any(operand[mask][:, :5].any() for operand in operands)
    for weight in weights.values():
        if weight.ndim == 2:
            pruned = weight[compute_pruned_mask([(0, size) for size in weight.shape])] == 0.0
            assert bool(pruned.all())


@contextmanager
def take_scales_from_the_shard() -> Iterator[None]:
    with (
        mock.patch.object(low_precision, "reduce_maxima", lambda maxima, group: maxima),
        mock.patch.object(Mesh, "maximise_over", lambda mesh, maxima, axes: maxima),
    ):
        yield


@contextmanager
def transpose_scales() -> Iterator[None]:
    """Agree over ranks on the maxima of the other dim."""
    find = low_precision.find_sharded_dim
    other = {"inputs": "outputs", "outputs": "inputs", None: None}
    with mock.patch.object(
        low_precision, "find_sharded_dim", lambda *args, **kwargs: other[find(*args, **kwargs)]
    ):
        yield


@contextmanager
def keep_stale_scales() -> Iterator[None]:
    """Use the maxima of a tensor that is half as large."""
    quantise = fp8.quantise

    def quantise_stale(
        values: Tensor, scaling: Scaling, maxima: Tensor | None = None
    ) -> QuantisedMatrix:
        own = fp8.compute_block_maxima(values, scaling) if maxima is None else maxima
        return quantise(values, scaling, own / 2)

    with mock.patch.object(fp8, "quantise", quantise_stale):
        yield


@contextmanager
def use_e5m2() -> Iterator[None]:
    quantise = fp8.quantise
    with mock.patch.object(
        fp8,
        "quantise",
        lambda values, scaling, maxima=None: quantise(
            values, replace(scaling, code_dtype=fp8.E5M2), maxima
        ),
    ):
        yield


@contextmanager
def let_stale_scales_overflow() -> Iterator[None]:
    """Leave elements beyond the largest number unclamped, as a cast that does not saturate."""
    with keep_stale_scales():
        quantise = fp8.quantise

        def overflow(
            values: Tensor, scaling: Scaling, maxima: Tensor | None = None
        ) -> QuantisedMatrix:
            matrix = quantise(values, scaling, maxima)
            scaled = fp8.apply_by_block(torch.mul, values.float(), matrix.multipliers, scaling)
            is_beyond = scaled.abs() > torch.finfo(scaling.code_dtype).max
            codes = torch.where(is_beyond, torch.nan, matrix.codes.float())
            return matrix._replace(codes=codes.to(scaling.code_dtype))

        with mock.patch.object(fp8, "quantise", overflow):
            yield


@contextmanager
def transpose_block_scales() -> Iterator[None]:
    """Give each block of fixed sizes the scale of the block in the transposed place."""
    compute = fp8.compute_block_maxima

    def compute_transposed(values: Tensor, scaling: Scaling) -> Tensor:
        maxima = compute(values, scaling)
        has_blocks = None not in (scaling.rows, scaling.columns)
        return maxima.t().reshape(maxima.shape) if has_blocks else maxima

    with mock.patch.object(fp8, "compute_block_maxima", compute_transposed):
        yield


MUTATED_CELLS = {
    "rowwise_with_gw_hp": (DENSE, TENSOR),
    "rowwise": (DENSE, TENSOR),
    "tensorwise": (DENSE, TENSOR),
    "mxfp8": (DENSE, TENSOR),
    "blockwise": (BROAD, Layout(dp_replicate=2)),
}
"""Blocks of `mxfp8` and `blockwise` lie within a shard; `check_low_precision` refuses others."""
SHORT_RECIPES = ("rowwise_with_gw_hp", "blockwise")
MUTATIONS = [
    *((recipe, mutate) for recipe in MUTATED_CELLS for mutate in (keep_stale_scales, use_e5m2)),
    *(
        (recipe, take_scales_from_the_shard)
        for recipe in ("rowwise_with_gw_hp", "rowwise", "tensorwise")
    ),
    # One scale of the whole tensor has no other dim and no other place.
    *((recipe, transpose_scales) for recipe in ("rowwise_with_gw_hp", "rowwise")),
    *((recipe, transpose_block_scales) for recipe in ("mxfp8", "blockwise")),
]


def build_mutated_cell(recipe: str) -> Cell:
    config, layout = MUTATED_CELLS[recipe]
    return build_cell(config, recipe, layout, 1)


@pytest.mark.parametrize(
    ("recipe", "mutate"),
    [
        pytest.param(*case, marks=() if case[0] in SHORT_RECIPES else pytest.mark.long)
        for case in MUTATIONS
    ],
)
def test_wrong_scales_are_caught(ranks: RankPool, recipe: str, mutate: Any) -> None:
    cell = build_mutated_cell(recipe)
    expected, single = compute_reference(ranks, cell)
    records = ranks.run(2, run_cell, cell, mutate)
    if mutate is transpose_scales:  # shapes of the shards no longer agree with their names
        records = [replace(record, sharded=single.sharded | _true_dims()) for record in records]
    assert compare(cell, records, expected)
    if mutate is keep_stale_scales:
        assert records[0].counts[:, 0].sum() > 0, "saturation shows a stale scale"


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=() if recipe in SHORT_RECIPES else pytest.mark.long)
        for recipe in MUTATED_CELLS
    ],
)
def test_codes_that_do_not_saturate_are_caught(ranks: RankPool, recipe: str) -> None:
    """Scales from own values never need it, so both sides have scales of half the maxima."""
    cell = build_mutated_cell(recipe)
    single = replace(cell, layout=Layout())
    expected = assemble_rows(single, ranks.run(1, run_cell, single, keep_stale_scales))
    assert compare(cell, ranks.run(2, run_cell, cell, keep_stale_scales), expected) == []
    assert compare(cell, ranks.run(2, run_cell, cell, let_stale_scales_overflow), expected)


@contextmanager
def omit_outer_scales() -> Iterator[None]:
    """Use block scales only."""
    with mock.patch.object(
        nvfp4, "_compute_outer_scales", lambda maxima, outer: torch.ones_like(maxima)
    ):
        yield


@contextmanager
def round_by_rank() -> Iterator[None]:
    """Draw other random numbers on each rank."""
    hash_numbers = hashing.hash_numbers
    with mock.patch.object(
        low_precision, "hash_numbers", lambda *numbers: hash_numbers(*numbers, dist.get_rank())
    ):
        yield


FOUR_BIT_MUTATIONS = [
    take_scales_from_the_shard,
    transpose_scales,
    omit_outer_scales,
    transpose_block_scales,
    round_by_rank,
]


@pytest.mark.parametrize("mutate", FOUR_BIT_MUTATIONS)
def test_wrong_4_bit_operands_are_caught(ranks: RankPool, mutate: Any) -> None:
    cell = build_cell(DENSE, "nvfp4", TENSOR, 1)
    expected, single = compute_reference(ranks, cell)
    records = ranks.run(2, run_cell, cell, mutate)
    if mutate is transpose_scales:
        records = [replace(record, sharded=single.sharded | _true_dims()) for record in records]
    wrong = compare(cell, records, expected)
    assert wrong
    if mutate is take_scales_from_the_shard:  # of activations, gradients and weights
        assert {dims for _, dims, _ in wrong} == {
            ("tokens", "inputs"),
            ("tokens", "outputs"),
            ("outputs", "inputs"),
        }
    if mutate is round_by_rank:
        assert ("tokens", "outputs") in {dims for _, dims, _ in wrong}


@cache
def _true_dims() -> dict[str, str | None]:
    names = [f"model.layers.{layer}" for layer in range(2)]
    outputs = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    outputs += ["mlp.gate_proj", "mlp.up_proj"]
    inputs = ["self_attn.o_proj", "mlp.down_proj"]
    return {f"{name}.{part}.weight": "outputs" for name in names for part in outputs} | {
        f"{name}.{part}.weight": "inputs" for name in names for part in inputs
    }


@pytest.mark.parametrize(
    "precision", ["fp8", pytest.param(NVFP4, id="nvfp4", marks=pytest.mark.long)]
)
def test_verify_holds_quantised_products_to_one_process(ranks: RankPool, precision: Any) -> None:
    recipe = build_recipe(DENSE, precision=precision)
    shape = read_recipe_shape(recipe)
    case = VerificationCase(2, "selective", dropout=True)

    def verify_case(**options: Any) -> VerificationReport:
        # float32 is requested; sums in it could round to other codes.
        return verify(
            recipe, shape, [TENSOR], [case], ["float32"],
            sequence_length=32, pool=ranks, **options,
        )  # fmt: skip

    report = verify_case()
    assert report.passed
    assert {cell.dtype for cell in report.cells} == {"float64"}
    assert not verify_case(mutation=take_scales_from_the_shard).passed


def test_the_bf16_step_computes(ranks: RankPool) -> None:
    section = FP8Section()
    cell = Cell(DENSE, section, Layout(dp_shard=2, tp=2, zero_stage=3))
    records = ranks.run(4, run_cell, cell)
    assert all(torch.isfinite(g).all() for g in records[0].gradients.values())
