"""The layout search equals an exhaustive one, prefers simple layouts, and predicts few of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from operator import le
from typing import Any

import pytest

from shardwright.architecture import read_config
from shardwright.architecture.frozen_names import match_frozen
from shardwright.config.low_precision import FP8Section, LowPrecisionRecipe
from shardwright.config.recipe import RecomputeMode
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate, LowRankAdapter
from shardwright.planner.explanation import explain
from shardwright.planner.low_precision import build_scaled_shares
from shardwright.planner.memory.activations import get_layer_activations
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.prediction import Prediction, TimeParts
from shardwright.planner.predictor import Predictor
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.search.best_first import search_layouts
from shardwright.planner.search.bounds import MinReserve, RankWork
from shardwright.planner.search.choice_costs import ChoiceCosts
from shardwright.planner.search.divisibility import explain_layout_conflict
from shardwright.planner.search.result import (
    EQUAL_STEP_SHARE,
    SearchResult,
    build_layout_key,
    measure_complexity,
    select_simplest,
)
from shardwright.planner.search.space import ANY_EXECUTION, PlanningProblem, SearchSpace
from shardwright.planner.uncertainty import MIN_FIT_PROBABILITY
from shardwright.schedule import PIPELINE_SCHEDULES
from tests.unit.planner import models

SMALL = Efficiency(
    context_bytes=1e6,
    communicator_bytes=1e6,
    reserve_bytes=1e6,
    kernel_seconds=1e-6,
    host_seconds=1e-6,
)


def iterate_all_candidates(predictor: Predictor, problem: PlanningProblem) -> Iterator[Candidate]:
    """Yield every candidate of the space from all products of degrees and the rules."""
    num = problem.num_gpus
    batch = problem.global_batch_size
    assert batch is not None
    degrees = [d for d in range(1, num + 1) if num % d == 0]
    schedules: list[tuple[str, int | None]] = [
        (name, None) for name in PIPELINE_SCHEDULES if name not in ("gpipe", "interleaved_1f1b")
    ]
    schedules += [("interleaved_1f1b", virtual) for virtual in range(2, 9)]
    for pp, tp, cp, replicas, shards in product(degrees, repeat=5):
        if pp * tp * cp * replicas * shards != num or batch % (replicas * shards):
            continue
        local = max(1, predictor.cluster.domain_size // (tp * cp))
        near = max(d for d in degrees if (replicas * shards) % d == 0 and d <= local)
        for zero, (schedule, virtual), ep in product(
            (0, 1, 2, 3), schedules if pp > 1 else [("1f1b", None)], degrees
        ):
            if (zero == 0) != (shards == 1 and (zero == 0 or cp == 1)) and not (
                zero and shards * cp > 1
            ):
                continue
            if zero and (shards * cp == 1 or shards not in (replicas * shards, near)):
                continue
            if zero == 0 and (shards > 1 or (ep > 1 and cp % ep)):
                continue
            for parallel, method in product(
                (True, False) if tp > 1 else (True,), _list_cp_methods(cp)
            ):
                layout = Layout(
                    dp_replicate=replicas, dp_shard=shards, tp=tp, pp=pp, cp=cp, ep=ep,
                    zero_stage=zero,  # type: ignore[arg-type]
                    sequence_parallel=parallel, cp_method=method, schedule=schedule,
                    virtual_stages=virtual,
                )  # fmt: skip
                yield from _iterate_batches(predictor, problem, layout)


def _list_cp_methods(cp: int) -> tuple[Any, ...]:
    return ("ring", "all_gather", "ulysses") if cp > 1 else ("auto",)


def _iterate_batches(
    predictor: Predictor, problem: PlanningProblem, layout: Layout
) -> Iterator[Candidate]:
    assert problem.global_batch_size is not None
    per_rank = problem.global_batch_size // layout.data_ranks
    for micro_batch in (size for size in range(1, per_rank + 1) if per_rank % size == 0):
        steps = per_rank // micro_batch
        if (
            explain_layout_conflict(
                predictor.facts, layout, problem.template.sequence_length, steps
            )
            is None
        ):
            for recompute in problem.recompute_kinds:
                yield replace(
                    problem.template,
                    layout=layout,
                    micro_batch_size=micro_batch,
                    gradient_accumulation_steps=steps,
                    recompute=recompute,
                )


def find_best_exhaustively(
    predictor: Predictor, problem: PlanningProblem
) -> dict[tuple[int, ...], Prediction]:
    best: dict[tuple[int, ...], Prediction] = {}
    for candidate in iterate_all_candidates(predictor, problem):
        prediction = predictor.predict(candidate)
        known = best.get(build_layout_key(candidate))
        if prediction.fits and (known is None or prediction.time.step < known.time.step):
            best[build_layout_key(candidate)] = prediction
    return best


@pytest.mark.parametrize(
    ("name", "num_gpus", "per_node", "memory_mib", "batch"),
    [
        ("llama", 4, 4, 4096, 8),
        ("llama", 4, 2, 28, 8),
        ("llama", 4, 4, 22, 4),
        ("tied", 4, 2, 25, 4),
        ("qwen3_moe", 4, 4, 30, 4),
        ("llama", 6, 3, 23, 6),
    ],
)
def test_the_search_finds_the_best_layouts(
    name: str, num_gpus: int, per_node: int, memory_mib: int, batch: int
) -> None:
    predictor = Predictor(
        ModelFacts(models.read_shape(name)),
        models.make_cluster(num_gpus, memory_bytes=memory_mib * 2**20, per_node=per_node),
        SMALL,
    )
    problem = PlanningProblem(Candidate(Layout(), 128), num_gpus, batch)
    truth = sorted(
        find_best_exhaustively(predictor, problem).values(),
        key=lambda prediction: prediction.time.step,
    )
    result = search_layouts(predictor, problem, num_layouts=8, max_extra_expansions=10**9)
    limited_result = search_layouts(predictor, problem, num_layouts=8, max_extra_expansions=0)
    assert truth, "no layout fits in this case"
    for proven, best in zip(result.predictions[: min(8, result.num_proven)], truth, strict=False):
        assert proven.time.step == pytest.approx(best.time.step, rel=1e-12)
    assert result.num_proven >= min(8, len(truth))
    limit = truth[0].time.step * (1 + EQUAL_STEP_SHARE)
    simplest = min(
        (*measure_complexity(prediction.candidate), prediction.time.step)
        for prediction in truth
        if prediction.time.step <= limit
    )
    assert limited_result.predictions[0].time.step == result.predictions[0].time.step
    assert result.best is not None
    found = (*measure_complexity(result.best.candidate), result.best.time.step)
    assert found == pytest.approx(simplest)
    assert limited_result.best is not None
    assert measure_complexity(limited_result.best.candidate)[0] == simplest[0]
    if not result.best.is_tight:
        assert result.chosen is result.best
        return
    not_tight = [
        prediction
        for candidate in iterate_all_candidates(predictor, problem)
        if (prediction := predictor.predict(candidate)).fit_probability >= MIN_FIT_PROBABILITY
    ]
    assert result.chosen is not None
    assert result.chosen.is_tight == (not not_tight)
    if not_tight:
        limit = min(prediction.time.step for prediction in not_tight) * (1 + EQUAL_STEP_SHARE)
        simplest = min(
            (*measure_complexity(prediction.candidate), prediction.time.step)
            for prediction in not_tight
            if prediction.time.step <= limit
        )
        assert result.chosen.time.step <= limit
        assert measure_complexity(result.chosen.candidate)[0] == simplest[0]


@pytest.mark.parametrize(
    "offload",
    [
        {"offload": "optimizer", "ahead_bytes": 2**30},
        {"offload": "optimizer", "is_updated_on_host": True},
        {"offload": "optimizer_disk", "activation_offload": "disk"},
    ],
    ids=["read ahead", "updated on the host", "on disk"],
)
def test_the_search_finds_the_best_layouts_with_offloading(offload: dict[str, Any]) -> None:
    """Passes hide transfers, and waits for transfers hide communication."""
    predictor = Predictor(
        ModelFacts(models.read_shape("llama")), models.make_cluster(4, per_node=2), SMALL
    )
    problem = PlanningProblem(
        Candidate(Layout(), 128, **offload), 4, 8, recompute_kinds=("none", "full")
    )
    truth = find_best_exhaustively(predictor, problem).values()
    result = search_layouts(predictor, problem, num_layouts=8, max_extra_expansions=10**9)
    assert result.num_proven >= 8
    fastest = sorted(prediction.time.step for prediction in truth)[:8]
    assert [each.time.step for each in result.predictions[:8]] == pytest.approx(fastest, rel=1e-12)


@pytest.mark.parametrize(
    ("freeze", "memory_mib"),
    [
        (["model.embed_tokens.weight", "model.layers.[01].*"], 22),
        (["model.*"], 17),
        (["*_proj.weight", "*embed*", "lm_head.weight"], 20),
    ],
    ids=["lower half", "all but head", "all but norms"],
)
def test_the_search_finds_the_best_layouts_with_frozen_parameters(
    freeze: list[str], memory_mib: int
) -> None:
    """Frozen weights take least memory under any ZeRO stage, and some layers have no backward
    pass."""
    shape = models.read_shape("llama")
    frozen = match_frozen(freeze, shape)
    cluster = models.make_cluster(4, memory_bytes=memory_mib * 2**20, per_node=2)
    predictor = Predictor(ModelFacts(shape, frozen_names=frozen), cluster, SMALL)
    problem = PlanningProblem(Candidate(Layout(), 128), 4, 8)
    truth = find_best_exhaustively(predictor, problem).values()
    result = search_layouts(predictor, problem, num_layouts=8, max_extra_expansions=10**9)
    num_expected = min(8, len(truth))
    assert num_expected > 0
    assert result.num_proven >= num_expected
    fastest = sorted(prediction.time.step for prediction in truth)[:num_expected]
    found = [each.time.step for each in result.predictions[:num_expected]]
    assert found == pytest.approx(fastest, rel=1e-12)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_costs_of_quantised_weights_are_those_of_each_sharding(
    recipe: LowPrecisionRecipe, *, is_compiled: bool
) -> None:
    """Ranks that gather codes quantise their shards; the search shares costs of layers."""
    shape = models.read_shape("llama")
    shares = build_scaled_shares(shape, FP8Section(recipe=recipe))
    template = Candidate(Layout(), 128, precision="fp8", scaled_shares=shares, compile=is_compiled)
    predictor = Predictor(ModelFacts(shape), parse_cluster("2xH100-80GB"), SMALL)
    problem = PlanningProblem(template, 2, 4)
    truth = find_best_exhaustively(predictor, problem)
    fastest = sorted(prediction.time.step for prediction in truth.values())
    for num_layouts in (1, 2, 4):
        result = search_layouts(
            predictor, problem, num_layouts=num_layouts, max_extra_expansions=10**9
        )
        assert result.num_proven >= num_layouts
        proven = result.predictions[:num_layouts]
        assert [each.time.step for each in proven] == pytest.approx(fastest[:num_layouts])
        for each in result.predictions:
            assert each.time == predictor.predict(each.candidate).time
    larger = PlanningProblem(template, 4, 8)
    space = SearchSpace(predictor.facts, larger, 4)
    costs = ChoiceCosts(predictor, larger, space)
    for degrees in chain.from_iterable(space.list_degrees()):
        shared = costs.get_layer_costs(degrees, ANY_EXECUTION)
        for sharding in space.list_shardings(degrees):
            candidate = space.build_candidate(degrees, ANY_EXECUTION, sharding)
            assert vars(predictor.compute_layer_costs(candidate)) == vars(shared)


@pytest.mark.parametrize(
    ("name", "hardware"),
    [("qwen3_moe", "8xH100-80GB"), ("qwen3_moe", "2xA100-80GB"), ("gemma2", "4xA100-80GB")],
)
def test_bounds_of_degrees_hold_for_every_execution(name: str, hardware: str) -> None:
    """Among them that an all-reduce may be faster than a gather and a reduce-scatter. Shared costs
    of layers are those of each execution and degree."""
    facts = ModelFacts(models.read_shape(name))
    predictor = Predictor(facts, parse_cluster(hardware, num_nodes=2), SMALL)
    num_gpus = predictor.cluster.num_gpus
    template = Candidate(Layout(), 512, has_masked_kernels=True)
    problem = PlanningProblem(template, num_gpus, 2 * num_gpus)
    space = SearchSpace(facts, problem, predictor.cluster.domain_size)
    costs = ChoiceCosts(predictor, problem, space)
    for degrees in chain.from_iterable(space.list_degrees()):
        least = costs.get_min_layer_costs(degrees)
        pipelines = costs.get_pipeline_options(degrees)
        assert pipelines is not None
        min_bytes = min(costs.iterate_min_activation_bytes(degrees, pipelines))
        for execution in space.list_executions(degrees):
            each = costs.get_layer_costs(degrees, execution)
            assert all(map(le, least.forward_seconds, each.forward_seconds))
            assert all(map(le, least.pass_seconds, each.pass_seconds))
            assert least.embedding_seconds <= each.embedding_seconds
            assert least.head_seconds <= each.head_seconds
            candidate = space.build_candidate(degrees, execution)
            assert vars(each) == vars(predictor.compute_layer_costs(candidate))
            activations = costs.get_activations(degrees, execution)
            assert min_bytes <= activations.compute_min_bytes(
                pipelines.num_passes, degrees.micro_batch_size
            )


def test_work_is_within_other_work_if_no_part_is_larger() -> None:
    work = RankWork((2, 3), num_embeddings=0, num_heads=0, earlier_layers=(1, 0))
    larger = RankWork((2, 4), num_embeddings=1, num_heads=1, earlier_layers=(1, 1))
    assert work.is_within(work)
    assert work.is_within(larger)
    for field in RankWork._fields:
        assert not work._replace(**{field: getattr(larger, field)}).is_within(work)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_bounds_of_pipelines_hold_for_every_schedule(name: str) -> None:
    """The common bound is the least of theirs, and none exceeds a simulation."""
    facts = ModelFacts(read_config(models.CONFIGS[name] | {"num_hidden_layers": 9}))
    predictor = Predictor(facts, models.make_cluster(4), SMALL)
    problem = PlanningProblem(Candidate(Layout(), 128), 4, 16)
    space = SearchSpace(facts, problem, 4)
    costs = ChoiceCosts(predictor, problem, space)
    num_dropped = 0
    for degrees in chain.from_iterable(space.list_degrees()):
        pipelines = costs.get_pipeline_options(degrees)
        assert pipelines is not None
        num_dropped += len(pipelines.bounds.pipelines) - len(pipelines.bounds.lowest)
        steps = degrees.accumulation_steps
        for execution in space.list_executions(degrees):
            layer_costs = costs.get_layer_costs(degrees, execution)
            by_schedule = []
            for scheduled in pipelines.options:
                seconds = scheduled.bounds.compute_seconds(layer_costs, steps)
                schedule = (scheduled.name, scheduled.virtual_stages)
                candidate = space.build_candidate(degrees, execution, schedule=schedule)
                time = predictor.build_step(candidate, layer_costs).predict()
                assert seconds <= time.step * (1 + 1e-12)
                by_schedule.append(seconds)
            assert pipelines.bounds.compute_seconds(layer_costs, steps) == min(by_schedule)
    assert num_dropped > 0


@pytest.mark.parametrize(
    ("name", "settings", "min_share"),
    [
        ("llama", {}, 0.9),
        ("qwen3_moe", {"layout": Layout(expert_dispatch="once_per_rank")}, 0.9),
        ("qwen3_moe", {"activation_offload": "host"}, 0.8),
        ("llama", {"adapter": LowRankAdapter(8, quantised=True)}, 0.8),
        ("gemma2", {"flash_attention": False, "has_fused_norms": False}, 0.8),
    ],
)
def test_bounds_of_memory_hold_on_the_first_or_the_last_rank(
    name: str, settings: dict[str, Any], min_share: float
) -> None:
    """The last rank's is that of passes that wait for gradients of weights."""
    facts = ModelFacts(read_config(models.CONFIGS[name] | {"num_hidden_layers": 9}))
    predictor = Predictor(facts, models.make_cluster(8), SMALL)
    template = replace(Candidate(Layout(), 128), **settings)
    problem = PlanningProblem(template, 8, 32)
    space = SearchSpace(facts, problem, 8)
    costs = ChoiceCosts(predictor, problem, space)
    reserve = MinReserve(SMALL)
    nearest = 0.0
    for degrees in chain.from_iterable(space.list_degrees()):
        if degrees.tp * degrees.cp > 2 or degrees.micro_batch_size not in (1, 4):
            continue
        pipelines = costs.get_pipeline_options(degrees)
        assert pipelines is not None
        rows = degrees.micro_batch_size
        least = costs.compute_min_persistent_bytes(degrees, pipelines.first_rank_load)
        for execution, sharding, scheduled in product(
            space.list_executions(degrees), space.list_shardings(degrees), pipelines.options
        ):
            schedule = (scheduled.name, scheduled.virtual_stages)
            choice = costs.get_complete_choice(degrees, execution, sharding, schedule)
            activations = costs.get_activations(degrees, execution)
            first = scheduled.first_rank_load
            passes = first.count_saving_passes()
            needed = costs.get_memory(choice, 0).total
            num_bytes = least + activations.compute_min_bytes(pipelines.num_passes, rows)
            assert reserve.add_to(degrees, num_bytes) <= needed
            num_bytes = costs.get_persistent_memory(degrees, first, sharding).total_at_loss
            num_bytes += activations.compute_min_bytes(passes, rows)
            bound = reserve.add_to(degrees, num_bytes)
            assert bound <= needed
            nearest = max(nearest, bound / needed)
            last = scheduled.deferring_rank_load
            if last is not None:
                num_bytes = costs.get_persistent_memory(degrees, last, sharding).total_at_loss
                deferred = costs.get_deferred_activations(degrees, execution)
                num_bytes += deferred.compute_min_bytes(last)
                bound = reserve.add_to(degrees, num_bytes)
                assert bound <= costs.get_memory(choice, degrees.pp - 1).total
    assert nearest > min_share


