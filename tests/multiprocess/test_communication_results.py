"""Recomputed blocks take the results of tensor-parallel communication from the forward pass:
collectives and products are counted, and gradients are equal bit by bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.config.recipe import RecomputeKind
from shardwright.config.training import FP8Section, PrecisionSection
from shardwright.layout import Layout
from shardwright.layout.saved_results import SavedResults
from shardwright.parallel import ParallelModel
from shardwright.parallel.experts import row_exchange
from shardwright.parallel.recompute import build_block_runner, build_layer_runner
from shardwright.rehearsal.collective_recorder import Collective, CollectiveRecorder
from shardwright.training.step import accumulate_gradients
from shardwright.verification.grid import GRID_MODELS
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_layouts import build, micro_batches
from tests.reference.cases import CASES

FP32 = PrecisionSection(kind="fp32")
MODELS: dict[str, dict[str, Any]] = {
    **GRID_MODELS,
    "olmo2": CASES["olmo2"] | {"vocab_size": 61},
    "gpt2-dropout": GRID_MODELS["tied"] | {"resid_pdrop": 0.1, "attn_pdrop": 0.0},
}
MICRO_BATCHES = 2
SPLIT_STREAM = Layout(tp=2)
WHOLE_STREAM = Layout(tp=2, sequence_parallel=False)


class Measured(NamedTuple):
    """Collectives by kind, products, host reads of row counts, and gradients of one step."""

    calls: Counter[str]
    num_products: int
    num_reads: int
    gradients: list[Tensor]


class _ProductCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_products += func.name() in ("aten::mm", "aten::addmm", "aten::bmm")
        return func(*args, **(kwargs or {}))


def measure_step(model: ParallelModel, kind: RecomputeKind | SavedResults) -> Measured:
    """Run one step with a kind of recomputation, or one that keeps some results."""
    shape = model.decoder.shape
    if isinstance(kind, frozenset):
        model.decoder.set_recompute(build_layer_runner(shape, model.layout, kind))
    else:
        model.decoder.set_recompute(build_block_runner(shape, model.layout, kind))
    model.decoder.zero_grad()
    read = row_exchange.read_row_counts
    with (
        patch.object(row_exchange, "read_row_counts", side_effect=read) as reads,
        CollectiveRecorder() as recorder,
        _ProductCounter() as products,
    ):
        rank = dist.get_rank() if model.layout.data_ranks > 1 else 0
        accumulate_gradients(model, micro_batches(rank), seed=0, step=0)
    gradients = [gradient.clone() for gradient, _ in model.list_gradients() if gradient is not None]
    calls = Counter(map(_describe_call, recorder.collectives))
    return Measured(calls, products.num_products, reads.call_count, gradients)


def _describe_call(call: Collective) -> str:
    return call.kind if "float" in call.dtype else f"{call.kind} of counts"


def measure_kinds(
    layout: Layout,
    model: str,
    precision: PrecisionSection,
    kinds: Sequence[RecomputeKind | SavedResults],
) -> list[tuple[Counter[str], int, int, bool]]:
    """Measure a step with each kind; the last value is True if gradients equal the first ones."""
    built = build(layout, precision, MODELS[model])
    measured = [measure_step(built, kind) for kind in kinds]
    assert len(measured[0].gradients) > 5
    return [
        (
            step.calls,
            step.num_products,
            step.num_reads,
            all(map(torch.equal, step.gradients, measured[0].gradients)),
        )
        for step in measured
    ]


@pytest.mark.parametrize(
    ("model", "layout", "repeated"),
    [
        # Both gathers, and the sum after attention. The last sum of a block is not needed again,
        # unless a norm or dropout follows it.
        ("dense", SPLIT_STREAM, {"all_gather": 2, "reduce_scatter": 1}),
        ("dense", WHOLE_STREAM, {"all_reduce": 1}),
        ("gpt2-dropout", WHOLE_STREAM, {"all_reduce": 2}),
        # Its norms over all heads sum squares, which `full` keeps too.
        ("olmo2", SPLIT_STREAM, {"all_gather": 2, "reduce_scatter": 2}),
        ("moe", SPLIT_STREAM, {"all_gather": 2, "reduce_scatter": 1}),
    ],
)
def test_selective_repeats_no_collective_and_no_product(
    gloo_ranks: RankPool, model: str, layout: Layout, repeated: dict[str, int]
) -> None:
    kinds: tuple[RecomputeKind, ...] = ("none", "selective", "full")
    num_layers = 3 if model == "olmo2" else 4
    for plain, selective, full in gloo_ranks.run(2, measure_kinds, layout, model, FP32, kinds):
        assert selective[0] == plain[0]
        assert selective[1] == plain[1]
        assert full[0] - plain[0] == Counter(
            {kind: MICRO_BATCHES * num_layers * count for kind, count in repeated.items()}
        )
        assert full[1] > plain[1]
        assert selective[3]
        assert full[3]


def test_a_layer_repeats_the_collectives_of_results_that_it_does_not_keep(
    gloo_ranks: RankPool,
) -> None:
    gathers: SavedResults = frozenset(["gathered", "projections"])
    sums: SavedResults = frozenset(["attention_out", "attention"])
    for plain, with_gathers, with_sums in gloo_ranks.run(
        2, measure_kinds, SPLIT_STREAM, "dense", FP32, ("none", gathers, sums)
    ):
        num_blocks = MICRO_BATCHES * 4
        assert with_gathers[0] - plain[0] == Counter({"reduce_scatter": num_blocks})
        assert with_sums[0] - plain[0] == Counter({"all_gather": 2 * num_blocks})
        # Of seven products: the output projection, gate and up; and projections, gate and up.
        assert with_gathers[1] - plain[1] == 3 * num_blocks
        assert with_sums[1] - plain[1] == 5 * num_blocks
        assert with_gathers[3]
        assert with_sums[3]


def test_numbers_of_rows_are_exchanged_and_read_once(gloo_ranks: RankPool) -> None:
    layout = Layout(dp_shard=2, ep=2, zero_stage=1)
    kinds: tuple[RecomputeKind, ...] = ("none", "selective", "full")
    for steps in gloo_ranks.run(2, measure_kinds, layout, "moe", FP32, kinds):
        for calls, _, num_reads, is_equal in steps:
            assert calls["all_to_all of counts"] == num_reads == MICRO_BATCHES * 4
            assert is_equal


def test_maxima_of_8_bit_operands_are_reduced_once(gloo_ranks: RankPool) -> None:
    precision = PrecisionSection(kind="fp8", fp8=FP8Section(recipe="tensorwise", emulate=True))
    kinds: tuple[RecomputeKind, ...] = ("none", "selective", "full")
    for plain, selective, full in gloo_ranks.run(
        2, measure_kinds, WHOLE_STREAM, "dense", precision, kinds
    ):
        assert selective[0] == plain[0]
        assert full[0] - plain[0] == Counter({"all_reduce": MICRO_BATCHES * 4})
        assert selective[3]
        assert full[3]
