"""The choice of saved results: within its budget, close to it, faster than `selective` at equal
memory, and refused with numbers if nothing fits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from shardwright.architecture import ModelShape, read_config
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.config.adapter_section import AdapterSection
from shardwright.config.layout import ClusterSection
from shardwright.config.recipe import Recipe, RecomputeMode, RecomputeSection
from shardwright.config.recipe_loading import validate_recipe
from shardwright.errors import RecipeError
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.launch.auto_layout import resolve_recompute_here
from shardwright.layout import Layout
from shardwright.layout.saved_results import LayerResults
from shardwright.planner.candidate import Candidate
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.predictor import Predictor
from shardwright.planner.published.conventions import FrameworkConventions
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.planner.recompute.choice import check_choosable, choose_recompute
from shardwright.planner.recompute.levels import compute_levels
from shardwright.plans import resolve_plan
from shardwright.units import GIB_BYTES
from tests.unit.planner import models

CLUSTER = parse_cluster("8xH100-80GB")
LLAMA_8B = read_config(
    {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    }
)
CANDIDATE = Candidate(
    Layout(dp_shard=8, zero_stage=3), 8192, micro_batch_size=2, has_masked_kernels=True
)
MODELS = {
    "llama": (LLAMA_8B, CANDIDATE),
    "pipeline": (
        LLAMA_8B,
        replace(
            CANDIDATE,
            layout=Layout(pp=2, dp_shard=4, zero_stage=2),
            gradient_accumulation_steps=8,
        ),
    ),
    "tensor parallel": (
        LLAMA_8B,
        replace(CANDIDATE, layout=Layout(tp=2, dp_shard=4, zero_stage=3), micro_batch_size=4),
    ),
    "qwen3_moe": (
        read_config(
            models.CONFIGS["qwen3_moe"] | {"hidden_size": 2048, "max_position_embeddings": 8192}
        ),
        replace(CANDIDATE, micro_batch_size=8),
    ),
    "gemma2": (
        read_config(
            models.CONFIGS["gemma2"]
            | {
                "hidden_size": 2048,
                "max_position_embeddings": 8192,
                "num_hidden_layers": 24,
            }
        ),
        replace(CANDIDATE, micro_batch_size=2),
    ),
}


def build_predictor(shape: ModelShape) -> Predictor:
    efficiency = load_efficiencies().get_efficiency(CLUSTER.accelerator)
    return Predictor(get_model_facts(shape), CLUSTER, efficiency)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_faster_than_selective_at_equal_memory(name: str) -> None:
    shape, candidate = MODELS[name]
    predictor = build_predictor(shape)
    selective = predictor.predict(replace(candidate, recompute="selective"))
    budget = selective.memory.total / GIB_BYTES
    chosen, choice = choose_recompute(predictor, candidate, RecomputeSection(budget_gib=budget))
    prediction = predictor.predict(chosen)
    assert prediction.memory.total == choice.memory_bytes <= selective.memory.total
    assert prediction.time.step < selective.time.step


@pytest.mark.parametrize("name", MODELS)
def test_every_budget_is_met_closely_and_more_memory_is_never_slower(name: str) -> None:
    shape, candidate = MODELS[name]
    predictor = build_predictor(shape)
    full = predictor.predict(replace(candidate, recompute="full")).memory.total
    none = predictor.predict(replace(candidate, recompute="none")).memory.total
    budgets = [full + share * (none - full) for share in (0.02, 0.2, 0.4, 0.6, 0.8, 1.001)]
    seconds = []
    largest_step = (none - full) / min(shape.num_layers, 32)
    for budget in budgets:
        section = RecomputeSection(budget_gib=budget / GIB_BYTES)
        chosen, choice = choose_recompute(predictor, candidate, section)
        assert budget - 2.0 * largest_step < choice.memory_bytes <= budget * (1 + 1e-9)
        seconds.append(predictor.predict(chosen).time.step)
    assert all(later <= earlier for earlier, later in pairwise(seconds))
    assert chosen.recompute == "none"
    assert choice.recompute_seconds == 0.0


def test_layers_at_the_end_of_each_stage_keep_more() -> None:
    shape, candidate = MODELS["pipeline"]
    section = RecomputeSection(budget_gib=40)
    chosen, choice = choose_recompute(build_predictor(shape), candidate, section)
    assert chosen.saved_results == choice.layers
    stages = chosen.engine.partition_layers(get_model_facts(shape), candidate.layout, 8192)
    assert len(stages) == 2
    for stage in stages:
        saved = [choice.layers[layer] for layer in stage.layers]
        sizes = [7 if results is None else len(results) for results in saved]
        assert sizes == sorted(sizes)
        assert len(set(sizes)) > 1


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 5])
def test_a_budget_below_full_recomputation_is_refused_with_the_least_that_works(
    micro_batch_size: int,
) -> None:
    predictor = build_predictor(LLAMA_8B)
    candidate = replace(CANDIDATE, micro_batch_size=micro_batch_size)
    full = predictor.predict(replace(candidate, recompute="full")).memory.total / GIB_BYTES
    with pytest.raises(RecipeError, match="weights, gradients and optimizer states") as caught:
        choose_recompute(predictor, candidate, RecomputeSection(budget_gib=full - 1))
    assert caught.value.field == "recompute.budget_gib"
    assert caught.value.allowed is not None
    least = float(caught.value.allowed.removeprefix("at least "))
    assert full <= least < 1.01 * full
    choose_recompute(predictor, candidate, RecomputeSection(budget_gib=least))


def test_auto_leaves_the_margin_of_the_planner_and_refuses_large_batches() -> None:
    predictor = build_predictor(LLAMA_8B)
    chosen, _ = choose_recompute(predictor, CANDIDATE, RecomputeSection())
    prediction = predictor.predict(chosen)
    assert prediction.fits
    assert not prediction.is_tight
    assert prediction.memory.total > 0.85 * predictor.capacity_bytes
    huge = replace(CANDIDATE, micro_batch_size=64)
    with pytest.raises(RecipeError, match="a process may use"):
        choose_recompute(predictor, huge, RecomputeSection())


def read_recipe(recompute: object) -> Recipe:
    return validate_recipe(
        {
            "model": {"config": models.CONFIGS["llama"]},
            "data": {"sources": ["nowhere"]},
            "training": {
                "sequence_length": 64,
                "micro_batch_size": 1,
                "learning_rate": 1e-3,
                "max_steps": 1,
            },
            "precision": "fp32",
            "run": {"device": "cpu"},
            "recompute": recompute,
        }
    )


def test_the_setting_is_a_kind_auto_or_a_budget() -> None:
    assert read_recipe("full").recompute == "full"
    assert read_recipe("auto").recompute == RecomputeSection()
    budget = read_recipe({"budget_gib": 60})
    assert budget.recompute == RecomputeSection(budget_gib=60.0)
    assert budget.recompute_kind is None
    with pytest.raises(RecipeError, match="none, selective, full, auto or") as caught:
        read_recipe("selectve")
    assert caught.value.field == "recompute"
    with pytest.raises(RecipeError, match="greater than 0") as caught:
        read_recipe({"budget_gib": -1})
    assert caught.value.field == "recompute.budget_gib"
    with pytest.raises(RecipeError, match="Did you mean `budget_gib`"):
        read_recipe({"budget_gb": 60})


def test_8_bit_products_are_refused() -> None:
    with pytest.raises(RecipeError, match="fp8 products"):
        check_choosable(LLAMA_8B, "fp8")
    check_choosable(LLAMA_8B, "bf16")


def test_auto_on_a_cpu_needs_a_cluster() -> None:
    recipe = read_recipe("auto")
    plan = resolve_plan(recipe, read_config(models.CONFIGS["llama"]), 1)
    assert plan.recompute == "auto"
    with pytest.raises(RecipeError, match="no GPU whose memory") as caught:
        resolve_recompute_here(recipe, plan)
    assert "budget_gib" in str(caught.value)
    cluster = ClusterSection(node="1xH100-80GB")
    resolved = resolve_recompute_here(recipe.model_copy(update={"cluster": cluster}), plan)
    assert resolved.recompute == "none"
    assert resolved.as_dict()["recompute_choice"]["layers"] == [None] * 4


def test_the_vocabulary_of_a_run_may_be_that_of_its_tokenizer() -> None:
    recipe = read_recipe({"budget_gib": 8})
    adapters = AdapterSection(rank=4)
    config = {key: size for key, size in models.CONFIGS["llama"].items() if key != "vocab_size"}
    sized = recipe.model_copy(update={"adapters": adapters})
    unsized = sized.model_copy(update={"model": recipe.model.model_copy(update={"config": config})})
    plan = resolve_plan(sized, add_adapters(read_config(models.CONFIGS["llama"]), adapters), 1)
    assert resolve_recompute_here(unsized, plan) == resolve_recompute_here(sized, plan)


@pytest.mark.parametrize(
    ("recompute", "saved", "share"),
    [
        ("selective", None, 0.0),
        # Two gathers and the sum after attention. Nothing needs the last sum again.
        ("full", None, 0.75),
        ("mixed", frozenset(["gathered"]), 0.25),
        ("mixed", frozenset(["attention_out"]), 0.5),
        ("mixed", frozenset(["attention_out", "gathered"]), 0.0),
    ],
)
def test_recomputation_repeats_collectives_unless_it_keeps_their_results(
    recompute: RecomputeMode, saved: LayerResults, share: float
) -> None:
    """The numbers of calls are those that tests/multiprocess/test_communication_results.py counts
    on real ranks."""
    predictor = build_predictor(LLAMA_8B)
    plain = replace(CANDIDATE, layout=Layout(tp=8))
    ((_, forward, backward, *_),) = predictor.compute_layer_costs(plain).layers
    recomputed = replace(
        plain, recompute=recompute, saved_results=saved and (saved,) * LLAMA_8B.num_layers
    )
    ((_, _, repeated, *_),) = predictor.compute_layer_costs(recomputed).layers
    assert backward.tensor == pytest.approx(forward.tensor)
    assert repeated.tensor - backward.tensor == pytest.approx(share * forward.tensor)


def test_other_trainers_repeat_all_collectives_of_a_recomputed_layer() -> None:
    predictor = build_predictor(LLAMA_8B)
    plain = replace(CANDIDATE, layout=Layout(tp=8), engine=FrameworkConventions())
    ((_, forward, backward, *_),) = predictor.compute_layer_costs(plain).layers
    recomputed = replace(plain, recompute="selective")
    ((_, _, repeated, *_),) = predictor.compute_layer_costs(recomputed).layers
    assert repeated.tensor - backward.tensor == pytest.approx(forward.tensor)


def test_a_budget_chooses_whether_to_keep_gathered_inputs() -> None:
    levels, *_ = compute_levels(
        build_predictor(LLAMA_8B), replace(CANDIDATE, layout=Layout(tp=8, dp_shard=1))
    )
    with_gather = [level for level in levels if level.results and "gathered" in level.results]
    without = [level for level in levels if level.results and "gathered" not in level.results]
    # They are the largest results, of which the time per byte is short.
    assert len(with_gather) == 1
    assert len(without) >= 3
    assert with_gather[0].seconds < min(level.seconds for level in without)
    assert with_gather[0].saved_bytes > max(level.saved_bytes for level in without)
