"""One compiled graph per kind of layer: the layer's number is not part of compiled code.

A graph per layer would take minutes to compile, and beyond about eight layers the compiler gives
up and runs the rest uncompiled.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from shardwright.architecture import read_config
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.config.adapter_section import AdapterSection
from shardwright.config.recipe import RecomputeKind
from shardwright.model import Decoder, DropoutKey
from shardwright.model.routing import ExpertRules
from shardwright.numerics.recompute import build_recompute_runner
from tests.compiled_graphs import GraphCounter
from tests.reference.cases import CASES

NUM_LAYERS = 5
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    # Each with its number of kinds of layers.
    "llama": (CASES["llama"] | {"num_hidden_layers": NUM_LAYERS}, 1),
    "gpt2": (CASES["gpt2"] | {"n_layer": NUM_LAYERS, "resid_pdrop": 0.1, "attn_pdrop": 0.1}, 1),
    "mixtral": (CASES["mixtral"] | {"num_hidden_layers": NUM_LAYERS}, 1),
    "deepseek_v3": (
        CASES["deepseek_v3"] | {"num_hidden_layers": NUM_LAYERS, "first_k_dense_replace": 3},
        2,
    ),
    "gemma2": (CASES["gemma2"] | {"num_hidden_layers": NUM_LAYERS, "layer_types": None}, 2),
    "gpt_oss": (CASES["gpt_oss"] | {"num_hidden_layers": NUM_LAYERS, "layer_types": None}, 2),
}

EVERY_RUN: dict[str, tuple[RecomputeKind, ...]] = {
    "llama": ("none", "selective", "full"),
    "gpt2": ("none",),
    "mixtral": ("none", "selective", "full"),
    "deepseek_v3": ("full",),
    "gemma2": ("selective",),
    "gpt_oss": ("none",),
}
"""Recomputation of the tests that run each time; the others are long."""

# Tracing reads `.grad` of a block's input, and instantiates autograd functions.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def build(
    name: str,
    recompute: RecomputeKind,
    capacity_factor: float | None = None,
    adapters: AdapterSection | None = None,
) -> Decoder:
    shape = add_adapters(read_config(MODELS[name][0]), adapters)
    rules = None if shape.experts is None else ExpertRules(0.01, 0.001, capacity_factor)
    decoder = Decoder(shape, expert_rules=rules)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    decoder.set_recompute(build_recompute_runner(recompute))
    return decoder


def run_step(decoder: Decoder, step: int) -> tuple[list[Tensor], Tensor | None]:
    """Return the gradients of a training step, and the router statistics."""
    ids_BT = torch.randint(
        0, decoder.shape.vocab_size, (2, 16), generator=torch.Generator().manual_seed(step)
    )
    decoder.zero_grad()
    sparse = decoder.shape.experts
    decoder(
        ids_BT,
        labels_BT=ids_BT,
        dropout=DropoutKey(0, step, torch.tensor([2 * step, 2 * step + 1])),
        row_weight=None if sparse is None else 0.5,
    ).backward()
    table = (
        None
        if sparse is None
        else decoder.router_totals.pop_table(NUM_LAYERS, sparse.num_experts, torch.device("cpu"))
    )
    return [p.grad.clone() for p in decoder.parameters() if p.grad is not None], table


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        pytest.param(name, kind, marks=() if kind in EVERY_RUN[name] else pytest.mark.long)
        for name in MODELS
        for kind in get_args(RecomputeKind)
    ],
)
def test_layers_of_a_kind_share_one_graph(name: str, recompute: RecomputeKind) -> None:
    check_graphs(name, recompute)


@pytest.mark.parametrize(
    "recompute",
    [pytest.param("none", marks=pytest.mark.long), "selective", "full"],
)
def test_experts_with_a_capacity_have_one_graph(recompute: RecomputeKind) -> None:
    """The number of choices that are kept differs between layers and steps."""
    check_graphs("mixtral", recompute, 0.8)


def check_graphs(name: str, recompute: RecomputeKind, capacity_factor: float | None = None) -> None:
    """Compare two compiled steps with uncompiled ones, and count the graphs."""
    decoder = build(name, recompute, capacity_factor)
    expected = [run_step(decoder, step) for step in (0, 1)]
    counter = GraphCounter()
    counter.compile(decoder, fullgraph=decoder.shape.experts is None)
    for step in (0, 1):
        gradients, table = run_step(decoder, step)
        expected_gradients, expected_table = expected[step]
        largest = max(gradient.norm() for gradient in expected_gradients)
        for got, want in zip(gradients, expected_gradients, strict=True):
            assert (got - want).norm() <= 1e-5 * want.norm() + 1e-6 * largest
        if table is not None:
            assert expected_table is not None
            torch.testing.assert_close(table, expected_table, rtol=1e-5, atol=1e-7)
            num_dropped = table[:, -3].sum()
            assert (num_dropped > 0) == (capacity_factor is not None)
    num_kinds = MODELS[name][1]
    assert counter.counts == (num_kinds, num_kinds)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [
        ("llama", "none"),
        ("llama", "selective"),
        ("llama", "full"),
        ("mixtral", "selective"),
        ("llama with adapters", "none"),
        pytest.param("llama with adapters", "full", marks=pytest.mark.long),
        pytest.param("gemma2", "full", marks=pytest.mark.long),
    ],
)
def test_rows_of_changing_lengths_compile_once(name: str, recompute: RecomputeKind) -> None:
    """50 steps, forward and backward."""
    model, _, has_adapters = name.partition(" with ")
    decoder = build(model, recompute, adapters=AdapterSection(rank=2) if has_adapters else None)
    counter = GraphCounter()
    counter.compile(decoder, dynamic=True, fullgraph=decoder.shape.experts is None)
    num_graphs = None
    for step in range(50):
        num_tokens = 8 * (2 + step * 7 % 23)
        ids_BT = torch.randint(0, decoder.shape.vocab_size, (2, num_tokens))
        documents_BT = (torch.arange(num_tokens) >= 3 + step % 5).long().expand(2, -1)
        decoder(ids_BT, labels_BT=ids_BT, document_ids_BT=documents_BT).backward()
        num_graphs = num_graphs or counter.counts
    # With adapters alone, the input of the first layer has no gradient.
    num_kinds = MODELS[model][1] + bool(has_adapters)
    assert counter.counts == num_graphs == (num_kinds, num_kinds)
