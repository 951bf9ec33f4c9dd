"""Weights gathered as 8-bit codes: the numbers of gathering bf16 and quantising it after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from shardwright.config.adapter_section import AdapterSection
from shardwright.config.low_precision import FP8Section, NVFP4Section
from shardwright.layout import Layout, RankGrid
from shardwright.model.products.fp8 import Scaling, compute_block_maxima
from shardwright.model.products.operand import Operand, list_scales, replace_first_scales
from shardwright.numerics import get_local_tensor
from shardwright.parallel import apply, code_gathers
from shardwright.parallel.mesh import Mesh
from shardwright.rehearsal.collective_recorder import CollectiveRecorder
from shardwright.training.step import accumulate_gradients
from tests.multiprocess.pool import RankPool
from tests.multiprocess.scaled_operands import (
    BROAD,
    BROAD_SPARSE,
    DENSE,
    SPARSE,
    Cell,
    build_model,
    read_micro_batches,
)

BLOCKS = FP8Section(recipe="blockwise")
ROWS = FP8Section(recipe="rowwise_with_gw_hp")
SHORT_BLOCKS = FP8Section(recipe="mxfp8")
NARROW = NVFP4Section(experimental=True)
ZERO_2 = Layout(dp_shard=2, zero_stage=2)
ZERO_3 = Layout(dp_shard=2, zero_stage=3)
AHEAD = replace(ZERO_3, prefetch_depth=2, max_gathers_in_flight=3)
"""Gathers the weights of two layers ahead of the one that computes."""
CELLS = {
    "zero3": Cell(BROAD, BLOCKS, ZERO_3, 2, "full"),
    "zero3-rows": Cell(DENSE | {"num_hidden_layers": 3}, ROWS, AHEAD, 2),
    "zero2": Cell(BROAD, BLOCKS, ZERO_2, 2),
    "experts": Cell(BROAD_SPARSE, BLOCKS, ZERO_3),
    "zero3-short-blocks": Cell(DENSE, SHORT_BLOCKS, ZERO_3, 2),
    "zero2-nvfp4": Cell(DENSE, NARROW, ZERO_2, 2, "selective"),
    "zero3-nvfp4": Cell(DENSE, NARROW, ZERO_3, 2, "full"),
    "experts-rows": Cell(SPARSE, ROWS, ZERO_3),
    "experts-short-blocks": Cell(SPARSE, SHORT_BLOCKS, ZERO_3),
    "experts-nvfp4": Cell(SPARSE, NARROW, ZERO_3),
    "tp-rows": Cell(SPARSE, ROWS, replace(ZERO_3, tp=2)),
    "tp-nvfp4": Cell(SPARSE, NARROW, replace(ZERO_3, tp=2)),
    "pp-rows": Cell(DENSE, ROWS, replace(ZERO_3, pp=2, schedule="zb_h1"), 2),
}
MUTATIONS = {
    "zero3": ("stale", "other block"),
    "zero3-rows": ("output in both passes", "maxima of the shard"),
    "zero3-short-blocks": ("output in both passes", "other block"),
    "zero2-nvfp4": ("maxima of the shard",),
    "tp-rows": ("other shard",),
}
"""Changes that a cell's gradients show."""


class Step(NamedTuple):
    """Result of a step on one rank."""

    gradients: dict[str, Tensor]
    gathered_bytes: int
    shapes: dict[str, torch.Size]
    """Shapes of the weights whose codes are gathered, of the tensor-parallel rank."""
    counts: Tensor


