"""Preference runs: what their reference takes and costs, and what is worked out once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.config import Recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.layout import Layout
from shardwright.planner import Candidate, Efficiency, predict
from shardwright.planner.candidate import LowRankAdapter, ReferenceKind
from shardwright.planner.problem import build_template
from tests.unit.planner import models


def recipe(**also: Any) -> Recipe:
    return validate_recipe(
        {
            "model": {"config": models.CONFIGS["llama"]},
            "data": {"sources": ["nowhere"]},
            "precision": "fp32",
            "training": {
                "sequence_length": 128,
                "micro_batch_size": 2,
                "learning_rate": 1e-3,
                "max_steps": 1,
            },
            **also,
        }
    )


def test_a_recipe_says_what_its_preferences_are_held_to() -> None:
    adapters = {"adapters": {"rank": 4}}
    assert build_template(recipe()).reference == "none"
    assert build_template(recipe(preference={"kind": "dpo"})).reference == "frozen"
    assert build_template(recipe(preference={"kind": "dpo"}, **adapters)).reference == "adapter_off"
    assert (
        build_template(
            recipe(preference={"kind": "dpo", "reference": "frozen"}, **adapters)
        ).reference
        == "frozen"
    )
    asked = build_template(recipe(preference={"kind": "dpo"}), adapter=LowRankAdapter(rank=8))
    assert asked.reference == "adapter_off"


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(pp=2), Layout(dp_shard=4, zero_stage=3), Layout(dp_replicate=4)],
    ids=str,
)
def test_a_frozen_reference_takes_its_weights_and_a_forward_pass(layout: Layout) -> None:
    def of(reference: ReferenceKind) -> Any:
        candidate = Candidate(layout, 128, gradient_accumulation_steps=4, reference=reference)
        return predict(models.shape("llama"), candidate, models.cluster(4), Efficiency())

    plain = of("none")
    held = of("frozen")
    off = of("adapter_off")
    assert held.memory.weights == 2 * plain.memory.weights
    assert off.memory.weights == plain.memory.weights
    assert plain.time.reference == 0.0
    assert held.time.reference == off.time.reference > 0.0
    assert held.time.step == pytest.approx(plain.time.step + held.time.reference, rel=0.02)
    # Three passes' worth of products, of which the reference repeats the first.
    assert 0.15 < held.time.reference / plain.time.compute < 0.8
    assert replace(held.time, reference=0.0).step < held.time.step
