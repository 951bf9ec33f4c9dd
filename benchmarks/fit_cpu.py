"""Fit the planner's numbers for CPU ranks that a profile does not contain, and report the errors on
rows that were not fitted.

    python -m benchmarks.fit_cpu       errors of the packaged numbers, of the fitted ones, and of
                                       each group predicted from the others

The rows are our own: those of `benchmarks.layouts` and `benchmarks.cpu` in docs/benchmarks, each
with the profile measured right before it. The profile has the rates of products, attention,
collectives and element-wise operations and the cost of synchronising ranks. Fitted are: the memory
traffic between products relative to a sum, a norm and a gate (`bytes_share`: rotations, casts,
transposing copies), the host's time to start an operation, the work of FSDP around each gather and
reduction relative to a measured synchronisation (`handoff_share`), the share of its measured rate
that a collective reaches in a step (`step_share`), and that of experts' products with few and
uneven rows (`expert_share`). Copy the printed entry to `START` of planner_parameters.py, from which
fits of the published rows start.
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
from benchmarks.layout_cases import ENTRIES
from benchmarks.predicted import build_candidate, build_cpu_cluster
from shardwright.architecture import ModelShape, read_config
from shardwright.hardware import Cluster
from shardwright.hardware.measured_profile import read_profile
from shardwright.planner import Candidate, predict
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.planner.rates.efficiency import Efficiency

DOCS = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
FITTED = {
    "bytes_share": (0.3, 6.0),
    "host_seconds": (1e-7, 1e-4),
    "handoff_share": (0.05, 5.0),
    "step_share": (0.2, 1.0),
    "expert_share": (0.3, 1.0),
}
"""Fitted fields with the bounds of the search."""
FACTORS = (2.0, 1.3, 1.1, 1.03)
PENALTY = 0.003
"""Loss of moving a number by a factor of e from its start: numbers that few rows read stay."""


@dataclass(frozen=True)
class Row:
    """One of our runs: the planner's inputs and the measured seconds of a step."""

    group: str
    name: str
    shape: ModelShape
    candidate: Candidate
    cluster: Cluster
    seconds: float

    def error(self, efficiency: Efficiency) -> float:
        """Return the logarithm of predicted over measured."""
        return log(
            predict(self.shape, self.candidate, self.cluster, efficiency).time.step / self.seconds
        )


def load_rows(folder: Path = DOCS) -> list[Row]:
    """Load the rows of both benchmarks, without groups whose rates could not be measured."""
    rows = []
    entries = {str(entry): entry for entry in ENTRIES}
    groups: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("layouts-*.json")):
        groups |= json.loads(path.read_text()).get("groups", {})
    for name, group in groups.items():
        if group["profile"] is None:
            continue
        profile = read_profile(group["profile"])
        for row in group["rows"]:
            entry = entries[row["name"]]
            cluster = build_cpu_cluster(entry.layout.world_size, profile)
            rows.append(
                Row(name, row["name"], entry.shape, entry.candidate, cluster, row["seconds"])
            )
    return rows + _load_bench_rows(folder)


def _load_bench_rows(folder: Path) -> list[Row]:
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
        cluster = build_cpu_cluster(case.world_size, read_profile(comparison["profile"]))
        seconds = case.tokens_per_step / ours["tokens_per_second"]
        group = f"bench {case.precision}"
        rows.append(
            Row(
                group,
                f"bench {comparison['name']}",
                read_config(LLAMA_29M),
                build_candidate(case),
                cluster,
                seconds,
            )
        )
    return rows


def fit(rows: Sequence[Row], start: Efficiency) -> Efficiency:
    """Minimise the mean absolute logarithm of errors over the numbers of `FITTED`, moved one at a
    time.
    """

    def loss(efficiency: Efficiency) -> float:
        distance = sum(
            log(getattr(efficiency, name) / getattr(start, name)) ** 2 for name in FITTED
        )
        return mean(abs(row.error(efficiency)) for row in rows) + PENALTY * distance

    best = start
    lowest = loss(start)
    for factor in FACTORS:
        is_moving = True
        while is_moving:
            is_moving = False
            for name, (low, high) in FITTED.items():
                for step in (factor, 1 / factor):
                    value = min(high, max(low, getattr(best, name) * step))
                    candidate_efficiency = replace(best, **{name: value})
                    found = loss(candidate_efficiency)
                    if found < lowest - 1e-6:
                        best = candidate_efficiency
                        lowest = found
                        is_moving = True
    return best


def show(title: str, errors: dict[str, float]) -> None:
    """Print one line about all errors, as shares of the measured time."""
    shares = [exp(error) - 1 for error in errors.values()]
    worst = max(errors, key=lambda name: abs(errors[name]))
    print(
        f"{title:32} {len(shares):3} rows  {mean(map(abs, shares)):6.1%} off, "
        f"bias {mean(shares):+6.1%}, "
        f"within 20%: {mean(abs(share) <= 0.2 for share in shares):4.0%}, "
        f"worst {exp(errors[worst]) - 1:+.0%} ({worst})"
    )


def main() -> None:
    """Print errors before and after, each group predicted from the others, and the entry."""
    rows = load_rows()
    packaged = load_efficiencies().get_efficiency(rows[0].cluster.accelerator)
    show("the package's numbers", {row.name: row.error(packaged) for row in rows})
    best = fit(rows, packaged)
    show("fitted to all", {row.name: row.error(best) for row in rows})
    print(f"cpu: { {name: float(f'{getattr(best, name):.3g}') for name in FITTED} }")
    predicted_errors: dict[str, float] = {}
    for group in dict.fromkeys(row.group for row in rows):
        others = fit([row for row in rows if row.group != group], packaged)
        found = {row.name: row.error(others) for row in rows if row.group == group}
        show(f"{group}, fitted to the others", found)
        predicted_errors |= found
    show("each group from the others", predicted_errors)
    print(
        "\n".join(f"  {exp(error) - 1:+5.0%}  {name}" for name, error in predicted_errors.items())
    )


if __name__ == "__main__":
    main()
