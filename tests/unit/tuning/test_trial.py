"""The recipe that a trial runs, the reason of a failure, and folders of killed searches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.config import dump_recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.config.yaml_document import parse_yaml
from shardwright.tuning.measurement import WARMUP_STEPS
from shardwright.tuning.recipe_tuning import restore_source
from shardwright.tuning.trial import (
    build_trial_recipe,
    remove_abandoned_trials,
    shorten_reason,
)
from tests.unit.planner import models

RECIPE: dict[str, Any] = {
    "name": "small",
    "model": {"config": models.CONFIGS["llama"]},
    "data": {"sources": "nowhere", "validation_fraction": 0.1},
    "training": {
        "sequence_length": 256,
        "global_batch_size": 16,
        "max_steps": 1000,
        "num_epochs": 2,
        "learning_rate": 1e-3,
        "min_learning_rate": 1e-4,
        "schedule": "warmup_stable_decay",
        "warmup_steps": 100,
        "decay_steps": 500,
    },
    "evaluation": {"every_steps": 1, "num_samples": 2},
    "checkpoint": {"every_steps": 1, "dir": "s3://bucket/run"},
    "elastic": {"max_restarts": 3},
    "run": {"sinks": ["wandb"], "profile_steps": [2], "replica_check_every_steps": 1},
    "cluster": "8xH100-80GB",
}


def test_a_trial_has_the_work_of_a_run_and_nothing_else() -> None:
    source = validate_recipe(RECIPE)
    trial = build_trial_recipe(source, Path("somewhere/run"), 16)
    assert validate_recipe(parse_yaml(dump_recipe(trial), "trial")) == trial
    assert trial.training.max_steps == WARMUP_STEPS + 16
    assert trial.training.num_epochs is None
    assert trial.training.learning_rate == 0
    assert trial.training.global_batch_size == 16
    assert (trial.model, trial.data, trial.optimizer) == (
        source.model,
        source.data,
        source.optimizer,
    )
    assert trial.checkpoint.dir is None
    assert trial.checkpoint.every_steps is None
    assert trial.evaluation.every_steps is None
    assert trial.elastic.max_restarts == 0
    assert trial.run.dir == "somewhere/run"
    assert trial.run.sinks == ()
    assert trial.run.profile_steps == ()
    assert trial.cluster is None


def test_a_tuned_recipe_keeps_the_users_precision_and_vocabulary() -> None:
    source = validate_recipe(RECIPE)
    planned = source.model_copy(
        update={
            "precision": source.precision.model_copy(update={"kind": "bf16"}),
            "model": source.model.model_copy(update={"config": {"vocab_size": 3}, "compile": True}),
            "recompute": "full",
        }
    )
    tuned = restore_source(planned, source)
    assert tuned.precision.kind == "auto"
    assert tuned.model.config == source.model.config
    assert tuned.model.compile is True
    assert tuned.recompute == "full"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("rank 1: rank 1 ran out of memory. The plan predicted 3 B", "rank 1 ran out of memory"),
        ("rank 0: ValueError: no\nTraceback", "rank 0: ValueError: no"),
        ("x" * 400, "x" * 297 + "..."),
    ],
)
def test_a_reason_is_one_short_line(reason: str, expected: str) -> None:
    assert shorten_reason(reason) == expected


def test_folders_of_a_killed_search_are_removed(tmp_path: Path) -> None:
    (tmp_path / "trial-abc" / "run").mkdir(parents=True)
    (tmp_path / "trials.jsonl").touch()
    remove_abandoned_trials(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["trials.jsonl"]
