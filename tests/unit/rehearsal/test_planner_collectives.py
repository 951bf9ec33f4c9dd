"""The planner's gathers of codes, exchanges of maxima and communication of partly frozen models are
those of a rehearsal."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.planner import models
from tests.unit.rehearsal.test_planner_memory import ALL_BUT_NORMS, LOWER_HALF, Case

from shardwright.architecture import read_recipe_shape
from shardwright.config.recipe import RecomputeKind
from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.element_counts import count_trained_elements
from shardwright.planner.memory.stage_load import StageLoad
from shardwright.planner.model_costs import ModelFacts, ParameterElements
from shardwright.planner.problem import build_template, get_recipe_facts
from shardwright.planner.published.conventions import FrameworkConventions
from shardwright.planner.rates.device_rates import DeviceRates
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.time.communication import NetworkModel, build_groups
from shardwright.planner.time.data_parallel_time import compute_rank_traffic
from shardwright.planner.time.maxima_exchanges import list_maxima_exchanges
from shardwright.planner.time.step_costs import StepCosts
from shardwright.planner.time.traffic import compute_data_traffic
from shardwright.plans import BatchPlan, build_plan
from shardwright.rehearsal.rank_rehearsal import rehearse_rank

TENSOR = Layout(tp=2)
NVFP4 = {"kind": "nvfp4", "nvfp4": {"experimental": True}}
TENSORS = {"kind": "fp8", "fp8": {"recipe": "tensorwise"}}
ROWS = {"kind": "fp8", "fp8": {"recipe": "rowwise"}}
OFFLOAD = {"parameters": "disk", "optimizer": "disk", "buffer_bytes": 2**20}
CASES: list[tuple[str, object, RecomputeKind, dict[str, Any]]] = [
    ("llama", {"kind": "fp8"}, "full", {}),
]
LONG_CASES: list[tuple[str, object, RecomputeKind, dict[str, Any]]] = [
    ("llama", TENSORS, "full", {}),
    ("llama", ROWS, "selective", {}),
    ("llama", NVFP4, "none", {}),
    ("qwen3_moe", {"kind": "fp8"}, "full", {}),
    ("qwen3_moe", NVFP4, "full", {}),
    ("llama", {"kind": "fp8", "fp8": {"recipe": "mxfp8"}}, "none", {}),
    ("llama", {"kind": "fp8"}, "full", OFFLOAD),
    ("llama", TENSORS, "selective", OFFLOAD),
    ("llama", ROWS, "none", OFFLOAD),
    ("qwen3_moe", {"kind": "fp8"}, "none", OFFLOAD),
    ("qwen3_moe", NVFP4, "full", OFFLOAD),
]


@pytest.mark.parametrize(
    ("model", "precision", "recompute", "offload"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_CASES)],
)
def test_the_planner_counts_the_exchanges_of_maxima(
    model: str, precision: object, recompute: RecomputeKind, offload: dict[str, Any]
) -> None:
    sections = {"precision": precision, "offload": offload}
    recipe = Case(model, TENSOR, sections=sections).make_recipe()
    shape = read_recipe_shape(recipe)
    batch = BatchPlan(64, 1, 1, 1)

    def count_reductions(section: PrecisionSection) -> Counter[int]:
        report = rehearse_rank(recipe, build_plan(shape, TENSOR, batch, section, recompute), 0)
        return Counter(each.num_bytes for each in report.collectives if each.kind == "all_reduce")

    found = count_reductions(recipe.precision) - count_reductions(PrecisionSection(kind="bf16"))
    facts = ModelFacts(shape.base_shape)
    candidate = replace(
        build_template(recipe), layout=TENSOR, sequence_length=64, micro_batch_size=1
    )
    predicted: Counter[int] = Counter()
    per_step = per_step_bytes = 0.0
    for kind in facts.kinds:
        for direction in list_maxima_exchanges(facts, kind, candidate):
            whole = [size for share, size in direction if share == 1.0]
            predicted.update({int(size): kind.count * whole.count(size) for size in set(whole)})
            parts = [(share, size) for share, size in direction if share < 1.0]
            per_step += kind.count * sum(share for share, _ in parts)
            per_step_bytes += kind.count * sum(share * size for share, size in parts)
    if per_step:
        assert not offload
        predicted.update({round(per_step_bytes / per_step): round(per_step)})
    assert found == predicted


@pytest.mark.parametrize(
    ("recipe_name", "num_exchanges", "adapters"),
    [
        ("rowwise_with_gw_hp", 1, {}),
        ("rowwise_with_gw_hp", 1, {"rank": 4}),
        pytest.param("mxfp8", 0, {}, marks=pytest.mark.long),
        pytest.param("nvfp4", 1, {}, marks=pytest.mark.long),
        pytest.param("nvfp4", 1, {"rank": 4}, marks=pytest.mark.long),
        pytest.param(
            "rowwise_with_gw_hp", 0, {"rank": 4, "quantize": "nf4"}, marks=pytest.mark.long
        ),
    ],
)
def test_the_planner_counts_the_bytes_of_gathered_codes(
    recipe_name: str, num_exchanges: int, adapters: dict[str, Any]
) -> None:
    layout = Layout(dp_shard=2, zero_stage=3)
    precision = NVFP4 if recipe_name == "nvfp4" else {"kind": "fp8", "fp8": {"recipe": recipe_name}}
    sections = {"precision": precision, **({"adapters": adapters} if adapters else {})}
    recipe = Case("llama", layout, sections=sections).make_recipe()
    shape = read_recipe_shape(recipe)

    def count(section: PrecisionSection) -> tuple[int, int]:
        plan = build_plan(shape, layout, BatchPlan(64, 1, 1, 2), section, "none")
        collectives = rehearse_rank(recipe, plan, 0).collectives
        kinds = [each.kind for each in collectives]
        gathered = sum(each.num_bytes for each in collectives if each.kind == "all_gather")
        return gathered, kinds.count("all_reduce")

    wide_bytes, wide_reductions = count(PrecisionSection(kind="bf16"))
    narrow_bytes, narrow_reductions = count(recipe.precision)
    assert narrow_reductions - wide_reductions == num_exchanges
    facts = ModelFacts(shape.base_shape)
    candidate = replace(build_template(recipe), layout=layout, recompute="none")
    elements = facts.count_elements(layout).layers
    saved = sum(
        2 * kind.count * each.local * (2 - candidate.get_gather_bytes(each))
        for kind, each in zip(facts.kinds, elements, strict=True)
    )
    # Scales of rows are not predicted.
    assert wide_bytes - narrow_bytes == pytest.approx(saved, rel=0.02)
    assert math.isclose(saved, 0) == ("quantize" in adapters)


@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_the_planner_exposes_the_sum_of_the_stage_that_ends_last(
    schedule: str, num_stages: int
) -> None:
    virtual_stages = num_stages if num_stages > 1 else None
    layout = Layout(
        pp=2, dp_replicate=2, zero_stage=0, schedule=schedule, virtual_stages=virtual_stages
    )
    recipe = Case("llama", layout).make_recipe()
    plan = build_plan(
        read_recipe_shape(recipe), layout, BatchPlan(64, 1, 4, 2), recipe.precision, "none"
    )
    collectives = rehearse_rank(recipe, plan, 2).collectives
    messages = [n for n, each in enumerate(collectives) if each.kind in ("send", "recv")]
    sums = [(n, each.num_bytes) for n, each in enumerate(collectives) if each.num_bytes > 2**20]
    assert len(sums) == num_stages
    after_all_passes = sum(num_bytes for n, num_bytes in sums if n > messages[-1])
    exposed_share = after_all_passes / sum(num_bytes for _, num_bytes in sums)
    candidate = replace(build_template(recipe), layout=layout)
    network = NetworkModel(models.make_cluster(4), Efficiency())
    parts = (ParameterElements(1e9, 1e9), ParameterElements(), ParameterElements())

    def predict_exposed_share(planned: Candidate) -> float:
        traffic = compute_data_traffic(parts, 1, planned, network, build_groups(layout))
        return traffic.last_reduce_seconds / traffic.reduce_seconds

    # The rank's other stage has the head, too.
    assert predict_exposed_share(candidate) == pytest.approx(exposed_share, abs=0.08)
    buckets = predict_exposed_share(replace(candidate, engine=FrameworkConventions()))
    assert buckets < 0.01


@pytest.mark.parametrize(
    ("layout", "freeze"),
    [
        (Layout(dp_shard=2, zero_stage=3), LOWER_HALF),
        (Layout(dp_shard=2, zero_stage=2), ALL_BUT_NORMS),
        pytest.param(Layout(dp_shard=2, zero_stage=2), LOWER_HALF, marks=pytest.mark.long),
        pytest.param(Layout(dp_shard=2, zero_stage=3), ALL_BUT_NORMS, marks=pytest.mark.long),
        pytest.param(Layout(dp_replicate=2), LOWER_HALF, marks=pytest.mark.long),
    ],
)
def test_the_planner_counts_the_gathers_and_reductions_of_frozen_parameters(
    layout: Layout, freeze: dict[str, Any]
) -> None:
    recipe = Case("llama", layout, sections=freeze).make_recipe()
    shape = read_recipe_shape(recipe)
    plan = build_plan(shape, layout, BatchPlan(64, 1, 1, 2), recipe.precision, "none")
    found: Counter[str] = Counter()
    for each in rehearse_rank(recipe, plan, 0).collectives:
        if each.num_bytes > 64:  # not the loss and the norm
            found[each.kind] += each.num_bytes
    facts = get_recipe_facts(recipe, shape)
    candidate = replace(build_template(recipe), layout=layout)
    load = StageLoad(tuple(kind.count for kind in facts.kinds))
    trained = count_trained_elements(facts, candidate, load).local
    reduction = "reduce_scatter" if layout.zero_stage else "all_reduce"
    predicted = {reduction: trained * candidate.reduce_bytes}
    if layout.zero_stage:
        network = NetworkModel(models.make_cluster(2), Efficiency())
        rates = DeviceRates(network.cluster, Efficiency(), "bf16")
        traffic = compute_rank_traffic(StepCosts(facts, candidate, rates, network), load)
        by_part = facts.count_elements(layout)
        layers = 4 * by_part.layers[0].local
        repeated = traffic.backward_gather_share * candidate.gathers_each_pass
        gathered = (1.0 + repeated) * layers + by_part.embedding.local + by_part.head.local
        predicted["all_gather"] = gathered * candidate.activation_bytes
    # The final norm, which is gathered with the last block, is counted with the root.
    assert dict(found) == pytest.approx(predicted, rel=1e-4)


def test_layers_below_all_trained_parameters_have_no_collectives_in_the_backward_pass() -> None:
    def count(sections: dict[str, Any]) -> Counter[str]:
        recipe = Case("llama", TENSOR, sections=sections).make_recipe()
        plan = build_plan(
            read_recipe_shape(recipe), TENSOR, BatchPlan(64, 1, 1, 1), recipe.precision, "none"
        )
        return Counter(each.kind for each in rehearse_rank(recipe, plan, 0).collectives)

    # Of each layer two gathers and two reductions, and the gather of the embedding's gradient.
    assert count({}) - count(LOWER_HALF) == Counter(all_gather=2 * 2 + 1, reduce_scatter=2 * 2)
