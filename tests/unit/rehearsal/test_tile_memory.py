"""Memory of eager attention over parts of the keys: the scores of one block of queries."""

from __future__ import annotations

import pytest
from tests.unit.rehearsal import test_planner_memory
from tests.unit.rehearsal.test_planner_memory import ROWS, TOKENS, Case

from shardwright.architecture import read_recipe_shape
from shardwright.layout import Layout
from shardwright.layout.context_method import ContextMethod
from shardwright.parallel.context import explicit_kernel
from shardwright.planner.memory import attention_activations
from shardwright.plans import BatchPlan, build_plan
from shardwright.rehearsal.rank_rehearsal import rehearse_rank


def rehearse_peak(case: Case) -> int:
    recipe = case.make_recipe()
    batch = BatchPlan(TOKENS, ROWS, case.steps, case.layout.data_ranks)
    plan = build_plan(read_recipe_shape(recipe), case.layout, batch, recipe.precision)
    return rehearse_rank(recipe, plan, case.rank).peak_bytes


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_no_more_than_the_scores_of_a_block_exist(
    method: ContextMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 2 has soft caps. A tile has 4 to 16 MiB of scores here; a block may have one."""
    case = Case("gemma2", Layout(cp=2, cp_method=method))
    whole = rehearse_peak(case)
    for module in (explicit_kernel, attention_activations):
        monkeypatch.setattr(module, "MAX_SCORE_BYTES", 2**20)
    assert whole - rehearse_peak(case) > 30 * 2**20
    test_planner_memory.test_the_planner_predicts_the_memory_of_the_step(case)
