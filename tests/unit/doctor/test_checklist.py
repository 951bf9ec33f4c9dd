"""Each point of the checklist passes on a recipe that has it and speaks up on one that has not,
with the command that mends it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint.commit import LATEST_NAME
from shardwright.config import Recipe
from shardwright.config.recipe_loading import apply_overrides, validate_recipe
from shardwright.data.model_data import prepare_for_model
from shardwright.doctor.checklist import check_recipe
from shardwright.doctor.finding import Finding
from shardwright.doctor.recovery_checks import (
    GPU_HOURS_PER_FAILURE,
    compute_save_interval_seconds,
    estimate_lost_share,
)
from shardwright.telemetry.event_log import EventWriter


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """A recipe with nothing left to say: on two ranks of a cluster, its data prepared."""
    (tmp_path / "corpus.txt").write_text(
        "".join(f"{a} + {b} = {a + b}\n" for a in range(60) for b in range(40))
    )
    document: dict[str, Any] = {
        "name": "sums",
        "seed": 3,
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 32,
            }
        },
        "tokenizer": {"kind": "character"},
        "data": {
            "sources": str(tmp_path / "corpus.txt"),
            "validation_fraction": 0.1,
            "validation_split": "tail",
            "cache_dir": str(tmp_path / "cache"),
        },
        "precision": "fp32",
        "training": {
            "sequence_length": 32,
            "micro_batch_size": 4,
            "max_steps": 100,
            "learning_rate": 1e-2,
        },
        "evaluation": {"every_steps": 50},
        "checkpoint": {"every_steps": 50},
        "elastic": {"max_restarts": 3},
        "cluster": "8xH100",
        "run": {"dir": str(tmp_path / "run")},
    }
    prepare_for_model(validate_recipe(document))
    return document


def altered(document: dict[str, Any], *changes: str) -> Recipe:
    return validate_recipe(apply_overrides(document, changes))


def spoken(recipe: Recipe, world_size: int = 2) -> dict[str, Finding]:
    return {
        finding.name: finding
        for finding in check_recipe(recipe, world_size, "r.yaml")
        if finding.verdict != "pass"
    }


def test_a_recipe_with_all_it_needs_passes(document: dict[str, Any]) -> None:
    recipe = altered(document)
    assert spoken(recipe) == {}
    names = {finding.name for finding in check_recipe(recipe, 2, "r.yaml")}
    assert {
        "layout fits the model", "memory", "data cache", "tokenizer and template", "enough samples", "validation", "weights",
        "size", "checkpoint folder", "saved often enough", "restarts", "time-outs", "resume", "seed",
    } == names  # fmt: skip


@pytest.mark.parametrize(
    ("change", "name", "verdict", "remedy"),
    [
        ("layout.tp=3", "layout fits the model", "fail", "Start a multiple of 3 ranks"),
        ("training.global_batch_size=9", "layout fits the model", "fail", "--set|Fix"),
        ("data.validation_fraction=0.0", "validation", "warn", "--set data.validation_fraction"),
        ("evaluation.every_steps=null", "validation", "warn", "--set evaluation.every_steps"),
        ("training.max_steps=100000", "enough samples", "warn", "--set training.max_steps="),
        ("run.timeout_seconds=7200.0", "time-outs", "warn", "--set run.timeout_seconds"),
        ("run.timeout_seconds=0.001", "time-outs", "fail", "--set run.timeout_seconds"),
        ("data.cache_dir=/nowhere/else", "data cache", "warn", "shardwright data r.yaml"),
        ("checkpoint.keep_last=100000000", "checkpoint folder", "fail", "--set checkpoint.dir"),
    ],
)
def test_what_is_missing_is_told_with_what_mends_it(
    document: dict[str, Any], change: str, name: str, verdict: str, remedy: str
) -> None:
    told = spoken(altered(document, change))
    assert name in told
    assert told[name].verdict == verdict
    assert any(word in told[name].remedy for word in remedy.split("|"))


def test_a_seed_that_was_not_said_is_told(document: dict[str, Any]) -> None:
    del document["seed"]
    assert set(spoken(validate_recipe(document))) == {"seed"}


def test_a_model_that_does_not_fit_is_told(document: dict[str, Any]) -> None:
    large = [
        "hidden_size=16384",
        "intermediate_size=65536",
        "num_hidden_layers=120",
        "num_attention_heads=128",
    ]
    told = spoken(altered(document, *(f"model.config.{change}" for change in large)))
    assert told["memory"].verdict == "fail"
    assert "shardwright plan r.yaml --cluster 8xH100" in told["memory"].remedy


def test_without_a_cluster_memory_and_steps_are_not_guessed(document: dict[str, Any]) -> None:
    told = spoken(altered(document, "cluster=null"))
    assert {"memory", "saved often enough"} <= set(told)
    assert "--set cluster=" in told["memory"].remedy


def test_steps_of_an_earlier_run_say_how_much_is_at_risk(
    document: dict[str, Any], tmp_path: Path
) -> None:
    with EventWriter(tmp_path / "run") as writer:
        for step in range(1, 6):
            writer.write(
                "step", step=step, loss=1.0, gradient_norm=1.0, learning_rate=1e-2, tokens=256, supervised_tokens=256,
                samples_seen=8 * step, step_seconds=3600.0, tokens_per_second=1.0,
            )  # fmt: skip
    recipe = altered(
        document,
        "training.max_steps=50000",
        "checkpoint.every_steps=5000",
        "run.timeout_seconds=100000.0",
    )
    told = spoken(recipe)["saved often enough"]
    best = told.numbers["best_every_steps"]
    assert told.numbers["step_seconds"] == 3600.0
    assert f"--set checkpoint.every_steps={best}" in told.remedy
    assert "saved often enough" not in spoken(
        altered(document, f"checkpoint.every_steps={best}", "training.max_steps=50000")
    )


def test_the_best_interval_loses_least() -> None:
    between = GPU_HOURS_PER_FAILURE * 3600 / 1024
    best = compute_save_interval_seconds(60.0, between)
    at_best = estimate_lost_share(best, 60.0, 300.0, between)
    assert all(
        estimate_lost_share(best * factor, 60.0, 300.0, between) > at_best
        for factor in (0.5, 0.9, 1.1, 2.0)
    )


def test_a_run_that_is_there_without_a_checkpoint_is_told(
    document: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("name: sums\n")
    told = spoken(altered(document))["resume"]
    assert "--resume" in told.remedy


def test_damaged_checkpoints_are_told(document: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    (folder.parent / LATEST_NAME).write_text("step-00000004\n")
    assert spoken(altered(document))["resume"].verdict == "fail"
