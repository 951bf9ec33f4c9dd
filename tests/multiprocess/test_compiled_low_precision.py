"""Quantised products in compiled blocks of several ranks: the operands of uncompiled ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwright.config.low_precision import FP8Section, LowPrecisionRecipe
from shardwright.layout import Layout, RankGrid
from shardwright.model import Decoder
from shardwright.numerics.compiled_casts import rounds_casts_on_cpu
from shardwright.numerics.function_compiler import request_exact_rounding
from shardwright.parallel import ParallelModel
from shardwright.schedule import has_split_backward
from shardwright.training.step import accumulate_gradients
from shardwright.verification.compiled_code import prepare_compilation
from tests.compiled_graphs import GraphCounter
from tests.counted_operands import CountedOperands, record_counted_operands
from tests.multiprocess.pool import RankPool
from tests.multiprocess.scaled_operands import (
    BROAD,
    DENSE,
    SPARSE,
    WIDE,
    Cell,
    build_model,
    build_section,
    read_micro_batches,
)

NUM_LAYERS = {"num_hidden_layers": 5}
TENSOR = (DENSE, "tensorwise", Layout(tp=2), "none")
LONG = {
    "gw_hp-ep": (SPARSE, "rowwise_with_gw_hp", Layout(dp_shard=2, ep=2, zero_stage=2), "full"),
    "gw_hp-ring": (DENSE, "rowwise_with_gw_hp", Layout(cp=2, cp_method="ring"), "none"),
    "gw_hp-tp": (DENSE, "rowwise_with_gw_hp", Layout(tp=2), "selective"),
    "rowwise-tp": (DENSE, "rowwise", Layout(tp=2, sequence_parallel=False), "full"),
    "mxfp8-zero3": (DENSE, "mxfp8", Layout(dp_shard=2, zero_stage=3), "full"),
    "mxfp8-experts-tp": (SPARSE, "mxfp8", Layout(tp=2), "selective"),
    "blockwise-zero2": (WIDE, "blockwise", Layout(dp_shard=2, zero_stage=2), "selective"),
    "blockwise-zero3": (BROAD, "blockwise", Layout(dp_shard=2, zero_stage=3), "full"),
    "nvfp4-tp": (DENSE, "nvfp4", Layout(tp=2), "selective"),
    "nvfp4-zero3": (DENSE, "nvfp4", Layout(dp_shard=2, zero_stage=3), "full"),
    "nvfp4-experts-ep": (SPARSE, "nvfp4", Layout(dp_shard=2, ep=2, zero_stage=2), "none"),
    "gw_hp-zb": (DENSE, "rowwise_with_gw_hp", Layout(pp=2, schedule="zb_h1"), "selective"),
    "tensorwise-tp-zb": (DENSE, "tensorwise", Layout(tp=2, pp=2, schedule="zb_h1"), "full"),
    "nvfp4-zbv-zero3": (
        DENSE,
        "nvfp4",
        Layout(dp_shard=2, pp=2, zero_stage=3, schedule="zbv"),
        "none",
    ),
    "mxfp8-experts-ep-zb": (
        SPARSE,
        "mxfp8",
        Layout(dp_shard=2, ep=2, pp=2, zero_stage=2, schedule="zb_h1"),
        "none",
    ),
}


def run_step(model: ParallelModel, cell: Cell, rank: int) -> tuple[list[Tensor], CountedOperands]:
    """Return a step's whole gradients, and the operands of this rank."""
    assert model.decoder.rounding_totals is not None
    model.decoder.rounding_totals.is_counting = True
    model.decoder.zero_grad()
    data_rank = RankGrid(cell.layout).data_rank(rank)
    with record_counted_operands() as operands:
        accumulate_gradients(model, read_micro_batches(cell, data_rank), seed=0, step=0)
    gathered = (model.gather_gradient(name) for name in model.layouts)
    return [gradient.clone() for gradient in gathered if gradient is not None], operands


def compute_uncompiled(cell: Cell) -> list[Tensor]:
    """Return the gradients of one process."""
    return run_step(build_model(cell), cell, 0)[0]


