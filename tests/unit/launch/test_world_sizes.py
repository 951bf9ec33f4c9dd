"""Numbers of ranks on which a run can continue, and the layouts for them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from shardwright.config import Recipe
from shardwright.config.offload import OffloadSection
from shardwright.config.run import ElasticSection
from shardwright.errors import LayoutError, RecipeError
from shardwright.launch import auto_layout
from shardwright.launch.auto_layout import resolve_auto_layout
from shardwright.launch.world_sizes import WorldSizes
from shardwright.plans import resolve_degrees
from tests.unit.training.finished import CONFIG


def build_recipe(
    layout: Any, *, min_ranks: int | None, cluster: str | None = None, **training: Any
) -> Recipe:
    document: dict[str, Any] = {
        "model": {"config": {**CONFIG, "vocab_size": 64}},
        "data": {"sources": "unread"},
        "precision": "fp32",
        "training": {"sequence_length": 8, "max_steps": 2, "learning_rate": 1e-3, **training},
        "layout": layout,
        "elastic": {"max_restarts": 3, "min_ranks": min_ranks},
    }
    if cluster is not None:
        document["cluster"] = cluster
    return Recipe.model_validate(document)


def test_degrees_stay_and_the_open_data_degree_shrinks() -> None:
    recipe = build_recipe({"tp": 2}, min_ranks=2, global_batch_size=12, micro_batch_size=1)
    sizes = WorldSizes(recipe, 8)
    sizes.check()
    assert sizes.find_smaller(8) == 6
    assert sizes.find_smaller(6) == 4
    assert sizes.find_smaller(2) is None
    assert sizes.get_recipe(6) is recipe
    assert resolve_degrees(sizes.get_recipe(6), 6)[0].tp == 2


@pytest.mark.parametrize(
    ("layout", "min_ranks", "training", "problem"),
    [
        ({"dp_replicate": 1, "dp_shard": 4}, 2, {"global_batch_size": 12}, "no number of ranks"),
        ({}, 1, {"micro_batch_size": 2}, "no number of ranks from 1 to 3"),
        ({}, 3, {"global_batch_size": 8, "micro_batch_size": 1}, "no number of ranks from 3 to 3"),
        ({}, 5, {"global_batch_size": 8}, "the run starts with fewer ranks"),
    ],
)
def test_a_minimum_without_effect_is_refused(
    layout: Any, min_ranks: int, training: dict[str, int], problem: str
) -> None:
    """The degrees are fixed, the global batch follows from them, it cannot be split, or there are
    fewer ranks.
    """
    recipe = build_recipe(layout, min_ranks=min_ranks, **training)
    with pytest.raises(RecipeError, match=problem) as error:
        WorldSizes(recipe, 4).check()
    assert (error.value.field, error.value.got) == ("elastic.min_ranks", min_ranks)


def test_without_a_minimum_nothing_is_checked() -> None:
    for min_ranks in (None, 4):
        sizes = WorldSizes(build_recipe({}, min_ranks=min_ranks, micro_batch_size=2), 4)
        sizes.check()
        assert sizes.find_smaller(4) is None


@pytest.mark.parametrize(
    "training", [{"global_batch_size": 12}, {"micro_batch_size": 2}, {"micro_batch_size": 3}]
)
def test_the_planner_chooses_again_with_the_same_global_batch(training: dict[str, int]) -> None:
    auto = build_recipe("auto", min_ranks=1, cluster="6xcpu", **training)
    first = resolve_auto_layout(auto, 6)
    sizes = WorldSizes(first, 6, auto)
    sizes.check()
    _, batch = resolve_degrees(first, 6)
    smaller = sizes.find_smaller(6)
    assert smaller is not None
    recipe = sizes.get_recipe(smaller)
    layout, smaller_batch = resolve_degrees(recipe, smaller)
    assert layout.world_size == smaller < 6
    assert smaller_batch.global_batch_size == batch.global_batch_size
    if "micro_batch_size" in training:
        assert smaller_batch.micro_batch_size == training["micro_batch_size"]
    assert sizes.get_recipe(6) is first


def test_the_number_with_the_shortest_predicted_step_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = {5: 4.0, 4: 3.0, 3: 1.0, 2: 2.0}

    def plan(recipe: Recipe, count: int) -> Any:
        assert recipe.layout.auto
        assert recipe.training.global_batch_size == 12
        if count == 2:
            raise LayoutError("no layout fits")
        offload = OffloadSection(optimizer="host" if count == 3 else "none")
        planned = recipe.model_copy(update={"name": f"of {count}", "offload": offload})
        return SimpleNamespace(uncorrected_seconds=seconds[count], recipe=planned)

    monkeypatch.setattr(auto_layout, "plan_ranks", plan)
    monkeypatch.setattr(auto_layout, "describe_choice", lambda planned: planned.recipe.name)
    fixed = {"dp_shard": 6, "dp_replicate": 1}
    recipes = [
        build_recipe(layout, min_ranks=2, cluster="6xcpu", global_batch_size=12)
        for layout in (fixed, "auto")
    ]
    sizes = WorldSizes(recipes[0], 6, recipes[1])
    assert sizes.find_smaller(6) == 3
    assert sizes.get_recipe(3).name == "of 3"
    # Of offloaded states no copies are kept.
    elastic = ElasticSection(max_restarts=3, min_ranks=2, warm_restarts=True, peer_copies=1)
    copied = [recipe.model_copy(update={"elastic": elastic}) for recipe in recipes]
    assert WorldSizes(copied[0], 6, copied[1]).find_smaller(6) == 4


def test_no_layout_for_fewer_ranks_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The recipe's micro-batch and accumulation need four data ranks."""
    batch = {"global_batch_size": 12, "micro_batch_size": 3, "gradient_accumulation_steps": 1}
    auto = build_recipe("auto", min_ranks=2, cluster="4xcpu", **batch)
    sizes = WorldSizes(resolve_auto_layout(auto, 4), 4, auto)
    with caplog.at_level(logging.WARNING, logger="shardwright"):
        assert sizes.find_smaller(4) is None
    assert "no layout for 2 to 3 ranks with the same global batch fits" in caplog.text
