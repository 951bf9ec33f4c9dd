"""Adapters against one process: kinds, families and layouts; and known bugs of sharded
adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from shardwright.layout import Layout, ParameterLayout
from shardwright.model.products.linear import Linear
from shardwright.parallel import apply
from shardwright.parallel.gradient_reduction import PendingReduction
from shardwright.verification.cases import VERIFICATION_DTYPES, VerificationCase
from shardwright.verification.cell import MutationContext
from tests.multiprocess.adapter_cells import AdapterCell, verify_adapter_cell
from tests.multiprocess.assertions import assert_clean, assert_detected
from tests.multiprocess.models import GPT2, TENSOR_LLAMA
from tests.multiprocess.pool import RankPool
from tests.reference.cases import CASES

DEEP = TENSOR_LLAMA | {"num_hidden_layers": 4}
ZBV = Layout(pp=2, schedule="zbv", virtual_stages=2)
PIPELINED = Layout(tp=2, async_tensor_parallel="chunked")
PLAIN = VerificationCase(1, documents=False)
ACCUMULATED = VerificationCase(2)
RECOMPUTED = VerificationCase(2, "full")
SELECTIVE = VerificationCase(2, "selective")


LORA, RSLORA, DORA = ({"kind": kind, "rank": 3} for kind in ("lora", "rslora", "dora"))
DROPPING = {"dropout": 0.1}

CELLS = [
    AdapterCell(TENSOR_LLAMA, LORA | DROPPING, Layout(tp=2), RECOMPUTED),
    AdapterCell(TENSOR_LLAMA, DORA, Layout(tp=4), SELECTIVE),
    AdapterCell(TENSOR_LLAMA, DORA | DROPPING, Layout(dp_shard=2, zero_stage=3), RECOMPUTED),
    AdapterCell(DEEP, DORA, ZBV, VerificationCase(4)),
    AdapterCell(GPT2, DORA | DROPPING, Layout(tp=2, sequence_parallel=False), ACCUMULATED),
    AdapterCell(CASES["phi3"], RSLORA, PIPELINED, SELECTIVE),
    AdapterCell(
        CASES["qwen3_moe"], LORA, Layout(dp_shard=2, ep=2, tp=2, zero_stage=2), ACCUMULATED
    ),
]
LONG_CELLS = [
    AdapterCell(TENSOR_LLAMA, LORA, Layout(dp_replicate=2), RECOMPUTED),
    AdapterCell(
        TENSOR_LLAMA,
        LORA | {"targets": ("q_proj", "v_proj")},
        Layout(dp_shard=2, zero_stage=1),
        ACCUMULATED,
    ),
    AdapterCell(
        TENSOR_LLAMA, RSLORA, Layout(dp_shard=2, zero_stage=2), VerificationCase(3, "selective")
    ),
    AdapterCell(TENSOR_LLAMA, LORA | DROPPING, Layout(cp=2, zero_stage=3), PLAIN),
    AdapterCell(TENSOR_LLAMA, DORA | DROPPING, Layout(cp=2, tp=2, zero_stage=2), PLAIN),
    AdapterCell(DEEP, LORA, ZBV, VerificationCase(4)),
    AdapterCell(DEEP, LORA, replace(ZBV, dp_shard=2, zero_stage=2), VerificationCase(4)),
    AdapterCell(
        DEEP, LORA, replace(PIPELINED, pp=2, schedule="zb_h1"), VerificationCase(3, "full")
    ),
    AdapterCell(TENSOR_LLAMA, DORA, Layout(dp_replicate=2, dp_shard=2, zero_stage=3), ACCUMULATED),
    AdapterCell(
        GPT2,
        LORA,
        replace(PIPELINED, dp_shard=2, zero_stage=3, sequence_parallel=False),
        ACCUMULATED,
    ),
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
def test_adapters_when_sharded(ranks: RankPool, cell: AdapterCell) -> None:
    assert_clean(verify_adapter_cell(ranks, cell, ("float32",)))


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS + LONG_CELLS, ids=str)
def test_adapters_under_every_layout(ranks: RankPool, cell: AdapterCell) -> None:
    assert_clean(verify_adapter_cell(ranks, cell, VERIFICATION_DTYPES))


def _patch_pending_reductions(part: str, modules: tuple[str, ...]) -> Any:
    """Omit the sums over ranks of some adapters' parts."""
    original = apply.list_pending_reductions

    def list_fewer(
        layouts: Mapping[str, ParameterLayout], *arguments: Any, **named: Any
    ) -> list[PendingReduction]:
        sums = original(layouts, *arguments, **named)
        return [
            pending
            for pending in sums
            if not (part in pending.name and any(name in pending.name for name in modules))
        ]

    return patch.object(apply, "list_pending_reductions", list_fewer)


@contextmanager
def skip_sum_of_column_parallel_a() -> Iterator[None]:
    """Keep the gradient of the rank's own outputs for A of a column-parallel matrix."""
    with _patch_pending_reductions(
        "lora_A", ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    ):
        yield


@contextmanager
def skip_sum_of_row_parallel_b() -> Iterator[None]:
    """Keep the gradient of the rank's own inputs for B of a row-parallel matrix."""
    with _patch_pending_reductions("lora_B", ("o_proj", "down_proj")):
        yield


@contextmanager
def skip_sum_of_magnitudes() -> Iterator[None]:
    """Keep the gradient of the rank's own products for a magnitude of a row-parallel matrix."""
    with _patch_pending_reductions("lora_magnitude_vector", ("o_proj", "down_proj")):
        yield


@contextmanager
def compute_norms_of_own_columns() -> Iterator[None]:
    """Compute row norms of a row-parallel matrix from the rank's own columns."""
    original = Linear._compute_adapted_norms

    def compute_local(self: Linear, scale: float) -> Any:
        num_in = self.num_in
        self.num_in = 0
        try:
            return original(self, scale)
        finally:
            self.num_in = num_in

    with patch.object(Linear, "_compute_adapted_norms", compute_local):
        yield


@contextmanager
def number_inputs_locally() -> Iterator[None]:
    """Key dropout of inputs by the number of the feature within the rank."""
    original = Linear._drop_adapter_input

    def drop_local(self: Linear, *arguments: Any) -> Any:
        num_in = self.num_in
        self.num_in = 0
        try:
            return original(self, *arguments)
        finally:
            self.num_in = num_in

    with patch.object(Linear, "_drop_adapter_input", drop_local):
        yield


TP = Layout(tp=2)


@pytest.mark.parametrize(
    ("mutation", "adapters"),
    [
        (skip_sum_of_column_parallel_a, LORA),
        (skip_sum_of_row_parallel_b, LORA),
        (skip_sum_of_magnitudes, DORA),
        (compute_norms_of_own_columns, DORA),
        (number_inputs_locally, LORA | DROPPING),
    ],
)
def test_the_verifier_detects(
    ranks: RankPool, mutation: MutationContext, adapters: dict[str, Any]
) -> None:
    assert_detected(
        verify_adapter_cell(
            ranks, AdapterCell(TENSOR_LLAMA, adapters, TP, PLAIN), ("float32",), mutation
        ),
        "gradient",
    )
