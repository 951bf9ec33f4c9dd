"""Checkpoint values as training saves them, of an invented run."""

from __future__ import annotations

from typing import Any


def make_run_values(step: int) -> dict[str, Any]:
    """Return the values at a step; the run has one sequence per step and one parameter."""
    run = {
        "model": {"family": "llama"},
        "tokenizer": "0" * 32,
        "data": "0" * 32,
        "seed": 0,
        "sequence_length": 8,
        "global_batch_size": 1,
        "optimizer": {"name": "adamw"},
        "precision": "fp32",
        "freeze": [],
        "training": {"learning_rate": 1e-3},
    }
    return {
        "step": step,
        "samples_seen": step,
        "steps_left_out": 0,
        "skipped_in_a_row": 0,
        "best_loss": None,
        "loss_scaler": None,
        "layout": "zero_stage=0",
        "evaluation_due": False,
        "run": run,
        "recipe": {"recompute": "none"},
        "drift": [],
        "optimizer": {
            "rule": "adamw",
            "steps": {"w": step},
            "hyperparameters": {"w": {"lr": 1e-3}},
        },
    }
