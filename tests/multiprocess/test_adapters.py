"""Adapters against one process: kinds, families and cuts; and the bugs of their cuts, put back one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from shardwright.architecture import shape_of
from shardwright.layout import Layout, ParameterLayout
from shardwright.model.linear import Linear
from shardwright.parallel import apply
from shardwright.parallel.reduce import PendingSum
from shardwright.verify.cases import DTYPES, Case
from shardwright.verify.cell import Mutation
from shardwright.verify.matrix import Report, verify
from tests.multiprocess.bugs import assert_caught, assert_clean
from tests.multiprocess.models import GPT2, recipe_of
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_tensor import HEADS
from tests.reference.cases import CASES

DEEP = HEADS | {"num_hidden_layers": 4}
ZBV = Layout(pp=2, schedule="zbv", virtual_stages=2)
PLAIN, ACCUMULATED, RECOMPUTED = Case(1, documents=False), Case(2), Case(2, "full")


class Cell(NamedTuple):
    """A model with adapters, a layout and a way of computing."""

    config: dict[str, Any]
    adapters: dict[str, Any]
    layout: Layout
    case: Case

    def __str__(self) -> str:
        """What pytest calls it."""
        told = "-".join(str(value) for value in self.adapters.values() if not isinstance(value, tuple))
        return f"{self.config['model_type']}-{told}-{self.layout}-{self.case.recompute}"


LORA, RSLORA, DORA = ({"kind": kind, "rank": 3} for kind in ("lora", "rslora", "dora"))
DROPPING = {"dropout": 0.1}

CELLS = [
    Cell(HEADS, LORA | DROPPING, Layout(tp=2), RECOMPUTED),
    Cell(HEADS, DORA, Layout(tp=4), PLAIN),
    Cell(HEADS, DORA | DROPPING, Layout(dp_shard=2, zero_stage=3), RECOMPUTED),
    Cell(DEEP, DORA, ZBV, Case(4)),
    Cell(GPT2, DORA | DROPPING, Layout(tp=2, sequence_parallel=False), ACCUMULATED),
    Cell(CASES["phi3"], RSLORA, Layout(tp=2), ACCUMULATED),
    Cell(CASES["qwen3_moe"], LORA, Layout(dp_shard=2, ep=2, tp=2, zero_stage=2), ACCUMULATED),
]
MORE = [
    Cell(HEADS, LORA, Layout(dp_replicate=2), RECOMPUTED),
    Cell(HEADS, LORA | {"targets": ("q_proj", "v_proj")}, Layout(dp_shard=2, zero_stage=1), ACCUMULATED),
    Cell(HEADS, RSLORA, Layout(dp_shard=2, zero_stage=2), Case(3, "selective")),
    Cell(HEADS, LORA | DROPPING, Layout(cp=2, zero_stage=3), PLAIN),
    Cell(HEADS, DORA | DROPPING, Layout(cp=2, tp=2, zero_stage=2), PLAIN),
    Cell(DEEP, LORA, ZBV, Case(4)),
    Cell(DEEP, LORA, replace(ZBV, dp_shard=2, zero_stage=2), Case(4)),
    Cell(DEEP, LORA, Layout(pp=2, tp=2), Case(3, "full")),
    Cell(HEADS, DORA, Layout(dp_replicate=2, dp_shard=2, zero_stage=3), ACCUMULATED),
    Cell(GPT2, LORA, Layout(tp=2, dp_shard=2, zero_stage=3), ACCUMULATED),
    Cell(CASES["phi3"], DORA, Layout(tp=2, sequence_parallel=False), ACCUMULATED),
    Cell(CASES["gpt_neox"], DORA, Layout(tp=2), ACCUMULATED),
    Cell(CASES["mixtral"], RSLORA, Layout(dp_shard=4, ep=2, zero_stage=3), ACCUMULATED),
    Cell(CASES["gpt_oss"], LORA, Layout(tp=2), ACCUMULATED),
    Cell(CASES["gpt_oss"], LORA, Layout(dp_shard=2, ep=2, tp=2, zero_stage=1), ACCUMULATED),
    Cell(CASES["deepseek_v3"], LORA, Layout(tp=2), ACCUMULATED),
    Cell(CASES["deepseek_v3"], DORA | {"exclude": ("experts.*",)}, Layout(dp_shard=2, ep=2, zero_stage=2), ACCUMULATED),
]


def run(ranks: RankPool, cell: Cell, dtypes: tuple[str, ...], mutation: Mutation | None = None) -> Report:
    """Hold the cell's adapters against one process."""
    recipe = recipe_of(cell.config, adapters=cell.adapters)
    shape = shape_of(recipe)
    case = replace(cell.case, tied=shape.tied_embeddings)
    return verify(recipe, shape, [cell.layout], [case], list(dtypes), sequence_length=12, pool=ranks, mutation=mutation)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_adapters_under_a_cut(ranks: RankPool, cell: Cell) -> None:
    assert_clean(run(ranks, cell, ("float32",)))


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS + MORE, ids=str)
def test_adapters_under_every_cut(ranks: RankPool, cell: Cell) -> None:
    assert_clean(run(ranks, cell, DTYPES))


