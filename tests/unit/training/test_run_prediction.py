"""Prediction of a training run, cached per recipe and plan, and compared with its first steps."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwright.architecture import read_recipe_shape
from shardwright.config.layout import ClusterSection
from shardwright.config.recipe_loading import validate_recipe
from shardwright.hardware import MatmulRate, MeasuredProfile, save_profile
from shardwright.layout import Layout
from shardwright.plans import BatchPlan, build_plan
from shardwright.telemetry.event_log import EventLog, StepEvent, WarningEvent, read_events
from shardwright.training import loop
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.training.metrics import run_prediction
from shardwright.training.metrics.run_prediction import predict_training_run
from shardwright.training.run import train
from tests.unit.planner import models
from tests.unit.training.test_loop import build_recipe

WINDOWS = SimpleNamespace(report=SimpleNamespace(packing="windows"))


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
    run = SimpleNamespace(recipe=recipe, planned_recipe=None, plan=plan, shape=shape, data=WINDOWS)
    return cast(ValidatedRun, run)


def test_the_prediction_of_a_run_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = run_prediction.predict_rows

    def count_calls(*arguments: Any) -> Any:
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(run_prediction, "predict_rows", count_calls)
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


def train_on_predicted_cpu(folder: Path, *, bytes_per_second: float | None) -> EventLog:
    """Train eight steps on a CPU whose rates are given, or the catalogue's, and return the
    events."""
    cluster = ClusterSection(node="1xcpu")
    if bytes_per_second is not None:
        profile = MeasuredProfile(
            "any", None, "2026", 2**34, bytes_per_second, (MatmulRate("fp32", 8, 8, 8, 1e9),)
        )
        save_profile(profile, folder / "profile.json")
        cluster = ClusterSection(node="1xcpu", profile=str(folder / "profile.json"))
    recipe = build_recipe(folder, max_steps=8)
    train(
        recipe.model_copy(
            update={
                "cluster": cluster,
                "evaluation": recipe.evaluation.model_copy(update={"every_steps": 8}),
            }
        )
    )
    return read_events(folder / "run")


def test_a_run_with_slow_input_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = loop.read_step_micro_batches

    def read_late(*arguments: Any) -> Any:
        time.sleep(0.2)
        return read(*arguments)

    monkeypatch.setattr(loop, "read_step_micro_batches", read_late)
    events = train_on_predicted_cpu(tmp_path, bytes_per_second=1e8)
    (warning,) = [
        event for event in events.filter_by_type(WarningEvent) if event.slowdown is not None
    ]
    assert warning.step == 7  # two steps to warm up, and five measured ones
    assert warning.slowdown is not None
    assert warning.slowdown["part"] == "input"
    assert warning.slowdown["measured_part_seconds"] > 0.1
    assert "faster_layout" not in warning.slowdown
    assert "reading the input takes" in warning.message
    assert warning.message.endswith("no other layout would be faster at the measured rates")
    assert (tmp_path / "run" / "log.txt").read_text().count(warning.message) == 1


def test_a_run_on_a_cpu_without_measured_rates_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step slower than a whole CPU of the catalogue is no warning."""
    read = loop.read_step_micro_batches

    def read_late(*arguments: Any) -> Any:
        time.sleep(0.1)
        return read(*arguments)

    monkeypatch.setattr(loop, "read_step_micro_batches", read_late)
    events = train_on_predicted_cpu(tmp_path, bytes_per_second=None)
    assert not events.filter_by_type(WarningEvent)
    assert "`shardwright doctor --calibrate`" in (tmp_path / "run" / "log.txt").read_text()


def test_a_run_within_the_interval_does_not_warn(tmp_path: Path) -> None:
    events = train_on_predicted_cpu(tmp_path, bytes_per_second=1e6)
    assert len(events.filter_by_type(StepEvent)) == 8
    assert not events.filter_by_type(WarningEvent)
    assert "predicted step time" in (tmp_path / "run" / "log.txt").read_text()
