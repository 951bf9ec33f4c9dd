"""Fit the planner's efficiencies to published measurements, and say how well they predict rows that
they were not fitted on.

    python -m benchmarks.fit_planner --published FOLDER score            errors with the efficiencies that are in the package
    python -m benchmarks.fit_planner --published FOLDER fit              fit to all rows, and write planner/efficiencies.yaml
    python -m benchmarks.fit_planner --published FOLDER halves           fit to each half of the rows, and predict the other
    python -m benchmarks.fit_planner --published FOLDER sources          fit without a source and predict it, source by source

FOLDER (default: $SHARDWRIGHT_PUBLISHED) holds measurements.csv and failures.csv. Every parameter
has a cause that a person can name: what an accelerator achieves, or how a trainer behaves; none
belongs to a row or to a model. benchmarks/planner_fit.py says what is searched for and how; every
fit begins at benchmarks/planner_parameters.py's START, whatever the package holds.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from benchmarks.planner_fit import PULL, Fit
from benchmarks.planner_parameters import PARAMETERS, START
from benchmarks.planner_rows import (
    Errors,
    Row,
    at_most,
    errors_of,
    halve,
    load_rows,
    show,
    show_errors,
)
from shardwright.planner import calibration
from shardwright.planner.calibration import EfficiencyTable, load_efficiencies

PACKAGED = Path(calibration.__file__).with_name("efficiencies.yaml")
HEADER = """\
# Fitted by benchmarks/fit_planner.py to published measurements; docs/planning-accuracy.md lists
# the sources and errors.
"""
MOST_OF_A_SOURCE = 300
"""Rows of one source that the package's numbers look at: of nanotron's 948 more tell nothing that
is new.
"""


def fit(
    rows: Sequence[Row], turns: int, pull: float = PULL, *, verbose: bool = False
) -> EfficiencyTable:
    """The numbers that predict these rows best. The search is begun anew where it ended: its steps
    have become small by then, and what a device's end makes jump is behind it."""
    search = Fit(rows, PARAMETERS, START, pull)
    return search.run(turns, begin=search.run(turns, verbose=verbose), verbose=verbose)


def halves(rows: Sequence[Row], turns: int, pull: float) -> dict[str, list[Errors]]:
    """Errors of every row under numbers that did not look at it: each half of a source's rows is
    predicted from the other.

    Of a source of more than twice `MOST_OF_A_SOURCE` rows a fit looks at fewer than half.
    """
    one, other = halve(rows)
    found: dict[str, list[Errors]] = {}
    for looked_at, held_out in ((one, other), (other, one)):
        efficiencies = fit(at_most(looked_at, MOST_OF_A_SOURCE), turns, pull)
        for row in held_out:
            found.setdefault(row.case.source, []).append(errors_of(row, efficiencies))
    return found


def without_source(
    rows: Sequence[Row], turns: int, pull: float, sources: Iterable[str]
) -> dict[str, list[Errors]]:
    """Errors of a source's rows under numbers fitted to all other sources, a source at a time; each
    is printed as it comes.

    The search begins at the package's numbers, which have seen the source, and moves away from what
    only it told: of that nothing but the distance to the level above is left in the loss.
    """
    found = {}
    for source in sources:
        others = [row for row in rows if row.case.source != source]
        search = Fit(at_most(others, MOST_OF_A_SOURCE), PARAMETERS, START, pull)
        efficiencies = search.run(turns, begin=load_efficiencies(PACKAGED))
        found[source] = [errors_of(row, efficiencies) for row in rows if row.case.source == source]
        show_errors(f"{source} held out", {source: found[source]})
    return found


def write(efficiencies: EfficiencyTable, path: Path) -> None:
    """The file that the planner reads."""
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
    parser.add_argument("--turns", type=int, default=20, help="of the search, at most")
    parser.add_argument(
        "--pull",
        type=float,
        default=PULL,
        help="how strongly a number is held to the level above it",
    )
    parser.add_argument(
        "--source",
        action="append",
        help="score: only rows of these sources; sources: hold out only these",
    )
    parser.add_argument(
        "--efficiencies", type=Path, default=PACKAGED, help="what `fit` writes and `score` reads"
    )
    parser.add_argument("what", choices=("score", "fit", "halves", "sources"))
    options = parser.parse_args()
    if options.published is None:
        parser.error(
            "say where the published measurements are: --published FOLDER, or SHARDWRIGHT_PUBLISHED"
        )
    rows = load_rows(options.published)
    every = sorted({row.case.source for row in rows})
    if options.what == "fit":
        efficiencies = fit(
            at_most(rows, MOST_OF_A_SOURCE), options.turns, options.pull, verbose=True
        )
        write(efficiencies, options.efficiencies)
        show("Fitted to all rows", rows, efficiencies)
    elif options.what == "halves":
        show_errors("Each half predicted from the other", halves(rows, options.turns, options.pull))
    elif options.what == "sources":
        show_errors(
            "A whole source held out",
            without_source(rows, options.turns, options.pull, options.source or every),
        )
    else:
        wanted = [row for row in rows if not options.source or row.case.source in options.source]
        show("With the package's numbers", wanted, load_efficiencies(options.efficiencies))


if __name__ == "__main__":
    main()
