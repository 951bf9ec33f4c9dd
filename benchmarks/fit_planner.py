"""Fit the planner's efficiencies to published measurements, and say how well they predict rows that they were not fitted on.

    python -m benchmarks.fit_planner --published FOLDER score            errors with the efficiencies that are in the package
    python -m benchmarks.fit_planner --published FOLDER fit              fit, and write planner/efficiencies.yaml
    python -m benchmarks.fit_planner --published FOLDER validate         fit without a source and predict it, source by source

FOLDER (default: $SHARDWRIGHT_PUBLISHED) holds measurements.csv and failures.csv. Every parameter has a cause that a person can
name: what an accelerator achieves, or how a trainer behaves; none belongs to a row or to a model. The search is by coordinates:
one number at a time is moved by a factor as long as that lowers the loss, with factors that shrink.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, log
from pathlib import Path

import yaml

from benchmarks.planner_parameters import PARAMETERS, START, Parameter
from shardwright.planner import achieved
from shardwright.planner.achieved import Efficiencies, load_efficiencies
from shardwright.planner.measurements import Case, configuration, read_case, read_rows
from shardwright.planner.published import memory_bytes, predict_case
from shardwright.units import GIB_BYTES

FACTORS = (1.15, 1.08, 1.04)
MOST_ROWS = 100
"""Rows of one source that the search looks at, and no more than half: the others are held out."""


@dataclass(frozen=True)
class Row:
    """A case with what was measured; `ran` False is a run that did not fit."""

    case: Case
    tokens_per_second: float | None
    memory_gib: float | None
    ran: bool

    @property
    def order(self) -> bytes:
        """A hash of the id: an order that is the same on every machine and has nothing to do with the row."""
        return hashlib.sha256(self.case.id.encode()).digest()


@dataclass(frozen=True)
class Errors:
    """Of one row: measured over predicted throughput less one (the error of the step time), memory, and whether `fits` is right."""

    time: float | None
    memory: float | None
    right: bool | None

    @property
    def loss(self) -> float:
        """What the search lowers: absolute errors, those of memory half again below -5%, and 0.5 for a wrong `fits` of a row that
        does not say how much it took."""
        total = 0.0
        if self.time is not None:
            total += min(abs(self.time), 1.5)
        if self.memory is not None:
            total += min(abs(self.memory), 1.5) + (0.5 * (-0.05 - self.memory) if self.memory < -0.05 else 0.0)
        return total if self.memory is not None or self.right is None or self.right else total + 0.5


def number(text: str | None) -> float | None:
    return float(text) if text not in (None, "", "nan") else None


def load_rows(folder: Path) -> list[Row]:
    """All rows of both tables. Failures whose cause is unknown (nanotron's) teach nothing about memory and are left out."""
    rows = []
    for raw in read_rows(folder / "measurements.csv"):
        speed = number(raw["tokens_per_sec_per_gpu"]) or number(raw["derived_tokens_per_sec_per_gpu"])
        rows.append(Row(read_case(raw["id"], configuration(raw)), speed, number(raw["peak_memory_gib_per_gpu"]), True))
    for raw in read_rows(folder / "failures.csv"):
        if raw["source_group"] != "nanotron-ultrascale":
            rows.append(Row(read_case(raw["id"], configuration(raw)), None, None, False))
    return rows


def errors_of(row: Row, efficiencies: Efficiencies) -> Errors:
    """One row's errors under some efficiencies."""
    prediction = predict_case(row.case, efficiencies)
    predicted_gib = memory_bytes(row.case, prediction, efficiencies) / GIB_BYTES if row.memory_gib else 0.0
    speed = prediction.tokens_per_second_per_gpu
    judged = row.case.source in ("aleph-layouts", "litgpt", "bloom-prequel")
    return Errors(
        time=row.tokens_per_second / speed - 1 if row.tokens_per_second else None,
        memory=predicted_gib / row.memory_gib - 1 if row.memory_gib else None,
        right=prediction.fits == row.ran if judged else None,
    )


def split(rows: Iterable[Row], most: int = MOST_ROWS, share: float = 0.5) -> tuple[list[Row], list[Row]]:
    """Rows that the fit looks at, and rows that it never does: of each source at most a share, by a hash of the id.

    Where no row of an accelerator, a trainer or a kernel would be looked at, the first of them is, too: else its numbers would stay
    guesses.
    """
    chosen: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.order):
        chosen[row.case.source].append(row)
    fitted, held_out = [], []
    for found in chosen.values():
        looked_at = min(most, ceil(share * len(found)))
        fitted += found[:looked_at]
        held_out += found[looked_at:]
    known = {name for row in fitted for name in names_read(row.case)}
    for row in list(held_out):
        if not known.issuperset(names_read(row.case)):
            known.update(names_read(row.case))
            held_out.remove(row)
            fitted.append(row)
    return fitted, held_out


