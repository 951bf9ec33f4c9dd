"""Quantised products under every parallelism: the operands of one process, byte by byte.

`test_low_precision` has some of these cases and runs each time; these are the daily matrix.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.config.adapter_section import AdapterSection
from shardwright.config.low_precision import LowPrecisionRecipe
from shardwright.layout import Layout
from shardwright.schedule import PIPELINE_SCHEDULES
from tests.multiprocess.pool import RankPool
from tests.multiprocess.scaled_operands import (
    DEEPSEEK,
    DENSE,
    GPT2,
    GPT_OSS,
    PHI3,
    SPARSE,
    Cell,
    build_section,
)
from tests.multiprocess.test_low_precision import assert_equals_one_process

BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128}
"""Two tensor-parallel ranks have whole blocks of 128 of every matrix."""
CONFIGS: dict[str, dict[LowPrecisionRecipe, dict[str, Any]]] = {
    "dense": {
        "rowwise_with_gw_hp": DENSE,
        "mxfp8": DENSE,
        "blockwise": DENSE | BLOCKS,
        "tensorwise": DENSE,
        "rowwise": DENSE,
        "nvfp4": DENSE,
    },
    "sparse": {
        "rowwise_with_gw_hp": SPARSE,
        "mxfp8": SPARSE,
        "blockwise": SPARSE | BLOCKS | {"moe_intermediate_size": 256},
        "rowwise": SPARSE,
        "nvfp4": SPARSE,
    },
}

DENSE_LAYOUTS = {
    "ddp": (Layout(dp_replicate=2), 1),
    "zero1": (Layout(dp_shard=2, zero_stage=1), 2),
    "zero2": (Layout(dp_shard=2, zero_stage=2), 2),
    "zero3": (Layout(dp_shard=2, zero_stage=3), 1),
    "hsdp": (Layout(dp_replicate=2, dp_shard=2, zero_stage=3), 1),
    "tp-sp": (Layout(tp=2), 1),
    "tp": (Layout(tp=2, sequence_parallel=False), 2),
    "ring": (Layout(cp=2, cp_method="ring"), 1),
    "ulysses": (Layout(cp=2, cp_method="ulysses"), 2),
    "all_gather": (Layout(cp=2, cp_method="all_gather"), 1),
    "1f1b": (Layout(pp=2, schedule="1f1b"), 4),
    "zb_h1": (Layout(pp=2, schedule="zb_h1"), 4),
    "zero3-tp": (Layout(dp_shard=2, tp=2, zero_stage=3), 1),
    "ring-tp": (Layout(cp=2, tp=2, cp_method="ring"), 1),
    "tp-zb_h1": (Layout(tp=2, pp=2, schedule="zb_h1"), 4),
    "ring-zb_h1": (Layout(cp=2, pp=2, cp_method="ring", schedule="zb_h1"), 4),
}
SPARSE_LAYOUTS = {
    "zero3": (Layout(dp_shard=2, zero_stage=3), 1),
    "ep-zero1": (Layout(dp_shard=2, ep=2, zero_stage=1), 2),
    "ep-zero2": (Layout(dp_shard=2, ep=2, zero_stage=2), 1),
    "ep-zero3": (Layout(dp_shard=2, ep=2, zero_stage=3), 1),
    "tp-sp": (Layout(tp=2), 1),
    "ep-tp": (Layout(dp_shard=2, ep=2, tp=2, zero_stage=2), 1),
    "ep-ring": (Layout(cp=2, ep=2, cp_method="ring"), 1),
    "zb_h1": (Layout(pp=2, schedule="zb_h1"), 4),
    "ep-zb_h1": (Layout(dp_shard=2, ep=2, pp=2, zero_stage=1, schedule="zb_h1"), 2),
}
SCHEDULES = {
    name: (Layout(pp=2, schedule=name), 4)
    for name in PIPELINE_SCHEDULES
    if name not in ("1f1b", "zb_h1")
}
"""Schedules that `DENSE_LAYOUTS` does not have; the model has four layers for them."""
DISPATCHES: dict[str, tuple[Layout, int]] = {
    "halves": (Layout(dp_shard=2, ep=2, zero_stage=2, expert_dispatch="halves"), 1),
    "once_per_rank": (Layout(dp_shard=2, ep=2, zero_stage=3, expert_dispatch="once_per_rank"), 1),
    "halves-tp": (Layout(dp_shard=2, ep=2, tp=2, zero_stage=1, expert_dispatch="halves"), 2),
}
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "gpt2": (GPT2, ("zero3", "tp-sp", "ring", "zb_h1")),
    "phi3": (PHI3, ("zero3", "tp-sp", "ring", "zb_h1")),
    "gpt_oss": (GPT_OSS, ("zero3", "ep-zero2", "ep-ring", "zb_h1")),
    "deepseek_v3": (DEEPSEEK, ("zero3", "ep-zero2", "ep-ring", "zb_h1")),
}
"""Other models, and their layouts."""
FAMILY_RECIPES: tuple[LowPrecisionRecipe, ...] = ("rowwise_with_gw_hp", "mxfp8", "nvfp4")
MICRO_BATCH_LAYOUTS = ("tp-sp", "tp", "1f1b", "zb_h1", "tp-zb_h1")
"""Layouts that recipes support whose scales span all tokens of a micro-batch."""
PACKED_LAYOUTS = ("zero3", "zero3-tp", "ring-zb_h1")
ADAPTED_LAYOUTS = ("zero2", "zero3-tp", "tp-sp", "ring", "ulysses", "zb_h1", "ring-zb_h1")


def build_cell(
    kind: str, recipe: LowPrecisionRecipe, layout: tuple[Layout, int], **options: Any
) -> Cell:
    config = CONFIGS[kind][recipe]
    # A rank of ring attention has two chunks of each row, which have whole blocks of 128 tokens.
    length = 512 if recipe == "blockwise" and layout[0].cp > 1 else 128
    return Cell(
        config | {"max_position_embeddings": length},
        build_section(recipe),
        *layout,
        length=length,
        **options,
    )


def list_cells() -> dict[str, Cell]:
    """List every case by its name."""
    cells = {}
    for recipe in CONFIGS["dense"]:
        is_invariant = recipe not in ("tensorwise", "rowwise")
        for name, layout in DENSE_LAYOUTS.items():
            if is_invariant or name in MICRO_BATCH_LAYOUTS:
                cells[f"{recipe}-{name}"] = build_cell("dense", recipe, layout)
        for name in ADAPTED_LAYOUTS if is_invariant else ("tp-sp", "zb_h1"):
            layout = DENSE_LAYOUTS[name]
            cell = build_cell("dense", recipe, layout, adapters=AdapterSection(rank=4))
            cells[f"{recipe}-lora-{name}"] = cell
        for name in PACKED_LAYOUTS if is_invariant else ():
            layout = DENSE_LAYOUTS[name]
            if layout[0].tp == 1 or recipe == "rowwise_with_gw_hp":  # others are refused
                packed = AdapterSection(rank=4, quantize="nf4")
                cell = build_cell("dense", recipe, layout, adapters=packed)
                cells[f"{recipe}-qlora-{name}"] = cell
        for recompute in ("selective", "full"):
            for name in ("tp-sp", "zb_h1"):
                cell = build_cell("dense", recipe, DENSE_LAYOUTS[name])
                cells[f"{recipe}-{recompute}-{name}"] = replace(cell, recompute=recompute)
        for name, layout in SCHEDULES.items():
            cell = build_cell("dense", recipe, layout)
            cells[f"{recipe}-{name}"] = replace(cell, config=cell.config | {"num_hidden_layers": 4})
        if is_invariant:
            for name in ("zero3", "ring", "all_gather", "zb_h1"):
                cell = build_cell("dense", recipe, DENSE_LAYOUTS[name])
                cells[f"{recipe}-documents-{name}"] = replace(cell, has_documents=True)
    for recipe in CONFIGS["sparse"]:
        for name, layout in SPARSE_LAYOUTS.items():
            if recipe != "rowwise" or name in MICRO_BATCH_LAYOUTS:
                cells[f"{recipe}-experts-{name}"] = build_cell("sparse", recipe, layout)
        if recipe == "rowwise":
            continue
        for name, layout in DISPATCHES.items():
            cells[f"{recipe}-experts-{name}"] = build_cell("sparse", recipe, layout)
        for name in ("ep-zero2", "zb_h1"):
            cell = build_cell("sparse", recipe, SPARSE_LAYOUTS[name])
            for recompute in ("selective", "full"):
                cells[f"{recipe}-experts-{recompute}-{name}"] = replace(cell, recompute=recompute)
            for quantize in (None, "nf4"):
                kind = "lora" if quantize is None else "qlora"
                adapters = AdapterSection(rank=4, quantize=quantize)
                cells[f"{recipe}-experts-{kind}-{name}"] = replace(cell, adapters=adapters)
    for family, (config, names) in FAMILIES.items():
        for recipe in FAMILY_RECIPES:
            for name in names:
                layout = (DENSE_LAYOUTS | SPARSE_LAYOUTS)[name]
                cells[f"{recipe}-{family}-{name}"] = Cell(config, build_section(recipe), *layout)
    return cells


CELLS = list_cells()


@pytest.mark.long
@pytest.mark.parametrize("name", CELLS)
def test_operands_and_gradients_are_those_of_one_process(ranks: RankPool, name: str) -> None:
    assert_equals_one_process(ranks, CELLS[name])
