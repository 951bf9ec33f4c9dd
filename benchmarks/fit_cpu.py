"""Fit what the planner takes of CPU ranks beside their measured rates, and say how far off it is on
rows that were not fitted.

    python -m benchmarks.fit_cpu       the errors of the package's numbers, the fitted ones, and each group predicted by the others

The rows are our own: those of `benchmarks.cuts` and `benchmarks.cpu` under docs/benchmarks, each
beside the profile that was measured right before it. Products, attention, collectives, element-wise
operations and what a meeting of ranks costs are that profile's. What is left to fit: how much more
there is between products than a sum, a norm and a gate (`bytes_share`: rotations, casts, copies
into other orders), the host's time to start an operation, what FSDP does around each gather and
reduction (`handoff_seconds`), what a collective in a step reaches of its measured pace
(`step_share`), and experts' products, whose rows are few and uneven, of theirs (`expert_share`).
The entry that is printed goes into `START` of planner_parameters.py, from where fits of the
published rows take it over.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.case import LLAMA_29M, Case
from benchmarks.cut_cases import ENTRIES
from benchmarks.predicted import candidate_of, ranks_of
from shardwright.architecture import ModelShape, read_config
from shardwright.hardware import Cluster
from shardwright.hardware.measured_profile import read_profile
from shardwright.planner import Candidate, predict
from shardwright.planner.calibration import load_efficiencies
from shardwright.planner.efficiency import Efficiency

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
FITTED = {
    "bytes_share": (0.3, 6.0),
    "host_seconds": (1e-7, 1e-4),
    "handoff_seconds": (1e-4, 1e-2),
    "step_share": (0.2, 1.0),
    "expert_share": (0.3, 1.0),
}
"""With the bounds of the search."""
FACTORS = (2.0, 1.3, 1.1, 1.03)
PULL = 0.003
"""Of the loss, for moving a number by a factor of e from where the fit begins: what hardly any row
reads shall stay.
"""


@dataclass(frozen=True)
class Row:
    """A run of ours: what the planner is asked, and how long a step took."""

    group: str
    name: str
    shape: ModelShape
    candidate: Candidate
    cluster: Cluster
    seconds: float

    def error(self, efficiency: Efficiency) -> float:
        """Logarithm of predicted over measured."""
        return log(
            predict(self.shape, self.candidate, self.cluster, efficiency).time.step / self.seconds
        )


def load_rows(folder: Path = DOCS) -> list[Row]:
    """Rows of both files; of groups whose rates could not be measured there are none."""
    rows = []
    entries = {str(entry): entry for entry in ENTRIES}
    groups: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("cuts-*.json")):
        groups |= json.loads(path.read_text()).get("groups", {})
    for name, group in groups.items():
        if group["profile"] is None:
            continue
        profile = read_profile(group["profile"])
        for row in group["rows"]:
            entry = entries[row["name"]]
            cluster = ranks_of(entry.layout.world_size, profile)
            rows.append(
                Row(name, row["name"], entry.shape, entry.candidate, cluster, row["seconds"])
            )
    return rows + _bench_rows(folder)


def _bench_rows(folder: Path) -> list[Row]:
    rows = []
    comparisons = []
    for name in ("cpu-two-ranks.json", "cpu-shardwright.json"):
        comparisons += (
            json.loads((folder / name).read_text())["comparisons"]
            if (folder / name).exists()
            else []
        )
    for comparison in comparisons:
        ours = comparison["contenders"].get("shardwright")
        if ours is None or comparison.get("profile") is None:
            continue
        fields = (
            "zero_stage",
            "precision",
            "world_size",
            "sequence_length",
            "micro_batch_size",
            "compile",
        )
        case = Case("shardwright", weights_dir="", **{name: comparison[name] for name in fields})
        cluster = ranks_of(case.world_size, read_profile(comparison["profile"]))
        seconds = case.tokens_per_step / ours["tokens_per_second"]
        group = f"bench {case.precision}"
        rows.append(
            Row(
                group,
                f"bench {comparison['name']}",
                read_config(LLAMA_29M),
                candidate_of(case),
                cluster,
                seconds,
            )
        )
    return rows


def fit(rows: Sequence[Row], start: Efficiency) -> Efficiency:
    """The numbers of `FITTED` that make the mean absolute logarithm of the errors least, moved one
    at a time.
    """

    def loss(efficiency: Efficiency) -> float:
        moved = sum(log(getattr(efficiency, name) / getattr(start, name)) ** 2 for name in FITTED)
        return mean(abs(row.error(efficiency)) for row in rows) + PULL * moved

    best = start
    least = loss(start)
    for factor in FACTORS:
        moving = True
        while moving:
            moving = False
            for name, (low, high) in FITTED.items():
                for step in (factor, 1 / factor):
                    value = min(high, max(low, getattr(best, name) * step))
                    tried = replace(best, **{name: value})
                    found = loss(tried)
                    if found < least - 1e-6:
                        best = tried
                        least = found
                        moving = True
    return best


def show(title: str, errors: dict[str, float]) -> None:
    """One line of all errors, as shares of what was measured."""
    shares = [exp(error) - 1 for error in errors.values()]
    worst = max(errors, key=lambda name: abs(errors[name]))
    print(
        f"{title:32} {len(shares):3} rows  {mean(map(abs, shares)):6.1%} off, bias {mean(shares):+6.1%}, "
        f"within 20%: {mean(abs(share) <= 0.2 for share in shares):4.0%}, worst {exp(errors[worst]) - 1:+.0%} ({worst})"
    )


def main() -> None:
    """Print errors before and after, each group held out, and the entry."""
    rows = load_rows()
    packaged = load_efficiencies().get_efficiency(rows[0].cluster.accelerator)
    show("the package's numbers", {row.name: row.error(packaged) for row in rows})
    best = fit(rows, packaged)
    show("fitted to all", {row.name: row.error(best) for row in rows})
    print(f"cpu: { {name: float(f'{getattr(best, name):.3g}') for name in FITTED} }")
    held_out: dict[str, float] = {}
    for group in dict.fromkeys(row.group for row in rows):
        others = fit([row for row in rows if row.group != group], packaged)
        found = {row.name: row.error(others) for row in rows if row.group == group}
        show(f"{group}, fitted to the others", found)
        held_out |= found
    show("each group by the others", held_out)
    print("\n".join(f"  {exp(error) - 1:+5.0%}  {name}" for name, error in held_out.items()))


if __name__ == "__main__":
    main()
