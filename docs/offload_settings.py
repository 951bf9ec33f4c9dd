"""Table of settings in offload.md, with the planner's predictions; `generate.py` writes it."""

from __future__ import annotations

from pathlib import Path

import shardwright
from shardwright.planner.planning_result import PlanningResult
from shardwright.units import GIB_BYTES, format_count

ROOT = Path(__file__).parents[1]
SMALL_CLUSTER = "1xL4-24GB"
"""A GPU on which settings that fill free memory (working weights, read-ahead) take none."""
CLUSTER = "1xH100-80GB"
SEQUENCE_LENGTH = 4096
GLOBAL_BATCH_SIZE = 16

_HOST_WEIGHTS = ("offload.optimizer=host", "offload.parameters=host")
_HOST_MASTERS = (*_HOST_WEIGHTS, "offload.update_on=host", "precision.working_weights=true")
_DISK_WEIGHTS = ("offload.optimizer=disk", "offload.parameters=disk")
_LORA = ("adapters.rank=16",)

ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("nothing", ()),
    ("`optimizer: host`", ("offload.optimizer=host",)),
    ("`optimizer: host`, `parameters: host`", _HOST_WEIGHTS),
    ("the same with `update_on: host`, `precision.working_weights: true`", _HOST_MASTERS),
    ("`optimizer: disk`", ("offload.optimizer=disk",)),
    ("`optimizer: disk`, `parameters: disk`", _DISK_WEIGHTS),
    ("LoRA, nothing", _LORA),
    ("LoRA, `parameters: host`", (*_LORA, "offload.parameters=host")),
)
"""Settings, and the keys of the recipe that they set."""


def render_offload_settings() -> str:
    """Render the memory that each setting takes of every tier, and the speed of its best plan."""
    lines = [
        "| offloaded | GiB of the GPU, at least | GiB of host memory | GiB of disk "
        "| tokens/s on an H100 with 80 GB |",
        "|---|---|---|---|---|",
    ]
    for setting, changes in ROWS:
        least = _plan(
            SMALL_CLUSTER, *changes, "training.micro_batch_size=1", "recompute=full"
        ).recipe_prediction
        assert least is not None
        best = _plan(CLUSTER, *changes).chosen
        speed = "does not fit" if best is None else format_count(best.tokens_per_second)
        tiers = (least.memory.total, least.memory.host, least.memory.disk)
        memory = " | ".join(f"{tier / GIB_BYTES:.0f}" for tier in tiers)
        lines.append(f"| {setting} | {memory} | {speed} |")
    batch = f"{GLOBAL_BATCH_SIZE} sequences of {SEQUENCE_LENGTH:,} tokens a step"
    lines += [
        "",
        f"Predicted for llama3-8b on one GPU in bf16, AdamW, {batch}. Memory: one sequence at",
        "a time, full recomputation. Speed: of the fastest plan, with the planner's assumed rates",
        "of the link, host memory and disk ([below](#planning-it)).",
        "",
    ]
    return "\n".join(lines)


def _plan(cluster: str, *changes: str) -> PlanningResult:
    """Plan Llama 3 8B on `cluster` with `changes` of the recipe."""
    overrides = [
        f"training.sequence_length={SEQUENCE_LENGTH}",
        f"training.global_batch_size={GLOBAL_BATCH_SIZE}",
        "recompute=auto",
        *changes,
    ]
    recipe = shardwright.load_recipe(ROOT / "recipes/llama3-8b.yaml", overrides=overrides)
    return shardwright.plan(recipe, cluster)
