"""Costs of models with frozen parameters (`model.freeze`): FLOPs, passes, traffic and memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from operator import mul

import pytest

from shardwright.architecture.frozen_names import LayerTraining, list_layer_training, match_frozen
from shardwright.config.recipe import RecomputeMode
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.activations import get_layer_activations
from shardwright.planner.memory.element_counts import count_trained_elements
from shardwright.planner.memory.peaks import predict_memory
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.predictor import Predictor
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.search.choice_costs import ChoiceCosts
from shardwright.planner.search.space import PlanningProblem, SearchSpace
from shardwright.planner.search.state import DeferredActivations
from shardwright.planner.time.data_parallel_time import compute_rank_traffic
from shardwright.planner.time.pipeline import get_pipeline
from shardwright.planner.time.step_costs import StepCosts
from shardwright.planner.time.traffic import NO_TRAFFIC
from tests.unit.planner import models

EMBEDDING = "model.embed_tokens.weight"
LOWER_HALF = (EMBEDDING, "model.layers.[01].*")


def build_facts(*patterns: str, name: str = "llama") -> ModelFacts:
    shape = models.read_shape(name)
    return ModelFacts(shape, frozen_names=match_frozen(patterns, shape))


def build_predictor(facts: ModelFacts) -> Predictor:
    return Predictor(facts, models.make_cluster(4), Efficiency())


@pytest.mark.parametrize(
    ("patterns", "has_backward"),
    [
        ((EMBEDDING,), [True] * 4),
        (LOWER_HALF, [False, False, True, True]),
        (("model.layers.[01].*",), [True] * 4),
        (("model.*",), [False] * 4),
        ((EMBEDDING, "model.layers.0.mlp.*"), [True] * 4),
    ],
    ids=str,
)
def test_a_gradient_passes_through_layers_from_the_first_trained_parameter(
    patterns: tuple[str, ...], has_backward: list[bool]
) -> None:
    facts = build_facts(*patterns)
    training = list_layer_training(facts.shape, facts.frozen_names)
    assert [part.has_backward for part in training] == has_backward
    assert [facts.kinds[slot].has_backward for slot in facts.slot_of_layer] == has_backward


def test_layers_of_which_the_same_is_frozen_are_one_kind() -> None:
    assert set(list_layer_training(models.read_shape("llama"), ())) == {LayerTraining()}
    facts = build_facts("model.layers.[13].self_attn.q_proj.weight")
    assert facts.slot_of_layer == (0, 1, 0, 1)
    trained = [{p.role: p.is_trained for p in kind.matmuls}["query"] for kind in facts.kinds]
    assert trained == [True, False]


@pytest.mark.parametrize(
    "patterns", [(EMBEDDING,), LOWER_HALF, ("*_proj.weight",), ("lm_head.weight",), ("model.*",)]
)
def test_predicted_flops_are_those_that_training_counts(patterns: tuple[str, ...]) -> None:
    facts = build_facts(*patterns)
    candidate = Candidate(Layout(), 128)
    prediction = build_predictor(facts).predict(candidate)
    expected = facts.shape.count_flops_per_token(128, facts.frozen_names)
    assert prediction.model_flops_per_step == expected * candidate.global_batch_tokens
    whole = build_predictor(build_facts()).predict(candidate)
    assert prediction.model_flops_per_step <= whole.model_flops_per_step
    assert prediction.time.step < whole.time.step
    assert prediction.memory.total < whole.memory.total


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_layers_without_a_backward_pass_save_send_and_compute_nothing_for_it(
    recompute: RecomputeMode,
) -> None:
    facts = build_facts(*LOWER_HALF)
    candidate = Candidate(Layout(tp=2, cp=2, cp_method="ring"), 128, recompute=recompute)
    costs = build_predictor(facts).compute_layer_costs(candidate)
    whole = build_predictor(build_facts()).compute_layer_costs(candidate)
    for kind, passes in zip(facts.kinds, costs.layers, strict=True):
        activations = get_layer_activations(facts, kind, candidate)
        if kind.has_backward:
            assert activations.saved_bytes > 0
            assert passes == whole.layers[0]
            continue
        assert activations.saved_bytes == activations.total_bytes == 0.0
        assert passes.seconds.backward == passes.seconds.recompute == 0.0
        assert passes.traffic_backward is NO_TRAFFIC
        assert passes.pass_seconds == passes.forward_seconds == whole.layers[0].forward_seconds


def test_frozen_matrices_have_gradients_of_inputs_only() -> None:
    candidate = Candidate(Layout(), 128)
    facts = build_facts("*_proj.weight")
    (frozen,) = build_predictor(facts).compute_layer_costs(candidate).layers
    (whole,) = build_predictor(build_facts()).compute_layer_costs(candidate).layers
    assert frozen.seconds.weight_gradient == 0.0
    saved = whole.seconds.backward - frozen.seconds.backward
    assert saved == pytest.approx(whole.seconds.weight_gradient)
    assert frozen.seconds.forward == whole.seconds.forward


@pytest.mark.parametrize(
    "layout",
    [Layout(dp_replicate=2), *(Layout(dp_shard=2, zero_stage=stage) for stage in (1, 2, 3))],
    ids=str,
)
def test_trained_parameters_are_reduced_and_groups_gathered_whole(layout: Layout) -> None:
    candidate = Candidate(layout, 128)

    def compute(facts: ModelFacts) -> tuple[StepCosts, StageLoad]:
        predictor = build_predictor(facts)
        rates = predictor.get_rates(candidate)
        counts = tuple(kind.count for kind in facts.kinds)
        return StepCosts(facts, candidate, rates, predictor.network), StageLoad(counts)

    frozen_costs, load = compute(build_facts(*LOWER_HALF))
    frozen = compute_rank_traffic(frozen_costs, load)
    whole = compute_rank_traffic(*compute(build_facts()))
    assert frozen.gather_seconds == pytest.approx(whole.gather_seconds)
    assert frozen.backward_gather_share == pytest.approx(0.75)  # one group is gathered ahead
    assert 0.4 < frozen.reduce_seconds / whole.reduce_seconds < 0.6
    trained = count_trained_elements(frozen_costs.facts, candidate, load)
    everything = count_trained_elements(build_facts(), candidate, StageLoad((4,)))
    by_part = build_facts().count_elements(layout)
    left_out = by_part.embedding.local + 2 * by_part.layers[0].local
    assert everything.local - trained.local == left_out


def test_a_root_without_gradients_leaves_the_last_reduction_to_a_group() -> None:
    facts = build_facts(EMBEDDING, "lm_head.weight", "model.norm.weight")
    candidate = Candidate(Layout(dp_shard=2, zero_stage=2), 128)
    predictor = build_predictor(facts)
    costs = StepCosts(facts, candidate, predictor.get_rates(candidate), predictor.network)
    traffic = compute_rank_traffic(costs, StageLoad((4,)))
    assert traffic.last_reduce_seconds == pytest.approx(traffic.reduce_seconds / 4)


def test_a_stage_that_is_frozen_takes_no_time_of_an_update() -> None:
    facts = build_facts(*LOWER_HALF)
    template = Candidate(
        Layout(pp=2), 128, gradient_accumulation_steps=4, offload="optimizer", optimizer="adamw"
    )
    for candidate in (template, replace(template, offload="optimizer_disk")):
        step = build_predictor(facts).build_step(candidate)
        assert step.predict().optimizer >= 0.0
        # The look-up of embeddings is counted half in each direction.
        assert step.stage_seconds[0].backward < 0.001 * step.stage_seconds[1].backward


def test_the_bound_of_persistent_memory_holds_for_every_sharding() -> None:
    """The highest ZeRO stage gathers more than it saves of frozen weights."""
    facts = build_facts("model.*")
    predictor = build_predictor(facts)
    problem = PlanningProblem(Candidate(Layout(wrap_blocks=2), 128, precision="fp32"), 2, 4)
    space = SearchSpace(facts, problem, 2)
    costs = ChoiceCosts(predictor, problem, space)
    num_checked = 0
    for degrees in chain.from_iterable(space.list_degrees()):
        pipelines = costs.get_pipeline_options(degrees)
        if pipelines is None:
            continue
        bound = costs.get_min_persistent_bytes(degrees, pipelines)
        for _, num_bytes in costs.list_sharding_bytes(degrees, pipelines):
            assert bound <= num_bytes
            num_checked += 1
    assert num_checked > 4


def test_copies_of_frozen_weights_are_cast_once_only() -> None:
    template = Candidate(Layout(), 128, recompute="full")
    casts = [
        build_predictor(build_facts(*patterns)).predict(copied).time.optimizer
        - build_predictor(build_facts(*patterns)).predict(template).time.optimizer
        for copied in [replace(template, working_weights=True)]
        for patterns in [(), ("*_proj.weight",), ("*_proj.weight", "lm_head.weight")]
    ]
    assert casts[0] > casts[1] > casts[2] == 0.0


@pytest.mark.parametrize(
    "schedule", ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev"]
)
def test_the_memory_of_a_rank_is_at_least_that_of_the_passes_that_bound_it(schedule: str) -> None:
    """Searches discard a layout if these passes alone do not fit."""
    facts = build_facts(*LOWER_HALF)
    candidate = Candidate(Layout(pp=2, schedule=schedule), 64, 2, gradient_accumulation_steps=4)
    saved = [get_layer_activations(facts, kind, candidate).saved_bytes for kind in facts.kinds]
    deferred = [
        get_layer_activations(facts, kind, candidate).deferred_bytes for kind in facts.kinds
    ]
    pipeline = get_pipeline(facts, candidate.layout, 4, 64)
    bounds = DeferredActivations(tuple(saved), tuple(deferred))
    for rank in range(2):
        load = pipeline.build_rank_load(rank)
        assert load.passes
        activations = predict_memory(facts, candidate, load, Efficiency()).activations
        assert activations >= sum(map(mul, load.count_saving_passes(), saved))
        assert activations >= bounds.compute_min_bytes(load)
