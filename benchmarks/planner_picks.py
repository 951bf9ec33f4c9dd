"""Picks among the published rows of a job: the throughput that a user loses, and how often the
picked row ran.

The rules are the fastest prediction whatever its memory (as in the folder's score.py), the fastest
one that fits and is not tight, and what `plan` recommends: the simplest of the indistinguishable
layouts that fit, or of those that are not tight if it is.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.planner_rows import NOISY_SOURCE, Row
from shardwright.planner.prediction import Prediction
from shardwright.planner.search.result import SearchResult

MIN_JOB_ROWS = 3
"""Fewest rows of a job with a pick."""

Rule = Callable[[Sequence[Prediction]], Prediction | None]


def pick_fastest(predictions: Sequence[Prediction]) -> Prediction | None:
    return min(predictions, key=lambda prediction: prediction.time.step, default=None)


def pick_fastest_with_margin(predictions: Sequence[Prediction]) -> Prediction | None:
    """Return the fastest prediction that fits and is not tight."""
    return pick_fastest([each for each in predictions if each.fits and not each.is_tight])


def recommend(predictions: Sequence[Prediction]) -> Prediction | None:
    """Return the layout that `plan` recommends if these are the only ones."""
    fitting = [each for each in predictions if each.fits]
    result = SearchResult(fitting)
    if result.best is not None and result.best.is_tight:
        result.best_with_margin = SearchResult([each for each in fitting if not each.is_tight]).best
    return result.chosen


RULES: dict[str, Rule] = {
    "fastest": pick_fastest,
    "not tight": pick_fastest_with_margin,
    "`plan`": recommend,
}


def group_by_job(rows: Iterable[Row], predictions: Mapping[str, Prediction]) -> list[list[Row]]:
    """Return the rows with a prediction of each job that has at least three. `predictions`: by id
    of the row."""
    jobs: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.case.id in predictions:
            jobs[row.job].append(row)
    return [job for job in jobs.values() if len(job) >= MIN_JOB_ROWS]


def pick_row(job: Sequence[Row], predictions: Mapping[str, Prediction], rule: Rule) -> Row | None:
    """Return the row of a job that a rule picks. None if no row fits."""
    picked = rule([predictions[row.case.id] for row in job])
    return next((row for row in job if predictions[row.case.id] is picked), None)


def compute_slowdowns(
    rows: Iterable[Row], predictions: Mapping[str, Prediction], rule: Rule
) -> dict[str, list[float]]:
    """Return, for each job of at least three measured rows, the share of the best measured
    throughput that the picked row loses, by source. Where no row is predicted to fit, the pick is
    the fastest prediction."""
    slowdowns: dict[str, list[float]] = defaultdict(list)
    for job in group_by_job((row for row in rows if row.tokens_per_second), predictions):
        row = pick_row(job, predictions, rule) or pick_row(job, predictions, pick_fastest)
        assert row is not None
        speeds = [each.tokens_per_second or 0.0 for each in job]
        slowdowns[row.case.source].append(1 - (row.tokens_per_second or 0.0) / max(speeds))
    return slowdowns


def find_picks_that_ran(
    rows: Iterable[Row], predictions: Mapping[str, Prediction], rule: Rule
) -> list[bool]:
    """Return whether the picked row ran, for each job that has rows that ran and rows that are
    known to have run out of memory, if the rule picks one."""
    judged = group_by_job((row for row in rows if row.is_judged), predictions)
    mixed = [job for job in judged if len({row.ran for row in job}) == 2]
    picks = (pick_row(job, predictions, rule) for job in mixed)
    return [row.ran for row in picks if row is not None]


def show_picks(rows: Sequence[Row], predictions: Mapping[str, Prediction]) -> None:
    """Print two tables in Markdown: what the picks of each rule lose by source, and how many of
    them ran."""
    by_rule = {name: compute_slowdowns(rows, predictions, rule) for name, rule in RULES.items()}
    print(f"\n| source | jobs | {' | '.join(by_rule)} |")
    print(f"|---|---:|{'---:|' * len(by_rule)}")
    sources = sorted(next(iter(by_rule.values())))
    groups = {source: [source] for source in sources}
    groups["mean of all jobs"] = sources
    groups[f"without {NOISY_SOURCE}"] = [each for each in sources if each != NOISY_SOURCE]
    for name, members in groups.items():
        losses = [
            [loss for source in members for loss in found[source]] for found in by_rule.values()
        ]
        cells = [f"{statistics.mean(found):.1%}" for found in losses if found]
        print(f"| {name} | {len(losses[0])} | {' | '.join(cells)} |")
    print("\n| rule | jobs with a pick | picked row ran |\n|---|---:|---:|")
    for name, rule in RULES.items():
        ran = find_picks_that_ran(rows, predictions, rule)
        share = f"{statistics.mean(ran):.0%}" if ran else ""
        print(f"| {name} | {len(ran)} | {share} |")
