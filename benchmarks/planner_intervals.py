"""Measure how far predictions are from runs that nothing was fitted to, and check the intervals
made from that.

    python -m benchmarks.planner_intervals fit        write planner/error_spreads.yaml
    python -m benchmarks.planner_intervals coverage   share of the rows of each source inside
                                                      intervals made without it

--published (default: $SHARDWRIGHT_PUBLISHED) is the folder of measurements.csv and failures.csv.
Every error is that of a row whose source, accelerator generation or half of the rows was left out
of the fit. `coverage` leaves out a source twice: its rows are predicted by a fit without them, and
the spreads that make their intervals come from errors in fits that never had them either. The
errors of a source T that calibrate the intervals of a source S are from a fit without S and T.

Public rows (docs/benchmarks/public-rows.csv) are in no fit. Their errors are those of predictions
that were made before anyone had seen one of them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf, log
from pathlib import Path
from statistics import mean, median

import numpy as np
import yaml

from benchmarks.gpu_figures import count_predicted_runs
from benchmarks.planner_fit import UNSEEN_ROWS_PER_SOURCE, Fit
from benchmarks.planner_parameters import PARAMETERS, START
from benchmarks.planner_rows import (
    MAX_ROWS_PER_SOURCE,
    Errors,
    LeftOut,
    PartKind,
    Row,
    compute_errors,
    leave_out_each,
    list_parts,
    load_rows,
    select_at_most,
)
from benchmarks.public_rows import ROWS as PUBLIC_ROWS
from benchmarks.public_rows import PublicError, compute_error, read_first_prediction
from shardwright.planner import uncertainty
from shardwright.planner.published.measurements import (
    extract_configuration,
    read_published_run,
    read_rows,
)
from shardwright.planner.rates.calibration import EfficiencyTable, load_efficiencies
from shardwright.planner.uncertainty import (
    INTERVAL_SHARE,
    OWN_TRAINER,
    ROWS_TO_HALVE,
    ErrorCause,
    ErrorSpread,
    ErrorSpreads,
    Quantity,
)

PACKAGED = Path(uncertainty.__file__).with_name("error_spreads.yaml")
CPU_MEASUREMENTS = Path(__file__).parents[1] / "docs" / "benchmarks" / "layouts-predicted.json"
GPU_MEASUREMENTS = CPU_MEASUREMENTS.with_name("gpu.json")
HEADER = """\
# Written by benchmarks/planner_intervals.py from errors of rows that were left out of the fit.
# Spreads are logarithms of measured over predicted at the ends of the 80% interval.
"""
QUANTITIES: tuple[Quantity, ...] = ("time", "memory")
MIN_ROWS = 5
"""Fewest rows of a source that show a spread."""


@dataclass(frozen=True)
class UnseenError:
    """Logarithms of measured over predicted time and memory of a row in a fit without it.

    `trainer_ignorance` and `accelerator_ignorance`: share of the variance that is left with the
    measurements of the fit, by quantity.
    """

    row: Row
    errors: Mapping[Quantity, float]
    trainer_ignorance: Mapping[Quantity, float]
    accelerator_ignorance: float

    def find_cause(self, quantity: Quantity) -> ErrorCause:
        """Return the cause that the error shows."""
        if self.row.case.shape.experts is not None:
            return "sparse"
        if self.trainer_ignorance[quantity] >= 0.5:
            return "trainer"
        if quantity == "time" and self.accelerator_ignorance >= 0.5:
            return "accelerator"
        return "base"


def count_rows(rows: Iterable[Row]) -> dict[Quantity, dict[str, int]]:
    """Count the rows with a measured time, and with a measured memory, by trainer and by
    accelerator generation. Memory does not depend on the generation."""
    found: dict[Quantity, dict[str, int]] = {quantity: defaultdict(int) for quantity in QUANTITIES}
    for row in rows:
        if row.tokens_per_second:
            found["time"][row.case.framework] += 1
            found["time"][row.case.cluster.accelerator.generation] += 1
        if row.memory_gib:
            found["memory"][row.case.framework] += 1
    return {quantity: dict(numbers) for quantity, numbers in found.items()}


def predict_left_out(
    rows: Sequence[Row], parts: Iterable[LeftOut], initial: EfficiencyTable
) -> list[list[UnseenError]]:
    """Return the errors of the predicted rows of each part. All fits are steps from the same
    slopes."""
    parts = list(parts)
    fit = Fit(select_at_most(rows, UNSEEN_ROWS_PER_SOURCE), PARAMETERS, START)
    fits = fit.fit_without([part.is_left_out for part in parts], initial)
    return [
        compute_unseen_errors(
            filter(part.is_predicted, select_at_most(rows, part.max_rows)),
            [row for row in rows if not part.is_left_out(row)],
            efficiencies,
        )
        for part, efficiencies in zip(parts, fits, strict=True)
    ]


def compute_unseen_errors(
    rows: Iterable[Row], fitted: Iterable[Row], efficiencies: EfficiencyTable
) -> list[UnseenError]:
    """Compute the errors of rows under efficiencies fitted to others."""
    return explain_errors(((row, compute_errors(row, efficiencies)) for row in rows), fitted)


def load_public_errors() -> list[tuple[Row, PublicError]]:
    """Load public rows with the errors of their predictions before anyone had seen one."""
    return [
        (
            Row(read_published_run(raw["id"], extract_configuration(raw)), None, None, ran=True),
            compute_error(raw, read_first_prediction(raw)),
        )
        for raw in read_rows(PUBLIC_ROWS)
    ]


def explain_errors(
    errors: Iterable[tuple[Row, Errors | PublicError]], fitted: Iterable[Row]
) -> list[UnseenError]:
    """Return the errors of rows with a measurement, and how little the fitted rows say about each
    trainer and accelerator. `fitted`: rows of the fit."""
    num_rows = count_rows(fitted)

    def compute_ignorance(quantity: Quantity, name: str) -> float:
        return 1 / (1 + num_rows[quantity].get(name, 0) / ROWS_TO_HALVE)

    found = []
    for row, errors_of_row in errors:
        logarithms: dict[Quantity, float] = {}
        if errors_of_row.time is not None:
            logarithms["time"] = -log(1 + errors_of_row.time)
        if errors_of_row.memory is not None:
            logarithms["memory"] = -log(1 + errors_of_row.memory)
        if logarithms:
            found.append(
                UnseenError(
                    row,
                    logarithms,
                    {
                        quantity: compute_ignorance(quantity, row.case.framework)
                        for quantity in QUANTITIES
                    },
                    compute_ignorance("time", row.case.cluster.accelerator.generation),
                )
            )
    return found


def combine_parts(
    rows: Sequence[Row],
    parts: Mapping[PartKind, Sequence[LeftOut]],
    errors: Iterable[list[UnseenError]],
    public: Sequence[UnseenError],
) -> ErrorSpreads:
    """Combine the errors of `parts`, in their order, and of public rows into spreads by cause.
    `rows`: those of the intervals' fit."""
    remaining = iter(errors)
    found = {
        kind: [error for _ in parts_of_kind for error in next(remaining)]
        for kind, parts_of_kind in parts.items()
    }
    spreads: dict[Quantity, dict[ErrorCause, ErrorSpread]] = {
        "time": measure_spreads("time", [*found["source"], *public], found["generation"]),
        # Sources with memory have one trainer each: only halves show a measured trainer.
        "memory": measure_spreads("memory", [*found["source"], *found["half"], *public], []),
    }
    # Our engine's tensors are known, and no row fits its allocator. So it is like a trainer of the
    # folder in a fit without its rows.
    spreads["memory"]["own"] = combine_sources(group_errors("memory", found["source"])["trainer"])
    return ErrorSpreads(spreads, count_rows(rows))


