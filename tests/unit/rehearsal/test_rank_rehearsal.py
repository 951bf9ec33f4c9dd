"""Rehearsals of packed rows and of preference pairs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.planner import models

from shardwright.architecture import read_recipe_shape
from shardwright.config import Recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.layout import Layout
from shardwright.planner import Efficiency
from shardwright.planner.memory.peaks import predict_memory
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.problem import build_template
from shardwright.planner.time.pipeline import get_pipeline
from shardwright.plans import BatchPlan, build_plan
from shardwright.rehearsal.rank_rehearsal import RankRehearsal, rehearse_rank

TOKENS = 256
ROWS = 2


def make_recipe(**sections: Any) -> Recipe:
    return validate_recipe(
        {
            "model": {"config": models.CONFIGS["llama"], "loss_chunk_tokens": 128},
            "data": {"sources": ["nowhere"]},
            "precision": {"kind": "fp32"},
            "training": {
                "sequence_length": TOKENS,
                "micro_batch_size": ROWS,
                "learning_rate": 1e-3,
                "max_steps": 1,
            },
            **sections,
        }
    )


def predict_live_bytes(*, has_masked_kernels: bool = False, **sections: Any) -> float:
    """Predict the bytes of the same step by the planner's formulas."""
    recipe = make_recipe(**sections)
    facts = get_model_facts(read_recipe_shape(recipe))
    candidate = replace(
        build_template(recipe),
        micro_batch_size=ROWS,
        gradient_accumulation_steps=2,
        has_masked_kernels=has_masked_kernels,
    )
    load = get_pipeline(facts, Layout(), 2, TOKENS).build_rank_load(0)
    return predict_memory(facts, replace(candidate, layout=Layout()), load, Efficiency()).live


def rehearse(layout: Layout | None = None, **sections: Any) -> RankRehearsal:
    recipe = make_recipe(**sections)
    shape = read_recipe_shape(recipe)
    layout = layout or Layout()
    plan = build_plan(
        shape, layout, BatchPlan(TOKENS, ROWS, 2, layout.data_ranks), recipe.precision, "none"
    )
    return rehearse_rank(recipe, plan, 0)


def test_packed_rows_need_a_mask() -> None:
    plain = rehearse()
    packed = rehearse(data={"sources": ["nowhere"], "packing": "documents"})
    # One element in the dtype of the scores for each pair of positions of a row.
    assert packed.peak_bytes - plain.peak_bytes == pytest.approx(
        ROWS * TOKENS * TOKENS * torch.float32.itemsize, rel=0.05
    )


def test_the_planner_adds_the_bytes_of_a_dense_mask_and_of_repeated_keys() -> None:
    packing = {"sources": ["nowhere"], "packing": "documents"}
    rehearsed_bytes = rehearse(data=packing).peak_bytes - rehearse().peak_bytes
    predicted_bytes = predict_live_bytes(data=packing) - predict_live_bytes()
    shape = models.read_shape("llama")
    repeated_bytes = (
        shape.num_layers
        * 2
        * ROWS
        * TOKENS
        * (shape.query_width - shape.kv_width)
        * torch.float32.itemsize
    )
    assert predicted_bytes - repeated_bytes == pytest.approx(rehearsed_bytes, rel=0.1)
    assert repeated_bytes > rehearsed_bytes, "without shared keys the test proves nothing"
    added_bytes = predict_live_bytes(has_masked_kernels=True, data=packing) - predict_live_bytes(
        has_masked_kernels=True
    )
    # Rotary tables follow each row's positions, with and without documents.
    assert added_bytes == 0.0  # no mask


def test_a_frozen_reference_doubles_the_weights_and_runs_first() -> None:
    layout = Layout(dp_shard=2, zero_stage=3)
    plain = rehearse(layout)
    with_reference = rehearse(layout, preference={"kind": "dpo"})
    assert with_reference.weights_bytes == 2 * plain.weights_bytes
    assert with_reference.optimizer_bytes == plain.optimizer_bytes
    gathers = [
        sum(call.kind == "all_gather" for call in report.collectives)
        for report in (plain, with_reference)
    ]
    assert gathers[1] > gathers[0]
    assert plain.collectives[0].kind == with_reference.collectives[0].kind


def test_a_reference_without_adapters_needs_no_second_copy() -> None:
    adapters = {"adapters": {"rank": 4}}
    assert (
        rehearse(**adapters, preference={"kind": "dpo"}).weights_bytes
        == rehearse(**adapters).weights_bytes
    )


def count_elements(recipe: Recipe, *, is_block: bool) -> int:
    return sum(
        math.prod(spec.shape)
        for spec in read_recipe_shape(recipe).list_parameters()
        if (spec.layer is not None) == is_block
    )


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(dp_shard=2, zero_stage=3)], ids=["one rank", "ZeRO-3"]
)
def test_frozen_parameters_have_no_gradients_states_and_reductions(layout: Layout) -> None:
    model = {"config": models.CONFIGS["llama"], "loss_chunk_tokens": 128}
    whole = rehearse(layout)
    part = rehearse(layout, model=model | {"freeze": ["model.layers.*"]})
    frozen_bytes = 4 * count_elements(make_recipe(), is_block=True) // layout.dp_shard
    assert part.weights_bytes == whole.weights_bytes
    assert whole.gradients_bytes - part.gradients_bytes == frozen_bytes
    assert whole.optimizer_bytes - part.optimizer_bytes == pytest.approx(2 * frozen_bytes, rel=1e-3)
    assert part.peak_bytes < whole.peak_bytes - 2 * frozen_bytes

    def count_reduced(report: RankRehearsal) -> int:
        return sum(call.num_bytes for call in report.collectives if "reduce" in call.kind)

    if layout.world_size > 1:
        assert count_reduced(part) < count_reduced(whole) / 2
