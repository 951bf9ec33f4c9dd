"""What a run is predicted to take is worked out once, however often it is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwright.architecture import read_recipe_shape
from shardwright.config.recipe_loading import validate_recipe
from shardwright.layout import Layout
from shardwright.plan import BatchPlan, Plan
from shardwright.train import run_prediction
from shardwright.train.run_checks import ValidatedRun
from shardwright.train.run_prediction import predict_training_run
from tests.unit.planner import models


def checked(cluster: Any) -> ValidatedRun:
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
    plan = Plan(layout, BatchPlan(128, 2, 1, layout.data_ranks), recipe.precision, "none")
    return cast(
        ValidatedRun, SimpleNamespace(recipe=recipe, plan=plan, shape=read_recipe_shape(recipe))
    )


def test_the_same_run_is_predicted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = run_prediction.predict

    def counted(*given: Any) -> Any:
        asked.append(given)
        return original(*given)

    monkeypatch.setattr(run_prediction, "predict", counted)
    run_prediction._predict_cached.cache_clear()
    first = predict_training_run(checked("8xA100-80GB"))
    again = predict_training_run(checked("8xA100-80GB"))
    assert first is again
    assert len(asked) == 1
    other = predict_training_run(checked("8xH100-80GB"))
    assert other is not None
    assert first is not None
    assert other.time.step < first.time.step
    assert len(asked) == 2


def test_without_a_cluster_nothing_is_predicted() -> None:
    assert predict_training_run(checked(None)) is None