def calibrate(rows: Sequence[Row], initial: EfficiencyTable) -> ErrorSpreads:
    """Measure the spreads of errors by cause, each source, each accelerator generation and each
    half of the rows being left out once. Runs of `make gpu` count as measurements of our engine."""
    parts = list_parts(rows)
    errors = predict_left_out(rows, chain(*parts.values()), initial)
    found = combine_parts(rows, parts, errors, explain_errors(load_public_errors(), rows))
    results = json.loads(GPU_MEASUREMENTS.read_text(encoding="utf-8"))
    own = {"time": "tokens_per_second", "memory": "peak_allocated_bytes"}
    num_rows = {
        quantity: {**numbers, OWN_TRAINER: count_predicted_runs(results, own[quantity])}
        for quantity, numbers in found.num_rows.items()
    }
    return replace(found, num_rows=num_rows)


def measure_spreads(
    quantity: Quantity, by_source: Iterable[UnseenError], by_generation: Iterable[UnseenError]
) -> dict[ErrorCause, ErrorSpread]:
    """Return the spread of each cause beyond that of `base`.

    Args:
        by_source: errors of rows in fits without their source, for all causes except the
            accelerator.
        by_generation: errors in fits without their accelerator generation.
    """
    errors = group_errors(quantity, by_source)
    errors["accelerator"] = group_errors(quantity, by_generation)["accelerator"]
    base = combine_sources(errors["base"])
    spreads: dict[ErrorCause, ErrorSpread] = {"base": base}
    for cause in ("trainer", "sparse", "accelerator"):
        spread = combine_sources(errors[cause])
        spreads[cause] = ErrorSpread(
            _subtract_variance(spread.low, base.low), _subtract_variance(spread.high, base.high)
        )
    spreads["cpu"] = measure_cpu_spread(quantity)
    return spreads


