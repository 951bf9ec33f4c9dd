"""Step time of layouts over a network, compared with predictions from rates that `doctor` measured
on the same network.

    shardwright doctor --recipe RECIPE --layout dp_shard=2,zero_stage=3 --calibrate rates.json
    python -m benchmarks.network_layouts --profile rates.json --network '1 Gbit/s' --out FILE
    python -m benchmarks.network_layouts --out FILE --predict      measure nothing: predict the rows
                                                                   of the file again

Both commands run once per rank, under torchrun or with its variables set by hand, on two machines
with one rank each (or two network namespaces of one machine). `--recipe` writes the recipe that
`doctor` reads. Every rank takes part in all layouts; rank 0 chooses what `plan` recommends, adds it
to the layouts, and writes the file: one group per network, replaced if it is measured again. The
layouts are timed in turn, round by round; a step takes as long as its slowest rank, and the fastest
round counts, as for the rates.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, cast

import torch.distributed as dist
import yaml

from benchmarks.conditions import format_rows, read_conditions
from benchmarks.layouts import build_layout, run_step
from shardwright import plan
from shardwright.architecture import ModelShape, read_config
from shardwright.config.layout import LayoutSection
from shardwright.config.recipe_loading import parse_layout
from shardwright.config.training import PrecisionSection
from shardwright.hardware import Cluster
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.hardware.measured_profile import read_profile
from shardwright.layout import Layout, resolve_layout
from shardwright.planner import Candidate, predict
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.plans import BatchPlan, Plan, build_plan

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
TOKENS = 128
GLOBAL_BATCH = 8
NUM_RANKS = 2
CASES = (
    ("dp_replicate=2", 1),
    ("dp_replicate=2", 4),
    ("dp_shard=2,zero_stage=1", 4),
    ("dp_shard=2,zero_stage=2", 2),
    ("dp_shard=2,zero_stage=3", 2),
    ("dp_shard=2,zero_stage=3", 4),
    ("tp=2", 8),
    ("tp=2,sequence_parallel=false", 8),
    ("pp=2,schedule=1f1b", 1),
    ("pp=2,schedule=1f1b", 2),
    ("pp=2,schedule=zb_h1", 1),
    ("pp=2,schedule=zbv", 1),
    ("cp=2,cp_method=ring", 8),
    ("cp=2,cp_method=ulysses", 8),
)
"""Layouts and their micro-batch sizes."""


PAGE = f"""\
# Layouts over slow links

Two CPU ranks of one thread, on one core each, in network namespaces whose link has a rate and a
delay in each direction. A Llama of {CONFIG["num_hidden_layers"]} layers and width
{CONFIG["hidden_size"]} in fp32, {GLOBAL_BATCH} rows of {TOKENS} tokens a step. Rates:
`doctor --calibrate` on the same network, right before, with one layout (ZeRO-3). Measured: the
fastest of a few steps, as for the rates. Ranks have real-time priority (`chrt -f 10`): other
processes, however low their priority, would take a core from a rank that waits
([why](../decisions/0185-idle-cores.md)). `python -m benchmarks.network_layouts` makes this page
([why predictions have this form](../decisions/0142-slow-links.md)).

