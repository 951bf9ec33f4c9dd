"""Context parallelism through the whole engine: every method, zero stage and kind of attention against one process."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.architecture import shape_of
from shardwright.layout import Layout
from shardwright.verify.cases import Case
from shardwright.verify.matrix import verify
from tests.multiprocess.models import LLAMA, recipe_of
from tests.multiprocess.pool import RankPool

DOCUMENTS = Case(accumulation=2)
DROPPING = Case(accumulation=1, recompute="full", dropout=True)
SELECTIVE = Case(accumulation=2, recompute="selective", tied=True, documents=False)

MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 7}


def hold(ranks: RankPool, config: dict[str, Any], layout: Layout, case: Case, *, tokens: int = 24, **changes: Any) -> None:
    recipe = recipe_of(config, **changes)
    report = verify(recipe, shape_of(recipe), [layout], [case], ["float64", "float32"], sequence_length=tokens, pool=ranks)
    for cell in report.cells:
        assert cell.failure is None, cell.failure
        assert cell.passed, [finding for finding in cell.findings if not finding.passed]


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("case", [DOCUMENTS, DROPPING, SELECTIVE], ids=str)
@pytest.mark.parametrize("stage", [0, 3])
def test_cp2(ranks: RankPool, method: Any, case: Case, stage: Any) -> None:
    hold(ranks, LLAMA, Layout(cp=2, cp_method=method, zero_stage=stage), case)
