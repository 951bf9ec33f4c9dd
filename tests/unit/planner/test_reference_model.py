"""Preference runs: memory and time of the reference model."""

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


def make_recipe(**sections: Any) -> Recipe:
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
            **sections,
        }
    )


def test_the_recipe_determines_the_kind_of_reference() -> None:
    adapters = {"adapters": {"rank": 4}}
    assert build_template(make_recipe()).reference == "none"
    assert build_template(make_recipe(preference={"kind": "dpo"})).reference == "frozen"
    assert (
        build_template(make_recipe(preference={"kind": "dpo"}, **adapters)).reference
        == "adapter_off"
    )
    assert (
        build_template(
            make_recipe(preference={"kind": "dpo", "reference": "frozen"}, **adapters)
        ).reference
        == "frozen"
    )
    with_adapter = build_template(
        make_recipe(preference={"kind": "dpo"}), adapter=LowRankAdapter(rank=8)
    )
    assert with_adapter.reference == "adapter_off"


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(pp=2), Layout(dp_shard=4, zero_stage=3), Layout(dp_replicate=4)],
    ids=str,
)
def test_a_frozen_reference_costs_its_weights_and_a_forward_pass(layout: Layout) -> None:
    def predict_with(reference: ReferenceKind) -> Any:
        candidate = Candidate(layout, 128, gradient_accumulation_steps=4, reference=reference)
        return predict(models.read_shape("llama"), candidate, models.make_cluster(4), Efficiency())

    plain = predict_with("none")
    frozen = predict_with("frozen")
    adapter_off = predict_with("adapter_off")
    assert frozen.memory.weights == 2 * plain.memory.weights
    assert adapter_off.memory.weights == plain.memory.weights
    assert plain.time.reference == 0.0
    assert frozen.time.reference == adapter_off.time.reference > 0.0
    assert frozen.time.step == pytest.approx(plain.time.step + frozen.time.reference, rel=0.02)
    # A step has three passes of products; the reference adds one.
    assert 0.15 < frozen.time.reference / plain.time.compute < 0.8
    assert replace(frozen.time, reference=0.0).step < frozen.time.step
