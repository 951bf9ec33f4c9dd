"""`auto` of `model.loss_chunk_tokens` and `precision.working_weights`: on CUDA what fits by the
prediction, on a CPU 1,024 tokens and no copies that take memory."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from shardwright.architecture import HFShape
from shardwright.config.layout import ClusterSection
from shardwright.config.offload import OffloadSection
from shardwright.launch.auto_layout import take_planned_memory
from shardwright.optim.sharded_optimizer import count_elements
from shardwright.planner.auto_layout import build_cluster
from shardwright.planner.memory_settings import predict_run
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.predictor import Predictor
from shardwright.planner.problem import build_plan_candidate
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.planner.slowdown import StepSeconds
from shardwright.training.checks.run_checks import ValidatedRun, validate_run
from shardwright.training.memory_settings import agree_on_memory_settings, take_free_memory
from shardwright.training.metrics import run_prediction
from shardwright.training.metrics.run_prediction import (
    predict_training_memory,
    predict_training_run,
)
from tests.unit.training import test_run_checks
from tests.unit.training.test_precision_choice import FakeRankSync

VOCAB_SIZE = 50_000
LENGTH = 16_384


def validate(
    folder: Path, chunk: Any = "auto", length: int = LENGTH, **sections: Any
) -> ValidatedRun:
    config = test_run_checks.CONFIG | {"max_position_embeddings": length, "vocab_size": VOCAB_SIZE}
    recipe = test_run_checks.build_recipe(
        folder,
        model={"config": config, "loss_chunk_tokens": chunk, **sections.pop("model", {})},
        training={
            "sequence_length": length,
            "micro_batch_size": 1,
            "global_batch_size": 1,
            **sections.pop("training", {}),
        },
        **sections,
    )
    return validate_run(recipe, 1)


def predict(run: ValidatedRun, chunk_tokens: int) -> float:
    model = run.recipe.model.model_copy(update={"loss_chunk_tokens": chunk_tokens})
    recipe = run.recipe.model_copy(update={"model": model})
    return predict_training_memory(replace(run, recipe=recipe)).total


def take_chunk(run: ValidatedRun, free_bytes: float) -> int | str:
    """Return the tokens of a chunk that the run takes."""
    return take_free_memory(run, free_bytes).recipe.model.loss_chunk_tokens


def test_a_larger_chunk_is_predicted_to_need_its_logits(tmp_path: Path) -> None:
    run = validate(tmp_path)
    added = predict(run, 8192) - predict(run, 1024)
    assert added == pytest.approx((8192 - 1024) * VOCAB_SIZE * 8, rel=0.15)  # fp32, twice


@pytest.mark.parametrize("chunk_tokens", [8192, 4096, 2048, 1024])
def test_the_largest_chunk_that_fits_is_chosen(tmp_path: Path, chunk_tokens: int) -> None:
    run = validate(tmp_path)
    needed = predict(run, chunk_tokens) / 0.85
    assert take_chunk(run, needed * 1.001) == chunk_tokens
    assert take_chunk(run, needed * 0.999) == max(1024, chunk_tokens // 2)


def test_a_chunk_is_not_larger_than_a_micro_batch_needs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "shardwright"):
        assert take_chunk(validate(tmp_path, length=1024), 1e15) == 1024
    assert "chunks of 1,024 tokens (auto: a micro-batch has 1,024 tokens)" in caplog.text
    assert take_chunk(validate(tmp_path, length=1500), 1e15) == 2048


def test_without_a_prediction_the_chunk_is_the_smallest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = object.__new__(HFShape)
    valid = validate(tmp_path)
    placement = replace(valid.plan.placement, shape=shape)
    run = replace(valid, plan=replace(valid.plan, placement=placement))
    with caplog.at_level(logging.INFO, "shardwright"):
        assert take_chunk(run, 1e15) == 1024
    assert "memory of transformers' own classes is not predicted" in caplog.text


def test_the_device_with_the_least_free_memory_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = validate(tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10**15, 10**15))
    cuda = torch.device("cuda", 0)
    least = predict(run, 2048) / 0.85 * 1.001
    with caplog.at_level(logging.INFO, "shardwright"):
        chosen = agree_on_memory_settings(run, FakeRankSync([least]), cuda)
    assert chosen.recipe.model.loss_chunk_tokens == 2048
    assert "loss: chunks of 2,048 tokens (auto: " in caplog.text
    alone = agree_on_memory_settings(run, FakeRankSync(), cuda)
    assert alone.recipe.model.loss_chunk_tokens == 8192


def test_a_cpu_has_a_fixed_number_and_a_number_in_the_recipe_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    run = agree_on_memory_settings(validate(tmp_path), FakeRankSync(), cpu)
    assert run.recipe.model.loss_chunk_tokens == 1024
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10**15, 10**15))
    explicit = agree_on_memory_settings(
        validate(tmp_path, 300), FakeRankSync(), torch.device("cuda", 0)
    )
    assert explicit.recipe.model.loss_chunk_tokens == 300


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_run_a_rehearsal_and_a_plan_have_the_same_settings(
    tmp_path: Path, recompute: str
) -> None:
    cluster = ClusterSection(node="1xH100-80GB")
    sections = {"precision": {"kind": "bf16"}, "cluster": cluster, "recompute": recompute}
    run = validate(tmp_path, **sections)
    recipe, plan, lines = take_planned_memory(run.recipe, run.plan)
    assert recipe.model.loss_chunk_tokens == 8192
    assert plan.has_working_weights
    assert len(lines) == 2
    empty = take_free_memory(run, 80e9)
    assert (empty.recipe, empty.plan) == (recipe, plan)
    assert empty.planned_recipe is run.recipe
    device = build_cluster(cluster, 1)
    efficiency = load_efficiencies().get_efficiency(device.accelerator)
    predictor = Predictor(get_model_facts(run.shape), device, efficiency)
    planned = predict_run(predictor, build_plan_candidate(run.recipe, run.plan))
    predicted = predict_training_run(empty)  # with the rows of the data
    assert predicted is not None
    assert (predicted.candidate, predicted.memory) == (planned.candidate, planned.memory)
    elsewhere = run.recipe.model_copy(update={"cluster": ClusterSection(node="1xcpu")})
    assert take_planned_memory(elsewhere, run.plan) == (elsewhere, run.plan, ())
    nowhere = run.recipe.model_copy(update={"cluster": None})
    assert take_planned_memory(nowhere, run.plan) == (nowhere, run.plan, ())


def test_a_new_plan_searches_with_the_settings_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ClusterSection(node="1xH100-80GB")
    run = take_free_memory(validate(tmp_path, precision={"kind": "bf16"}, cluster=cluster), 80e9)
    prediction = predict_training_run(run)
    assert prediction is not None
    assert prediction.candidate.working_weights is True
    arguments: list[Any] = []
    monkeypatch.setattr(run_prediction, "find_slow_part", lambda *_: None)
    monkeypatch.setattr(run_prediction, "split_prediction", lambda *_: None)
    monkeypatch.setattr(run_prediction, "replan", lambda *given: arguments.extend(given))
    run_prediction.find_slowdown(run, prediction, StepSeconds(1.0, 1.0, {}))
    template = arguments[2].template
    assert (template.loss_chunk_tokens, template.is_loss_chunk_auto) == (1024, True)
    assert template.working_weights == "auto"
    assert arguments[1] == prediction.candidate


OFFLOADED = {
    "offload": {"optimizer": "disk", "parameters": "disk"},
    "model": {"compile_functions": False},
    "training": {"global_batch_size": 2},
}
"""Weights would move in the passes; `auto` makes no copies of them by itself."""


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, True),
        ({"optimizer": {"name": "adamw_8bit"}}, True),
        ({"optimizer": {"name": "sgd"}}, False),
        ({"model": {"compile_functions": False}}, False),
        ({"model": {"compile_functions": False}, "recompute": "full"}, True),
        ({"precision": {"kind": "bf16", "working_weights": False}}, False),
        ({"precision": {"kind": "fp32"}}, False),
        ({"layout": {"zero_stage": 0, "dp_shard": 1}, "recompute": "full"}, True),
        (OFFLOADED, True),
        (OFFLOADED | {"layout": {"zero_stage": 3, "dp_shard": 1}}, True),
        (OFFLOADED | {"precision": {"kind": "bf16", "working_weights": False}}, False),
    ],
    ids=str,
)
def test_weights_are_copied_where_it_saves_time_and_fits(
    tmp_path: Path, sections: dict[str, Any], expected: bool
) -> None:
    run = validate(tmp_path, 1024, length=64, **{"precision": {"kind": "bf16"}, **sections})
    assert not run.plan.has_working_weights
    chosen = take_free_memory(run, 1e15)
    assert chosen.plan.has_working_weights == expected
    if not expected:
        assert chosen is run
        return
    needed = predict_training_memory(chosen).total / 0.85
    assert take_free_memory(run, needed * 1.001).plan.has_working_weights
    assert take_free_memory(run, needed * 0.999) is run
    assert take_free_memory(chosen, 0.0) is chosen


def test_copies_are_predicted_to_need_their_bytes_under_recomputation(tmp_path: Path) -> None:
    run = validate(tmp_path, 1024, length=64, precision={"kind": "bf16"}, recompute="full")
    chosen = take_free_memory(run, 1e15)
    added = predict_training_memory(chosen).weights - predict_training_memory(run).weights
    # The head is tied to the table of embeddings.
    matrices = [p for p in run.shape.list_parameters() if len(p.shape) == 2]
    elements = sum(p.shape[0] * p.shape[1] for p in matrices)
    assert added == pytest.approx(2 * elements)


def test_moments_are_read_ahead_into_memory_that_is_free(tmp_path: Path) -> None:
    sections = {"optimizer": "host", "buffer_bytes": 8192}

    def validate_for_gpu(**others: Any) -> ValidatedRun:
        valid = validate(tmp_path, 1024, length=64, offload=sections | others)
        run = valid.recipe.run.model_copy(update={"device": "cuda"})
        return replace(valid, recipe=valid.recipe.model_copy(update={"run": run}))

    run = validate_for_gpu()
    ahead_bytes = take_free_memory(run, 1e15).recipe.offload.ahead_bytes
    moment_bytes = 8 * sum(count_elements(p.shape) for p in run.shape.list_parameters())
    assert moment_bytes / 2 - 4 * 8192 < ahead_bytes < moment_bytes / 2
    assert ahead_bytes % 8192 == 0
    half = validate_for_gpu(read_ahead_bytes=ahead_bytes // 2)
    free_bytes = predict_training_memory(half).total / 0.85
    fitting = take_free_memory(run, free_bytes)
    assert ahead_bytes // 2 - 8192 <= fitting.recipe.offload.ahead_bytes <= ahead_bytes // 2
    assert take_free_memory(run, 0.0).recipe.offload.ahead_bytes == 0
    for others in ({"read_ahead_bytes": 16384}, {"update_on": "host"}, {"optimizer": "disk"}):
        other = validate_for_gpu(**others)
        assert take_free_memory(other, 1e15) is other


def test_buckets_are_larger_if_much_is_read_ahead() -> None:
    section = OffloadSection(optimizer="host", buffer_bytes=8192)
    assert (section.bucket_bytes, section.device_buffer_bytes) == (8192, 3 * 8192)
    for ahead_bytes, bucket_bytes in ((8192, 8192), (2**20, 2**15), (2**20 + 4096, 2**15)):
        ahead = OffloadSection(optimizer="host", buffer_bytes=8192, read_ahead_bytes=ahead_bytes)
        assert ahead.bucket_bytes == bucket_bytes
        assert ahead.device_buffer_bytes == 3 * 8192 + ahead_bytes
    assert ahead.change_tiers(optimizer="disk").read_ahead_bytes == "auto"
    for tiers in ({"optimizer": "disk"}, {"optimizer": "host", "update_on": "host"}):
        with pytest.raises(ValidationError, match="remove `read_ahead_bytes`"):
            OffloadSection.model_validate(tiers | {"read_ahead_bytes": 8192})
