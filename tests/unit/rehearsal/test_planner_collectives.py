"""The planner's exchanges of maxima are those of a rehearsal, by number and bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from tests.unit.rehearsal.test_planner_memory import Case

from shardwright.architecture import read_recipe_shape
from shardwright.config.recipe import RecomputeKind
from shardwright.config.training import PrecisionSection
from shardwright.layout import Layout
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.problem import build_template
from shardwright.planner.time.maxima_exchanges import list_maxima_exchanges
from shardwright.plans import BatchPlan, build_plan
from shardwright.rehearsal.rank_rehearsal import rehearse_rank

TENSOR = Layout(tp=2)
NVFP4 = {"kind": "nvfp4", "nvfp4": {"experimental": True}}
CASES: list[tuple[str, object, RecomputeKind]] = [
    ("llama", {"kind": "fp8"}, "full"),
]
LONG_CASES: list[tuple[str, object, RecomputeKind]] = [
    ("llama", {"kind": "fp8", "fp8": {"recipe": "tensorwise"}}, "full"),
    ("llama", {"kind": "fp8", "fp8": {"recipe": "rowwise"}}, "selective"),
    ("llama", NVFP4, "none"),
    ("qwen3_moe", {"kind": "fp8"}, "full"),
    ("qwen3_moe", NVFP4, "full"),
    ("llama", {"kind": "fp8", "fp8": {"recipe": "mxfp8"}}, "none"),
]


@pytest.mark.parametrize(
    ("model", "precision", "recompute"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_CASES)],
)
def test_the_planner_counts_the_exchanges_of_maxima(
    model: str, precision: object, recompute: RecomputeKind
) -> None:
    recipe = Case(model, TENSOR, sections={"precision": precision}).make_recipe()
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
    per_step = 0.0
    for kind in facts.kinds:
        for direction in list_maxima_exchanges(facts, kind, candidate):
            whole = [size for share, size in direction if share == 1.0]
            predicted.update({int(size): kind.count * whole.count(size) for size in set(whole)})
            per_step += kind.count * sum(share for share, _ in direction if share < 1.0)
    weights = found - predicted
    assert predicted - found == Counter()
    assert sum(weights.values()) == pytest.approx(per_step)
