"""Check the order of predicted layouts against measurements of the same job.

    python -m benchmarks.planner_order --published FOLDER

FOLDER (default: $SHARDWRIGHT_PUBLISHED) contains measurements.csv and failures.csv. A job is one
model, cluster, row length, batch and precision of a source; its rows differ in their layout. Each
source is predicted by a fit without it. The first table has pairs of rows by the distance of their
predicted step times, and the share of pairs that were measured in the predicted order. The second
compares pairs whose predictions are indistinguishable by what makes one of them simpler. The third
has the share of the errors that the rows of a job have in common.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import log, prod
from pathlib import Path
from statistics import mean, median, variance

from benchmarks.fit_planner import fit_other_sources
from benchmarks.planner_fit import PULL
from benchmarks.planner_picks import MIN_JOB_ROWS
from benchmarks.planner_rows import NOISY_SOURCE, Row, load_rows
from shardwright.planner.candidate import Candidate
from shardwright.planner.published.predictions import predict_published_run
from shardwright.planner.rates.calibration import EfficiencyTable
from shardwright.planner.search.result import EQUAL_STEP_SHARE, measure_complexity

GAPS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Bounds of the distances between two predictions, as shares of the faster one's step time."""


@dataclass(frozen=True)
class TimedRow:
    """A row of a job with predicted and measured seconds of a step."""

    source: str
    job: Hashable
    candidate: Candidate
    predicted_seconds: float
    measured_seconds: float

    @property
    def error(self) -> float:
        """Logarithm of measured over predicted seconds."""
        return log(self.measured_seconds / self.predicted_seconds)


def time_rows(rows: Iterable[Row], tables: Mapping[str, EfficiencyTable]) -> list[TimedRow]:
    """Return the rows with a measured throughput. `tables`: efficiencies by id of the row."""
    found = []
    for row in rows:
        if not row.tokens_per_second:
            continue
        run = row.case
        prediction = predict_published_run(run, tables[run.id])
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


def find_simpler(first: TimedRow, second: TimedRow) -> tuple[str, TimedRow, TimedRow] | None:
    """Return the first property in which two layouts differ, the row that has less of it, and the
    other one. None if they differ in no such property."""

    def list_properties(row: TimedRow) -> dict[str, int]:
        layout = row.candidate.layout
        return {
            "axes of model parallelism": measure_complexity(row.candidate)[0],
            "product of their degrees": prod((layout.pp, layout.tp, layout.cp, layout.ep)),
            "ZeRO stage": layout.zero_stage,
            "recomputation": ("none", "selective", "full").index(row.candidate.recompute),
        }

    others = list_properties(second)
    for name, value in list_properties(first).items():
        if value != others[name]:
            return (name, first, second) if value < others[name] else (name, second, first)
    return None


def compare_simpler(jobs: Iterable[Sequence[TimedRow]]) -> dict[str, list[list[float]]]:
    """Return, for each property of `find_simpler`, the logarithms of the simpler row's measured
    step time over the other one's, one list per job. Pairs are those that are predicted within
    `EQUAL_STEP_SHARE`."""
    found: dict[str, list[list[float]]] = defaultdict(list)
    for job in jobs:
        ratios: dict[str, list[float]] = defaultdict(list)
        for pair in combinations(job, 2):
            fast, slow = sorted(row.predicted_seconds for row in pair)
            difference = find_simpler(*pair)
            if difference is not None and slow <= fast * (1 + EQUAL_STEP_SHARE):
                name, simpler, other = difference
                ratios[name].append(log(simpler.measured_seconds / other.measured_seconds))
        for name, values in ratios.items():
            found[name].append(values)
    return found


def compute_common_share(jobs: Sequence[Sequence[TimedRow]]) -> tuple[float, float]:
    """Return the root mean square of the errors of all rows, and of their distances from the mean
    of their job, corrected for the number of its rows."""
    total = mean(row.error**2 for job in jobs for row in job)
    weights = [len(job) - 1 for job in jobs]
    within = sum(
        weight * variance(row.error for row in job)
        for weight, job in zip(weights, jobs, strict=True)
    )
    return total**0.5, (within / sum(weights)) ** 0.5


def show(jobs: Sequence[Sequence[TimedRow]]) -> None:
    """Print the tables of pairs in Markdown."""
    print("| predicted distance | pairs | in the predicted order |")
    print("|---|---:|---:|")
    for low, high, hits in zip(GAPS, GAPS[1:], check_order(jobs), strict=False):
        if hits:
            print(f"| {low:.0%} to {high:.0%} | {len(hits):,} | {mean(hits):.0%} |")
    print("\n| the simpler one has less | jobs | pairs | it is faster | its step, median of jobs |")
    print("|---|---:|---:|---:|---:|")
    for name, by_job in compare_simpler(jobs).items():
        ratios = [ratio for job in by_job for ratio in job]
        median_ratio = median(map(mean, by_job))
        print(
            f"| {name} | {len(by_job)} | {len(ratios):,} | {mean(x < 0 for x in ratios):.0%} "
            f"| {median_ratio:+.1%} |"
        )


def show_common_shares(jobs: Iterable[Sequence[TimedRow]]) -> None:
    """Print the errors of rows and within jobs by source, of jobs with several rows."""
    by_source: dict[str, list[Sequence[TimedRow]]] = defaultdict(list)
    for job in jobs:
        if len(job) >= MIN_JOB_ROWS:
            by_source[job[0].source].append(job)
    print("\n| source | jobs | error of a row | within its job | common |")
    print("|---|---:|---:|---:|---:|")
    for source, found in sorted(by_source.items()):
        total, within = compute_common_share(found)
        common = 1 - (within / total) ** 2
        print(f"| {source} | {len(found)} | {total:.1%} | {within:.1%} | {common:.0%} |")


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
    rows = load_rows(options.published)
    jobs = group_by_job(time_rows(rows, fit_other_sources(rows, PULL)))
    print(f"All sources but {NOISY_SOURCE}\n")
    show([job for job in jobs if job[0].source != NOISY_SOURCE])
    print(f"\n{NOISY_SOURCE}\n")
    show([job for job in jobs if job[0].source == NOISY_SOURCE])
    show_common_shares(jobs)


if __name__ == "__main__":
    main()
