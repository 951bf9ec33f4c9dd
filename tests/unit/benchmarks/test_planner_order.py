"""The order of predicted layouts, and the measured slowdown of the recommended one."""

from __future__ import annotations

import pytest
from benchmarks.planner_order import TimedRow, check_order, compute_slowdown, group_by_job

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


def test_the_simplest_of_the_equal_rows_is_recommended() -> None:
    job = [make_row("a", 1.0, 1.0, tp=4), make_row("a", 1.04, 1.1), make_row("a", 1.2, 1.3)]
    assert compute_slowdown(job, 0.0) == 0.0
    assert compute_slowdown(job, 0.05) == pytest.approx(0.1)
