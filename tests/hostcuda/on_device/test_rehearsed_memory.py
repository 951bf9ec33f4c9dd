"""The planner's peak bytes are those of a rehearsal on CUDA, for every kind of operand.

All widths are multiples of 128, so that every recipe is supported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwright.architecture import read_recipe_shape
from shardwright.config.recipe import RecomputeKind
from shardwright.layout import Layout
from shardwright.planner.memory.peaks import predict_memory
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.problem import build_template
from shardwright.planner.time.pipeline import get_pipeline
from shardwright.plans import BatchPlan, build_plan
from shardwright.rehearsal.rank_rehearsal import rehearse_rank
from tests.hostcuda.on_device.test_rehearsed_step import FAMILIES, NO_OVERHEAD, make_recipe

WIDTHS = {
    "hidden_size": 256, "intermediate_size": 768, "head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
TOKENS = 512
ROWS = 4
ONE_RANK = Layout()
ZERO_1 = Layout(dp_shard=2, zero_stage=1)
ZERO_3 = Layout(dp_shard=2, zero_stage=3)
TENSOR = Layout(tp=2)
SPLIT = Layout(pp=2, schedule="zb_h1")
Case = tuple[str, str, Layout, RecomputeKind]
CASES: list[Case] = [
    ("llama", "blockwise", ZERO_3, "none"),
    ("llama", "mxfp8", TENSOR, "none"),
    ("llama", "nvfp4", ZERO_1, "selective"),
    ("qwen3_moe", "mxfp8", ZERO_3, "full"),
]
WORKING_CASES: list[Case] = [
    ("llama", "tensorwise", ONE_RANK, "none"),
    ("qwen3_moe", "mxfp8", ONE_RANK, "none"),
    ("qwen3_moe", "blockwise", ONE_RANK, "none"),
]
"""With two micro-batches: weights are quantised once per step."""
LONG_CASES: list[Case] = [
    ("llama", "bf16", TENSOR, "none"),
    ("llama", "tensorwise", TENSOR, "none"),
    ("llama", "rowwise", TENSOR, "full"),
    ("llama", "rowwise_with_gw_hp", ZERO_3, "full"),
    ("llama", "rowwise_with_gw_hp", ZERO_1, "selective"),
    ("llama", "blockwise", ZERO_1, "selective"),
    ("llama", "mxfp8", SPLIT, "none"),
    ("llama", "mxfp8", ZERO_3, "full"),
    ("llama", "nvfp4", TENSOR, "none"),
    ("llama", "nvfp4", ZERO_3, "full"),
    ("llama", "rowwise_with_gw_hp", ZERO_3, "none"),
    ("llama", "mxfp8", ZERO_3, "none"),
    ("llama", "nvfp4", ZERO_3, "none"),
    ("qwen3_moe", "mxfp8", ZERO_3, "none"),
    ("qwen3_moe", "rowwise_with_gw_hp", ZERO_3, "none"),
    ("qwen3_moe", "blockwise", ZERO_1, "selective"),
]
OFFLOADED_CASES: list[Case] = [
    ("llama", "blockwise", ZERO_3, "none"),
    ("llama", "mxfp8", ZERO_3, "none"),
    ("llama", "rowwise", TENSOR, "full"),
    ("llama", "nvfp4", ZERO_1, "selective"),
]
OFFLOAD = {"parameters": "host", "optimizer": "host", "buffer_bytes": 2**20}
HOST_UPDATE = OFFLOAD | {"update_on": "host"}


WORKING = "bf16 with working weights"


def build_precision(name: str) -> dict[str, Any]:
    if name == "bf16":
        return {"kind": name}
    if name == WORKING:
        return {"kind": "bf16", "working_weights": True}
    options = {"experimental": True} if name == "nvfp4" else {"recipe": name}
    kind = name if name == "nvfp4" else "fp8"
    return {"kind": kind, kind: options}


@pytest.mark.parametrize(
    ("family", "precision", "layout", "recompute", "offload"),
    [
        *((*case, {}) for case in CASES),
        *(pytest.param(*case, {}, marks=pytest.mark.long) for case in LONG_CASES + WORKING_CASES),
        *(pytest.param(*case, OFFLOAD, marks=pytest.mark.long) for case in OFFLOADED_CASES),
        ("llama", WORKING, ONE_RANK, "none", HOST_UPDATE),
        *(
            pytest.param("llama", precision, layout, recompute, offload, marks=pytest.mark.long)
            for precision in ("bf16", WORKING)
            for layout in (ONE_RANK, Layout(dp_replicate=2), Layout(pp=2))
            for recompute in ("none", "selective", "full")
            for offload in (OFFLOAD, HOST_UPDATE)
            # There the planner leaves out a tensor of the residual stream, 2% of this model.
            if (layout.pp, recompute) != (2, "full")
        ),
    ],
    ids=str,
)
def test_the_planner_predicts_the_peak_of_a_rehearsal(
    family: str,
    precision: str,
    layout: Layout,
    recompute: RecomputeKind,
    offload: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capability = (10, 0) if precision in ("mxfp8", "nvfp4") else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    config = {
        "model_type": family,
        **FAMILIES[family],
        **WIDTHS,
        "num_hidden_layers": 6 if offload else 3,
    }
    if family == "qwen3_moe":
        config["moe_intermediate_size"] = 256
    training = {"sequence_length": TOKENS, "micro_batch_size": ROWS}
    recipe = make_recipe(
        family,
        precision=build_precision(precision),
        offload=offload,
        model={"config": config, "loss_chunk_tokens": 128},
        training=training | {"learning_rate": 1e-3, "max_steps": 1},
    )
    num_micro_batches = 4 if layout.pp > 1 else 2 if layout == ONE_RANK else 1
    shape = read_recipe_shape(recipe)
    batch = BatchPlan(TOKENS, ROWS, num_micro_batches, layout.data_ranks)
    plan = replace(
        build_plan(shape, layout, batch, recipe.precision, recompute),
        offloads_trained_weights=recipe.has_offloaded_trained_weights,
    )
    report = rehearse_rank(recipe, plan, 0, "cuda")
    facts = ModelFacts(shape.base_shape)
    candidate = replace(
        build_template(recipe),
        layout=layout,
        micro_batch_size=ROWS,
        gradient_accumulation_steps=num_micro_batches,
        recompute=recompute,
        has_masked_kernels=True,
    )
    load = get_pipeline(facts, layout, num_micro_batches, TOKENS).build_rank_load(0)
    predicted = predict_memory(facts, candidate, load, NO_OVERHEAD)
    assert predicted.live == pytest.approx(report.peak_bytes, rel=0.02)
