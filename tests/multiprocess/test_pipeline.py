"""Pipelines: every schedule, with every data layout, has the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.architecture import read_recipe_shape
from shardwright.layout import Layout
from shardwright.schedule import PIPELINE_SCHEDULES
from shardwright.verification.cases import VERIFICATION_DTYPES, VerificationCase
from shardwright.verification.verification import VerificationReport, verify
from tests.multiprocess.models import GPT2, LLAMA, build_recipe
from tests.multiprocess.pool import RankPool

DEEP_LLAMA = LLAMA | {"num_hidden_layers": 5}
LONG = pytest.mark.long
"""Variants of cells that always run; `test_grid` runs each schedule with each ZeRO stage."""
DEEP_GPT2 = GPT2 | {"n_layer": 4}


def verify_layout(
    ranks: RankPool, config: dict[str, Any], layout: Layout, case: VerificationCase, **options: Any
) -> None:
    dtypes = options.pop("dtypes", ["float64"])
    recipe = build_recipe(config, **options)
    report = verify(
        recipe, read_recipe_shape(recipe), [layout], [case], dtypes, sequence_length=12, pool=ranks
    )
    assert report.passed, list_failures(report)


def list_failures(report: VerificationReport) -> list[Any]:
    return [
        cell.failure or [finding for finding in cell.findings if not finding.passed]
        for cell in report.cells
    ]


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_every_schedule(ranks: RankPool, schedule: str) -> None:
    verify_layout(
        ranks,
        DEEP_LLAMA,
        Layout(pp=2, schedule=schedule),
        VerificationCase(4, tied=False),
        dtypes=VERIFICATION_DTYPES,
    )


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_every_schedule_tied_with_dropout_and_recompute(ranks: RankPool, schedule: str) -> None:
    recompute = "full" if PIPELINE_SCHEDULES[schedule].has_split_backward else "selective"
    verify_layout(
        ranks,
        DEEP_GPT2,
        Layout(pp=2, schedule=schedule),
        VerificationCase(4, recompute, tied=True, dropout=True),
    )


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(pp=2, dp_replicate=2, schedule="zb_h1"), marks=LONG),
        Layout(pp=2, dp_replicate=2, schedule="interleaved_1f1b"),
        *[
            pytest.param(Layout(pp=2, dp_shard=2, zero_stage=stage, schedule=schedule), marks=marks)
            for stage in (1, 2, 3)
            for schedule, marks in (
                ("1f1b", LONG),
                ("zb_h1", LONG if stage < 3 else ()),
                ("zbv", LONG),
            )
        ],
        pytest.param(
            Layout(pp=2, dp_replicate=2, dp_shard=2, zero_stage=2, schedule="zbv"), marks=LONG
        ),
        pytest.param(
            Layout(
                pp=2,
                dp_replicate=2,
                dp_shard=2,
                zero_stage=3,
                schedule="interleaved_1f1b",
                wrap_blocks=2,
            ),
            marks=LONG,
        ),
    ],
    ids=str,
)
def test_over_data_ranks(ranks: RankPool, layout: Layout) -> None:
    verify_layout(
        ranks,
        DEEP_LLAMA,
        layout,
        VerificationCase(4, "selective", tied=layout.schedule != "zb_h1", dropout=True),
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe"])
def test_four_ranks(ranks: RankPool, schedule: str) -> None:
    verify_layout(
        ranks,
        DEEP_LLAMA,
        Layout(pp=4, schedule=schedule),
        VerificationCase(4, tied=True, dropout=True),
        dtypes=VERIFICATION_DTYPES,
    )


def test_fewer_micro_batches_than_ranks(ranks: RankPool) -> None:
    verify_layout(
        ranks, DEEP_LLAMA, Layout(pp=4, schedule="zb_h1"), VerificationCase(1, tied=False)
    )
