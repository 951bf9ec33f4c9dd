"""Rows that hold several documents, and pairs of responses, are rehearsed as such."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.planner import models

from shardwright.architecture import read_recipe_shape
from shardwright.config import Recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.layout import Layout
from shardwright.plan import BatchPlan, Plan
from shardwright.planner import Efficiency
from shardwright.planner.memory import predict_memory
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.pipeline import get_pipeline
from shardwright.planner.problem import build_template
from shardwright.rehearse.rank_rehearsal import RankRehearsal, rehearse_rank

TOKENS = 256
ROWS = 2


def recipe_of(**also: Any) -> Recipe:
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
            **also,
        }
    )


def planned(**also: Any) -> float:
    """Bytes of the same step by the planner's formulas."""
    recipe = recipe_of(**also)
    facts = get_model_facts(read_recipe_shape(recipe))
    candidate = replace(
        build_template(recipe), micro_batch_size=ROWS, gradient_accumulation_steps=2
    )
    load = get_pipeline(facts, Layout(), 2, TOKENS).build_rank_load(0)
    return predict_memory(facts, replace(candidate, layout=Layout()), load, Efficiency()).live


def rehearsed(layout: Layout | None = None, **also: Any) -> RankRehearsal:
    recipe = recipe_of(**also)
    layout = layout or Layout()
    plan = Plan(layout, BatchPlan(TOKENS, ROWS, 2, layout.data_ranks), recipe.precision, "none")
    return rehearse_rank(recipe, read_recipe_shape(recipe), plan, 0)


def test_packed_rows_take_a_mask() -> None:
    plain = rehearsed()
    packed = rehearsed(data={"sources": ["nowhere"], "packing": "documents"})
    # One number in the precision of the scores for each pair of positions of a row.
    assert packed.peak_bytes - plain.peak_bytes == pytest.approx(
        ROWS * TOKENS * TOKENS * torch.float32.itemsize, rel=0.05
    )


def test_the_planner_adds_what_a_mask_adds_and_the_keys_that_cuda_repeats_for_it() -> None:
    packing = {"sources": ["nowhere"], "packing": "documents"}
    rehearsed_bytes = rehearsed(data=packing).peak_bytes - rehearsed().peak_bytes
    planned_bytes = planned(data=packing) - planned()
    shape = models.shape("llama")
    repeated = (
        shape.num_layers
        * 2
        * ROWS
        * TOKENS
        * (shape.query_width - shape.kv_width)
        * torch.float32.itemsize
    )
    assert planned_bytes - repeated == pytest.approx(rehearsed_bytes, rel=0.1)
    assert repeated > rehearsed_bytes, "the test says nothing where no keys are shared"


def test_a_frozen_reference_is_held_beside_the_model_and_answers_first() -> None:
    layout = Layout(dp_shard=2, zero_stage=3)
    plain = rehearsed(layout)
    held = rehearsed(layout, preference={"kind": "dpo"})
    assert held.weights_bytes == 2 * plain.weights_bytes
    assert held.optimizer_bytes == plain.optimizer_bytes
    gathers = [
        sum(call.kind == "all_gather" for call in report.collectives) for report in (plain, held)
    ]
    assert gathers[1] > gathers[0]
    assert plain.collectives[0].kind == held.collectives[0].kind


def test_adapters_that_are_switched_off_hold_nothing_twice() -> None:
    adapters = {"adapters": {"rank": 4}}
    assert (
        rehearsed(**adapters, preference={"kind": "dpo"}).weights_bytes
        == rehearsed(**adapters).weights_bytes
    )
