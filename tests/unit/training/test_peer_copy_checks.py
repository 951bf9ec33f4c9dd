"""Peer copies that cannot be kept are refused before a rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardwright.errors import RecipeError
from shardwright.training.checks import peer_copy_checks
from shardwright.training.checks.run_checks import validate_run
from tests.unit.training.test_run_checks import build_recipe

ELASTIC = {"max_restarts": 1, "warm_restarts": True, "peer_copies": 1}


def test_copies_need_processes_that_stay(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="set `warm_restarts` too"):
        build_recipe(tmp_path, elastic={"max_restarts": 1, "peer_copies": 1})
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        build_recipe(tmp_path, elastic=ELASTIC | {"peer_copies": 2})


@pytest.mark.parametrize(
    ("sections", "num_ranks", "problem"),
    [
        ({}, 1, "a single rank has no peer"),
        ({"offload": {"optimizer": "host"}}, 2, "copies of offloaded states are not kept"),
    ],
)
def test_runs_without_copies_are_refused(
    tmp_path: Path, sections: dict[str, Any], num_ranks: int, problem: str
) -> None:
    with pytest.raises(RecipeError, match=problem) as error:
        validate_run(build_recipe(tmp_path, elastic=ELASTIC, **sections), num_ranks)
    assert error.value.field == "elastic.peer_copies"
    assert error.value.remedy is not None


def test_too_little_host_memory_is_refused_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = build_recipe(tmp_path, elastic=ELASTIC, layout={"dp_shard": 2, "zero_stage": 3})
    validated = validate_run(recipe, 2)
    elements = sum(spec.num_elements for spec in validated.shape.list_parameters())
    # fp32 weights and two moments: two steps, each rank's own half and its peer's.
    needed = 2 * 2 * 12 * elements
    monkeypatch.setattr(peer_copy_checks, "read_available_memory", lambda: needed)
    validate_run(recipe, 2)
    monkeypatch.setattr(peer_copy_checks, "read_available_memory", lambda: needed - 1)
    with pytest.raises(RecipeError, match="not enough host memory") as error:
        validate_run(recipe, 2)
    assert "available" in str(error.value.got)
    assert "at least" in str(error.value.allowed)
    monkeypatch.setattr(peer_copy_checks, "read_available_memory", lambda: None)
    validate_run(recipe, 2)
