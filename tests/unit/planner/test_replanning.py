"""Measured steps are divided into the parts of the prediction, and a new plan uses their rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.architecture import read_config
from shardwright.hardware import (
    AttentionRate,
    CollectiveRate,
    ElementwiseRate,
    MatmulRate,
    MeasuredProfile,
    parse_cluster,
)
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.predictor import build_predictor
from shardwright.planner.replanning import MeasuredSlowdown, NewPlan, fit_slowdown, replan
from shardwright.planner.search.best_first import search_layouts
from shardwright.planner.search.space import PlanningProblem
from shardwright.planner.slowdown import (
    RankStep,
    StepSeconds,
    combine_ranks,
    find_slow_part,
    split_prediction,
)
from shardwright.units import MIB_BYTES
from tests.unit.planner.models import CONFIGS, LLAMA2_13B

SMALL = CONFIGS["llama"]

PREDICTOR = build_predictor(
    get_model_facts(read_config(LLAMA2_13B)),
    parse_cluster("8xH100-80GB", num_nodes=2, link="ib400"),
)
CANDIDATE = Candidate(
    Layout(dp_shard=16, zero_stage=3), 4096, gradient_accumulation_steps=4, recompute="full"
)
PROBLEM = PlanningProblem(CANDIDATE, 16, 64)


def measure(slowdown: MeasuredSlowdown, candidate: Candidate = CANDIDATE) -> StepSeconds:
    """Return the step of a cluster that is slower than its data sheet."""
    return split_prediction(slowdown.apply(PREDICTOR).predict(candidate).time)


def plan_again(measured: StepSeconds) -> NewPlan:
    return replan(PREDICTOR, CANDIDATE, PROBLEM, measured)


def test_the_parts_of_a_prediction_are_its_step() -> None:
    predicted = measure(MeasuredSlowdown())
    assert sum(predicted.list_parts().values()) == pytest.approx(predicted.step, rel=1e-12)


@pytest.mark.parametrize(
    ("slowdown", "part", "parallelism"),
    [
        (MeasuredSlowdown(inter=12.0), "traffic", "data"),
        (MeasuredSlowdown(compute=1.7), "products", None),
        (MeasuredSlowdown(compute=1.1, inter=20.0), "traffic", "data"),
    ],
    ids=["link", "products", "both"],
)
def test_a_slow_cluster_is_recognised_and_planned_like_it_is(
    slowdown: MeasuredSlowdown, part: str, parallelism: str | None
) -> None:
    measured = measure(slowdown)
    slow = find_slow_part(measure(MeasuredSlowdown()), measured)
    assert (slow.part, slow.parallelism) == (part, parallelism)
    fitted = fit_slowdown(PREDICTOR, CANDIDATE, measured)
    assert fitted.compute == pytest.approx(slowdown.compute, rel=0.02)
    assert fitted.inter == pytest.approx(slowdown.inter, rel=0.02)
    assert fitted.intra == 1.0
    best = search_layouts(slowdown.apply(PREDICTOR), PROBLEM, num_layouts=1).chosen
    new = plan_again(measured)
    assert best is not None
    assert new.faster is not None
    assert new.faster.candidate == best.candidate
    assert new.faster_seconds == pytest.approx(best.time.step, rel=0.02)


def test_slow_links_between_nodes_lead_to_a_layout_that_uses_them_less() -> None:
    new = plan_again(measure(MeasuredSlowdown(inter=40.0)))
    assert new.faster is not None
    assert new.faster.candidate.layout.pp == 2  # one stage per node
    assert new.faster_seconds is not None
    assert new.faster_seconds < measure(MeasuredSlowdown(inter=40.0)).step / 2


def test_a_tensor_parallel_link_is_slow_within_the_node() -> None:
    candidate = Candidate(
        Layout(dp_shard=2, tp=8, zero_stage=1), 4096, gradient_accumulation_steps=32
    )
    slowdown = MeasuredSlowdown(intra=5.0)
    measured = measure(slowdown, candidate)
    slow = find_slow_part(measure(MeasuredSlowdown(), candidate), measured)
    assert (slow.part, slow.parallelism) == ("traffic", "tensor")
    fitted = fit_slowdown(PREDICTOR, candidate, measured)
    assert fitted.intra == pytest.approx(5.0, rel=0.02)
    new = replan(PREDICTOR, candidate, PROBLEM, measured)
    assert new.faster is not None
    assert new.faster.candidate.layout.tp == 1


def test_no_layout_reads_input_faster_or_waits_less() -> None:
    """The best layout stays the best if only input is slow, and gains less of a longer step."""
    best = search_layouts(PREDICTOR, PROBLEM, num_layouts=1).chosen
    assert best is not None
    predicted = measure(MeasuredSlowdown(), best.candidate)
    late = replace(predicted, step=3 * predicted.step, input=2 * predicted.step)
    slow = find_slow_part(predicted, late)
    assert (slow.part, slow.describe()) == ("input", "reading the input")
    new = replan(PREDICTOR, best.candidate, PROBLEM, late)
    assert new.faster is None
    plain = plan_again(measure(MeasuredSlowdown()))
    assert plain.faster is not None  # the layout with full recomputation is not the best
    usual = measure(MeasuredSlowdown())
    later = replace(usual, step=1.3 * usual.step, input=0.3 * usual.step)
    assert plan_again(later).faster_seconds == pytest.approx(best.time.step + later.input, rel=0.02)
    dominated = replace(usual, step=101 * usual.step, input=100 * usual.step)
    assert plan_again(dominated).faster is None


def test_a_measured_profile_is_slowed_too() -> None:
    profile = MeasuredProfile(
        "x",
        None,
        "2026",
        2**34,
        1e10,
        (MatmulRate("fp32", 512, 512, 512, 1e11),),
        (CollectiveRate("reduce_scatter", 2, 2, MIB_BYTES, 0.02),),
        attention=(AttentionRate("fp32", 512, 64, 5e10, 4e10),),
        elementwise=(ElementwiseRate("fp32", 512, 256, 1e9, 2e9),),
    )
    cluster = parse_cluster("2xcpu", profile=profile)
    candidate = Candidate(Layout(dp_shard=2, zero_stage=2), 512, precision="fp32")
    predictor = build_predictor(get_model_facts(read_config(SMALL)), cluster)

    def split(slowdown: MeasuredSlowdown) -> StepSeconds:
        return split_prediction(slowdown.apply(predictor).predict(candidate).time)

    measured = split(MeasuredSlowdown(compute=2.0, intra=7.0))
    assert measured.products == pytest.approx(2 * split(MeasuredSlowdown()).products, rel=0.02)
    fitted = fit_slowdown(predictor, candidate, measured)
    assert fitted.compute == pytest.approx(2.0, rel=0.02)
    assert fitted.intra == pytest.approx(7.0, rel=0.02)


def build_ranks(*steps: tuple[float, float, dict[str, float]]) -> list[RankStep]:
    return [RankStep(*step) for step in steps]


def test_a_rank_for_which_the_others_wait_is_named() -> None:
    # Rank 1 computes for 0.9 s instead of 0.3 s; rank 0 waits for it, and each sends for 0.1 s.
    combined = combine_ranks(
        build_ranks((1.0, 0.0, {"data": 0.7}), (1.0, 0.0, {"data": 0.1})), Layout(dp_replicate=2)
    )
    assert combined.products == pytest.approx(0.3)
    assert combined.traffic["data"] == pytest.approx(0.1)
    assert combined.waiting == pytest.approx(0.6)
    assert combined.slow_rank == 1
    slow = find_slow_part(StepSeconds(0.4, 0.3, {"data": 0.1}), combined)
    assert (slow.part, slow.slow_rank) == ("waiting", 1)
    assert slow.describe() == "waiting for rank 1"


def test_slow_input_of_one_rank_is_not_traffic() -> None:
    combined = combine_ranks(
        build_ranks((1.0, 0.0, {"data": 0.7}), (1.0, 0.6, {"data": 0.1})), Layout(dp_shard=2)
    )
    assert combined.input == pytest.approx(0.6)
    assert combined.traffic["data"] == pytest.approx(0.1)
    assert combined.waiting == pytest.approx(0.0)


def test_one_slow_link_of_several_groups_counts() -> None:
    # Two tensor-parallel groups; only ranks 2 and 3 have a slow link.
    fast = (1.0, 0.0, {"tensor": 0.1, "data": 0.5})
    late = (1.0, 0.0, {"tensor": 0.5, "data": 0.1})
    combined = combine_ranks(
        build_ranks(fast, fast, late, late), Layout(dp_shard=2, tp=2, zero_stage=1)
    )
    assert combined.traffic == pytest.approx({"tensor": 0.5, "data": 0.1})
    assert combined.waiting == pytest.approx(0.0)


def test_the_slowest_stage_of_a_pipeline_has_the_products() -> None:
    combined = combine_ranks(
        build_ranks((1.0, 0.0, {"pipeline": 0.6}), (1.0, 0.0, {"pipeline": 0.2})), Layout(pp=2)
    )
    assert combined.products == pytest.approx(0.8)
    assert combined.traffic["pipeline"] == pytest.approx(0.2)
    assert combined.waiting == pytest.approx(0.0)
    assert combined.slow_rank is None
