"""Plans on GPUs have the settings that a run takes by free memory; the search is without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwright.config.recipe import Recipe
from shardwright.hardware import Cluster
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.hardware.step_versions import describe_step_versions
from shardwright.layout import Layout
from shardwright.planner.auto_layout import choose_layout
from shardwright.planner.memory_settings import (
    predict_found,
    predict_run,
    reset_memory_settings,
)
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.planning_result import PlanningResult, plan_recipe
from shardwright.planner.predictor import Predictor
from shardwright.planner.problem import (
    build_problem,
    build_template,
    read_planning_shape,
    resolve_compilation_on,
)
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.planner.search.result import SearchResult, recommend
from shardwright.planner.step_profile import (
    StepProfile,
    build_tuned_step,
    describe_workload,
)
from tests.unit.planner import models

LLAMA3_12_LAYERS: dict[str, Any] = models.LLAMA2_13B | {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def build_recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"config": LLAMA3_12_LAYERS} | sections.pop("model", {}),
            "tokenizer": {"kind": "bpe", "vocab_size": 128_256},
            "data": {"sources": "data.txt"},
            "precision": "bf16",
            "layout": "auto",
            "training": {
                "sequence_length": 4096,
                "global_batch_size": 2,
                "micro_batch_size": 2,
                "max_steps": 1,
                "learning_rate": 1e-4,
            }
            | sections.pop("training", {}),
            **sections,
        }
    )


def build_predictor(recipe: Recipe, cluster: Cluster) -> Predictor:
    efficiency = load_efficiencies().get_efficiency(cluster.accelerator)
    return Predictor(get_model_facts(read_planning_shape(recipe)), cluster, efficiency)


def plan(node: str, **sections: Any) -> PlanningResult:
    return plan_recipe(build_recipe(**sections), parse_cluster(node), should_explain=True)


def test_a_plan_has_the_settings_of_the_measured_run() -> None:
    """27,173 tokens/s were measured on an H200 with these settings (docs/benchmarks/gpu.md)."""
    chosen = plan("1xH200").chosen
    assert chosen is not None
    candidate = chosen.candidate
    assert (candidate.micro_batch_size, candidate.recompute) == (2, "none")
    assert (candidate.compile, candidate.loss_chunk_tokens) == (True, 8192)
    assert candidate.working_weights is True
    assert chosen.tokens_per_second == pytest.approx(27_173, rel=0.01)
    predictor = build_predictor(build_recipe(), parse_cluster("1xH200"))
    lean = reset_memory_settings(candidate, build_template(build_recipe()))
    assert predictor.predict(lean).tokens_per_second == pytest.approx(0.95 * 27_173, rel=0.01)
    assert predict_run(predictor, lean) == chosen


def test_a_setting_of_the_recipe_stays_and_a_full_device_takes_none() -> None:
    model = {"loss_chunk_tokens": 512, "compile": False, "fused_pointwise": "none"}
    precision = {"kind": "bf16", "working_weights": False}
    chosen = plan("1xH200", model=model, precision=precision).chosen
    assert chosen is not None
    assert (chosen.candidate.compile, chosen.candidate.loss_chunk_tokens) == (False, 512)
    assert not chosen.candidate.has_working_weights
    predictor = build_predictor(build_recipe(), parse_cluster("1xH200"))
    template = build_template(build_recipe())
    largest = predict_run(predictor, template).candidate
    assert largest.loss_chunk_tokens == 4096  # as many as the micro-batch has
    needed = predictor.predict(template).memory.total
    device = replace(predictor.cluster.accelerator, memory_bytes=int(1.05 * needed))
    full = build_predictor(build_recipe(), replace(predictor.cluster, accelerator=device))
    smallest = predict_run(full, template).candidate
    assert (smallest.loss_chunk_tokens, smallest.working_weights) == (1024, "auto")


def test_listed_layouts_are_ordered_with_the_settings_of_a_run() -> None:
    result = plan("4xH200", training={"global_batch_size": 32, "micro_batch_size": None})
    steps = [each.time.step for each in result.predictions]
    assert steps == sorted(steps)
    assert result.effort.num_proven == 0
    predictor = build_predictor(build_recipe(), parse_cluster("4xH200"))
    for each in result.predictions:
        assert predict_run(predictor, each.candidate).time == each.time
        assert each.candidate.compile
    line = next(each for each in result.explanation if "blocks compiled" in each)
    assert result.chosen is not None
    assert f"the loss in chunks of {result.chosen.candidate.loss_chunk_tokens:,} tokens" in line
    assert result.chosen in result.predictions


def test_a_plan_with_ligers_loss_names_no_chunks_of_ours() -> None:
    result = plan("1xH200", model={"loss_kernel": "liger"})
    line = next(each for each in result.explanation if "blocks compiled" in each)
    assert "the loss by Liger's kernel (predicted as chunks of 1,024 tokens)" in line
    assert result.chosen is not None
    assert result.chosen.as_dict()["loss_kernel"] == "liger"


def test_settings_change_the_order_of_layouts() -> None:
    predictor = build_predictor(build_recipe(), parse_cluster("4xH200"))
    template = replace(build_template(build_recipe()), gradient_accumulation_steps=2)
    sharded = Layout(dp_shard=4, zero_stage=3)
    found = [
        replace(template, layout=layout, micro_batch_size=size)
        for layout, size in ((sharded, 2), (sharded, 1), (Layout(dp_replicate=4), 1))
    ]
    raw = SearchResult([predictor.predict(each) for each in found], num_proven=3)
    result = predict_found(predictor, raw)
    steps = [each.time.step for each in result.predictions]
    assert steps == sorted(steps)
    assert steps == sorted(predict_run(predictor, each).time.step for each in found)
    assert result.num_proven == 0
    assert result.chosen is recommend(result.predictions)
    on_cpu = build_predictor(build_recipe(), parse_cluster("4xEPYC-9654"))
    assert predict_found(on_cpu, raw) is raw


def test_an_automatic_layout_is_the_planned_one() -> None:
    recipe = build_recipe(training={"global_batch_size": 32, "micro_batch_size": None})
    cluster = parse_cluster("4xH200")
    prediction = choose_layout(recipe, cluster, 4).prediction
    planned = plan_recipe(recipe, cluster).chosen
    assert planned is not None
    assert prediction.candidate.layout == planned.candidate.layout
    assert prediction.time.step == pytest.approx(planned.time.step)


def test_a_cpu_and_an_accelerator_without_triton_compile_nothing() -> None:
    recipe = build_recipe()
    for name, compiled in (
        ("1xP100", False),
        ("1xCPU", False),
        ("1xV100", True),
        ("1xMI300X", True),
    ):
        model = resolve_compilation_on(recipe, parse_cluster(name).accelerator).model
        assert (model.compile, model.fused_pointwise) == (compiled, "none")
    uncompiled = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"compile": False})}
    )
    model = resolve_compilation_on(uncompiled, parse_cluster("1xH100").accelerator).model
    assert (model.compile, model.fused_pointwise) == (False, "compiled")


def test_a_measured_step_corrects_the_settings_that_it_was_measured_with() -> None:
    recipe = build_recipe()
    cluster = parse_cluster("1xH200")
    predictor = build_predictor(recipe, cluster)
    result = plan_recipe(recipe, cluster)
    chosen = result.chosen
    assert chosen is not None
    problem = build_problem(recipe, build_template(recipe), 1)
    step = build_tuned_step(
        chosen,
        describe_workload(predictor, problem),
        measured_seconds=2 * chosen.time.step,
        spread=0.01,
        rates=cluster.rates_source,
        measured_at="today",
        versions=describe_step_versions(cluster),
    )
    corrected = plan_recipe(recipe, cluster, step_profile=StepProfile(cluster.name, (step,)))
    measured = [each for each in corrected.predictions if each.is_measured]
    assert [each.candidate for each in measured] == [chosen.candidate]
    assert measured[0].time.step == pytest.approx(2 * chosen.time.step)
