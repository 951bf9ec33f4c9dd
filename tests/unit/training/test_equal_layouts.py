"""Ranks of a launcher plan `layout: auto` by themselves, and refuse to run different layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.config import Recipe
from shardwright.errors import InputError
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.training.checks.auto_choice import check_equal_layouts
from shardwright.training.rank_sync import RankSync
from tests.unit.training.test_precision_choice import FakeRankSync, build_recipe


class RecordingRankSync(RankSync):
    """Rank synchronisation of one rank that records what it sends."""

    def __init__(self) -> None:
        self.rank_environment = RankEnvironment()
        self.sent: list[float] = []

    def gather(self, values: Any, *, is_ragged: bool = False) -> list[list[float]]:
        self.sent = list(values)
        return [self.sent]


def compute_hash(recipe: Recipe) -> float:
    rank_sync = RecordingRankSync()
    check_equal_layouts(recipe, rank_sync)
    (value,) = rank_sync.sent
    assert value == int(value) < 2**53
    return value


CHANGES: tuple[dict[str, Any], ...] = (
    {"layout": {"dp_shard": 2, "zero_stage": 3}},
    {"layout": {"prefetch_depth": 2}},
    {"recompute": "full"},
    {"offload": {"optimizer": "disk"}},
    {"training": {"micro_batch_size": 1}},
    {"training": {"gradient_accumulation_steps": 2}},
    {"model": {"compile": False}},
)


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_ranks_with_different_settings_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    recipe = build_recipe(tmp_path)
    document = recipe.model_dump(mode="json", exclude_unset=True)
    for name, value in change.items():
        former = document.get(name)
        document[name] = former | value if isinstance(former, dict) else value
    other = Recipe.model_validate(document)
    same = compute_hash(recipe)
    check_equal_layouts(recipe, FakeRankSync([same], [same]))
    with pytest.raises(InputError, match="ranks 0 and 2 have different layouts, batches") as error:
        check_equal_layouts(recipe, FakeRankSync([same], [compute_hash(other)]))
    assert error.value.field == "layout"
    assert "$SHARDWRIGHT_CACHE/steps" in str(error.value.remedy)


def test_folders_may_differ_between_nodes(tmp_path: Path) -> None:
    recipe = build_recipe(tmp_path)
    run = recipe.run.model_copy(update={"dir": "elsewhere"})
    offload = recipe.offload.model_copy(update={"dir": "/scratch"})
    moved = recipe.model_copy(update={"run": run, "offload": offload})
    assert compute_hash(moved) == compute_hash(recipe)
