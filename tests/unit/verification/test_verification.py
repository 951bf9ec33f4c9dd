"""Steps that a verification runs: as many micro-batches as each pipeline schedule needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from tests.multiprocess.models import TENSOR_LLAMA, build_recipe

from shardwright.architecture import read_recipe_shape
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.verification.cases import choose_cases
from shardwright.verification.rank_pool import RankPool
from shardwright.verification.verification import verify


class RecordingPool:
    """Pool that records the micro-batches of references and layouts, and runs nothing."""

    def __init__(self) -> None:
        self.references: list[int] = []
        self.layouts: list[tuple[str, int]] = []

    def run(self, num_ranks: int, _function: Any, problem: Any, *arguments: Any) -> list[Any]:
        number = problem.batch.gradient_accumulation_steps
        assert problem.case.accumulation == number
        if isinstance(arguments[0], Path):
            self.references.append(number)
        else:
            (plan, *_) = arguments
            assert plan.batch.gradient_accumulation_steps == number
            self.layouts.append((plan.layout.schedule if plan.layout.pp > 1 else "", number))
        return [[] for _ in range(num_ranks)]


def verify_layouts(layouts: list[Layout], **changes: Any) -> RecordingPool:
    recipe = build_recipe(TENSOR_LLAMA | {"num_hidden_layers": 4}, **changes)
    pool = RecordingPool()
    verify(
        recipe,
        read_recipe_shape(recipe),
        layouts,
        choose_cases(False, is_full=False),
        ["float32"],
        sequence_length=12,
        pool=cast("RankPool", pool),
    )
    return pool


def test_cases_have_as_many_micro_batches_as_a_schedule_needs(tmp_path: Path) -> None:
    file = str(tmp_path / "own.csv")
    Path(file).write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    names = ["1f1b", "interleaved_1f1b", "dualpipev", file]
    pool = verify_layouts([Layout(pp=2, schedule=name) for name in names] + [Layout(tp=2)])
    numbers = {name: [n for item, n in pool.layouts if item == name] for name in ["", *names]}
    assert numbers == {
        "": [1, 2, 3],
        "1f1b": [1, 2, 3],
        "interleaved_1f1b": [2, 2, 4],
        "dualpipev": [4, 4, 4],
        file: [2, 2, 2],
    }
    # Layouts with equal numbers of micro-batches share a reference.
    assert pool.references == [1, 2, 4, 2, 4, 3, 4, 2]


def test_scales_of_a_micro_batch_are_verified_with_one() -> None:
    low_precision = {"precision": {"kind": "fp8", "fp8": {"recipe": "rowwise"}}}
    pool = verify_layouts([Layout(pp=2, schedule="zbv")], **low_precision)
    assert pool.layouts == [("zbv", 1)]
    with pytest.raises(LayoutError, match=r"layout.schedule: .* this schedule needs 4") as raised:
        verify_layouts([Layout(pp=2, schedule="dualpipev")], **low_precision)
    assert raised.value.allowed == "gpipe, 1f1b, zb_h1 or zbv"
