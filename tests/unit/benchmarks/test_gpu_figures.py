"""Figures that every kind of step of `make gpu` has, attention operators, and the table of
switches."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import gpu_attention, gpu_functions, gpu_offload, gpu_step_cost
from benchmarks.attention_operators import AttentionRecorder, name_kernels, select_attention
from benchmarks.gpu_figures import (
    STEP_HEADER,
    StepFigures,
    build_step_figures,
    format_step,
    name_attention_kernels,
)
from benchmarks.gpu_page import render_page
from benchmarks.gpu_quantised_steps import SIZES, time_steps
from benchmarks.gpu_step_figures import measure_rates
from benchmarks.gpu_switches import FUNCTION_SWITCHES, SwitchRow, list_switches
from benchmarks.predicted import find_catalogue_cluster
from benchmarks.shapes import TINY
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.launch.allocator import ALLOCATOR_VARIABLE

CPU = torch.device("cpu")


def check_figures(row: dict[str, Any], *, kernels: list[str]) -> None:
    """Check the seven figures of a step: speed, MFU, memory, prediction, attention, breaks,
    waits."""
    assert StepFigures.__annotations__.keys() <= row.keys()
    assert row["tokens_per_second"] > 0
    assert row["mfu"] > 0
    assert row["predicted"]["memory_bytes"] > 0
    assert row["predicted"]["step_seconds"] > 0
    assert row["attention_kernels"] == kernels
    assert row["graph_breaks"] == 0
    on_cpu = ("peak_allocated_bytes", "peak_reserved_bytes", "host_waits")
    assert [row[key] for key in on_cpu] == [None] * 3
    assert len(format_step(row)) == len(STEP_HEADER)


def mark_long(variants: Iterable[str]) -> list[Any]:
    """Return the variants as parameters; those that add little are left to the long suites."""
    chosen = ("LoRA, frozen weights on disk", gpu_step_cost.BUDGET, gpu_step_cost.LENGTHS)
    return [
        pytest.param(name, marks=() if name in chosen else pytest.mark.long) for name in variants
    ]


def make_arguments(folder: Path, variant: str, **options: Any) -> argparse.Namespace:
    config = folder / "config.json"
    config.write_text(json.dumps(TINY["tiny"].config))
    return argparse.Namespace(
        device="cpu",
        precision="fp32",
        config=config,
        length=64,
        rows=2,
        steps=2,
        variant=variant,
        result=folder / "result.json",
        **options,
    )


@pytest.mark.parametrize("lora_rank", [pytest.param(None, marks=pytest.mark.long), 4])
def test_steps_with_quantised_products_have_every_figure(lora_rank: int | None) -> None:
    # A CPU has no hardware for 8-bit products, so that nothing is predicted for it.
    rates = measure_rates(CPU, "fp32")._replace(cluster=find_catalogue_cluster("NVIDIA H200"))
    row = time_steps(
        *("tensorwise", SIZES["tiny"], "tiny", CPU, False), lora_rank=lora_rank, rates=rates
    )
    check_figures(row, kernels=["flash"])
    # The prediction is that of adapters: they are few, so that updates take less memory.
    plain = time_steps(None, SIZES["tiny"], "tiny", CPU, is_compiled=False, rates=rates)
    assert (row["predicted"]["memory_bytes"] < plain["predicted"]["memory_bytes"]) == bool(
        lora_rank
    )


@pytest.mark.parametrize("variant", mark_long(gpu_offload.DISK_VARIANTS))
def test_steps_with_offloaded_states_have_every_figure(variant: str, tmp_path: Path) -> None:
    row = gpu_offload.measure_variant(make_arguments(tmp_path, variant))
    check_figures(row, kernels=["flash"])
    is_moving = "disk" in gpu_offload.DISK_VARIANTS[variant].keys.values()
    assert (row["read_bytes"] > 0) == is_moving
    assert row["waiting_seconds"] >= 0.0


@pytest.mark.parametrize("variant", mark_long(gpu_step_cost.MORE_VARIANTS))
def test_the_training_loop_has_every_figure_with_each_switch(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOCATOR_VARIABLE, "")
    monkeypatch.delenv(ALLOCATOR_VARIABLE)
    arguments = make_arguments(tmp_path, variant)
    budget_bytes = 2**40
    selective = {"name": gpu_step_cost.SELECTIVE, "predicted": {"reserved_bytes": budget_bytes}}
    arguments.result.write_text(json.dumps({"variants": [selective]}))
    row = gpu_step_cost.measure_variant(arguments)
    check_figures(row, kernels=["flash"])
    assert row["compiled"] is False
    grows = not variant.endswith(gpu_step_cost.SEGMENTS)
    assert os.environ[ALLOCATOR_VARIABLE] == f"expandable_segments:{grows}"


def test_attention_cases_have_kernels_and_waits() -> None:
    config = gpu_attention.CASES["packed documents (Llama 3 8B)"].config
    sizes = {**config, **gpu_attention._SIZES, "max_position_embeddings": 64, **gpu_attention._TINY}
    row, _ = gpu_attention.measure(CPU, "fp32", sizes, "auto", has_documents=False)
    assert row["attention_kernels"] == ["flash"]
    assert row["host_waits"] is None
    row, _ = gpu_attention.measure(CPU, "fp32", sizes, "explicit", has_documents=False)
    assert row["attention_kernels"] == []


def test_recorded_operators_distinguish_the_kernels() -> None:
    query = torch.randn(1, 2, 16, 8, requires_grad=True)
    expected = {SDPBackend.FLASH_ATTENTION: ["flash"], SDPBackend.MATH: ["math"]}
    for backend, kernels in expected.items():
        recorder = AttentionRecorder("cpu")
        with sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(query, query, query).sum().backward()
        found = recorder.end()
        assert found["attention_kernels"] == kernels
        assert all(name.startswith("aten::") for name in found["attention_operators"])
    # What torch 2.11 names its operators and generated kernels on CUDA.
    for name, kernels in {
        "aten::_scaled_dot_product_cudnn_attention": ["cuDNN"],
        "aten::_cudnn_attention_forward": ["cuDNN"],
        "aten::_scaled_dot_product_flash_attention": ["flash"],
        "aten::_flash_attention_forward": ["flash"],
        "aten::_scaled_dot_product_efficient_attention_backward": ["efficient"],
        "flash_attn::_flash_attn_varlen_forward": ["flash", "varlen"],
        "torch_attn::_varlen_attn": ["varlen"],
        "triton_tem_fused_flex_attention_backward_zeros_3": ["flex"],
        "aten::scaled_dot_product_attention": [],
    }.items():
        assert select_attention([name, "aten::mm", "ScaledDotProductAttention"]) == [name]
        assert name_kernels([name]) == kernels, name


def test_a_row_names_recorded_kernels_and_marks_those_of_the_log() -> None:
    assert name_attention_kernels({"attention": ["sdpa (causal order)"]}) == "sdpa (log)"
    recorded = {"attention": ["sdpa"], "attention_kernels": ["cuDNN", "flex"]}
    assert name_attention_kernels(recorded) == "cuDNN, flex"
    assert name_attention_kernels(recorded | {"attention_kernels": []}) == "no attention operator"


def make_row(**fields: Any) -> dict[str, Any]:
    measured = {
        "peak_allocated_bytes": 2**31,
        "peak_reserved_bytes": 2**32,
        "attention_operators": [],
        "attention_kernels": ["cuDNN"],
        "graph_breaks": 0,
        "host_waits": 1.0,
    }
    figures = build_step_figures(
        tokens_per_second=100.0,
        flops_per_token=2.0,
        ceiling=1000.0,
        measured=measured,
        predicted={"memory_bytes": 2**30, "step_seconds": 0.5},
    )
    return {**figures, "step_seconds": 1.0, "peak_bytes": 2**31} | fields


def make_results() -> list[dict[str, Any]]:
    """Results of steps of every kind, each with a switch on and off."""
    off = {"switch": "batches read ahead", "compared_with": "default", "is_off": True}
    on = {"switch": "recompute: selective", "compared_with": "default", "is_off": False}
    base = {"switch": "", "compared_with": None, "is_off": True}
    common = {"compiled": True, "difference": "one"}
    variants = [
        make_row(name="default", **base, **common),
        make_row(name="between steps", step_seconds=2.0, **off, **common),
        make_row(name="selective", step_seconds=4.0, **on, **common),
        {"name": "broken", "difference": "x", "failure": "out of memory", **off},
    ]
    offload = [
        make_row(name="resident", compared_with="resident", waiting_seconds=0.0),
        make_row(name="moments on disk", compared_with="resident", waiting_seconds=0.25)
        | {"step_seconds": 5.0, "times_resident": 5.0, "has_equal_losses": True},
    ]
    case = {"shape": "tiny", "sequence_length": 64, "micro_batch_size": 2, "name": "tiny-64"}
    row = {"tokens_per_second": 128.0, "peak_allocated_bytes": 2**30}
    cases = [
        case | {"options": [], "contenders": {"shardwright": row}},
        case
        | {"options": ["compile"], "contenders": {"shardwright": row | {"tokens_per_second": 256}}},
    ]
    function = {"on_seconds": 1.0, "off_seconds": 3.0, "temporary_bytes": {"on": 1, "off": 2}}
    sides = {"on": {"seconds": 1.0, "peak_bytes": None}, "off": {"failed": "out of memory"}}
    junit = """<testsuite><testcase name="a"><properties>
    <property name="cp_split: zigzag" value="2.0 ms"/>
    <property name="cp_split: work" value="1.0 ms"/>
    </properties></testcase></testsuite>"""
    steps = {"bf16, all layers": {"seconds": 3.0, "peak_bytes": 4}}
    conditions = {"limit": 1.0, "num_layers": 4, "shape": "tiny"}
    low_precision = {"low_precision": conditions, "obstacles": {}, "kernels": {}, "curves": {}}
    earlier = {"rowwise, all layers": {"seconds": 9.0, "peak_bytes": 9}}
    later = {"rowwise, all layers": {"seconds": 2.0, "peak_bytes": 3}}
    results: dict[str, dict[str, Any]] = {
        "low precision": low_precision | {"steps": steps | earlier},
        "low precision all layers": low_precision | {"steps": steps | later},
        "functions": {"functions": {"NF4 to bf16": function}},
        "attention": {"attention": {"windows": sides}},
        "step cost tiny-64": {"variants": variants},
        "offload tiny-64": {"offload": offload},
        "speed tiny-64": {"cases": cases},
        "other tests": {"junit": junit},
        "damaged": {"functions": 3},
    }
    return [
        {"name": name, "part": 1, "status": "passed", "seconds": 1.0, "result": result}
        for name, result in results.items()
    ]


def test_the_table_of_switches_compares_each_with_the_run_without_it() -> None:
    gib = 2**30
    found = list_switches(make_results())
    products = "precision: products of 8 or 4 bits, rowwise"
    assert found == [
        SwitchRow(products, "Llama 3 8B, all layers", 2.0, 3.0, 3, 4),
        SwitchRow("model.compile_functions: true", "NF4 to bf16", 1.0, 3.0, 1, 2),
        *(
            SwitchRow(switch, f"step cost tiny-64: {name}", on, off, 2 * gib, 2 * gib)
            for switch, name, on, off in (
                ("batches read ahead", "between steps", 1.0, 2.0),
                ("recompute: selective", "selective", 4.0, 1.0),
            )
        ),
        SwitchRow("offload: moments on disk", "offload tiny-64", 5.0, 1.0, 2 * gib, 2 * gib),
        SwitchRow("cp_split: work", "two GPUs", 1e-3, 2e-3),
        SwitchRow("model.compile: true", "tiny, 64 tokens", 0.5, 1.0, gib, gib),
    ]
    assert FUNCTION_SWITCHES.keys() == gpu_functions.CASES.keys()


def test_the_page_begins_with_the_switches_and_shows_every_figure() -> None:
    page = render_page({"steps": make_results()})
    assert page.index("## Which switch gives what") < page.index("## Steps")
    row = "| batches read ahead | step cost tiny-64: between steps | 1,000.00 | 2,000.00 | 2.00 |"
    assert f"{row} 2.0 | 2.0 |" in page
    figures = "100 | 20.0% | 2.0 | 4.0 | 1.0 | 0.5 | cuDNN | 0 | 1 |"
    assert f"| between steps | one | yes | 2.0000 | {figures}" in page
    assert f"| moments on disk | 5.0000 |  |  | 5.00 | 0.2500 | yes | {figures}" in page
    assert "| broken | out of memory |" in page
