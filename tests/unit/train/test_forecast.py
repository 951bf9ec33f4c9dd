"""What a run is predicted to take is worked out once, however often it is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwright.architecture import shape_of
from shardwright.config.load import validate_recipe
from shardwright.layout import Layout
from shardwright.plan import BatchPlan, Plan
from shardwright.train import forecast as module
from shardwright.train.forecast import forecast
from shardwright.train.preflight import Checked
from tests.unit.planner import models


def checked(cluster: Any) -> Checked:
    recipe = validate_recipe(
        {
            "model": {"config": models.CONFIGS["llama"]},
            "data": {"sources": ["nowhere"]},
            "cluster": cluster,
            "precision": "fp32",
            "training": {"sequence_length": 128, "micro_batch_size": 2, "learning_rate": 1e-3, "max_steps": 1},
        }
    )
    layout = Layout(dp_shard=8, zero_stage=3)
    plan = Plan(layout, BatchPlan(128, 2, 1, layout.data_ranks), recipe.precision, "none")
    return cast(Checked, SimpleNamespace(recipe=recipe, plan=plan, shape=shape_of(recipe)))


def test_the_same_run_is_predicted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    original = module.predict

    def counted(*given: Any) -> Any:
        asked.append(given)
        return original(*given)

    monkeypatch.setattr(module, "predict", counted)
    module._predicted.cache_clear()
    first, again = forecast(checked("8xA100-80GB")), forecast(checked("8xA100-80GB"))
    assert first is again
    assert len(asked) == 1
    other = forecast(checked("8xH100-80GB"))
    assert other is not None
    assert first is not None
    assert other.time.step < first.time.step
    assert len(asked) == 2


def test_without_a_cluster_nothing_is_predicted() -> None:
    assert forecast(checked(None)) is None
