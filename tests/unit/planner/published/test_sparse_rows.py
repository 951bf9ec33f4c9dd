"""Sparse rows of FSDP2 trainers: names, kernels of dispatch, experts and attention."""

from __future__ import annotations

import pytest

from shardwright.planner.published.measurements import (
    PublishedRun,
    extract_configuration,
    read_published_run,
)
from shardwright.planner.published.predictions import predict_published_run
from tests.unit.planner.published.rows import ROW


def read_automodel_run(**columns: str) -> PublishedRun:
    """Read a sparse row of NeMo Automodel on 64 H100 without tensor or pipeline parallelism."""
    row = ROW | {
        **dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "params_b"), ""),
        **dict.fromkeys(("num_experts", "top_k", "ep", "flash_attention", "zero_stage"), ""),
        **{"tp": "1", "pp": "1", "dp": "64"},
        "source": "NeMo Automodel performance summary",
        "gpu": "H100-80GB-SXM",
        "gpus": "64",
        "micro_batch": "2",
        "notes": "",
    }
    return read_published_run("x", extract_configuration(row | columns))


@pytest.mark.parametrize(
    ("name", "num_experts"),
    [
        ("Qwen3 MoE 30B", 128),
        ("Nemotron V3 Nano 30B", 128),
        ("Nemotron V3 Super 120B", 512),
        ("GPT-OSS 20B", 32),
    ],
)
def test_a_dispatch_kernel_distributes_the_experts_of_a_row(name: str, num_experts: int) -> None:
    run = read_automodel_run(model_name=name, notes="TE + DeepEP")
    assert run.shape.experts is not None
    assert run.shape.experts.num_experts == num_experts
    assert run.candidate.layout.ep == min(64, num_experts)
    assert read_automodel_run(model_name=name).candidate.layout.ep == 1


def test_a_dispatch_kernel_sends_a_token_once_to_a_node() -> None:
    run = read_automodel_run(model_name="Qwen3 MoE 30B", ep="64", notes="torchtitan; DeepEP")
    plain = read_automodel_run(model_name="Qwen3 MoE 30B", ep="64", source="", notes="torchtitan")
    assert (run.conventions.has_node_dispatch, plain.conventions.has_node_dispatch) == (True, False)
    assert predict_published_run(run).time.expert < 0.8 * predict_published_run(plain).time.expert


def test_kernels_of_sinks_and_experts_are_those_of_megatron() -> None:
    features = read_automodel_run(model_name="GPT-OSS 20B").features
    assert not {"attention_sinks", "biased experts"} & set(features)
    megatron = read_automodel_run(model_name="GPT-OSS 20B", source="Megatron-Bridge")
    assert {"attention_sinks", "biased experts"} <= set(megatron.features)


def test_recipes_with_an_all_to_all_send_a_row_to_each_expert() -> None:
    by_gpu = {
        gpu: read_automodel_run(
            model_name="Qwen3-235B-A22B",
            gpu=gpu,
            ep="32",
            source="Megatron-Bridge",
            notes="26.04 NeMo Container",
        )
        for gpu in ("H100-80GB-SXM", "GB300")
    }
    assert {gpu: run.conventions.has_node_dispatch for gpu, run in by_gpu.items()} == {
        "H100-80GB-SXM": False,
        "GB300": True,
    }