@pytest.mark.parametrize(
    ("name", "num_gpus", "share"), [("llama", 8, 1.07), ("gemma2", 4, 1.01), ("qwen3_moe", 8, 1.01)]
)
def test_a_search_with_a_margin_equals_one_on_smaller_devices(
    name: str, num_gpus: int, share: float
) -> None:
    """It continues the search without a margin from the first proof."""
    facts = ModelFacts(models.read_shape(name))
    problem = PlanningProblem(Candidate(Layout(), 128), num_gpus, 2 * num_gpus)

    def build_predictor(capacity_bytes: float) -> Predictor:
        cluster = models.make_cluster(
            num_gpus, memory_bytes=round(capacity_bytes), per_node=num_gpus // 2
        )
        predictor = Predictor(facts, cluster, SMALL)
        predictor.capacity_bytes = capacity_bytes
        return predictor

    ample = search_layouts(build_predictor(2**40), problem).best
    assert ample is not None
    predictor = build_predictor(share * ample.memory.total)
    result = search_layouts(predictor, problem)
    assert result.best is not None
    assert result.best.is_tight
    assert result.best_with_margin is not None
    capacity_bytes = predictor.capacity_bytes / (1 + predictor.uncertainty.memory_margin)
    expected = search_layouts(build_predictor(capacity_bytes), problem, num_layouts=1).best
    assert expected is not None
    assert result.best_with_margin.candidate == expected.candidate
    assert result.best_with_margin.time == expected.time