{{tables}}
"""


@dataclass(frozen=True)
class NetworkEntry:
    """One layout with its split of the batch."""

    layout: Layout
    micro_batch_size: int
    precision: str = "fp32"
    recompute: str = "none"

    @property
    def shape(self) -> ModelShape:
        """Shape of the model."""
        return read_config(CONFIG)

    @property
    def batch(self) -> BatchPlan:
        """Split of the global batch."""
        data_ranks = self.layout.data_ranks
        accumulation = GLOBAL_BATCH // (self.micro_batch_size * data_ranks)
        return BatchPlan(TOKENS, self.micro_batch_size, accumulation, data_ranks)

    @property
    def plan(self) -> Plan:
        """Plan for the engine."""
        return build_plan(
            self.shape,
            self.layout,
            self.batch,
            PrecisionSection(kind=cast(Any, self.precision)),
            cast(Any, self.recompute),
        )

    @property
    def candidate(self) -> Candidate:
        """Candidate for the planner."""
        return Candidate(
            self.layout,
            TOKENS,
            micro_batch_size=self.micro_batch_size,
            gradient_accumulation_steps=self.batch.gradient_accumulation_steps,
            precision=cast(Any, self.precision),
            recompute=cast(Any, self.recompute),
            loss_chunk_tokens=TOKENS,
        )

    def __str__(self) -> str:
        suffix = "" if self.recompute == "none" else f", recompute {self.recompute}"
        return f"{self.candidate.describe()}, micro batch {self.micro_batch_size}{suffix}"


def list_entries() -> list[NetworkEntry]:
    """List the layouts that are measured on every network."""
    return [
        NetworkEntry(resolve_layout(LayoutSection(**parse_layout(text)), NUM_RANKS), size)
        for text, size in CASES
    ]


def build_recipe() -> dict[str, Any]:
    """Build the recipe that `doctor` and `plan` read."""
    return {
        "model": {"config": CONFIG, "loss_chunk_tokens": TOKENS},
        "data": {"sources": "not-read.jsonl"},
        "precision": "fp32",
        "training": {
            "sequence_length": TOKENS,
            "global_batch_size": GLOBAL_BATCH,
            "micro_batch_size": 2,
            "max_steps": 1,
            "learning_rate": 1e-4,
        },
        "run": {"device": "cpu"},
    }


def build_cluster(profile: dict[str, Any]) -> Cluster:
    """Build a cluster of two nodes with one rank each, with measured rates."""
    return parse_cluster("1xCPU", num_nodes=NUM_RANKS, profile=read_profile(profile))


def choose_layout(cluster: Cluster) -> NetworkEntry:
    """Return the layout that `plan` recommends."""
    chosen = plan(build_recipe(), cluster).chosen
    assert chosen is not None, "no layout fits"
    candidate = chosen.candidate
    return NetworkEntry(candidate.layout, candidate.micro_batch_size, recompute=candidate.recompute)


def measure(
    entries: list[NetworkEntry], num_rounds: int, max_seconds: float
) -> dict[NetworkEntry, list[float]]:
    """Return seconds of the steps of each layout, equal on all ranks; at least two of each."""
    for entry in entries:
        build_layout(cast(Any, entry))
    steps: dict[NetworkEntry, list[float]] = {entry: [] for entry in entries}
    started = time.monotonic()
    for number in range(num_rounds):
        for entry in entries:
            times: list[Any] = [None] * NUM_RANKS
            step = run_step(cast(Any, entry))["seconds"]
            dist.all_gather_object(times, (step, time.monotonic() - started))
            steps[entry].append(max(pair[0] for pair in times))
        if number and max(pair[1] for pair in times) > max_seconds:
            break
    return steps


def read_entry(row: dict[str, Any]) -> NetworkEntry:
    """Return the layout of a row of the file."""
    return NetworkEntry(
        Layout(**row["degrees"]), row["micro_batch_size"], recompute=row["recompute"]
    )


def predict_rows(group: dict[str, Any]) -> None:
    """Add the planner's predicted seconds, and their parts, to the rows of a network."""
    cluster = build_cluster(group["profile"])
    efficiency = load_efficiencies().get_efficiency(cluster.accelerator)
    for row in group["rows"]:
        entry = read_entry(row)
        row["predicted_seconds"] = predict(
            entry.shape, entry.candidate, cluster, efficiency
        ).time.step


