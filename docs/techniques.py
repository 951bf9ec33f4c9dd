"""Table of techniques of the guide, with the planner's predictions; `generate.py` writes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.config import load_recipe
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate, LowRankAdapter
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.predictor import Predictor
from shardwright.planner.problem import read_planning_shape
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.units import GIB_BYTES, format_count

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    """A technique, when to use it, and a layout to predict on the model of `recipe`."""

    technique: str
    does: str
    when: str
    page: str
    change: dict[str, Any]
    recipe: str = "llama3-8b"


_ZERO3 = Layout(dp_shard=8, zero_stage=3)
_FULL = {"recompute": "full"}

ROWS = (
    Row(
        "DDP",
        "every GPU has the whole model, gradients are summed",
        "the model fits with memory to spare",
        "parallelism/data.md",
        _FULL | {"layout": Layout(dp_replicate=8)},
    ),
    Row(
        "ZeRO-1",
        "optimizer states are sharded over the GPUs",
        "the model nearly fits",
        "parallelism/data.md",
        _FULL | {"layout": Layout(dp_shard=8, zero_stage=1)},
    ),
    Row(
        "ZeRO-2",
        "gradients are sharded too",
        "ZeRO-1 does not fit, and a step has few micro-batches",
        "parallelism/data.md",
        _FULL | {"layout": Layout(dp_shard=8, zero_stage=2)},
    ),
    Row(
        "ZeRO-3 (FSDP)",
        "parameters are sharded too, gathered for use",
        "the first choice when it does not fit",
        "parallelism/data.md",
        _FULL | {"layout": _ZERO3},
    ),
    Row(
        "tensor (tp)",
        "every matrix is sharded within a node",
        "there are more data ranks than sequences in the global batch, or one layer does not fit",
        "parallelism/tensor.md",
        _FULL | {"layout": Layout(tp=8, sequence_parallel=False)},
    ),
    Row(
        "+ sequence (sp)",
        "norms and residuals are sharded too",
        "always with tp",
        "parallelism/tensor.md",
        _FULL | {"layout": Layout(tp=8)},
    ),
    Row(
        "pipeline (pp)",
        "layers are partitioned over GPUs",
        "links between nodes are slow, and a step has many micro-batches",
        "parallelism/pipeline.md",
        _FULL | {"layout": Layout(pp=4, dp_shard=2, zero_stage=1)},
    ),
    Row(
        "context (cp)",
        "the sequence is sharded; ranks exchange keys and values, or heads",
        "one sequence is too long for a GPU",
        "parallelism/context.md",
        _FULL | {"layout": Layout(dp_shard=2, cp=4, zero_stage=3, cp_method="ring")},
    ),
    Row(
        "expert (ep)",
        "experts are placed on different GPUs, tokens are exchanged",
        "the model has experts",
        "parallelism/expert.md",
        {"layout": Layout(dp_shard=8, ep=8, zero_stage=3)} | _FULL,
        "qwen3-30b-a3b",
    ),
    Row(
        "recompute none",
        "activations are kept",
        "memory is left",
        "planning.md",
        {"layout": _ZERO3, "recompute": "none"},
    ),
    Row(
        "recompute selective",
        "everything except matmuls and attention is recomputed",
        "memory is slightly too small",
        "planning.md",
        {"layout": _ZERO3, "recompute": "selective"},
    ),
    Row(
        "recompute full",
        "whole blocks are computed again",
        "memory is too small",
        "planning.md",
        {"layout": _ZERO3, "recompute": "full"},
    ),
    Row(
        "precision fp32",
        "matmuls in fp32",
        "to check the others",
        "planning.md",
        _FULL | {"layout": _ZERO3, "precision": "fp32"},
    ),
    Row(
        "precision bf16",
        "matmuls in bf16, master weights in fp32",
        "always on GPUs that support it",
        "planning.md",
        _FULL | {"layout": _ZERO3, "precision": "bf16"},
    ),
    Row(
        "master weights bf16",
        "weights, gradients and moments in bf16 too, rounded stochastically",
        "when memory is short",
        "optimizers.md#weights-in-bf16",
        _FULL | {"layout": _ZERO3, "precision": "bf16", "has_bf16_masters": True},
    ),
    Row(
        "precision fp8",
        "matmuls in fp8",
        "on GPUs with 8-bit units; Llama 3 8B took 0.80 of the time of bf16 on one H200",
        "low-precision.md",
        _FULL | {"layout": _ZERO3, "precision": "fp8"},
    ),
    Row(
        "offload",
        "optimizer states in host memory or on disk",
        "the optimizer states do not fit",
        "offload.md",
        _FULL | {"layout": _ZERO3, "offload": "optimizer"},
    ),
    Row(
        "LoRA",
        "small matrices next to frozen ones are trained",
        "fine-tuning",
        "planning.md",
        _FULL | {"layout": _ZERO3, "adapter": LowRankAdapter(16)},
    ),
    Row(
        "QLoRA",
        "the frozen ones in 4 bits",
        "fine-tuning on little memory",
        "planning.md",
        _FULL | {"layout": _ZERO3, "adapter": LowRankAdapter(16, quantised=True)},
    ),
)

CLUSTER = "8xH100-80GB"
GLOBAL_BATCH = 64
SEQUENCE = 8192


def render_techniques() -> str:
    """Render the table of techniques with the planner's predictions on one node with the same
    global batch.
    """
    cluster = parse_cluster(CLUSTER)
    efficiency = load_efficiencies().get_efficiency(cluster.accelerator)
    recipes = {row.recipe: load_recipe(ROOT / "recipes" / f"{row.recipe}.yaml") for row in ROWS}
    predictors = {
        name: Predictor(get_model_facts(read_planning_shape(recipe)), cluster, efficiency)
        for name, recipe in recipes.items()
    }
    lines = [
        "| technique | what it does | use it when | predicted layout | GiB a GPU | tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        candidate = _set_batch(
            replace(
                Candidate(Layout(), SEQUENCE if row.recipe == "llama3-8b" else 4096), **row.change
            )
        )
        prediction = predictors[row.recipe].predict(candidate)
        memory = f"{prediction.memory.total / GIB_BYTES:.0f}" + (
            "" if prediction.fits else " (does not fit)"
        )
        layout = candidate.describe() + ("" if row.recipe == "llama3-8b" else f" ({row.recipe})")
        speed = format_count(prediction.tokens_per_second) if prediction.fits else "-"
        lines.append(
            f"| [{row.technique}]({row.page}) | {row.does} | {row.when} | {layout} "
            f"| {memory} | {speed} |"
        )
    capacity_gib = next(iter(predictors.values())).capacity_bytes / GIB_BYTES
    defaults = f"llama3-8b on {cluster.name}, {SEQUENCE:,} tokens a sequence, "
    defaults += f"{GLOBAL_BATCH} sequences a step, bf16 and micro batch 1"
    limit = f"a run may fill {capacity_gib:.0f} GiB of a GPU."
    lines += ["", f"{defaults} unless noted otherwise; {limit}", ""]
    return "\n".join(lines)


def _set_batch(candidate: Candidate) -> Candidate:
    """Set the same global batch for all layouts by gradient accumulation."""
    return replace(
        candidate,
        micro_batch_size=1,
        gradient_accumulation_steps=GLOBAL_BATCH // candidate.layout.data_ranks,
    )