def compare_with_uncompiled(cell: Cell) -> tuple[tuple[int, int], list[Tensor]]:
    """Run a step uncompiled and one compiled; return the numbers of graphs, and gradients."""
    model = build_model(cell)
    rank = torch.distributed.get_rank()
    expected, expected_operands = run_step(model, cell, rank)
    counter = GraphCounter()
    if cell.layout.pp > 1 and has_split_backward(cell.layout.schedule):
        assert model.pipeline is not None
        counter.compile_split(model.decoder, model.pipeline.gradient_store)
    else:
        counter.compile(model.decoder, fullgraph=model.decoder.shape.experts is None)
    gradients, operands = run_step(model, cell, rank)
    assert operands
    assert operands == expected_operands
    for got, want in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    return counter.counts, gradients


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(TENSOR, id="tensorwise-tp"),
        *(pytest.param(case, id=name, marks=pytest.mark.long) for name, case in LONG.items()),
    ],
)
def test_compiled_ranks_have_one_graph_and_the_same_operands(ranks: RankPool, case: Any) -> None:
    config, recipe, layout, recompute = case
    section = build_section(recipe)
    accumulation = 2 if layout.pp > 1 else 1
    cell = Cell(config | NUM_LAYERS, section, layout, accumulation, recompute)
    results = ranks.run(layout.world_size, compare_with_uncompiled, cell)
    num_backward = 2 if layout.pp > 1 and has_split_backward(layout.schedule) else 1
    assert [counts for counts, _ in results] == [(1, num_backward)] * layout.world_size
    if layout.world_size == layout.tp:  # the same micro-batches in one process
        single = replace(cell, layout=Layout(), recompute="none")
        (expected,) = ranks.run(1, compute_uncompiled, single)
        for got, want in zip(results[0][1], expected, strict=True):
            assert (got - want).norm() <= 1e-5 * want.norm()


def record_forward_pass(cell: Cell, *, compile_blocks: bool) -> CountedOperands:
    """Return the operands of a forward pass in bf16."""
    model = build_model(cell, compute_dtype=torch.bfloat16, compile_blocks=compile_blocks)
    assert model.decoder.rounding_totals is not None
    model.decoder.rounding_totals.is_counting = True
    (batch,) = read_micro_batches(cell, 0)
    with torch.no_grad(), record_counted_operands() as operands:
        model.decoder(batch.input_ids_BT)
    return operands


def compare_forward_passes(cell: Cell) -> None:
    prepare_compilation()
    compiled = record_forward_pass(cell, compile_blocks=True)
    assert len(compiled) == 7
    assert all(len(operands) == 2 for operands in compiled.values())  # input and weight
    assert compiled == record_forward_pass(cell, compile_blocks=False)


@pytest.mark.long
@pytest.mark.skipif(not rounds_casts_on_cpu(), reason="torch leaves out casts on a CPU")
def test_compiled_blocks_quantise_rounded_values(ranks: RankPool) -> None:
    section = FP8Section(recipe="tensorwise", compute="bf16")
    ranks.run(
        1,
        compare_forward_passes,
        Cell(DENSE | {"num_hidden_layers": 1}, section, Layout(), 1, "none"),
    )


def check_rounding_options(cell: Cell) -> None:
    """Assert that Inductor gets the options of rounding, from torch or from a backend."""
    with mock.patch.object(Decoder, "compile_blocks") as compile_blocks:
        build_model(cell, compile_blocks=True)
    (call,) = compile_blocks.call_args_list
    backend = call.kwargs.get("backend")
    options = call.kwargs["options"] if backend is None else backend.inductor_options
    exact = request_exact_rounding()
    assert exact
    section = cell.section
    has_columns = section.recipe == "rowwise"
    assert options == exact | ({"loop_ordering_after_fusion": False} if has_columns else {})


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("tensorwise", Layout()),
        ("rowwise", Layout()),
        ("tensorwise", Layout(pp=2, schedule="zb_h1")),
    ],
    ids=str,
)
def test_compiled_blocks_round_as_pytorch(
    ranks: RankPool, recipe: LowPrecisionRecipe, layout: Layout
) -> None:
    accumulation = 2 if layout.pp > 1 else 1
    cell = Cell(DENSE, build_section(recipe), layout, accumulation, "none")
    ranks.run(layout.world_size, check_rounding_options, cell)