PULL = 0.02
"""What it costs to move a number by a factor of e from where every fit begins: few rows shall not drive one to the end of its
range, where rows that nobody has seen are worse off for it."""


class Search:
    """Coordinate search over the parameters; a row is predicted anew only when a number that it reads has changed."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        per_source: dict[str, int] = defaultdict(int)
        for row in rows:
            per_source[row.case.source] += 1
        # Every source counts alike, but for the square root of its size: a source of five rows shall not outweigh one of hundreds.
        self.weights = [per_source[row.case.source] ** -0.5 for row in rows]
        self.readers: dict[tuple[str, str], list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            for key in names_read(row.case):
                self.readers[key].append(index)

    def losses(self, indices: Iterable[int], efficiencies: Efficiencies) -> dict[int, float]:
        return {index: self.weights[index] * errors_of(self.rows[index], efficiencies).loss for index in indices}

    def run(self, start: Efficiencies, parameters: Sequence[Parameter], passes: int, *, keep: Path | None = None) -> Efficiencies:
        """The efficiencies after so many passes over all parameters, fewer when nothing moves; `keep` is written after each."""
        best = start
        current = self.losses(range(len(self.rows)), best)
        for turn in range(passes):
            factor = FACTORS[min(turn, len(FACTORS) - 1)]
            moved = False
            for parameter in parameters:
                readers = self.readers.get((parameter.section, parameter.name), [])
                if not readers:
                    continue
                better, found = self._move(best, parameter, readers, factor, current)
                if better is not None:
                    best, moved = better, True
                    current |= found
            if keep is not None:
                print(f"pass {turn + 1}: loss {sum(current.values()):.3f}", flush=True)
                write(best, keep)
            if not moved and turn >= len(FACTORS):
                break
        return best

    def _move(
        self, best: Efficiencies, parameter: Parameter, readers: list[int], factor: float, current: dict[int, float]
    ) -> tuple[Efficiencies | None, dict[int, float]]:
        value = parameter.get(best, self._value(parameter, readers, best))
        origin = parameter.get(START, self._value(parameter, readers, START))
        before = sum(current[index] for index in readers) + PULL * log(value / origin) ** 2
        kept: tuple[Efficiencies | None, dict[int, float]] = (None, {})
        for direction in (factor, 1 / factor):
            tried = value
            while True:
                tried *= direction
                changed = parameter.put(best, tried)
                found = self.losses(readers, changed)
                after = sum(found.values()) + PULL * log(tried / origin) ** 2
                if after >= before - 1e-6:
                    break
                before, kept = after, (changed, found)
                if not parameter.low < tried < parameter.high:
                    break
            if kept[0] is not None:
                break
        return kept

    def _value(self, parameter: Parameter, readers: list[int], efficiencies: Efficiencies) -> float:
        """What the first reader has for it now: a default, or a value of a wider section."""
        case = self.rows[readers[0]].case
        value = getattr(efficiencies.of(case.cluster.accelerator, case.framework, case.features), parameter.field)
        if parameter.precision:
            value = value.get(parameter.precision, efficiencies.of(case.cluster.accelerator, case.framework).matmul_share)
        return float(value) or parameter.low or 0.05


def names_read(case: Case) -> list[tuple[str, str]]:
    """Entries of `efficiencies.yaml` that a case reads."""
    accelerator = case.cluster.accelerator
    return [
        ("accelerators", accelerator.generation),
        ("accelerators", accelerator.name),
        ("frameworks", case.framework),
        *(("features", feature) for feature in case.features),
    ]


def show(title: str, errors: dict[str, list[Errors]]) -> None:
    """A table in Markdown: per source, error of the step time and of memory."""
    print(f"\n{title}\n", flush=True)
    print("| source | rows | step time | bias | within 20% | memory rows | memory | bias | over 5% under | fits right |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for source, found in sorted(errors.items()):
        time = [error.time for error in found if error.time is not None]
        memory = [error.memory for error in found if error.memory is not None]
        right = [error.right for error in found if error.right is not None]
        cells = [source, str(len(time)), mean_of(time), bias_of(time), share(abs(x) <= 0.2 for x in time), str(len(memory))]
        cells += [mean_of(memory), bias_of(memory), share(x < -0.05 for x in memory), share(right)]
        print(f"| {' | '.join(cells)} |")


def mean_of(values: list[float]) -> str:
    return f"{100 * statistics.mean(map(abs, values)):.1f}%" if values else ""


def bias_of(values: list[float]) -> str:
    return f"{100 * statistics.median(values):+.1f}%" if values else ""


def share(hits: Iterable[bool]) -> str:
    found = list(hits)
    return f"{100 * sum(found) / len(found):.0f}%" if found else ""


def by_source(rows: Iterable[Row], efficiencies: Efficiencies) -> dict[str, list[Errors]]:
    found: dict[str, list[Errors]] = defaultdict(list)
    for row in rows:
        found[row.case.source].append(errors_of(row, efficiencies))
    return found


def validate(rows: list[Row], passes: int, sources: Iterable[str], *, everything: bool) -> None:
    """Errors on a source of which no row was looked at, a source at a time; what is found is printed as it comes.

    What the held-out source reads is forgotten and fitted again to the others, as far as they read it too; `everything` forgets and
    fits all numbers, which takes hours. Without it the others keep the numbers that they alone read, in whose fit the held-out rows
    had a part through what both read.
    """
    left_out: dict[str, list[Errors]] = {}
    for source in sources or sorted({row.case.source for row in rows}):
        held_out = [row for row in rows if row.case.source == source]
        read = {name for row in held_out for name in names_read(row.case)}
        others, _ = split(row for row in rows if row.case.source != source)
        parameters, start = PARAMETERS, START
        if not everything:
            others = [row for row in others if read.intersection(names_read(row.case))]
            parameters = tuple(parameter for parameter in PARAMETERS if (parameter.section, parameter.name) in read)
            start = forget(load_efficiencies(), read)
        found = by_source(held_out, Search(others).run(start, parameters, passes))
        show(f"{source} held out: {len(others)} rows of others tell of what it reads", found)
        left_out |= found
    show("A whole source held out", left_out)


def forget(efficiencies: Efficiencies, names: Iterable[tuple[str, str]]) -> Efficiencies:
    """The efficiencies with some entries as every fit begins with them."""
    sections = {section: dict(entries) for section, entries in efficiencies.sections.items()}
    for section, name in names:
        sections.setdefault(section, {}).pop(name, None)
        if name in START.sections.get(section, {}):
            sections[section][name] = START.sections[section][name]
    return Efficiencies(sections)


PACKAGED = Path(achieved.__file__).with_name("efficiencies.yaml")
HEADER = """\
# Fitted by benchmarks/fit_planner.py to published measurements; docs/planning-accuracy.md says to which, and how well.
"""


def write(efficiencies: Efficiencies, path: Path) -> None:
    """The file that the planner reads."""
    sections = {name: {key: dict(entry) for key, entry in section.items()} for name, section in efficiencies.sections.items()}
    path.write_text(HEADER + yaml.safe_dump(sections, sort_keys=True), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, default=os.environ.get("SHARDWRIGHT_PUBLISHED"))
    parser.add_argument("--passes", type=int, default=8)
    parser.add_argument("--source", action="append", help="only rows of these sources; to validate: hold out only these")
    parser.add_argument("--out", type=Path, default=PACKAGED, help="what `fit` writes, after each pass")
    parser.add_argument("--everything", action="store_true", help="validate: fit every number anew for each source")
    parser.add_argument(
        "--all-rows", action="store_true", help="fit: look at all rows (nanotron's: 300), for the package's numbers"
    )
    parser.add_argument(
        "--only", action="append", default=[], help="fit only entries with this name (a trainer, a generation, ...)"
    )
    parser.add_argument("--forget", action="append", default=[], help="begin with this entry's numbers as every fit begins")
    parser.add_argument("--from-defaults", action="store_true", help="begin at the defaults, not at the package's numbers")
    parser.add_argument("what", choices=("score", "fit", "validate"))
    options = parser.parse_args()
    if options.published is None:
        parser.error("say where the published measurements are: --published FOLDER, or SHARDWRIGHT_PUBLISHED")
    every = load_rows(options.published)
    if options.what == "validate":
        validate(every, options.passes, options.source or (), everything=options.everything)
        return
    rows = [row for row in every if not options.source or row.case.source in options.source]
    efficiencies = START if options.from_defaults else load_efficiencies()
    fitted, held_out = split(rows, most=300, share=1.0) if options.all_rows else split(rows)
    if options.what == "fit":
        names = {(parameter.section, parameter.name) for parameter in PARAMETERS}
        efficiencies = forget(efficiencies, (name for name in names if name[1] in options.forget))
        parameters = [parameter for parameter in PARAMETERS if not options.only or parameter.name in options.only]
        efficiencies = Search(fitted).run(efficiencies, parameters, options.passes, keep=options.out)
    show("Rows that were fitted", by_source(fitted, efficiencies))
    show("Rows that were held out", by_source(held_out, efficiencies))


if __name__ == "__main__":
    main()
