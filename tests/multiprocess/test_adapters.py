"""Adapters against one process: kinds, families and cuts; and the bugs of their cuts, put back one
at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from shardwright.layout import Layout, ParameterLayout
from shardwright.model.linear import Linear
from shardwright.parallel import apply
from shardwright.parallel.gradient_reduction import PendingReduction
from shardwright.verify.cases import VERIFICATION_DTYPES, VerificationCase
from shardwright.verify.cell import MutationContext
from tests.multiprocess.adapter_cells import AdapterCell, hold
from tests.multiprocess.bugs import assert_caught, assert_clean
from tests.multiprocess.models import GPT2
from tests.multiprocess.pool import RankPool
from tests.multiprocess.test_tensor import HEADS
from tests.reference.cases import CASES

DEEP = HEADS | {"num_hidden_layers": 4}
ZBV = Layout(pp=2, schedule="zbv", virtual_stages=2)
PLAIN = VerificationCase(1, documents=False)
ACCUMULATED = VerificationCase(2)
RECOMPUTED = VerificationCase(2, "full")


LORA, RSLORA, DORA = ({"kind": kind, "rank": 3} for kind in ("lora", "rslora", "dora"))
DROPPING = {"dropout": 0.1}

CELLS = [
    AdapterCell(HEADS, LORA | DROPPING, Layout(tp=2), RECOMPUTED),
    AdapterCell(HEADS, DORA, Layout(tp=4), PLAIN),
    AdapterCell(HEADS, DORA | DROPPING, Layout(dp_shard=2, zero_stage=3), RECOMPUTED),
    AdapterCell(DEEP, DORA, ZBV, VerificationCase(4)),
    AdapterCell(GPT2, DORA | DROPPING, Layout(tp=2, sequence_parallel=False), ACCUMULATED),
    AdapterCell(CASES["phi3"], RSLORA, Layout(tp=2), ACCUMULATED),
    AdapterCell(
        CASES["qwen3_moe"], LORA, Layout(dp_shard=2, ep=2, tp=2, zero_stage=2), ACCUMULATED
    ),
]
MORE = [
    AdapterCell(HEADS, LORA, Layout(dp_replicate=2), RECOMPUTED),
    AdapterCell(
        HEADS,
        LORA | {"targets": ("q_proj", "v_proj")},
        Layout(dp_shard=2, zero_stage=1),
        ACCUMULATED,
    ),
    AdapterCell(HEADS, RSLORA, Layout(dp_shard=2, zero_stage=2), VerificationCase(3, "selective")),
    AdapterCell(HEADS, LORA | DROPPING, Layout(cp=2, zero_stage=3), PLAIN),
    AdapterCell(HEADS, DORA | DROPPING, Layout(cp=2, tp=2, zero_stage=2), PLAIN),
    AdapterCell(DEEP, LORA, ZBV, VerificationCase(4)),
    AdapterCell(DEEP, LORA, replace(ZBV, dp_shard=2, zero_stage=2), VerificationCase(4)),
    AdapterCell(DEEP, LORA, Layout(pp=2, tp=2), VerificationCase(3, "full")),
    AdapterCell(HEADS, DORA, Layout(dp_replicate=2, dp_shard=2, zero_stage=3), ACCUMULATED),
    AdapterCell(GPT2, LORA, Layout(tp=2, dp_shard=2, zero_stage=3), ACCUMULATED),
    AdapterCell(CASES["phi3"], DORA, Layout(tp=2, sequence_parallel=False), ACCUMULATED),
    AdapterCell(CASES["gpt_neox"], DORA, Layout(tp=2), ACCUMULATED),
    AdapterCell(CASES["mixtral"], RSLORA, Layout(dp_shard=4, ep=2, zero_stage=3), ACCUMULATED),
    AdapterCell(CASES["gpt_oss"], LORA, Layout(tp=2), ACCUMULATED),
    AdapterCell(CASES["gpt_oss"], LORA, Layout(dp_shard=2, ep=2, tp=2, zero_stage=1), ACCUMULATED),
    AdapterCell(CASES["deepseek_v3"], LORA, Layout(tp=2), ACCUMULATED),
    AdapterCell(
        CASES["deepseek_v3"],
        DORA | {"exclude": ("experts.*",)},
        Layout(dp_shard=2, ep=2, zero_stage=2),
        ACCUMULATED,
    ),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_adapters_under_a_cut(ranks: RankPool, cell: AdapterCell) -> None:
    assert_clean(hold(ranks, cell, ("float32",)))


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS + MORE, ids=str)
def test_adapters_under_every_cut(ranks: RankPool, cell: AdapterCell) -> None:
    assert_clean(hold(ranks, cell, VERIFICATION_DTYPES))


def _dropping(part: str, of: tuple[str, ...]) -> Any:
    """Leaves the sums of some adapters' parts over the ranks out."""
    original = apply.list_pending_reductions

    def fewer(
        layouts: Mapping[str, ParameterLayout], *arguments: Any, **named: Any
    ) -> list[PendingReduction]:
        sums = original(layouts, *arguments, **named)
        return [
            pending
            for pending in sums
            if not (part in pending.name and any(name in pending.name for name in of))
        ]

    return patch.object(apply, "list_pending_reductions", fewer)


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
    """A magnitude beside a row-cut matrix keeps the gradient of the rank's own share of the
    product.
    """
    with _dropping("lora_magnitude_vector", ("o_proj", "down_proj")):
        yield


@contextmanager
def lengths_of_the_own_columns() -> Iterator[None]:
    """The rows of a row-cut matrix are measured by the columns that the rank has."""
    original = Linear._compute_adapted_norms

    def own(self: Linear, scale: float) -> Any:
        num_in, self.num_in = self.num_in, 0
        try:
            return original(self, scale)
        finally:
            self.num_in = num_in

    with patch.object(Linear, "_compute_adapted_norms", own):
        yield


@contextmanager
def inputs_number_themselves_locally() -> Iterator[None]:
    """Every rank drops the features of its own inputs by their number there."""
    original = Linear._drop_adapter_input

    def own(self: Linear, *arguments: Any) -> Any:
        num_in, self.num_in = self.num_in, 0
        try:
            return original(self, *arguments)
        finally:
            self.num_in = num_in

    with patch.object(Linear, "_drop_adapter_input", own):
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
def test_the_verifier_sees(
    ranks: RankPool, mutation: MutationContext, adapters: dict[str, Any]
) -> None:
    assert_caught(
        hold(ranks, AdapterCell(HEADS, adapters, TP, PLAIN), ("float32",), mutation), "gradient"
    )
