"""The search against one that looks at everything, what it prefers, and how little it looks at."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from shardwright.architecture import read_config
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate
from shardwright.planner.divisibility import explain_layout_conflict
from shardwright.planner.efficiency import Efficiency
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.prediction import MEMORY_ERROR_SHARE, Prediction
from shardwright.planner.predictor import Predictor
from shardwright.planner.search import search_layouts
from shardwright.planner.search_result import (
    EQUAL_STEP_SHARE,
    build_layout_key,
    measure_complexity,
)
from shardwright.planner.search_space import PlanningProblem
from shardwright.schedule import PIPELINE_SCHEDULES
from tests.unit.planner import models

SMALL = Efficiency(
    context_bytes=1e6,
    communicator_bytes=1e6,
    reserve_bytes=1e6,
    kernel_seconds=1e-6,
    host_seconds=1e-6,
)


def everything(predictor: Predictor, question: PlanningProblem) -> Iterator[Candidate]:
    """Every candidate of the space, by products of small numbers and the rules alone."""
    num = question.num_gpus
    batch = question.global_batch_size
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
            for parallel, method in product((True, False) if tp > 1 else (True,), _methods(cp)):
                layout = Layout(
                    dp_replicate=replicas, dp_shard=shards, tp=tp, pp=pp, cp=cp, ep=ep, zero_stage=zero,  # type: ignore[arg-type]
                    sequence_parallel=parallel, cp_method=method, schedule=schedule, virtual_stages=virtual,
                )  # fmt: skip
                yield from _batches(predictor, question, layout)


def _methods(cp: int) -> tuple[Any, ...]:
    return ("ring", "all_gather", "ulysses") if cp > 1 else ("auto",)


def _batches(
    predictor: Predictor, question: PlanningProblem, layout: Layout
) -> Iterator[Candidate]:
    assert question.global_batch_size is not None
    per_rank = question.global_batch_size // layout.data_ranks
    for micro_batch in (size for size in range(1, per_rank + 1) if per_rank % size == 0):
        steps = per_rank // micro_batch
        if (
            explain_layout_conflict(
                predictor.facts, layout, question.template.sequence_length, steps
            )
            is None
        ):
            for recompute in question.recompute_kinds:
                yield replace(
                    question.template,
                    layout=layout,
                    micro_batch_size=micro_batch,
                    gradient_accumulation_steps=steps,
                    recompute=recompute,
                )


def best_of_all(
    predictor: Predictor, question: PlanningProblem
) -> dict[tuple[int, ...], Prediction]:
    best: dict[tuple[int, ...], Prediction] = {}
    for candidate in everything(predictor, question):
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
def test_nothing_better_is_ever_left_out(
    name: str, num_gpus: int, per_node: int, memory_mib: int, batch: int
) -> None:
    predictor = Predictor(
        ModelFacts(models.shape(name)),
        models.cluster(num_gpus, memory_bytes=memory_mib * 2**20, per_node=per_node),
        SMALL,
    )
    question = PlanningProblem(Candidate(Layout(), 128), num_gpus, batch)
    truth = sorted(
        best_of_all(predictor, question).values(), key=lambda prediction: prediction.time.step
    )
    found = search_layouts(predictor, question, num_layouts=8, max_extra_expansions=10**9)
    hurried = search_layouts(predictor, question, num_layouts=8, max_extra_expansions=0)
    assert truth, "the case is too tight to say anything"
    for mine, best in zip(found.predictions[: min(8, found.num_proven)], truth, strict=False):
        assert mine.time.step == pytest.approx(best.time.step, rel=1e-12)
    assert found.num_proven >= min(8, len(truth))
    limit = truth[0].time.step * (1 + EQUAL_STEP_SHARE)
    fewest = min(
        measure_complexity(prediction.candidate)
        for prediction in truth
        if prediction.time.step <= limit
    )
    assert found.best is not None
    assert measure_complexity(found.best.candidate)[0] == fewest[0]
    assert hurried.predictions[0].time.step == found.predictions[0].time.step
    assert hurried.best is not None
    assert measure_complexity(hurried.best.candidate)[0] == fewest[0]
    if not found.best.is_tight:
        assert found.chosen is found.best
        return
    with_room = [
        prediction
        for candidate in everything(predictor, question)
        if (prediction := predictor.predict(candidate)).memory.total * (1 + MEMORY_ERROR_SHARE)
        <= predictor.capacity_bytes
    ]
    assert found.chosen is not None
    assert found.chosen.is_tight == (not with_room)
    if with_room:
        limit = min(prediction.time.step for prediction in with_room) * (1 + EQUAL_STEP_SHARE)
        fewest = min(
            measure_complexity(prediction.candidate)
            for prediction in with_room
            if prediction.time.step <= limit
        )
        assert found.chosen.time.step <= limit
        assert measure_complexity(found.chosen.candidate)[0] == fewest[0]


def test_memory_is_what_turns_layouts_down() -> None:
    facts = ModelFacts(models.shape("llama"))
    question = PlanningProblem(Candidate(Layout(), 128), 4, 8)
    roomy = search_layouts(Predictor(facts, models.cluster(4), SMALL), question)
    tight = search_layouts(
        Predictor(facts, models.cluster(4, memory_bytes=22 * 2**20), SMALL), question
    )
    none = search_layouts(Predictor(facts, models.cluster(4, memory_bytes=2**20), SMALL), question)
    assert roomy.chosen is not None
    assert tight.chosen is not None
    assert tight.chosen.time.step > roomy.chosen.time.step
    assert all(prediction.fits for prediction in tight.predictions)
    assert none.chosen is None
    assert none.predictions == []
    assert none.num_too_large > 0


def test_a_tight_layout_is_chosen_only_where_nothing_else_fits() -> None:
    facts = ModelFacts(models.shape("llama"))
    question = PlanningProblem(Candidate(Layout(), 128), 4, 8)
    least = min(
        Predictor(facts, models.cluster(4), SMALL).predict(c).memory.total
        for c in everything(Predictor(facts, models.cluster(4), SMALL), question)
    )
    for share, is_tight in ((1.02, True), (1.02 * (1 + MEMORY_ERROR_SHARE), False)):
        predictor = Predictor(
            facts, models.cluster(4, memory_bytes=int(least * share / SMALL.usable_share)), SMALL
        )
        found = search_layouts(predictor, question, num_layouts=1)
        assert found.chosen is not None
        assert found.best is not None
        assert found.best.is_tight, "the case is too roomy to say anything"
        assert found.chosen.is_tight is is_tight
        assert (found.chosen.warning is not None) is is_tight
        assert found.chosen.fits


def test_what_is_not_allowed_is_not_found() -> None:
    predictor = Predictor(ModelFacts(models.shape("llama")), models.cluster(4), SMALL)
    question = PlanningProblem(
        Candidate(Layout(), 128), 4, 8, is_allowed=lambda candidate: candidate.layout.tp == 4
    )
    found = search_layouts(predictor, question)
    assert {prediction.candidate.layout.tp for prediction in found.predictions} == {4}


def test_sixteen_thousand_devices_are_searched_by_looking_at_few_layouts() -> None:
    """What is counted here is what time goes by: the seconds themselves are
    `benchmarks/plan.py`'s.
    """
    predictor = Predictor(
        ModelFacts(read_config(models.LLAMA3_405B)),
        parse_cluster("8xH100-80GB", num_nodes=2048),
        Efficiency(),
    )
    found = search_layouts(predictor, PlanningProblem(Candidate(Layout(), 8192), 16384, 2048))
    assert found.chosen is not None
    assert found.chosen.num_gpus == 16384
    assert found.num_predicted < 100


def test_the_collector_runs_again_after_a_search() -> None:
    predictor = Predictor(ModelFacts(models.shape("llama")), models.cluster(4), SMALL)
    assert gc.isenabled()
    search_layouts(predictor, PlanningProblem(Candidate(Layout(), 128), 4, 8))
    assert gc.isenabled()
