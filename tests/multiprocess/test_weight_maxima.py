"""Maxima of weights, agreed once per step: few collectives, and never those of former weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.layout import Layout, RankGrid
from shardwright.model.moe import ExpertStack
from shardwright.model.products.linear import Linear
from shardwright.numerics import get_local_tensor
from shardwright.parallel import apply
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.parallel_model import ParallelModel
from shardwright.parallel.weight_maxima import WeightMaxima
from shardwright.rehearsal.collective_recorder import CollectiveRecorder
from shardwright.training.step import accumulate_gradients
from tests.multiprocess.pool import RankPool
from tests.multiprocess.scaled_operands import (
    DENSE,
    SPARSE,
    Cell,
    StepRecord,
    assemble_rows,
    build_model,
    build_section,
    read_micro_batches,
    record_operands,
)

LENGTH = 32
"""Tokens of a row."""

# Cells, with the products of a step whose scale of the weight spans ranks. A layer of DENSE has
# five matrices of which outputs are sharded, and two of which inputs are; of SPARSE four and two.
CELLS = {
    # The output and the input gradient in each of two layers and micro-batches.
    "tensorwise-tp": (
        Cell(DENSE, build_section("tensorwise"), Layout(tp=2), 2, length=LENGTH),
        2 * 2 * (5 + 2) * 2,
    ),
    # Scales of rows span the ranks that shard inputs.
    "gw_hp-zero3-tp": (
        Cell(
            SPARSE,
            build_section("rowwise_with_gw_hp"),
            Layout(dp_shard=2, tp=2, zero_stage=3),
            length=LENGTH,
        ),
        2 * (4 + 2 + 2),
    ),
}


class TwoSteps(NamedTuple):
    """Two steps of a rank, between which the weights change."""

    records: list[StepRecord]
    num_collectives: list[int]


def change_weights(model: ParallelModel) -> None:
    """Change each element of each weight, as an optimizer or a checkpoint does: in place."""
    for _, parameter in model.named_parameters():
        get_local_tensor(parameter.detach()).mul_(1.75)


def run_two_steps(cell: Cell, change: str = "none") -> TwoSteps:
    """Run two steps; `change` says how the agreement is changed."""
    rank = dist.get_rank() if cell.layout.world_size > 1 else 0
    grid = RankGrid(cell.layout)
    build = apply.build_weight_maxima
    gather = apply.gather_codes
    maximise = Mesh.maximise_over
    maxima: list[Tensor] = []

    def exchange(mesh: Mesh, tensor: Tensor, axes: Sequence[str]) -> Tensor:
        maxima.append(tensor if change == "shard" else maximise(mesh, tensor, axes))
        return maxima[0 if change == "stale" else -1]

    def build_if_wanted(*arguments: Any) -> WeightMaxima | None:
        return None if change == "in each product" else build(*arguments)

    def gather_if_wanted(*arguments: Any, **options: Any) -> frozenset[str]:
        # Codes are gathered only with maxima that are agreed before.
        return frozenset() if change == "in each product" else gather(*arguments, **options)

    steps = TwoSteps([], [])
    with (
        mock.patch.object(apply, "gather_codes", gather_if_wanted),
        mock.patch.object(apply, "build_weight_maxima", build_if_wanted),
        mock.patch.object(Mesh, "maximise_over", exchange),
    ):
        model = build_model(cell)
        batches = read_micro_batches(cell, grid.data_rank(rank))
        parts = [part for part in model.decoder.modules() if isinstance(part, Linear | ExpertStack)]
        products = [part.scaled for part in parts if part.scaled is not None]
        sharded: dict[str, str | None] = {each.name: each.sharded for each in products}
        for _ in range(2):
            with record_operands() as operands, CollectiveRecorder() as recorder:
                accumulate_gradients(model, batches, seed=0, step=0)
            tensor_rank = grid.coordinates(rank)["tp"]
            steps.records.append(StepRecord(tensor_rank, operands, sharded, {}, torch.zeros(0)))
            steps.num_collectives.append(len(recorder.collectives))
            change_weights(model)
    return steps


def list_wrong_steps(gloo_ranks: RankPool, cell: Cell, change: str) -> list[int]:
    """Return the steps in which a rank's operands are not those of one process."""
    single = replace(cell, layout=Layout())
    (expected,) = gloo_ranks.run(1, run_two_steps, single)
    found = gloo_ranks.run(cell.layout.world_size, run_two_steps, cell, change)
    rows = [assemble_rows(cell, [steps.records[number] for steps in found]) for number in range(2)]
    return [
        number
        for number in range(2)
        if rows[number] != assemble_rows(single, [expected.records[number]])
    ]


@pytest.mark.parametrize("name", CELLS)
def test_maxima_are_agreed_once_per_step(gloo_ranks: RankPool, name: str) -> None:
    cell, num_products = CELLS[name]
    assert list_wrong_steps(gloo_ranks, cell, "none") == []
    # A shard's scale is wrong in every step, a kept one from the change of the weights on.
    assert list_wrong_steps(gloo_ranks, cell, "shard") == [0, 1]
    assert list_wrong_steps(gloo_ranks, cell, "stale") == [1]
    size = cell.layout.world_size
    agreed = gloo_ranks.run(size, run_two_steps, cell)[0].num_collectives
    in_products = gloo_ranks.run(size, run_two_steps, cell, "in each product")[0].num_collectives
    assert in_products[0] - agreed[0] == in_products[1] - agreed[1] == num_products - 1
