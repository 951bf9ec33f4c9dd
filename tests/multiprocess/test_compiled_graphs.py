"""One compiled graph per kind of layer under tensor, context and expert parallelism, with equal
results; context and expert parallelism in NCCL's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.config.adapter_section import AdapterSection
from shardwright.config.recipe import RecomputeKind
from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout, RankGrid
from shardwright.layout.saved_results import SavedResults
from shardwright.model import DropoutKey
from shardwright.model.products.split_backward import DeferredGraph
from shardwright.model.routing import ExpertRules
from shardwright.parallel.experts import row_exchange
from shardwright.parallel.experts.padded_exchange import find_padded_exchange
from shardwright.parallel.parallel_model import ParallelModel
from shardwright.parallel.recompute import build_block_runner, build_layer_runner
from shardwright.training.step import accumulate_gradients
from tests import deep_ep_double
from tests.compiled_graphs import GraphCounter
from tests.multiprocess.models import DEEPSEEK, GPT2, GPT_OSS, LLAMA
from tests.multiprocess.nccl_order.pool import OrderedRankPool
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_layouts import TOKENS, build, micro_batches
from tests.reference.cases import CASES

NUM_LAYERS = 5
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "intermediate_size": 28, "num_hidden_layers": NUM_LAYERS},
    "gpt2": {**GPT2, "n_layer": NUM_LAYERS, "attn_pdrop": 0.1, "resid_pdrop": 0.1},
    "mixtral": {**CASES["mixtral"], "num_hidden_layers": NUM_LAYERS},
    "gemma2": {**CASES["gemma2"], "num_hidden_layers": NUM_LAYERS, "layer_types": None},
    "deepseek": {**DEEPSEEK, "num_hidden_layers": NUM_LAYERS, "first_k_dense_replace": 3},
    "gpt_oss": {**GPT_OSS, "num_hidden_layers": NUM_LAYERS},
}
NUM_KINDS = {"gemma2": 2, "deepseek": 2, "gpt_oss": 2}
BALANCED = ExpertRules(0.5, 0.1)
LIMITED = ExpertRules(0.5, 0.1, capacity_factor=0.8)


class CompiledCase(NamedTuple):
    """Model, layout, recomputation and rules of experts."""

    model: str
    layout: Layout
    recompute: RecomputeKind | SavedResults = "none"
    rules: ExpertRules = BALANCED
    has_adapters: bool = False

    def __str__(self) -> str:
        limit = "" if self.rules.capacity_factor is None else "-limited"
        limit += "-adapters" if self.has_adapters else ""
        kind = self.recompute
        if isinstance(kind, frozenset):
            kind = f"keep {' '.join(sorted(kind))}"
        return f"{self.model}-{self.layout}-{kind}{limit}"


CHUNKED = Layout(tp=2, async_tensor_parallel="chunked")


PADDED: dict[str, Any] = {"expert_dispatch": "padded", "expert_row_limit": 8.0}

CASES_ON_TWO_RANKS = [
    CompiledCase("llama", Layout(tp=2), "selective"),
    CompiledCase("llama", CHUNKED, frozenset(["projections", "gate_up"])),
    CompiledCase("gpt2", Layout(cp=2, cp_method="ring"), "full"),
    CompiledCase("mixtral", Layout(cp=2, cp_method="ulysses")),
    CompiledCase(
        "mixtral",
        Layout(dp_shard=2, ep=2, expert_dispatch="halves", zero_stage=1),
        "selective",
        LIMITED,
    ),
    CompiledCase(
        "deepseek", Layout(dp_shard=2, ep=2, expert_dispatch="once_per_rank", zero_stage=3), "full"
    ),
    CompiledCase("gpt_oss", Layout(dp_shard=2, ep=2, zero_stage=3, **PADDED), "full", LIMITED),
    CompiledCase(
        "deepseek", Layout(dp_shard=2, ep=2, expert_dispatch="deep_ep", zero_stage=3), "full"
    ),
]
LONG = [
    CompiledCase("llama", Layout(tp=2)),
    CompiledCase("llama", Layout(tp=2, sequence_parallel=False), "selective"),
    CompiledCase("llama", Layout(tp=2, sequence_parallel=False), "full"),
    CompiledCase("llama", CHUNKED, "selective"),
    CompiledCase("llama", CHUNKED, frozenset(["gathered"])),
    CompiledCase("gpt2", CHUNKED, "full", has_adapters=True),
    CompiledCase("deepseek", CHUNKED),
    CompiledCase("gemma2", replace(CHUNKED, sequence_parallel=False), "full"),
    CompiledCase("llama", Layout(cp=2, cp_method="ring")),
    CompiledCase("gpt2", Layout(cp=2, cp_method="ulysses"), "selective"),
    CompiledCase("gemma2", Layout(cp=2, cp_method="all_gather"), "selective"),
    CompiledCase("mixtral", Layout(dp_shard=2, ep=2, zero_stage=2)),
    CompiledCase("mixtral", Layout(dp_shard=2, ep=2, zero_stage=1), "full", LIMITED),
    CompiledCase(
        "gpt_oss",
        Layout(dp_shard=2, ep=2, expert_dispatch="halves", zero_stage=3),
        "selective",
        LIMITED,
    ),
    CompiledCase("deepseek", Layout(dp_shard=2, ep=2, zero_stage=2), "selective"),
    CompiledCase(
        "gpt_oss",
        Layout(dp_shard=2, ep=2, expert_dispatch="once_per_rank", zero_stage=3),
        "selective",
        LIMITED,
    ),
    CompiledCase(
        "mixtral",
        Layout(dp_shard=2, ep=2, expert_dispatch="once_per_rank", zero_stage=2),
        has_adapters=True,
    ),
    CompiledCase("deepseek", Layout(cp=2, ep=2, cp_method="ring"), "full", LIMITED),
    CompiledCase(
        "deepseek", Layout(dp_shard=2, ep=2, expert_dispatch="halves", tp=2, zero_stage=3), "full"
    ),
    CompiledCase("gpt_oss", Layout(tp=2), "full", LIMITED),
    CompiledCase("deepseek", Layout(dp_shard=2, ep=2, zero_stage=2, **PADDED)),
    CompiledCase(
        "deepseek", Layout(dp_shard=2, ep=2, tp=2, zero_stage=3, **PADDED), "selective", LIMITED
    ),
    CompiledCase("mixtral", Layout(cp=2, ep=2, cp_method="ring", **PADDED), "full", LIMITED),
]


SPLIT = [
    CompiledCase("llama", Layout(pp=2, schedule="zb_h1"), "full"),
    CompiledCase("gpt2", Layout(pp=2, schedule="zbv", virtual_stages=2)),
    CompiledCase("llama", Layout(pp=2, tp=2, schedule="zb_h1"), "selective"),
    CompiledCase("llama", replace(CHUNKED, pp=2, schedule="zb_h1"), "full"),
    CompiledCase("mixtral", Layout(dp_shard=2, ep=2, pp=2, zero_stage=2, schedule="zb_h1"), "full"),
    CompiledCase("llama", Layout(dp_shard=2, pp=2, zero_stage=3, schedule="zb_h1"), "selective"),
    CompiledCase("gemma2", Layout(cp=2, cp_method="ring", pp=2, schedule="zbv")),
]


def run_step(model: Any, step: int, num_tokens: int = TOKENS) -> list[Tensor]:
    """Return the gradients of a step on rows of other documents than those of other steps."""
    random = torch.Generator().manual_seed(step)
    ids_BT = torch.randint(0, model.decoder.shape.vocab_size, (2, num_tokens), generator=random)
    documents_BT = (torch.arange(num_tokens) >= 3 + 2 * step).long().expand(2, -1)
    model.decoder.zero_grad()
    model.module(
        ids_BT,
        labels_BT=ids_BT,
        document_ids_BT=documents_BT,
        dropout=DropoutKey(0, step, torch.tensor([0, 1])),
        row_weight=None if model.decoder.shape.experts is None else 0.5,
    ).backward()
    model.finish_gradients()
    gathered = (model.gather_gradient(name) for name, _ in model.named_parameters())
    return [gradient.clone() for gradient in gathered if gradient is not None]


def set_recompute(model: ParallelModel, case: CompiledCase) -> None:
    """Let all blocks recompute as the case says."""
    shape = model.decoder.shape
    if isinstance(case.recompute, frozenset):
        runner = build_layer_runner(shape, case.layout, case.recompute)
    else:
        runner = build_block_runner(shape, case.layout, case.recompute)
    model.decoder.set_recompute(runner)


def compare_with_eager(case: CompiledCase) -> tuple[int, int]:
    """Run two steps, eager and compiled; return the numbers of graphs.

    Sparse blocks are compiled as in a run, without `fullgraph`, which would allow sizes that are
    read on the host by itself. A break would then make more graphs.
    """
    calls: list[str] = []
    with deep_ep_double.install(calls.append):
        return _compare_with_eager(case, calls)


def _compare_with_eager(case: CompiledCase, deep_ep_calls: list[str]) -> tuple[int, int]:
    adapters = AdapterSection(rank=2) if case.has_adapters else None
    model = build(case.layout, PrecisionSection(kind="fp64"), MODELS[case.model], adapters)
    model.decoder.expert_rules = case.rules
    set_recompute(model, case)
    expected = [run_step(model, step) for step in (0, 1)]
    counter = GraphCounter()
    counter.compile(model.decoder, fullgraph=model.decoder.shape.experts is None)
    deep_ep_calls.clear()
    read = row_exchange.read_row_counts
    with patch.object(row_exchange, "read_row_counts", side_effect=read) as reads:
        for step in (0, 1):
            for got, want in zip(run_step(model, step), expected[step], strict=True):
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    # The host reads each layer's counts once per step, also if the layer is recomputed.
    num_sparse = sum(layer.sparse for layer in model.decoder.shape.layers)
    is_deep_ep = case.layout.expert_dispatch == "deep_ep"
    has_reads = case.layout.ep > 1 and case.layout.expert_dispatch != "padded"
    num_reads = deep_ep_calls.count("plan") if is_deep_ep else reads.call_count
    assert num_reads == (2 * num_sparse if has_reads else 0)
    if case.model == "llama" and case.layout.tp > 1:
        assert counter.num_forward_collectives == (4 if case.layout.sequence_parallel else 2)
        # Recomputation repeats the collectives whose results it does not keep, but not the last
        # one, which nothing needs.
        num_repeated = 0
        if case.recompute == "full" or isinstance(case.recompute, frozenset):
            keeps_inputs = "gathered" in case.recompute or not case.layout.sequence_parallel
            num_repeated = 1 if keeps_inputs else 3
        assert counter.num_backward_collectives == counter.num_forward_collectives + num_repeated
    return counter.counts


@pytest.mark.parametrize(
    "case",
    [*CASES_ON_TWO_RANKS, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)],
    ids=str,
)
def test_layers_of_a_kind_share_one_graph(
    ranks: RankPool, ordered_ranks: OrderedRankPool, case: CompiledCase
) -> None:
    # Traced code of these calls torch's functional collectives, which need a C++ backend.
    has_shared_capacity = case.layout.cp > 1 and case.rules.capacity_factor is not None
    pool = ranks if case.layout.tp > 1 or has_shared_capacity else ordered_ranks
    # With adapters alone, the input of the first layer has no gradient.
    num_kinds = NUM_KINDS.get(case.model, 1) + case.has_adapters
    results = pool.run(case.layout.world_size, compare_with_eager, case)
    assert results == [(num_kinds, num_kinds)] * case.layout.world_size


NUM_STEPS = 12  # each of eleven lengths
CHANGING_LENGTHS = [
    CompiledCase("llama", Layout(tp=2), "selective"),
    CompiledCase("llama", Layout(cp=2, cp_method="ring")),
    CompiledCase("mixtral", Layout(dp_shard=2, ep=2, zero_stage=2), "full"),
    CompiledCase("llama", Layout(dp_shard=2, zero_stage=3), "full", has_adapters=True),
]
LONG_CHANGING_LENGTHS = [
    CompiledCase("llama", Layout(tp=2, sequence_parallel=False), "full"),
    CompiledCase("llama", CHUNKED),
    CompiledCase("gpt_oss", Layout(tp=2)),
    CompiledCase("llama", Layout(tp=2), has_adapters=True),
    CompiledCase("llama", Layout(cp=2, cp_method="ulysses"), "full"),
    CompiledCase("gemma2", Layout(cp=2, cp_method="all_gather"), "selective"),
    CompiledCase("mixtral", Layout(cp=2, ep=2, cp_method="ring"), "full"),
    CompiledCase(
        "deepseek", Layout(dp_shard=2, ep=2, expert_dispatch="once_per_rank", zero_stage=3)
    ),
    CompiledCase("llama", Layout(dp_shard=2, zero_stage=3), "selective"),
]


def run_changing_lengths(case: CompiledCase) -> tuple[tuple[int, int], tuple[int, int]]:
    """Run steps whose rows have other lengths and documents each time, on each data rank.

    Return the numbers of graphs after the first step and after the last. The gradients of some
    steps are compared with those of uncompiled blocks.
    """
    adapters = AdapterSection(rank=2) if case.has_adapters else None
    model = build(case.layout, PrecisionSection(kind="fp64"), MODELS[case.model], adapters)
    set_recompute(model, case)
    data_rank = RankGrid(case.layout).data_rank(dist.get_rank())
    compared = (0, 1, NUM_STEPS - 1)

    def run(step: int) -> list[Tensor]:
        # Not as long as a width in the first step, for which torch makes a graph of its own.
        num_tokens = 8 * (3 + (7 * step + 4 * data_rank) % 11)
        return run_step(model, step, num_tokens)

    expected = {step: run(step) for step in compared}
    counter = GraphCounter()
    is_whole = model.decoder.shape.experts is None
    counter.compile(model.decoder, dynamic=True, fullgraph=is_whole)
    counts = []
    for step in range(NUM_STEPS):
        gradients = run(step)
        counts.append(counter.counts)
        for got, want in zip(gradients, expected.get(step, gradients), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    return counts[0], counts[-1]


@pytest.mark.parametrize(
    "case",
    [
        *CHANGING_LENGTHS,
        *(pytest.param(case, marks=pytest.mark.long) for case in LONG_CHANGING_LENGTHS),
    ],
    ids=str,
)
def test_rows_of_changing_lengths_compile_once(ranks: RankPool, case: CompiledCase) -> None:
    num_kinds = NUM_KINDS.get(case.model, 1) + case.has_adapters
    for first, last in ranks.run(2, run_changing_lengths, case):
        assert first == last == (num_kinds, num_kinds)


def compare_raised_limits(case: CompiledCase) -> tuple[int, int]:
    """Run a step, raise the limit of padded rows, and run another; return the numbers of graphs."""
    model = build(case.layout, PrecisionSection(kind="fp64"), MODELS[case.model])
    set_recompute(model, case)
    exchange = find_padded_exchange(model.decoder)
    assert exchange is not None

    def run_steps() -> Iterator[list[Tensor]]:
        exchange.limit = case.layout.expert_row_limit
        for step in (0, 1):
            yield run_step(model, step)
            assert exchange.raise_limit()

    expected = list(run_steps())
    counter = GraphCounter()
    counter.compile(model.decoder, fullgraph=False)
    for gradients, expected_gradients in zip(run_steps(), expected, strict=True):
        for got, want in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    return counter.counts


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_another_graph_has_a_raised_limit_of_padded_rows(
    ordered_ranks: OrderedRankPool, recompute: RecomputeKind
) -> None:
    layout = Layout(dp_shard=2, ep=2, zero_stage=3, expert_dispatch="padded", expert_row_limit=1.0)
    case = CompiledCase("mixtral", layout, recompute)
    assert ordered_ranks.run(2, compare_raised_limits, case) == [(2, 2)] * 2


def compare_split_with_eager(case: CompiledCase) -> None:
    """Run a step of a pipeline eager and compiled, with one graph per kind of this rank's layers.

    Each block's matrices are left to W, once per micro-batch with an I.
    """
    model = build(case.layout, PrecisionSection(kind="fp64"), MODELS[case.model])
    assert model.pipeline is not None
    set_recompute(model, case)
    data_rank = RankGrid(case.layout).data_rank(dist.get_rank())

    def collect_gradients() -> dict[str, Tensor]:
        model.decoder.zero_grad()
        accumulate_gradients(model, micro_batches(data_rank), seed=0, step=0)
        gathered = {name: model.gather_gradient(name) for name in model.layouts}
        return {name: part.clone() for name, part in gathered.items() if part is not None}

    expected = collect_gradients()
    counter = GraphCounter()
    counter.compile_split(model.decoder, model.pipeline.gradient_store)
    with patch.object(
        DeferredGraph, "accumulate", autospec=True, side_effect=DeferredGraph.accumulate
    ) as accumulate:
        gradients = collect_gradients()
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12)
    schedule = model.pipeline.schedule(2)
    num_blocks = {stage.index: len(stage.layers) for stage in model.pipeline.stages}
    assert accumulate.call_count == sum(
        num_blocks[action.stage]
        for action in schedule.rows[model.pipeline.rank]
        if action.kind == "W"
    )
    own_kinds = {
        model.decoder.shape.layers[layer]
        for stage in model.pipeline.stages
        if stage.rank == model.pipeline.rank
        for layer in stage.layers
    }
    assert counter.counts == (len(own_kinds), 2 * len(own_kinds))


@pytest.mark.parametrize(
    "case",
    [SPLIT[0], *(pytest.param(case, marks=pytest.mark.long) for case in SPLIT[1:])],
    ids=str,
)
def test_matrices_of_compiled_blocks_wait_for_their_turn(
    ranks: RankPool, case: CompiledCase
) -> None:
    ranks.run(case.layout.world_size, compare_split_with_eager, case)