def group_errors(
    quantity: Quantity, errors: Iterable[UnseenError]
) -> dict[ErrorCause, dict[str, list[float]]]:
    """Return the errors of each cause by source."""
    found: dict[ErrorCause, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for error in errors:
        if quantity in error.errors:
            found[error.find_cause(quantity)][error.row.case.source].append(error.errors[quantity])
    return found


def combine_sources(errors: Mapping[str, Sequence[float]]) -> ErrorSpread:
    """Return the spread of a row of a source like these: a tenth of the errors is below it and a
    tenth above, if every source counts once (pooled distributions, arXiv 1809.07441, section 3).
    """
    tail = (1 - INTERVAL_SHARE) / 2
    sources = [found for found in errors.values() if len(found) >= MIN_ROWS]
    if not sources:
        return ErrorSpread()
    weights = np.concatenate([np.full(len(found), 1 / len(found)) for found in sources])
    values = np.concatenate(sources)
    order = np.argsort(values)
    values, shares = values[order], np.cumsum(weights[order]) / len(sources)
    low, high = values[np.searchsorted(shares, (tail, 1 - tail))]
    return ErrorSpread(max(0.0, -float(low)), max(0.0, float(high)))


def _subtract_variance(total: float, part: float) -> float:
    return max(0.0, total**2 - part**2) ** 0.5


def measure_cpu_spread(quantity: Quantity) -> ErrorSpread:
    """Return the spread of our own engine's errors on CPU ranks with measured rates. They are the
    rows of a page of docs/benchmarks, one group per model and precision."""
    groups = json.loads(CPU_MEASUREMENTS.read_text(encoding="utf-8"))["groups"]
    measured, predicted = {
        "time": ("seconds", "step_seconds"),
        "memory": ("memory_bytes", "memory_bytes"),
    }[quantity]
    errors = {
        name: [
            log(row[measured] / row["predicted"][predicted])
            for row in group["rows"]
            if row.get("predicted") and row.get(measured)
        ]
        for name, group in groups.items()
    }
    return combine_sources(errors)


def write(spreads: ErrorSpreads, path: Path) -> None:
    """Write the file that the planner reads."""
    document = {
        quantity: {
            "spreads": {
                cause: [round(spread.low, 3), round(spread.high, 3)]
                for cause, spread in spreads.spreads[quantity].items()
            },
            "num_rows": dict(spreads.num_rows[quantity]),
        }
        for quantity in QUANTITIES
    }
    path.write_text(HEADER + yaml.safe_dump(document, sort_keys=True), encoding="utf-8")


@dataclass(frozen=True)
class Coverage:
    """Share of rows inside their intervals, and the median ends of these, as ratios to the
    prediction."""

    num_rows: int
    share: float
    low: float
    high: float


def measure_coverage(
    errors: Sequence[UnseenError], spreads: ErrorSpreads
) -> dict[Quantity, Coverage]:
    """Return the coverage of the rows by intervals of these spreads."""
    found: dict[Quantity, Coverage] = {}
    for quantity in QUANTITIES:
        judged = []
        for error in errors:
            if quantity not in error.errors:
                continue
            case = error.row.case
            spread: ErrorSpread = getattr(
                spreads.get_uncertainty(
                    case.cluster.accelerator,
                    case.framework,
                    is_sparse=case.shape.experts is not None,
                ),
                quantity,
            )
            judged.append(
                (-spread.low <= error.errors[quantity] <= spread.high, *spread.apply(1.0))
            )
        if judged:
            inside, lows, highs = zip(*judged, strict=True)
            found[quantity] = Coverage(len(judged), mean(inside), median(lows), median(highs))
    return found


def cover_sources(
    rows: Sequence[Row], initial: EfficiencyTable
) -> dict[str, dict[Quantity, Coverage]]:
    """Return the coverage of each source by intervals that its rows had no part in."""
    sources = sorted({row.case.source for row in rows})
    absent = leave_out_each(rows, lambda row: row.case.source)
    parts = [list_parts(rows, is_absent) for is_absent in absent]
    every_part = list_parts(rows)
    own = [LeftOut(is_absent, max_rows=len(rows)) for is_absent in absent]
    wanted = [*own, *(part for kinds in [*parts, every_part] for part in chain(*kinds.values()))]
    errors = iter(predict_left_out(rows, wanted, initial))
    own_errors = [next(errors) for _ in own]
    public_errors = load_public_errors()
    found = {}
    for source, is_absent, kinds, unseen in zip(sources, absent, parts, own_errors, strict=True):
        present = [row for row in rows if not is_absent(row)]
        spreads = combine_parts(present, kinds, errors, explain_errors(public_errors, present))
        found[source] = measure_coverage(unseen, spreads)
    fitted_errors = list(errors)
    public = explain_errors(public_errors, rows)
    for source in sorted({error.row.case.source for error in public}):
        others = [error for error in public if error.row.case.source != source]
        spreads = combine_parts(rows, every_part, fitted_errors, others)
        unseen = [error for error in public if error.row.case.source == source]
        found[source] = measure_coverage(unseen, spreads)
    return found


def show_coverage(found: Mapping[str, Mapping[Quantity, Coverage]]) -> None:
    """Print a row of Markdown for each source."""
    for source, by_quantity in found.items():
        cells = [source]
        for quantity in QUANTITIES:
            coverage = by_quantity.get(quantity)
            cells += (
                ["", "", ""]
                if coverage is None
                else [
                    str(coverage.num_rows),
                    f"{coverage.share:.0%}",
                    f"{coverage.low - 1:+.0%} to {coverage.high - 1:+.0%}",
                ]
            )
        print(f"| {' | '.join(cells)} |", flush=True)


def show_totals(found: Mapping[str, Mapping[Quantity, Coverage]]) -> None:
    """Print the share of rows inside: of a source on average, of at most `MAX_ROWS_PER_SOURCE` rows
    of each source, and of all rows."""
    for quantity in QUANTITIES:
        covered = [each[quantity] for each in found.values() if quantity in each]
        by_source, by_limited_rows, by_row = (
            sum(coverage.share * min(coverage.num_rows, limit) for coverage in covered)
            / sum(min(coverage.num_rows, limit) for coverage in covered)
            for limit in (1, MAX_ROWS_PER_SOURCE, inf)
        )
        print(
            f"{quantity}: {by_source:.0%} of a source on average, {by_limited_rows:.0%} of at most "
            f"{MAX_ROWS_PER_SOURCE} rows of each, {by_row:.0%} of all rows"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--published", type=Path, default=os.environ.get("SHARDWRIGHT_PUBLISHED"))
    parser.add_argument("--out", type=Path, default=PACKAGED, help="file of `fit`")
    parser.add_argument("command", choices=("fit", "coverage"))
    options = parser.parse_args()
    if options.published is None:
        parser.error(
            "the folder of published measurements is missing: pass --published FOLDER or set "
            "SHARDWRIGHT_PUBLISHED"
        )
    rows = load_rows(options.published)
    if options.command == "fit":
        write(calibrate(rows, load_efficiencies()), options.out)
        return
    print("| source | rows | time inside | interval | rows | memory inside | interval |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    found = cover_sources(rows, load_efficiencies())
    show_coverage(found)
    show_totals(found)


if __name__ == "__main__":
    main()