def test_the_simplest_has_the_fewest_axes_then_the_lowest_zero_stage_then_less_time() -> None:
    cluster = models.make_cluster(4)
    predictor = Predictor(ModelFacts(models.read_shape("llama")), cluster, SMALL)
    prediction = predictor.predict(Candidate(Layout(), 128))

    def predict(layout: Layout, seconds: float, recompute: RecomputeMode = "none") -> Prediction:
        candidate = Candidate(layout, 128, recompute=recompute)
        return replace(prediction, candidate=candidate, time=TimeParts(compute=seconds))

    slow = predict(Layout(), 1 + 1.01 * EQUAL_STEP_SHARE)
    fastest = predict(Layout(tp=2, pp=2), 1.0)
    sharded = predict(Layout(tp=2, dp_shard=2, zero_stage=3), 1.01)
    large = predict(Layout(tp=4), 1.02, "full")
    small = predict(Layout(tp=2, dp_replicate=2), 1.03)
    assert select_simplest([fastest, sharded, large, small, slow]) is large
    assert select_simplest([fastest, sharded, slow]) is sharded
    assert select_simplest([slow, fastest]) is fastest
    assert select_simplest([]) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.0004, "is as fast as "), (1.02, "is only 2.0% slower than the fastest (")],
)
def test_the_explanation_compares_the_simplest_with_the_fastest(seconds: float, text: str) -> None:
    predictor = Predictor(ModelFacts(models.read_shape("llama")), models.make_cluster(4), SMALL)
    fast = predictor.predict(Candidate(Layout(tp=2, pp=2), 128))
    simple = predictor.predict(Candidate(Layout(tp=4), 128))
    result = SearchResult(
        [
            replace(fast, time=TimeParts(compute=1.0)),
            replace(simple, time=TimeParts(compute=seconds)),
        ]
    )
    line = explain(predictor, PlanningProblem(fast.candidate, 4, 8), result)[0]
    assert line.startswith(f"{simple.candidate.describe()} {text}{fast.candidate.describe()}")
    assert line.endswith("and is simpler; predictions are not that precise.")