def _dropping(part: str, of: tuple[str, ...]) -> Any:
    """Leaves the sums of some adapters' parts over the ranks out."""
    original = apply.pending_sums

    def fewer(layouts: Mapping[str, ParameterLayout], *arguments: Any, **named: Any) -> list[PendingSum]:
        sums = original(layouts, *arguments, **named)
        return [pending for pending in sums if not (part in pending.name and any(name in pending.name for name in of))]

    return patch.object(apply, "pending_sums", fewer)


@contextmanager
def whole_inputs_are_not_summed() -> Iterator[None]:
    """A beside a column-cut matrix keeps the gradient of the rank's own outputs."""
    with _dropping("lora_A", ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
        yield


@contextmanager
def whole_outputs_are_not_summed() -> Iterator[None]:
    """B beside a row-cut matrix keeps the gradient of the rank's own inputs."""
    with _dropping("lora_B", ("o_proj", "down_proj")):
        yield


@contextmanager
def magnitudes_are_not_summed() -> Iterator[None]:
    """A magnitude beside a row-cut matrix keeps the gradient of the rank's own share of the product."""
    with _dropping("lora_magnitude_vector", ("o_proj", "down_proj")):
        yield


@contextmanager
def lengths_of_the_own_columns() -> Iterator[None]:
    """The rows of a row-cut matrix are measured by the columns that the rank has."""
    original = Linear._norms

    def own(self: Linear, scale: float) -> Any:
        num_in, self.num_in = self.num_in, 0
        try:
            return original(self, scale)
        finally:
            self.num_in = num_in

    with patch.object(Linear, "_norms", own):
        yield


@contextmanager
def inputs_number_themselves_locally() -> Iterator[None]:
    """Every rank drops the features of its own inputs by their number there."""
    original = Linear._drop

    def own(self: Linear, *arguments: Any) -> Any:
        num_in, self.num_in = self.num_in, 0
        try:
            return original(self, *arguments)
        finally:
            self.num_in = num_in

    with patch.object(Linear, "_drop", own):
        yield


TP = Layout(tp=2)


@pytest.mark.parametrize(
    ("mutation", "adapters"),
    [
        (whole_inputs_are_not_summed, LORA),
        (whole_outputs_are_not_summed, LORA),
        (magnitudes_are_not_summed, DORA),
        (lengths_of_the_own_columns, DORA),
        (inputs_number_themselves_locally, LORA | DROPPING),
    ],
)
def test_the_verifier_sees(ranks: RankPool, mutation: Mutation, adapters: dict[str, Any]) -> None:
    assert_caught(run(ranks, Cell(HEADS, adapters, TP, PLAIN), ("float32",), mutation), "gradient")
