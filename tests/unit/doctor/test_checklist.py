"""Each point of the checklist passes on a complete recipe, and warns with a remedy otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint.commit import LATEST_NAME
from shardwright.config import Recipe
from shardwright.config.overrides import apply_overrides
from shardwright.config.recipe_loading import validate_recipe
from shardwright.data.model_data import prepare_for_model
from shardwright.doctor.checklist import check_recipe
from shardwright.doctor.finding import Finding
from shardwright.doctor.recovery_checks import (
    GPU_HOURS_PER_FAILURE,
    compute_save_interval_seconds,
    estimate_lost_share,
)
from shardwright.telemetry.event_log import EventWriter
from shardwright.training.checks.run_checks import validate_run
from shardwright.units import format_bytes, format_count


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """Return a recipe without warnings: for two ranks of a cluster, with prepared data."""
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


def change_recipe(document: dict[str, Any], *changes: str) -> Recipe:
    return validate_recipe(apply_overrides(document, changes))


def collect_problems(recipe: Recipe, world_size: int = 2) -> dict[str, Finding]:
    return {
        finding.name: finding
        for finding in check_recipe(recipe, world_size, "r.yaml")
        if finding.verdict != "pass"
    }


def test_a_complete_recipe_passes(document: dict[str, Any]) -> None:
    recipe = change_recipe(document)
    assert collect_problems(recipe) == {}
    names = {finding.name for finding in check_recipe(recipe, 2, "r.yaml")}
    assert {
        "layout fits the model", "memory", "data cache", "tokenizer and template", "enough samples",
        "validation", "weights",
        "size", "checkpoint folder", "saved often enough", "restarts", "time-outs", "resume",
        "seed",
    } == names  # fmt: skip


def test_parameters_are_counted_with_the_tokenizers_vocabulary(document: dict[str, Any]) -> None:
    recipe = change_recipe(document)
    assert "vocab_size" not in document["model"]["config"]
    num_parameters = validate_run(recipe, 2).shape.num_parameters
    findings = {finding.name: finding for finding in check_recipe(recipe, 2, "r.yaml")}
    assert findings["weights"].value == (
        f"{format_count(num_parameters)} parameters, initialised from the seed"
    )
    # fp32 master weights and two moments.
    assert findings["size"].value.startswith(f"{format_bytes(12 * num_parameters)} each")


def test_numbers_without_a_vocabulary_say_so_until_the_data_is_tokenised(
    document: dict[str, Any], tmp_path: Path
) -> None:
    changes = [f"data.cache_dir={tmp_path / 'empty'}"]
    note = ", with a vocabulary of 257 ids for now: the data is not tokenised yet"
    findings = check_recipe(change_recipe(document, *changes), 2, "r.yaml")
    values = {finding.name: finding.value for finding in findings}
    assert values["weights"].endswith(f"initialised from the seed{note}")
    assert values["memory"].endswith(note)
    known = change_recipe(document, *changes, "model.config.vocab_size=64")
    assert not any("for now" in finding.value for finding in check_recipe(known, 2, "r.yaml"))


def test_a_negligible_number_of_failures_is_a_bound(document: dict[str, Any]) -> None:
    findings = {finding.name: finding for finding in check_recipe(change_recipe(document), 2, "r")}
    restarts = findings["restarts"]
    assert 0.0 < restarts.numbers["expected_failures"] < 0.01
    assert restarts.value == "at most 3 restarts; fewer than 0.01 failures expected in the run"


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
def test_problems_are_reported_with_their_remedy(
    document: dict[str, Any], change: str, name: str, verdict: str, remedy: str
) -> None:
    problems = collect_problems(change_recipe(document, change))
    assert name in problems
    assert problems[name].verdict == verdict
    assert any(word in problems[name].remedy for word in remedy.split("|"))


def test_a_missing_seed_is_reported(document: dict[str, Any]) -> None:
    del document["seed"]
    assert set(collect_problems(validate_recipe(document))) == {"seed"}


def test_a_model_that_does_not_fit_is_reported(document: dict[str, Any]) -> None:
    large = [
        "hidden_size=16384",
        "intermediate_size=65536",
        "num_hidden_layers=120",
        "num_attention_heads=128",
    ]
    problems = collect_problems(
        change_recipe(document, *(f"model.config.{change}" for change in large))
    )
    assert problems["memory"].verdict == "fail"
    assert "shardwright plan r.yaml --cluster 8xH100" in problems["memory"].remedy


def test_without_a_cluster_memory_and_step_time_are_unknown(document: dict[str, Any]) -> None:
    problems = collect_problems(change_recipe(document, "cluster=null"))
    assert {"memory", "saved often enough"} <= set(problems)
    assert "--set cluster=" in problems["memory"].remedy


def test_steps_of_an_earlier_run_determine_the_save_interval(
    document: dict[str, Any], tmp_path: Path
) -> None:
    with EventWriter(tmp_path / "run") as writer:
        for step in range(1, 6):
            writer.write(
                "step", step=step, loss=1.0, gradient_norm=1.0, learning_rate=1e-2, tokens=256,
                supervised_tokens=256,
                samples_seen=8 * step, step_seconds=3600.0, tokens_per_second=1.0,
            )  # fmt: skip
    recipe = change_recipe(
        document,
        "training.max_steps=50000",
        "checkpoint.every_steps=5000",
        "run.timeout_seconds=100000.0",
    )
    finding = collect_problems(recipe)["saved often enough"]
    best_interval = finding.numbers["best_every_steps"]
    assert finding.numbers["step_seconds"] == 3600.0
    assert f"--set checkpoint.every_steps={best_interval}" in finding.remedy
    assert "saved often enough" not in collect_problems(
        change_recipe(
            document, f"checkpoint.every_steps={best_interval}", "training.max_steps=50000"
        )
    )


def test_the_best_interval_minimises_the_lost_share() -> None:
    seconds_between_failures = GPU_HOURS_PER_FAILURE * 3600 / 1024
    best_interval = compute_save_interval_seconds(60.0, seconds_between_failures)
    smallest_share = estimate_lost_share(best_interval, 60.0, 300.0, seconds_between_failures)
    assert all(
        estimate_lost_share(best_interval * factor, 60.0, 300.0, seconds_between_failures)
        > smallest_share
        for factor in (0.5, 0.9, 1.1, 2.0)
    )


def test_an_existing_run_without_a_checkpoint_is_reported(
    document: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("name: sums\n")
    assert "--resume" in collect_problems(change_recipe(document))["resume"].remedy


def test_vanished_checkpoints_are_reported(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("name: sums\n")
    with EventWriter(tmp_path / "run") as events:
        events.write("checkpoint", step=4, path="step-00000004", size_bytes=1, seconds=1.0)
    finding = collect_problems(change_recipe(document))["resume"]
    assert finding.verdict == "fail"
    assert "the run has saved step-00000004 at step 4" in finding.value


def test_damaged_checkpoints_are_reported(document: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    (folder.parent / LATEST_NAME).write_text("step-00000004\n")
    assert collect_problems(change_recipe(document))["resume"].verdict == "fail"