def test_layouts_are_rejected_only_for_memory() -> None:
    facts = ModelFacts(models.read_shape("llama"))
    problem = PlanningProblem(Candidate(Layout(), 128), 4, 8)
    ample = search_layouts(Predictor(facts, models.make_cluster(4), SMALL), problem)
    tight = search_layouts(
        Predictor(facts, models.make_cluster(4, memory_bytes=22 * 2**20), SMALL), problem
    )
    none = search_layouts(
        Predictor(facts, models.make_cluster(4, memory_bytes=2**20), SMALL), problem
    )
    assert ample.chosen is not None
    assert tight.chosen is not None
    assert tight.chosen.time.step > ample.chosen.time.step
    assert all(prediction.fits for prediction in tight.predictions)
    assert none.chosen is None
    assert none.predictions == []
    assert none.num_too_large > 0


def test_a_tight_layout_is_chosen_only_if_no_other_fits() -> None:
    facts = ModelFacts(models.read_shape("llama"))
    problem = PlanningProblem(Candidate(Layout(), 128), 4, 8)
    smallest_bytes = min(
        Predictor(facts, models.make_cluster(4), SMALL).predict(c).memory.total
        for c in iterate_all_candidates(Predictor(facts, models.make_cluster(4), SMALL), problem)
    )
    margin = Predictor(facts, models.make_cluster(4), SMALL).uncertainty.memory_margin
    for share, is_tight in ((1.02, True), (1.02 * (1 + margin), False)):
        predictor = Predictor(
            facts,
            models.make_cluster(4, memory_bytes=int(smallest_bytes * share / SMALL.usable_share)),
            SMALL,
        )
        result = search_layouts(predictor, problem, num_layouts=1)
        assert result.chosen is not None
        assert result.best is not None
        assert result.best.is_tight, "no layout is tight in this case"
        assert result.chosen.is_tight is is_tight
        assert (result.chosen.warning is not None) is is_tight
        assert result.chosen.fits