def run_step(cell: Cell, mutation: str) -> Step:
    """Compute a step's gradients; `mutation` says how the gathers are changed."""
    gather = code_gathers.gather_codes
    names: list[str] = []

    def record(*arguments: Any, **options: Any) -> frozenset[str]:
        names.extend([] if mutation == "bf16" else gather(*arguments, **options))
        return frozenset(names)

    quantise = code_gathers.quantise

    def quantise_wrongly(values: Tensor, scaling: Scaling, maxima: Tensor | None) -> Operand:
        matrix = quantise(values, scaling, maxima)
        if mutation == "stale":
            return quantise(values, scaling, 2 * compute_block_maxima(values, scaling))
        if mutation == "other block":
            return replace_first_scales(matrix, list_scales(matrix)[0].flip(1))
        return matrix

    build = code_gathers._CodeGather.__init__

    def build_wrongly(self: Any, products: Any, group: Any, parameter: Any) -> None:
        build(self, products, group, parameter)
        if mutation == "output in both passes":
            self._group = SimpleNamespace(_training_state=TrainingState.FORWARD)
        if mutation == "other shard":
            self._shard_number = 1 - self._shard_number

    maximise = Mesh.maximise_over

    def keep_own(mesh: Mesh, tensor: Tensor, axes: Sequence[str]) -> Tensor:
        return tensor if mutation == "maxima of the shard" else maximise(mesh, tensor, axes)

    with (
        mock.patch.object(apply, "gather_codes", record),
        mock.patch.object(code_gathers, "quantise", quantise_wrongly),
        mock.patch.object(code_gathers._CodeGather, "__init__", build_wrongly),
        mock.patch.object(Mesh, "maximise_over", keep_own),
    ):
        model = build_model(cell, compute_dtype=torch.bfloat16)
        assert model.decoder.rounding_totals is not None
        model.decoder.rounding_totals.is_counting = True
        grid = RankGrid(cell.layout)
        if grid.coordinates(dist.get_rank())["dp_shard"] == 0:
            # Otherwise the maxima of both shards would give the same power of two.
            for name, weight in model.named_parameters():
                if name in model.decoder.rounding_totals.names:
                    get_local_tensor(weight.detach())[0] *= 8
        batches = read_micro_batches(cell, grid.data_rank(dist.get_rank()))
        with CollectiveRecorder() as recorder:
            accumulate_gradients(model, batches, seed=0, step=0)
    gradients = {name: model.gather_gradient(name) for name in model.layouts}
    return Step(
        {name: gradient for name, gradient in gradients.items() if gradient is not None},
        sum(each.num_bytes for each in recorder.collectives if each.kind == "all_gather"),
        {name: weight.shape for name, weight in model.named_parameters() if name in names},
        model.decoder.rounding_totals.pop_table(torch.device("cpu")),
    )


def count_scale_bytes(cell: Cell, shape: torch.Size) -> int:
    """Count the bytes of a weight's scales in a gather."""
    if cell.section.recipe == "rowwise_with_gw_hp":
        return shape[:-1].numel()
    if cell.section.recipe == "nvfp4":  # an outer scale of each rank, or of each expert
        return shape.numel() // 16**2 + 4 * (2 if len(shape) == 2 else shape[0])
    return shape.numel() // 32 if cell.section.recipe == "mxfp8" else 4 * shape.numel() // 128**2


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("zero3", "zero3-rows") else pytest.mark.long)
        for name in CELLS
    ],
)
def test_gathered_codes_give_the_gradients_of_gathered_bf16(
    gloo_ranks: RankPool, name: str
) -> None:
    cell = CELLS[name]
    size = cell.layout.world_size
    plain = gloo_ranks.run(size, run_step, cell, "bf16")
    coded = gloo_ranks.run(size, run_step, cell, "none")
    for wide, narrow in zip(plain, coded, strict=True):
        assert wide.gradients.keys() == narrow.gradients.keys()
        for key, gradient in wide.gradients.items():
            assert torch.equal(gradient, narrow.gradients[key]), key
        assert not wide.shapes
        assert narrow.shapes
        # At stage 3 each pass of a micro-batch gathers. bf16 has two bytes.
        num_gathers = 2 * cell.accumulation if cell.layout.zero_stage == 3 else 1
        num_elements = sum(shape.numel() for shape in narrow.shapes.values())
        saved = num_elements - sum(count_scale_bytes(cell, each) for each in narrow.shapes.values())
        assert wide.gathered_bytes - narrow.gathered_bytes == num_gathers * saved
        # Each product counts a whole weight, each gather a rank's half.
        num_products = cell.accumulation * (2 + (cell.recompute != "none"))
        fewer = (2 * num_products - num_gathers) * num_elements // 2
        assert (wide.counts - narrow.counts)[:, 3].sum() == fewer
        assert narrow.counts[:, 1].sum() > 0
    for mutation in MUTATIONS.get(name, ()):  # each is noticed
        wrong = gloo_ranks.run(size, run_step, cell, mutation)
        assert any(
            not torch.equal(gradient, step.gradients[key])
            for step, right in zip(wrong, plain, strict=True)
            for key, gradient in right.gradients.items()
        ), mutation


def test_matrices_with_dora_are_gathered_in_bf16(gloo_ranks: RankPool) -> None:
    """DoRA computes norms of their rows, for which there must be values and not only codes."""
    adapters = AdapterSection(kind="dora", rank=2, targets=["q_proj"])
    cell = replace(CELLS["zero2-nvfp4"], adapters=adapters)
    plain = gloo_ranks.run(2, run_step, cell, "bf16")
    coded = gloo_ranks.run(2, run_step, cell, "none")
    for wide, narrow in zip(plain, coded, strict=True):
        assert wide.gradients
        for key, gradient in wide.gradients.items():
            assert torch.equal(gradient, narrow.gradients[key]), key
        kinds = {name.split(".")[-2] for name in narrow.shapes}
        assert {"k_proj", "down_proj"} < kinds
        assert "q_proj" not in kinds
