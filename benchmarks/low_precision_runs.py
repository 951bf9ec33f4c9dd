"""Runs of `benchmarks.low_precision`: a small Llama in every precision, a larger one in three."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from benchmarks.conditions import format_rows, read_conditions
from shardwright.config.low_precision import FP8Recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.report.recorded_run import load_runs
from shardwright.report.run_comparison import compare_runs
from shardwright.telemetry.event_log import EvaluationEvent, StepEvent, read_events

NUM_STEPS = 300
NUM_LAST_STEPS = 50
"""Steps of which the final training loss is the mean."""
SEEDS = (1, 2, 3)
"""Seeds of every precision."""
BF16_SEEDS = (*SEEDS, 4, 5, 6)
FP8_RECIPES: tuple[str, ...] = get_args(FP8Recipe)
MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
"""Every matrix of a block has whole blocks of 128 x 128."""
LARGER_MODEL = MODEL | {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
}
LARGER_PRECISIONS = ("bf16", "fp8 rowwise", "fp8 rowwise_with_gw_hp")
SECTIONS: dict[str, Any] = {
    "tokenizer": {"kind": "character"},
    "training": {
        "sequence_length": 128,
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "learning_rate": 2e-3,
        "min_learning_rate": 2e-4,
        "schedule": "cosine",
        "warmup_steps": 40,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
    },
    "optimizer": {"name": "adamw", "beta2": 0.99},
    "evaluation": {"every_steps": NUM_STEPS, "micro_batch_size": 16, "max_batches": 16},
}


class TrainingRun(NamedTuple):
    """A run of the benchmark."""

    precision: str
    seed: int
    section: Any
    """`precision` of the recipe."""
    is_larger: bool = False

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        size = "larger-" if self.is_larger else ""
        return f"{size}{self.precision.replace(' ', '-')}-seed-{self.seed}"


def list_runs() -> list[TrainingRun]:
    """List every run; bf16 of a seed is the first of the seed."""
    precisions: dict[str, Any] = {"bf16": "bf16", "fp32": "fp32"}
    precisions |= {
        f"fp8 {recipe}": {"kind": "fp8", "fp8": {"recipe": recipe}} for recipe in FP8_RECIPES
    }
    runs = [TrainingRun(*run) for run in _pair_with_seeds(precisions)]
    runs += [TrainingRun("nvfp4", seed, build_nvfp4("stochastic")) for seed in SEEDS]
    runs += [TrainingRun("bf16", seed, "bf16") for seed in BF16_SEEDS[len(SEEDS) :]]
    runs += [TrainingRun("nvfp4 nearest", seed, build_nvfp4("nearest")) for seed in SEEDS]
    larger = {name: precisions[name] for name in LARGER_PRECISIONS}
    return runs + [TrainingRun(*run, is_larger=True) for run in _pair_with_seeds(larger)]


def _pair_with_seeds(precisions: dict[str, Any]) -> list[tuple[str, int, Any]]:
    return [(name, seed, section) for seed in SEEDS for name, section in precisions.items()]


def build_nvfp4(rounding: str) -> dict[str, Any]:
    """Return the section of nvfp4 with a rounding of gradients."""
    return {"kind": "nvfp4", "nvfp4": {"experimental": True, "gradient_rounding": rounding}}


def measure(folder: Path, num_steps: int) -> dict[str, Any]:
    """Train every run that `folder` has no result of; return losses and differences."""
    from shardwright.training.run import train  # imports torch

    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "runs.json"
    runs: dict[str, Any] = json.loads(results.read_text()) if results.exists() else {}
    for run in list_runs():
        row = runs.get(run.name)
        if row is None or len(row["losses"]) != num_steps:
            shutil.rmtree(folder / run.name, ignore_errors=True)  # of an interrupted run
            train(write_recipe(folder, run, num_steps))
            row = {"precision": run.precision, "seed": run.seed} | read_run(folder / run.name)
            row["difference"] = compare_with_bf16(folder, run)
            runs[run.name] = row
            results.write_text(format_rows(runs) + "\n")
        print(f"{run.name}: {row['final_loss']:.4f}, {row['validation_loss']:.4f}")
    rows = {
        is_larger: [runs[run.name] for run in list_runs() if run.is_larger == is_larger]
        for is_larger in (False, True)
    }
    return {
        "conditions": read_conditions(),
        "steps": num_steps,
        "runs": rows[False],
        "larger_runs": rows[True],
    }


def write_recipe(folder: Path, run: TrainingRun, num_steps: int) -> Any:
    """Return the recipe of a run, which is kept in `folder`."""
    source = Path(os.environ["SHARDWRIGHT_DATA"]) / "text/tinyshakespeare.txt"
    return validate_recipe(
        SECTIONS
        | {
            "model": {"config": LARGER_MODEL if run.is_larger else MODEL, "compile": False},
            "seed": run.seed,
            "precision": run.section,
            "data": {
                "sources": str(source),
                "validation_split": "tail",
                "validation_fraction": 0.05,
                "cache_dir": str(folder / "cache"),
            },
            "training": SECTIONS["training"]
            | ({"global_batch_size": 2, "micro_batch_size": 2} if run.is_larger else {})
            | {"max_steps": num_steps},
            "run": {"dir": str(folder / run.name), "device": "cpu"},
        }
    )


def read_run(folder: Path) -> dict[str, Any]:
    """Read a run's losses, and the largest fractions of flushed and numbers of saturated values."""
    events = list(read_events(folder / "events.jsonl"))
    steps = [event for event in events if isinstance(event, StepEvent)]
    evaluations = [event for event in events if isinstance(event, EvaluationEvent)]
    losses = [step.loss for step in steps]
    flushed = [value for step in steps for value in (step.fp8_flushed or {}).values()]
    saturated = [value for step in steps for value in (step.fp8_saturated or {}).values()]
    return {
        "final_loss": float(np.mean(losses[-NUM_LAST_STEPS:])),
        "validation_loss": evaluations[-1].loss,
        "largest_flushed": max(flushed, default=None),
        "num_saturated": sum(saturated) if saturated else None,
        "losses": [round(loss, 5) for loss in losses],
    }


def compare_with_bf16(folder: Path, run: TrainingRun) -> float:
    """Return the largest relative difference from bf16 of the same seed, as `compare` finds it."""
    names = (run.name, run._replace(precision="bf16").name)
    own, reference = load_runs([folder / name for name in names])
    return abs(compare_runs(own, reference).worst.relative_difference)
