"""The order of predicted layouts, what makes one faster, and errors within a job."""

from __future__ import annotations

from math import log, sqrt

import pytest
from benchmarks.planner_order import (
    TimedRow,
    check_order,
    compare_simpler,
    compute_common_share,
    group_by_job,
)

from shardwright.layout import Layout
from shardwright.planner.candidate import Candidate


def make_row(job: str, predicted: float, measured: float, tp: int = 1) -> TimedRow:
    return TimedRow("any", job, Candidate(Layout(tp=tp), 128), predicted, measured)


def test_pairs_are_compared_within_a_job_only() -> None:
    jobs = group_by_job(
        [
            make_row("a", 1.0, 1.0),
            make_row("b", 1.03, 9.0),
            make_row("a", 1.03, 0.9),
            make_row("a", 1.3, 2.0),
        ]
    )
    assert [len(job) for job in jobs] == [3]
    by_gap = check_order(jobs)
    assert by_gap == [[], [False], [], [], [True, True]]


def test_indistinguishable_pairs_are_compared_by_the_first_property_that_differs() -> None:
    job = [
        make_row("a", 1.0, 1.0, tp=4),
        make_row("a", 1.04, 1.1),
        make_row("a", 1.03, 1.5, tp=2),
        make_row("a", 1.2, 1.3),
    ]
    found = compare_simpler([job])
    assert found == {
        "axes of model parallelism": [pytest.approx([log(1.1), log(1.1 / 1.5)])],
        "product of their degrees": [pytest.approx([log(1.5)])],
    }


def test_an_error_that_a_whole_job_has_is_common() -> None:
    first = [make_row("a", 1.0, 2.0), make_row("a", 2.0, 4.0), make_row("a", 3.0, 6.0)]
    assert compute_common_share([first]) == pytest.approx((log(2), 0.0))
    second = [make_row("b", 1.0, 2.0), make_row("b", 1.0, 0.5)]
    assert compute_common_share([second]) == pytest.approx((log(2), sqrt(2) * log(2)))
