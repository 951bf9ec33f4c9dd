"""Rows padded to the longest of their micro-batch: under every layout the gradients of one
process with full, masked rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardwright.architecture import read_config
from shardwright.config.training import PrecisionSection
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.packed_dataset import PackedDataset, pack_documents
from shardwright.data.sample_order import SampleOrder
from shardwright.layout import Layout, RankGrid
from shardwright.model import Decoder
from shardwright.model.weight_init import initialise_parameter
from shardwright.parallel import apply_layout, build_mesh
from shardwright.plans import BatchPlan, balance_work, build_plan, compute_row_multiple
from shardwright.training.step import accumulate_gradients, count_tokens_and_flops
from tests.multiprocess.models import LLAMA
from tests.multiprocess.pool import RankPool

LENGTH = 48
GLOBAL = 8
LENGTHS = np.random.default_rng(0).integers(2, 50, size=30)
STARTS = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.uint64)
TOKENS = np.random.default_rng(1).integers(1, 60, size=int(STARTS[-1])).astype(np.uint16)
CONFIG = LLAMA | {
    "num_hidden_layers": 2,
    "intermediate_size": 28,
    "hidden_size": 24,
    "max_position_embeddings": LENGTH,
}
EXPERTS = CONFIG | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "norm_topk_prob": True,
}
LAYOUTS = [
    Layout(dp_shard=2, zero_stage=3),
    Layout(tp=2),
    Layout(pp=2),
    Layout(cp=2, cp_method="ring"),
    Layout(cp=2, cp_method="ulysses"),
]


Step = tuple[float, dict[str, Any], tuple[int, float]]
"""Loss, gradients, and (computed tokens, mean row length)."""


def run_step(
    layout: Layout, config: dict[str, Any] = CONFIG, *, full: bool, is_balanced: bool = False
) -> Step:
    """Run one step of two or more micro-batches."""
    micro = 2
    shape = read_config(config)
    multiple = None if full else compute_row_multiple(layout)
    batch = BatchPlan(
        LENGTH, micro, GLOBAL // micro // layout.data_ranks, layout.data_ranks, multiple
    )
    rows = PackedDataset(
        TOKENS, pack_documents(STARTS, LENGTH, is_unpacked=True), LENGTH, is_unpacked=not full
    )
    with torch.device("meta"):
        decoder = Decoder(shape, compute_dtype=torch.float64)
    specs = {spec.name: spec for spec in shape.list_parameters()}

    def fill(name: str, bounds: Any) -> Tensor:
        return initialise_parameter(specs[name], 3, dtype=torch.float64, narrow=bounds)

    plan = build_plan(decoder.shape, layout, batch, PrecisionSection(kind="fp64"))
    if is_balanced:
        plan = balance_work(plan, has_documents=False)
    model = apply_layout(
        decoder, plan, build_mesh(layout, "cpu"), torch.device("cpu"), read_slice=fill
    )
    data_rank = RankGrid(layout).data_rank(0 if model.mesh is None else model.mesh.rank)
    micro_batches = read_step_micro_batches(
        rows, SampleOrder(3, len(rows)), plan.batch, 1, data_rank
    )
    loss = accumulate_gradients(model, micro_batches, seed=0, step=1).mean()
    tokens, work = count_tokens_and_flops(model, micro_batches, float).tolist()
    return (
        loss,
        {name: model.gather_gradient(name) for name in model.layouts},
        (int(tokens), work / tokens),
    )


@pytest.fixture(scope="module")
def reference() -> Step:
    return run_step(Layout(), full=True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_equals_that_of_full_rows(ranks: RankPool, layout: Layout, reference: Step) -> None:
    assert_equals_full_rows(ranks.run(2, _run_short_rows, layout), reference)


def test_ranks_with_rows_of_different_length_exchange_tokens_of_experts(ranks: RankPool) -> None:
    assert_equals_full_rows(
        ranks.run(2, _run_short_rows, Layout(dp_shard=2, ep=2, zero_stage=2), EXPERTS),
        run_step(Layout(), EXPERTS, full=True),
    )


@pytest.mark.parametrize(
    "layout", [Layout(dp_replicate=2), Layout(dp_shard=2, zero_stage=3)], ids=str
)
def test_rows_that_are_assigned_by_work_have_the_same_gradients(
    ranks: RankPool, layout: Layout, reference: Step
) -> None:
    assert_equals_full_rows(ranks.run(2, _run_balanced_rows, layout), reference)


def assert_equals_full_rows(steps: list[Step], reference: Step) -> None:
    """Compare every rank's loss and gradients with those of full rows; fewer tokens are
    computed, in shorter rows.
    """
    loss, gradients, (tokens, longest) = reference
    assert (tokens, longest) == (GLOBAL * LENGTH, LENGTH)
    assert len({work for *_, work in steps}) == 1, "all ranks count the work of all"
    for own_loss, got, (computed, row_length) in steps:
        assert computed < 0.85 * tokens
        assert computed / GLOBAL < row_length < longest
        assert own_loss == pytest.approx(loss, rel=1e-12)
        assert got.keys() == gradients.keys()
        for name, gradient in got.items():
            error = float((gradient - gradients[name]).norm() / gradients[name].norm())
            assert error < 1e-11, name


def _run_balanced_rows(layout: Layout) -> Step:
    return run_step(layout, full=False, is_balanced=True)


def _run_short_rows(layout: Layout, config: dict[str, Any] = CONFIG) -> Step:
    return run_step(layout, config, full=False)
