"""Check the order of predicted layouts against measurements of the same job.

    python -m benchmarks.planner_order --published FOLDER

FOLDER (default: $SHARDWRIGHT_PUBLISHED) contains measurements.csv. A job is one model, cluster, row
length, batch and precision of a source; its rows differ in their layout. The first table has pairs
of rows by the distance of their predicted step times, and the share of pairs that were measured in
the predicted order. The second has the measured slowdown of the recommended row against the best of
its job, if the simplest row within some share of the fastest prediction is recommended.

The predictions use the packaged numbers, which were fitted to these rows.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import mean

from benchmarks.planner_picks import MIN_JOB_ROWS
from benchmarks.planner_rows import NOISY_SOURCE, Row, load_rows
from shardwright.planner.candidate import Candidate
from shardwright.planner.published.predictions import predict_run
from shardwright.planner.search.result import measure_complexity

GAPS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Bounds of the distances between two predictions, as shares of the faster one's step time."""
EQUAL_SHARES = (0.0, 0.03, 0.05, 0.08)


@dataclass(frozen=True)
class TimedRow:
    """A row of a job with predicted and measured seconds of a step."""

    source: str
    job: Hashable
    candidate: Candidate
    predicted_seconds: float
    measured_seconds: float


def time_rows(rows: Iterable[Row]) -> list[TimedRow]:
    """Return the rows with a measured throughput."""
    found = []
    for row in rows:
        if not row.tokens_per_second:
            continue
        run = row.case
        prediction = predict_run(run)
        candidate = prediction.candidate
        job = (
            run.source,
            run.shape.num_parameters,
            run.cluster.accelerator.name,
            run.cluster.num_gpus,
            candidate.sequence_length,
            candidate.global_batch_size,
            candidate.precision,
        )
        tokens_per_gpu = candidate.global_batch_tokens / prediction.num_gpus
        found.append(
            TimedRow(
                run.source,
                job,
                candidate,
                prediction.time.step,
                tokens_per_gpu / row.tokens_per_second,
            )
        )
    return found


def group_by_job(rows: Iterable[TimedRow]) -> list[list[TimedRow]]:
    """Return the rows of each job that has several."""
    jobs: dict[Hashable, list[TimedRow]] = defaultdict(list)
    for row in rows:
        jobs[row.job].append(row)
    return [job for job in jobs.values() if len(job) > 1]


def check_order(jobs: Iterable[Sequence[TimedRow]]) -> list[list[bool]]:
    """Return, for each distance of `GAPS`, whether pairs were measured in the predicted order."""
    found: list[list[bool]] = [[] for _ in GAPS[1:]]
    for job in jobs:
        for pair in combinations(job, 2):
            fast, slow = sorted(pair, key=lambda row: row.predicted_seconds)
            gap = slow.predicted_seconds / fast.predicted_seconds - 1
            for place, (low, high) in enumerate(pairwise(GAPS)):
                if low < gap <= high:
                    found[place].append(slow.measured_seconds > fast.measured_seconds)
    return found


def compute_slowdown(job: Sequence[TimedRow], equal_share: float) -> float:
    """Return how much slower the simplest row within `equal_share` of the fastest prediction is
    than the fastest measurement."""
    limit = min(row.predicted_seconds for row in job) * (1 + equal_share)
    picked = min(
        (row for row in job if row.predicted_seconds <= limit),
        key=lambda row: (measure_complexity(row.candidate), row.predicted_seconds),
    )
    return picked.measured_seconds / min(row.measured_seconds for row in job) - 1


def show(jobs: Sequence[Sequence[TimedRow]]) -> None:
    """Print both tables in Markdown."""
    print("| predicted distance | pairs | in the predicted order |")
    print("|---|---:|---:|")
    for low, high, hits in zip(GAPS, GAPS[1:], check_order(jobs), strict=False):
        if hits:
            print(f"| {low:.0%} to {high:.0%} | {len(hits):,} | {mean(hits):.0%} |")
    large = [job for job in jobs if len(job) >= MIN_JOB_ROWS]
    print("\n| equal within | jobs | recommended against the best |")
    print("|---|---:|---:|")
    for share in EQUAL_SHARES:
        slowdown = mean(compute_slowdown(job, share) for job in large)
        print(f"| {share:.0%} | {len(large)} | {slowdown:.1%} slower |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--published", type=Path, default=os.environ.get("SHARDWRIGHT_PUBLISHED"))
    options = parser.parse_args()
    if options.published is None:
        parser.error(
            "the folder of published measurements is missing: pass --published FOLDER or set "
            "SHARDWRIGHT_PUBLISHED"
        )
    jobs = group_by_job(time_rows(load_rows(options.published)))
    print(f"All sources but {NOISY_SOURCE}\n")
    show([job for job in jobs if job[0].source != NOISY_SOURCE])
    print(f"\n{NOISY_SOURCE}\n")
    show([job for job in jobs if job[0].source == NOISY_SOURCE])


if __name__ == "__main__":
    main()
