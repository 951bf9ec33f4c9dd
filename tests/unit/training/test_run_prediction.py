"""Prediction of a training run, cached per recipe and plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwright.architecture import read_recipe_shape
from shardwright.config.recipe_loading import validate_recipe
from shardwright.layout import Layout
from shardwright.plans import BatchPlan, build_plan
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.training.metrics import run_prediction
from shardwright.training.metrics.run_prediction import predict_training_run
from tests.unit.planner import models


def build_validated_run(cluster: Any) -> ValidatedRun:
    recipe = validate_recipe(
        {
            "model": {"config": models.CONFIGS["llama"]},
            "data": {"sources": ["nowhere"]},
            "cluster": cluster,
            "precision": "fp32",
            "training": {
                "sequence_length": 128,
                "micro_batch_size": 2,
                "learning_rate": 1e-3,
                "max_steps": 1,
            },
        }
    )
    layout = Layout(dp_shard=8, zero_stage=3)
    shape = read_recipe_shape(recipe)
    plan = build_plan(
        shape, layout, BatchPlan(128, 2, 1, layout.data_ranks), recipe.precision, "none"
    )
    return cast(ValidatedRun, SimpleNamespace(recipe=recipe, plan=plan, shape=shape))


def test_the_prediction_of_a_run_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = run_prediction.predict

    def count_calls(*arguments: Any) -> Any:
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(run_prediction, "predict", count_calls)
    run_prediction._predict_cached.cache_clear()
    first = predict_training_run(build_validated_run("8xA100-80GB"))
    repeated = predict_training_run(build_validated_run("8xA100-80GB"))
    assert first is repeated
    assert len(calls) == 1
    other = predict_training_run(build_validated_run("8xH100-80GB"))
    assert other is not None
    assert first is not None
    assert other.time.step < first.time.step
    assert len(calls) == 2


def test_without_a_cluster_there_is_no_prediction() -> None:
    assert predict_training_run(build_validated_run(None)) is None
