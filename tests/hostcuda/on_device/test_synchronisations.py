"""Steps with real numbers on ranks with the test device: losses of a CPU, and host synchronisations
as in the table of docs/cuda.md.

The table has the number per step of a rank that reads two micro-batches.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.layout import Layout
from shardwright.verification.rank_pool import RankPool
from tests.hostcuda.ranks import Case, compute_reference, run_on_device

PAGE = Path(__file__).parents[3] / "docs/cuda.md"
SHARDED = Layout(dp_shard=2, zero_stage=3)
SHARDED_EXPERTS = Case(Layout(dp_shard=2, ep=2, zero_stage=3), model="qwen3_moe", kind="bf16")
PADDED_EXPERTS = replace(
    SHARDED_EXPERTS,
    layout=replace(SHARDED_EXPERTS.layout, expert_dispatch="padded", expert_row_limit=1.5),
)
HALVED_EXPERTS = replace(
    SHARDED_EXPERTS, layout=replace(SHARDED_EXPERTS.layout, expert_dispatch="halves")
)
ROWS_PER_RANK = replace(
    SHARDED_EXPERTS, layout=replace(SHARDED_EXPERTS.layout, expert_dispatch="once_per_rank")
)
ADAPTERS = {"adapters": {"rank": 4}}  # of attention and experts, whose products are padded
CAPACITY = {"moe": {"capacity_factor": 0.8}}
COMPILED = Case(Layout(), kind="bf16", is_compiled=True)
COMPILED_EXPERTS = replace(SHARDED_EXPERTS, is_compiled=True)
CASES: dict[str, Case] = {
    "one GPU": Case(Layout()),
    "packed documents, bf16": Case(Layout(), kind="bf16", has_documents=True),
    "DDP": Case(Layout(dp_replicate=2)),
    "ZeRO-1": Case(Layout(dp_shard=2, zero_stage=1)),
    "ZeRO-3": Case(SHARDED),
    "tp, sp": Case(Layout(tp=2, sequence_parallel=True)),
    "tp, sp, selective recomputation": Case(
        Layout(tp=2, sequence_parallel=True), recompute="selective"
    ),
    "cp ring": Case(Layout(cp=2, cp_method="ring")),
    "cp ring, packed documents": Case(Layout(cp=2, cp_method="ring"), has_documents=True),
    "cp all-gather, packed documents": Case(
        Layout(cp=2, cp_method="all_gather"), has_documents=True
    ),
    "cp Ulysses": Case(Layout(cp=2, cp_method="ulysses")),
    "cp Ulysses, packed documents, bf16": Case(
        Layout(cp=2, cp_method="ulysses"), kind="bf16", has_documents=True
    ),
    "pp 1F1B": Case(Layout(pp=2, schedule="1f1b")),
    "pp ZB-H1": Case(Layout(pp=2, schedule="zb_h1")),
    "experts, bf16": Case(Layout(), model="qwen3_moe", kind="bf16"),
    "experts, fp32": Case(Layout(), model="qwen3_moe"),
    "experts with a capacity, bf16": Case(
        Layout(), model="qwen3_moe", kind="bf16", sections=CAPACITY
    ),
    "ep, bf16": SHARDED_EXPERTS,
    "ep, bf16, full recomputation": replace(SHARDED_EXPERTS, recompute="full"),
    "ep with a capacity, bf16": replace(SHARDED_EXPERTS, sections=CAPACITY),
    "ep, halves, bf16": HALVED_EXPERTS,
    "ep, once per rank, bf16": ROWS_PER_RANK,
    "experts, LoRA, bf16": Case(Layout(), model="qwen3_moe", kind="bf16", sections=ADAPTERS),
    "ep, LoRA, bf16": replace(SHARDED_EXPERTS, sections=ADAPTERS),
    "ep, padded, bf16": PADDED_EXPERTS,
    "ep, padded, with a capacity, bf16, full recomputation": replace(
        PADDED_EXPERTS, sections=CAPACITY, recompute="full"
    ),
    "ZeRO-3, Muon": Case(SHARDED, sections={"optimizer": {"name": "muon"}}),
    "ZeRO-3, Adafactor": Case(SHARDED, sections={"optimizer": {"name": "adafactor"}}),
    "compiled, bf16": COMPILED,
    "compiled, bf16, full recomputation": replace(COMPILED, recompute="full"),
    "compiled, bf16, packed documents": replace(COMPILED, has_documents=True),
    "compiled, bf16, DDP": replace(COMPILED, layout=Layout(dp_replicate=2)),
    "compiled, bf16, ZeRO-3": replace(COMPILED, layout=SHARDED),
    "compiled, bf16, tp, sp": replace(COMPILED, layout=Layout(tp=2, sequence_parallel=True)),
    "compiled, bf16, tp, sp, chunked": replace(
        COMPILED, layout=Layout(tp=2, async_tensor_parallel="chunked")
    ),
    "compiled, bf16, cp ring, packed documents": replace(
        COMPILED, layout=Layout(cp=2, cp_method="ring"), has_documents=True
    ),
    "compiled, bf16, cp Ulysses": replace(COMPILED, layout=Layout(cp=2, cp_method="ulysses")),
    "compiled, bf16, pp 1F1B": replace(COMPILED, layout=Layout(pp=2, schedule="1f1b")),
    "compiled, bf16, experts with a capacity": replace(
        COMPILED, model="qwen3_moe", sections=CAPACITY
    ),
    "compiled, bf16, ep": COMPILED_EXPERTS,
    "compiled, bf16, ep, full recomputation": replace(COMPILED_EXPERTS, recompute="full"),
    "compiled, bf16, ep with a capacity": replace(COMPILED_EXPERTS, sections=CAPACITY),
    "compiled, bf16, ep, padded, full recomputation": replace(
        PADDED_EXPERTS, is_compiled=True, recompute="full"
    ),
}
SHORT = {
    "compiled, bf16, full recomputation",
    "compiled, bf16, ep, full recomputation",
}
"""Compiled rows of `make test`; the others take seconds each to compile much the same."""


LONG = {name for name, case in CASES.items() if case.is_compiled} - SHORT


def read_budget() -> dict[str, int]:
    """Read the table of docs/cuda.md: synchronisations per step by layout."""
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    return {name: int(number) for name, number in rows}


def test_every_row_of_the_table_is_measured() -> None:
    assert set(read_budget()) == set(CASES)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in CASES],
)
def test_a_step_has_the_losses_of_a_cpu_and_no_more_synchronisations_than_documented(
    device_ranks: RankPool, name: str
) -> None:
    case = CASES[name]
    results = device_ranks.run(case.layout.world_size, run_on_device, case)
    expected = compute_reference(case)
    tolerance = 1e-4 if case.kind == "fp32" else 2e-2  # Muon multiplies in bf16
    for losses, _ in results:
        assert losses == pytest.approx(expected, rel=tolerance)
    budget = read_budget()[name]
    for rank, (_, counts) in enumerate(results):
        assert sum(counts.values()) == budget, f"rank {rank}: {Counter(counts)}"