def describe(network: str, group: dict[str, Any]) -> str:
    """Return a table of a network's rows, and the errors and the pick in words."""
    rows = sorted(group["rows"], key=lambda row: float(row["seconds"]))
    lines = [f"| {network} | measured | predicted | error |", "|---|---:|---:|---:|"]
    summary = summarise(group)
    for row in rows:
        error = row["predicted_seconds"] / row["seconds"] - 1
        lines.append(
            f"| {read_entry(row)}{' (planned)' * row['is_planned']} | {row['seconds']:.3f} s | "
            f"{row['predicted_seconds']:.3f} s | {error:+.0%} |"
        )
    conditions = group["conditions"]
    load = ", ".join(f"{number:.1f}" for number in conditions["load_average"])
    lines.append(
        f"\nMean error {summary['mean_error']:.1%}, largest {summary['largest_error']:.0%}; "
        f"{summary['num_ordered']} of {summary['num_pairs']} pairs in the measured order. The\n"
        f"layout that `plan` recommends takes {summary['regret']:.1%} longer than the fastest "
        f"measured one.\nMeasured {conditions['date']}, load average before and after {load}."
    )
    return "\n".join(lines)


def summarise(group: dict[str, Any]) -> dict[str, float]:
    """Return the errors of a network's rows, the number of pairs in the measured order, and how
    much longer the recommended layout takes than the fastest measured one, as a share."""
    rows = sorted(group["rows"], key=lambda row: float(row["seconds"]))
    errors = [abs(row["predicted_seconds"] / row["seconds"] - 1) for row in rows]
    planned = next(row for row in rows if row["is_planned"])
    pairs = [(a, b) for index, a in enumerate(rows) for b in rows[index + 1 :]]
    return {
        "mean_error": mean(errors),
        "largest_error": max(errors),
        "num_ordered": sum(a["predicted_seconds"] <= b["predicted_seconds"] for a, b in pairs),
        "num_pairs": len(pairs),
        "regret": planned["seconds"] / rows[0]["seconds"] - 1,
    }


def main() -> None:
    """Measure one network, or predict the rows of all; print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network_layouts", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--recipe", type=Path, help="write doctor's recipe to this file")
    parser.add_argument("--profile", type=Path, help="rates that doctor measured on this network")
    parser.add_argument("--network", help="name of the network in the file")
    parser.add_argument("--out", type=Path, help="JSON file of all networks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of the rounds")
    parser.add_argument("--predict", action="store_true")
    options = parser.parse_args()
    if options.recipe is not None:
        options.recipe.write_text(yaml.safe_dump(build_recipe()), encoding="utf-8")
    if options.out is None:
        return
    content: dict[str, Any] = {"networks": {}}
    if options.out.exists():
        content = json.loads(options.out.read_text(encoding="utf-8"))
    if not options.predict:
        group = measure_network(options.profile, options.rounds, options.seconds)
        content["networks"][options.network] = group
        if dist.get_rank() != 0:
            return
    tables = []
    for network, group in content["networks"].items():
        predict_rows(group)
        tables.append(describe(network, group))
    page = PAGE.format(tables="\n\n".join(tables))
    print(page)
    options.out.write_text(format_rows(content) + "\n", encoding="utf-8")
    options.out.with_suffix(".md").write_text(page, encoding="utf-8")


def measure_network(profile_file: Path, num_rounds: int, max_seconds: float) -> dict[str, Any]:
    """Measure all layouts over the network of this process group."""
    dist.init_process_group("gloo")
    profile = json.loads(profile_file.read_text(encoding="utf-8"))
    choice: list[Any] = [None]
    if dist.get_rank() == 0:
        choice = [choose_layout(build_cluster(profile))]
    dist.broadcast_object_list(choice)
    load = os.getloadavg()[0]
    entries = list(dict.fromkeys([*list_entries(), choice[0]]))
    measured = measure(entries, num_rounds, max_seconds)
    dist.barrier()
    return {
        "conditions": read_conditions()
        | {"rounds": num_rounds, "load_average": [load, os.getloadavg()[0]]},
        "profile": profile,
        "rows": [
            {
                "name": str(entry),
                "degrees": asdict(entry.layout),
                "micro_batch_size": entry.micro_batch_size,
                "recompute": entry.recompute,
                "seconds": min(steps),
                "steps": [round(step, 4) for step in steps],
                "is_planned": entry == choice[0],
            }
            for entry, steps in measured.items()
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
