"""Public rows that no fit uses: their table and its errors."""

from __future__ import annotations

import pytest
from benchmarks.public_rows import (
    ROWS,
    PublicError,
    compute_error,
    predict_now,
    read_first_prediction,
    write_table,
)

from shardwright.planner.published.measurements import read_rows

PREDICTION = {
    "pred_tok": "100", "pred_tok_low": "80", "pred_tok_high": "120",
    "pred_mem": "11", "pred_mem_low": "10", "pred_mem_high": "12",
}  # fmt: skip


def test_errors_and_coverage_of_a_group() -> None:
    slow, fast = (
        compute_error(
            {"tokens_per_sec_per_gpu": speed, "peak_memory_gib_per_gpu": memory}, PREDICTION
        )
        for speed, memory in (("75", "10"), ("110", ""))
    )
    assert slow == PublicError(pytest.approx(-0.25), False, pytest.approx(0.1), True)
    assert fast == PublicError(pytest.approx(0.1), True, None, None)
    lines = write_table([("a", slow), ("b", fast)], "kind")
    assert lines[2:] == [
        "| a | 1 | 25.0% | -25.0% | 0% | 1 | 10.0% | +10.0% | 100% |",
        "| b | 1 | 10.0% | +10.0% | 100% | 0 |  |  |  |",
        "| all | 2 | 17.5% | -7.5% | 50% | 1 | 10.0% | +10.0% | 100% |",
    ]


def test_the_rows_have_sources_measurements_and_first_predictions() -> None:
    rows = read_rows(ROWS)
    assert len({row["id"] for row in rows}) == len(rows) == 345
    for row in rows:
        assert row["url"].startswith("https://"), row["id"]
        assert row["tokens_per_sec_per_gpu"], row["id"]
        assert compute_error(row, read_first_prediction(row)).time is not None
    assert predict_now(rows[0]).keys() >= PREDICTION.keys()
