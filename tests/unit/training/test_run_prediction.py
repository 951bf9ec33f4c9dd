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
from shardwright.hardware.step_versions import describe_step_versions
from shardwright.layout import Layout
from shardwright.planner.auto_layout import build_cluster
from shardwright.planner.prediction import Prediction
from shardwright.planner.predictor import build_predictor
from shardwright.planner.problem import get_recipe_facts
from shardwright.planner.step_profile import (
    StepProfile,
    build_tuned_step,
    describe_workload,
    find_profile_path,
    save_step_profile,
)
from shardwright.planner.training_rows import TrainingRows
from shardwright.plans import BatchPlan, build_plan
from shardwright.telemetry.event_log import EventLog, StepEvent, WarningEvent, read_events
from shardwright.training import loop
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.training.metrics import run_prediction
from shardwright.training.metrics.run_prediction import compute_slow_limit, predict_training_run
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


def save_measured_step(run: ValidatedRun, predicted: Prediction, ratio: float) -> Path:
    """Save the measured time of a run's settings, a multiple of the predicted one."""
    assert run.recipe.cluster is not None
    problem = run_prediction._build_problem(run)
    facts = get_recipe_facts(run.recipe, run.shape)
    predictor = build_predictor(facts, build_cluster(run.recipe.cluster, 8))
    step = build_tuned_step(
        predicted,
        describe_workload(predictor, problem),
        measured_seconds=ratio * predicted.time.step,
        spread=0.001,
        rates=predictor.cluster.rates_source,
        measured_at="2026-01-01T00:00:00Z",
        versions=describe_step_versions(predictor.cluster),
    )
    path = find_profile_path(predictor.cluster)
    save_step_profile(StepProfile(predictor.cluster.name, (step,)), path)
    return path


def test_measured_steps_correct_the_prediction_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    run = build_validated_run("8xA100-80GB")
    predicted = predict_training_run(run)
    assert predicted is not None
    assert not predicted.is_measured
    assert compute_slow_limit(predicted) == predicted.step_interval[1]
    path = save_measured_step(run, predicted, 2.0)
    corrected = predict_training_run(run)
    assert corrected is not None
    assert corrected.is_measured
    assert corrected.memory == predicted.memory
    assert corrected.time.step == pytest.approx(2 * predicted.time.step)
    # Two runs of the same settings differ by more than the interval of one measurement.
    assert corrected.step_interval[1] < 1.002 * corrected.time.step
    assert compute_slow_limit(corrected) == pytest.approx(1.05 * corrected.time.step)
    # A run on a GPU takes free memory for some settings after its layout is measured.
    section = run.recipe.model.model_copy(update={"loss_chunk_tokens": 64})
    resolved = run.recipe.model_copy(update={"model": section})
    run_with_chunks = SimpleNamespace(**vars(run) | {"recipe": resolved})
    run_with_chunks.planned_recipe = run.recipe
    with_chunks = predict_training_run(cast(ValidatedRun, run_with_chunks))
    assert with_chunks is not None
    assert with_chunks.is_measured
    assert with_chunks.candidate.loss_chunk_tokens == 64
    # The measurements are compared with predictions of full rows.
    rows = TrainingRows(((128,),) * 64, 128, is_packed=False, is_uneven=False, pad_multiple=None)
    monkeypatch.setattr(run_prediction, "read_run_rows", lambda _run: rows)
    with_rows = predict_training_run(run)
    assert with_rows is not None
    assert not with_rows.is_measured
    monkeypatch.setattr(run_prediction, "read_run_rows", lambda _run: None)
    path.write_text("{")
    assert predict_training_run(run) == predicted
    assert "measured step times do not correct the prediction" in caplog.text


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
