"""One compiled graph per kind of layer under tensor and context parallelism, with equal results."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from shardwright.config.recipe import RecomputeKind
from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.model import DropoutKey
from shardwright.numerics import build_recompute_runner
from tests.compiled_graphs import GraphCounter
from tests.multiprocess.models import GPT2, LLAMA
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_layouts import TOKENS, build
from tests.reference.cases import CASES

NUM_LAYERS = 10
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "intermediate_size": 28, "num_hidden_layers": NUM_LAYERS},
    "gpt2": {**GPT2, "n_layer": NUM_LAYERS, "attn_pdrop": 0.1, "resid_pdrop": 0.1},
    "mixtral": {**CASES["mixtral"], "num_hidden_layers": NUM_LAYERS},
    "gemma2": {**CASES["gemma2"], "num_hidden_layers": NUM_LAYERS, "layer_types": None},
}
NUM_KINDS = {"gemma2": 2}


class CompiledCase(NamedTuple):
    """Model, layout and recomputation."""

    model: str
    layout: Layout
    recompute: RecomputeKind = "none"

    def __str__(self) -> str:
        return f"{self.model}-{self.layout}-{self.recompute}"


CASES_ON_TWO_RANKS = [
    CompiledCase("llama", Layout(tp=2)),
    CompiledCase("gpt2", Layout(cp=2, cp_method="ring"), "full"),
    CompiledCase("mixtral", Layout(cp=2, cp_method="ulysses")),
]
LONG = [
    CompiledCase("llama", Layout(tp=2, sequence_parallel=False), "full"),
    CompiledCase("llama", Layout(cp=2, cp_method="ring")),
    CompiledCase("gpt2", Layout(cp=2, cp_method="ulysses"), "selective"),
    CompiledCase("gemma2", Layout(cp=2, cp_method="all_gather"), "selective"),
]


def run_step(model: Any, step: int) -> list[Tensor]:
    """Return the gradients of a step on rows of other documents than those of other steps."""
    random = torch.Generator().manual_seed(step)
    ids_BT = torch.randint(0, model.decoder.shape.vocab_size, (2, TOKENS), generator=random)
    documents_BT = (torch.arange(TOKENS) >= 3 + 2 * step).long().expand(2, -1)
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


def compare_with_eager(case: CompiledCase, fullgraph: bool = True) -> tuple[int, int]:
    """Run two steps, eager and compiled; return the numbers of graphs."""
    model = build(case.layout, PrecisionSection(kind="fp64"), MODELS[case.model])
    model.decoder.set_recompute(build_recompute_runner(case.recompute))
    expected = [run_step(model, step) for step in (0, 1)]
    counter = GraphCounter()
    counter.compile(model.decoder, fullgraph=fullgraph)
    for step in (0, 1):
        for got, want in zip(run_step(model, step), expected[step], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    return counter.counts


@pytest.mark.parametrize(
    "case",
    [*CASES_ON_TWO_RANKS, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)],
    ids=str,
)
def test_layers_of_a_kind_share_one_graph(ranks: RankPool, case: CompiledCase) -> None:
    num_kinds = NUM_KINDS.get(case.model, 1)
    assert ranks.run(2, compare_with_eager, case) == [(num_kinds, num_kinds)] * 2


def test_experts_on_several_ranks_leave_a_few_graphs_per_kind(ranks: RankPool) -> None:
    """The host reads how many rows each rank gets, so the graph breaks there, in every layer at
    the same places.
    """
    case = CompiledCase("mixtral", Layout(dp_shard=2, ep=2, zero_stage=2))
    for num_forward, num_backward in ranks.run(2, compare_with_eager, case, False):
        assert 0 < num_forward <= 4
        assert 0 < num_backward <= 4