def test_layouts_that_are_not_allowed_are_not_found() -> None:
    predictor = Predictor(ModelFacts(models.read_shape("llama")), models.make_cluster(4), SMALL)
    problem = PlanningProblem(
        Candidate(Layout(), 128), 4, 8, is_allowed=lambda candidate: candidate.layout.tp == 4
    )
    result = search_layouts(predictor, problem)
    assert {prediction.candidate.layout.tp for prediction in result.predictions} == {4}


def test_a_search_over_sixteen_thousand_devices_predicts_few_layouts() -> None:
    """The search time depends on this count; `benchmarks/plan.py` measures the seconds."""
    predictor = Predictor(
        ModelFacts(read_config(models.LLAMA3_405B)),
        parse_cluster("8xH100-80GB", num_nodes=2048),
        Efficiency(),
    )
    result = search_layouts(predictor, PlanningProblem(Candidate(Layout(), 8192), 16384, 2048))
    assert result.chosen is not None
    assert result.chosen.num_gpus == 16384
    assert result.num_predicted < 100


def test_garbage_collection_is_enabled_after_a_search() -> None:
    predictor = Predictor(ModelFacts(models.read_shape("llama")), models.make_cluster(4), SMALL)
    assert gc.isenabled()
    search_layouts(predictor, PlanningProblem(Candidate(Layout(), 128), 4, 8))
    assert gc.isenabled()


