"""Weights gathered as 8-bit codes: the numbers of gathering bf16 and quantising it after."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.config.low_precision import FP8Section
from shardwright.layout import Layout, RankGrid
from shardwright.model.products.fp8 import QuantisedMatrix, Scaling, compute_block_maxima
from shardwright.parallel import apply, code_gathers
from shardwright.rehearsal.collective_recorder import CollectiveRecorder
from shardwright.training.step import accumulate_gradients
from tests.multiprocess.pool import RankPool
from tests.multiprocess.scaled_operands import (
    BROAD,
    BROAD_SPARSE,
    Cell,
    build_model,
    read_micro_batches,
)

BLOCK_ELEMENTS = 128 * 128
BLOCKS = FP8Section(recipe="blockwise")
CELLS = {
    "zero3": Cell(BROAD, BLOCKS, Layout(dp_shard=2, zero_stage=3), 2, "full"),
    "zero2": Cell(BROAD, BLOCKS, Layout(dp_shard=2, zero_stage=2), 2),
    "experts": Cell(BROAD_SPARSE, BLOCKS, Layout(dp_shard=2, zero_stage=3)),
}


class Step(NamedTuple):
    """Result of a step on one rank."""

    gradients: dict[str, Tensor]
    gathered_bytes: int
    code_elements: int
    """Elements of the weights whose codes are gathered."""
    counts: Tensor


def run_step(cell: Cell, mutation: str) -> Step:
    """Compute a step's gradients; `mutation` says how the gathers are changed."""
    gather = code_gathers.gather_codes
    names: list[str] = []

    def record(modules: Any) -> list[str]:
        names.extend([] if mutation == "bf16" else gather(modules))
        return names

    quantise = code_gathers.quantise

    def quantise_wrongly(values: Tensor, scaling: Scaling) -> QuantisedMatrix:
        matrix = quantise(values, scaling)
        if mutation == "stale":
            return quantise(values, scaling, 2 * compute_block_maxima(values, scaling))
        if mutation == "other block":
            return matrix._replace(multipliers=matrix.multipliers.flip(1))
        return matrix

    with (
        mock.patch.object(apply, "gather_codes", record),
        mock.patch.object(code_gathers, "quantise", quantise_wrongly),
    ):
        model = build_model(cell, compute_dtype=torch.bfloat16)
        assert model.decoder.rounding_totals is not None
        model.decoder.rounding_totals.is_counting = True
        batches = read_micro_batches(cell, RankGrid(cell.layout).data_rank(dist.get_rank()))
        with CollectiveRecorder() as recorder:
            accumulate_gradients(model, batches, seed=0, step=0)
    specs = {spec.name: spec for spec in model.decoder.shape.list_parameters()}
    gradients = {name: model.gather_gradient(name) for name in model.layouts}
    return Step(
        {name: gradient for name, gradient in gradients.items() if gradient is not None},
        sum(each.num_bytes for each in recorder.collectives if each.kind == "all_gather"),
        sum(specs[name].num_elements for name in names),
        model.decoder.rounding_totals.pop_table(torch.device("cpu")),
    )


@pytest.mark.parametrize(
    "name",
    ["zero3", *(pytest.param(name, marks=pytest.mark.long) for name in ("zero2", "experts"))],
)
def test_gathered_codes_give_the_gradients_of_gathered_bf16(
    gloo_ranks: RankPool, name: str
) -> None:
    cell = CELLS[name]
    plain = gloo_ranks.run(2, run_step, cell, "bf16")
    coded = gloo_ranks.run(2, run_step, cell, "none")
    for wide, narrow in zip(plain, coded, strict=True):
        assert wide.gradients.keys() == narrow.gradients.keys()
        for key, gradient in wide.gradients.items():
            assert torch.equal(gradient, narrow.gradients[key]), key
        assert wide.code_elements == 0
        assert narrow.code_elements > 0
        # At stage 3 each pass of a micro-batch gathers. bf16 has two bytes.
        num_gathers = 2 * cell.accumulation if cell.layout.zero_stage == 3 else 1
        saved = narrow.code_elements - 4 * narrow.code_elements // BLOCK_ELEMENTS
        assert wide.gathered_bytes - narrow.gathered_bytes == num_gathers * saved
        # Each product counts a whole weight, each gather a rank's half.
        num_products = cell.accumulation * (2 + (cell.recompute == "full"))
        fewer = (2 * num_products - num_gathers) * narrow.code_elements // 2
        assert (wide.counts - narrow.counts)[:, 3].sum() == fewer
        assert narrow.counts[:, 1].sum() > 0
    if name == "zero3":  # each mutation is noticed
        for mutation in ("stale", "other block"):
            wrong = gloo_ranks.run(2, run_step, cell, mutation)[0].gradients
            right = plain[0].gradients
            assert any(not torch.equal(right[key], wrong[key]) for key in right)
