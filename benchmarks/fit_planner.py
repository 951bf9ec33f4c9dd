"""Fit the planner's efficiencies to published measurements, and report how well they predict rows
that they were not fitted on.

    python -m benchmarks.fit_planner --published FOLDER score     errors of the packaged values
    python -m benchmarks.fit_planner --published FOLDER fit       fit to all rows and write
                                                                  planner/rates/efficiencies.yaml
    python -m benchmarks.fit_planner --published FOLDER halves    fit to each half of the rows and
                                                                  predict the other half
    python -m benchmarks.fit_planner --published FOLDER sources   predict each source by a fit
                                                                  without it

FOLDER (default: $SHARDWRIGHT_PUBLISHED) contains measurements.csv and failures.csv. Every parameter
has a nameable cause: the rates of an accelerator, or the behaviour of a trainer; none belongs to a
row or to a model. benchmarks/planner_fit.py describes the search; `fit` and `halves` start at START
of benchmarks/planner_parameters.py, or `fit` at the numbers of --initial.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks.planner_fit import PULL, UNSEEN_ROWS_PER_SOURCE, Fit
from benchmarks.planner_parameters import PARAMETERS, START
from benchmarks.planner_picks import show_picks
from benchmarks.planner_rows import (
    MAX_ROWS_PER_SOURCE,
    Row,
    compute_errors,
    leave_out_each,
    load_rows,
    select_at_most,
    show_errors,
    show_goals,
    split_into_halves,
)
from shardwright.planner.published.predictions import predict_least_memory
from shardwright.planner.rates import calibration
from shardwright.planner.rates.calibration import EfficiencyTable, load_efficiencies

PACKAGED = Path(calibration.__file__).with_name("efficiencies.yaml")
HEADER = """\
# Fitted by benchmarks/fit_planner.py to published measurements; docs/planning-accuracy.md lists
# the sources and errors.
"""


def fit(
    rows: Sequence[Row],
    turns: int,
    pull: float = PULL,
    *,
    initial: EfficiencyTable | None = None,
    verbose: bool = False,
) -> EfficiencyTable:
    """Fit the efficiencies that predict these rows best.

    Without `initial`, the search restarts once from its result, because its steps are small by then
    and the jumps at the memory limits of devices are behind it.
    """
    search = Fit(rows, PARAMETERS, START, pull)
    initial = initial or search.run(turns, verbose=verbose)
    return search.run(turns, initial=initial, verbose=verbose)


def fit_halves(rows: Sequence[Row], turns: int, pull: float) -> dict[str, EfficiencyTable]:
    """Fit to each half of every source's rows. Return, by id of a row, the efficiencies of the fit
    to the other half.

    A fit uses at most `MAX_ROWS_PER_SOURCE` rows of a source, even if half of it is more.
    """
    one, other = split_into_halves(rows)
    tables: dict[str, EfficiencyTable] = {}
    for fitted, predicted in ((one, other), (other, one)):
        efficiencies = fit(select_at_most(fitted, MAX_ROWS_PER_SOURCE), turns, pull)
        tables |= {row.case.id: efficiencies for row in predicted}
    return tables


def fit_other_sources(rows: Sequence[Row], pull: float) -> dict[str, EfficiencyTable]:
    """Fit without each source. Return, by id of a row, the efficiencies of the fit without its
    source.

    Each fit is one step from the packaged values, which were fitted to the source too. Values that
    only this source determines then appear in the loss through their distance to the level above
    alone, so the search moves them there.
    """
    search = Fit(select_at_most(rows, UNSEEN_ROWS_PER_SOURCE), PARAMETERS, START, pull)
    conditions = leave_out_each(rows, lambda row: row.case.source)
    return {
        row.case.id: efficiencies
        for is_left_out, efficiencies in zip(
            conditions, search.fit_without(conditions, load_efficiencies(PACKAGED)), strict=True
        )
        for row in rows
        if is_left_out(row)
    }


def write(efficiencies: EfficiencyTable, path: Path) -> None:
    """Write the file that the planner reads."""
    sections = {
        name: {key: dict(entry) for key, entry in section.items() if entry}
        for name, section in efficiencies.sections.items()
    }
    path.write_text(HEADER + yaml.safe_dump(sections, sort_keys=True), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--published", type=Path, default=os.environ.get("SHARDWRIGHT_PUBLISHED"))
    parser.add_argument("--turns", type=int, default=20, help="maximum turns of the search")
    parser.add_argument(
        "--pull",
        type=float,
        default=PULL,
        help="weight of a number's distance to the level above it",
    )
    parser.add_argument(
        "--source",
        action="append",
        help="score: only rows of these sources",
    )
    parser.add_argument(
        "--efficiencies", type=Path, default=PACKAGED, help="file of `fit` and `score`"
    )
    parser.add_argument(
        "--initial", type=Path, help="fit: file of the numbers at which the search starts"
    )
    parser.add_argument("command", choices=("score", "fit", "halves", "sources"))
    options = parser.parse_args()
    if options.published is None:
        parser.error(
            "the folder of published measurements is missing: pass --published FOLDER or set "
            "SHARDWRIGHT_PUBLISHED"
        )
    rows = load_rows(options.published)
    if options.command == "fit":
        efficiencies = fit(
            select_at_most(rows, MAX_ROWS_PER_SOURCE),
            options.turns,
            options.pull,
            initial=load_efficiencies(options.initial) if options.initial else None,
            verbose=True,
        )
        write(efficiencies, options.efficiencies)
        title = "Fitted to all rows"
        tables = {row.case.id: efficiencies for row in rows}
    elif options.command == "halves":
        title = "Each half predicted from the other"
        tables = fit_halves(rows, options.turns, options.pull)
    elif options.command == "sources":
        title = "Each source predicted from the others"
        tables = fit_other_sources(rows, options.pull)
    else:
        title = "With the package's numbers"
        rows = [row for row in rows if not options.source or row.case.source in options.source]
        efficiencies = load_efficiencies(options.efficiencies)
        tables = {row.case.id: efficiencies for row in rows}
    errors = {row.case.id: compute_errors(row, tables[row.case.id]) for row in rows}
    show_errors(title, rows, errors)
    if not options.source:
        show_goals(rows, errors)
        show_picks(
            rows,
            {row.case.id: predict_least_memory(row.case, tables[row.case.id]) for row in rows},
        )


if __name__ == "__main__":
    main()
