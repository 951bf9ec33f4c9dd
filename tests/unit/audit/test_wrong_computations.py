"""Experts with a capacity are named; the planted block without one equals transformers' class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardwright.audit.check import check_recorded_step
from shardwright.audit.recorder import Recorder
from tests.unit.audit.test_router_losses import build_batch, build_model
from tests.unit.audit.wrong_computations import limit_experts, split_features

NUM_SHARING = 2
EXPERT_MISTAKES = {
    "tokens_dropped",
    "tokens_dropped_by_logits",
    "tokens_dropped_by_parts",
    "features_taken_for_slots",
}


def record_step(folder: Path, change: Callable[[nn.Module], None]) -> None:
    """Record a step of two ranks that share rows, with changed experts; nothing is padded."""
    for rank in range(NUM_SHARING):
        model: Any = copy.deepcopy(build_model())
        model.config.output_router_logits = False
        for layer in model.model.layers:
            change(layer.mlp)
        recorder = Recorder(folder, rank=rank, world_size=NUM_SHARING, data_rank=0)
        with recorder.record_step(model):
            for index in range(2):
                batch = build_batch(0, index)
                del batch["attention_mask"]
                (model(**batch).loss / 2).backward()


@pytest.mark.parametrize(
    ("policy", "renormalises", "mistake"),
    [
        ("position", False, "tokens_dropped"),
        ("probabilities", True, "tokens_dropped"),
        ("logits", True, "tokens_dropped_by_logits"),
        ("parts", False, "tokens_dropped_by_parts"),
    ],
)
def test_experts_that_drop_tokens_are_named(
    tmp_path: Path, policy: str, renormalises: bool, mistake: str
) -> None:
    limit = partial(limit_experts, factor=0.75, policy=policy, renormalises=renormalises)
    record_step(tmp_path, limit)
    report = check_recorded_step(tmp_path, objective="mean_micro_batches")
    assert not report.passed
    assert report.diagnoses[0].keys == (mistake,)
    assert report.diagnoses[0].subject == "capacity factor 0.75"
    assert report.diagnoses[0].residual_after < 1e-4 * report.diagnoses[0].residual_before


def test_features_that_experts_take_for_slots_are_named(tmp_path: Path) -> None:
    record_step(tmp_path, partial(split_features, num_ranks=NUM_SHARING))
    report = check_recorded_step(tmp_path, objective="mean_micro_batches")
    assert report.diagnoses[0].keys == ("features_taken_for_slots",)
    assert report.diagnoses[0].residual_after < 1e-4 * report.diagnoses[0].residual_before


def test_experts_that_admit_every_token_are_not_accused(tmp_path: Path) -> None:
    limit = partial(limit_experts, factor=4.0, policy="position", renormalises=True)
    record_step(tmp_path, limit)
    report = check_recorded_step(tmp_path, objective="mean_micro_batches")
    assert report.passed, report.worst_parameters[0]
    assert not report.diagnoses
