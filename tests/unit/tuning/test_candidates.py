"""Candidates: overlapping intervals, one global batch, no repetitions, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.config import load_recipe
from shardwright.config.recipe_loading import dump_recipe, validate_recipe
from shardwright.config.yaml_document import parse_yaml
from shardwright.errors import InputError, LayoutError, RecipeError
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.planner.search.result import build_layout_key
from shardwright.plans import resolve_degrees
from shardwright.tuning.candidates import (
    SETTINGS,
    CandidateList,
    TuningRequest,
    list_candidates,
    parse_settings,
)
from tests.unit.planner import models

ROOT = Path(__file__).parents[3]
RECIPE: dict[str, Any] = {
    "name": "small",
    "model": {"config": models.CONFIGS["llama"], "compile": False},
    "data": {"sources": "nowhere"},
    "training": {
        "sequence_length": 256,
        "global_batch_size": 16,
        "max_steps": 100,
        "learning_rate": 1e-3,
    },
    "precision": "bf16",
}


def build_request(node: str = "2xcpu", **changes: Any) -> TuningRequest:
    recipe = validate_recipe(RECIPE | changes)
    cluster = parse_cluster(node)
    return TuningRequest(recipe, cluster, cluster.num_gpus, False, True)


def list_values(found: CandidateList, name: str) -> set[Any]:
    return {getattr(each.prediction.candidate.layout, name) for each in found.candidates}


@pytest.mark.parametrize(("node", "max_candidates"), [("2xcpu", 100), ("8xH100-80GB", 30)])
def test_candidates_overlap_keep_the_batch_and_are_distinct(node: str, max_candidates: int) -> None:
    request = build_request(node)
    found = list_candidates(replace(request, max_candidates=max_candidates))
    keys = [each.key for each in found.candidates]
    assert len(keys) == len(set(keys)) == min(max_candidates, found.num_overlapping)
    fastest = min((each.prediction for each in found.candidates), key=lambda p: p.time.step)
    for each in found.candidates:
        low, _ = each.prediction.step_interval
        assert low <= fastest.step_interval[1] or each.is_baseline
        layout, batch = resolve_degrees(each.recipe, request.num_ranks)
        assert batch.global_batch_size == 16
        assert layout == each.prediction.candidate.layout
        document = parse_yaml(dump_recipe(each.recipe), "recipe")
        assert validate_recipe(document) == each.recipe
    assert len(list_values(found, "zero_stage")) > 1
    if max_candidates >= found.num_overlapping:
        recompute = {each.prediction.candidate.recompute for each in found.candidates}
        assert recompute == {"none", "selective", "full"}


def test_the_recipes_own_settings_come_first() -> None:
    layout = {"zero_stage": 3, "dp_shard": 2}
    found = list_candidates(build_request(layout=layout, recompute="full"))
    first, *others = found.candidates
    assert first.is_baseline
    assert first.recipe.recompute == "full"
    assert first.recipe.layout.zero_stage == 3
    assert not any(each.is_baseline for each in others)
    steps = [each.prediction.time.step for each in others]
    assert steps[0] == min(steps)


def test_the_best_settings_of_several_layouts_come_before_variants_of_one() -> None:
    found = list_candidates(replace(build_request(), max_candidates=6))
    layouts = {build_layout_key(each.prediction.candidate) for each in found.candidates}
    assert len(layouts) == 5


def test_settings_that_probably_do_not_fit_come_later() -> None:
    recipe = load_recipe(ROOT / "recipes/llama2-13b.yaml", ["precision=bf16"])
    cluster = parse_cluster("8xA100-80GB")
    found = list_candidates(TuningRequest(recipe, cluster, 8, False, False, max_candidates=100))
    predictions = [each.prediction for each in found.candidates[1:]]
    assert all(prediction.fits for prediction in predictions[:6])
    later = [prediction for prediction in predictions if not prediction.fits]
    assert later
    fastest = min(prediction.time.step for prediction in predictions[:6])
    assert min(prediction.time.step for prediction in later) < fastest


def test_prefetching_buckets_compilation_and_offloading_vary() -> None:
    found = list_candidates(replace(build_request("8xH100-80GB"), max_candidates=200))
    assert list_values(found, "prefetch_depth") == {1, 2}
    assert list_values(found, "wrap_blocks") == {1, 2}
    assert len(list_values(found, "bucket_size_bytes")) == 3
    assert {each.recipe.model.compile for each in found.candidates} == {False, True}
    assert {each.recipe.offload.optimizer for each in found.candidates} >= {"none"}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_fixed_setting_has_the_recipes_value(setting: str) -> None:
    request = build_request("8xH100-80GB", layout={"zero_stage": 3, "dp_shard": 8})
    fixed = parse_settings([setting])
    found = list_candidates(replace(request, fixed=fixed, max_candidates=200))

    def get_value(recipe: Any) -> Any:
        layout = recipe.layout
        return {
            "layout": (layout.zero_stage, layout.tp, layout.pp, layout.dp_shard),
            "micro_batch_size": recipe.training.micro_batch_size,
            "recompute": recipe.recompute,
            "compile": recipe.model.compile,
            "prefetch": (layout.prefetch_depth, layout.wrap_blocks),
            "bucket_size": layout.bucket_size_bytes,
            "offload": recipe.offload,
        }[setting]

    assert len({get_value(each.recipe) for each in found.candidates}) == 1


def test_nothing_is_left_to_tune_if_all_settings_are_fixed() -> None:
    request = build_request(layout={"zero_stage": 3, "dp_shard": 2})
    with pytest.raises(InputError, match="nothing to tune") as error:
        list_candidates(replace(request, fixed=parse_settings(SETTINGS)))
    assert error.value.field == "--fix"


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(InputError, match=r"--fix: not a setting .*got batch; allowed: layout, "):
        parse_settings(["batch"])


def test_ranks_that_no_layout_divides_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"no layout divides .*got 7"):
        list_candidates(build_request("7xcpu"))


def test_a_model_that_fits_nowhere_is_refused() -> None:
    request = build_request("2xT4", model={"config": models.LLAMA2_13B}, precision="fp16")
    with pytest.raises(LayoutError, match="no candidate fits"):
        list_candidates(request)


def test_a_recipe_without_a_global_batch_keeps_the_one_of_its_layout() -> None:
    training = RECIPE["training"] | {"global_batch_size": None, "micro_batch_size": 4}
    request = build_request(training=training, layout={"zero_stage": 3})
    found = list_candidates(request)
    assert {each.recipe.training.global_batch_size for each in found.candidates} == {8}
    with pytest.raises(RecipeError, match=r"training.global_batch_size: the global batch is not"):
        list_candidates(build_request(training=training, layout="auto"))


def test_a_layout_that_does_not_fit_the_ranks_is_left_out_with_the_reason() -> None:
    request = build_request(layout={"tp": 3})
    found = list_candidates(request)
    assert not any(each.is_baseline for each in found.candidates)
    assert found.baseline_obstacle
    with pytest.raises(LayoutError, match="--fix layout"):
        list_candidates(replace(request, fixed=parse_settings(["layout"])))


def test_offloading_of_the_recipe_can_be_left_out() -> None:
    request = build_request("8xH100-80GB", offload={"optimizer": "host"})
    found = list_candidates(replace(request, max_candidates=200))
    assert {each.recipe.offload.optimizer for each in found.candidates} == {"none", "host"}


def test_other_offloading_of_the_recipe_remains() -> None:
    section = {"optimizer": "host", "parameters": "disk", "dir": "/scratch", "buffer_bytes": 8192}
    request = build_request("8xH100-80GB", adapters={"rank": 4}, offload=section)
    found = list_candidates(replace(request, max_candidates=200))
    assert {each.recipe.offload.optimizer for each in found.candidates} == {"none", "host"}
    for each in found.candidates:
        offload = each.recipe.offload
        assert (offload.parameters, offload.dir, offload.buffer_bytes) == ("disk", "/scratch", 8192)