def test_a_search_does_not_depend_on_earlier_ones() -> None:
    """Bounds by simulated schedules are those of the search itself."""
    facts = ModelFacts(models.read_shape("llama"))
    problem = PlanningProblem(Candidate(Layout(), 128), 4, 16)
    cluster = models.make_cluster(4, per_node=1)
    first, second = (
        search_layouts(Predictor(facts, cluster, SMALL), problem, max_extra_expansions=20)
        for _ in range(2)
    )
    assert any(each.candidate.layout.pp > 1 for each in first.predictions)
    assert second == first


def test_shared_costs_and_memory_are_those_of_each_candidate() -> None:
    """Expert parallelism changes no costs of dense layers, which the search computes once."""
    facts = ModelFacts(read_config(models.CONFIGS["qwen3_moe"] | {"mlp_only_layers": [0]}))
    predictor = Predictor(facts, models.make_cluster(8, per_node=4), SMALL)
    problem = PlanningProblem(Candidate(Layout(), 128), 8, 16)
    space = SearchSpace(facts, problem, 4)
    costs = ChoiceCosts(predictor, problem, space)
    (dense,) = (kind.slot for kind in facts.kinds if not kind.shape.sparse)
    dense_passes: dict[tuple[object, ...], list[object]] = {}
    for degrees in chain.from_iterable(space.list_degrees()):
        if degrees.micro_batch_size not in (1, 4):
            continue
        for execution in space.list_executions(degrees):
            shared = costs.get_layer_costs(degrees, execution)
            alone = predictor.compute_layer_costs(space.build_candidate(degrees, execution))
            assert vars(shared) == vars(alone)
            key = (degrees.tp, degrees.cp, degrees.micro_batch_size, execution)
            dense_passes.setdefault(key, []).append(shared.layers[dense])
            for sharding in space.list_shardings(degrees):
                choice = costs.get_complete_choice(degrees, execution, sharding, ("1f1b", None))
                load = choice.pipeline.build_rank_load(0)
                memory = predictor.compute_rank_memory(choice.candidate, load)
                assert costs.get_memory(choice, 0) == memory
                assert choice.step.predict() == predictor.build_step(choice.candidate).predict()
    assert any(len(passes) > 1 for passes in dense_passes.values())
    for passes in dense_passes.values():
        assert all(each is passes[0] for each in passes)


def test_activations_of_dense_layers_do_not_depend_on_expert_parallelism() -> None:
    facts = ModelFacts(read_config(models.CONFIGS["qwen3_moe"] | {"mlp_only_layers": [0]}))
    dense, sparse = sorted(facts.kinds, key=lambda kind: kind.shape.sparse)
    found = []
    for ep in (1, 2, 4):
        candidate = Candidate(Layout(dp_shard=4, ep=ep, zero_stage=3), 128)
        found.append(get_layer_activations(facts, dense, candidate))
        alone = ModelFacts(facts.shape)
        assert get_layer_activations(alone, dense, candidate) == found[0]
        assert get_layer_activations(alone, sparse, candidate) == get_layer_activations(
            facts, sparse, candidate
        )
    assert all(each is found[0] for each in found)
