"""What the planner says of a benchmark's case, to stand beside what was measured.

On a GPU of the catalogue from its data sheet and the fitted efficiencies; on CPU ranks, which no
data sheet describes, from the rates that the probe measures on them a moment before: the products,
rows of attention and messages that the planner asks for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.case import Case
from shardwright.architecture import ModelShape, read_config
from shardwright.errors import InputError
from shardwright.hardware import Cluster, MeasuredProfile
from shardwright.hardware.catalog_loading import find_accelerator, parse_cluster
from shardwright.layout import Layout
from shardwright.planner import Candidate, predict
from shardwright.planner.calibration import load_efficiencies


def measured_profile(
    runs: Sequence[tuple[ModelShape, Candidate]], layout: Layout
) -> MeasuredProfile | None:
    """What CPU ranks achieve now of all that the planner asks about `runs`; None, and a line, where
    they cannot be measured.
    """
    from shardwright.doctor.cluster_profile import build_profile, build_request_for_runs
    from shardwright.doctor.diagnosis import examine

    order = build_request_for_runs(runs, layout, device="cpu")
    diagnosis = examine(order, layout.world_size)
    assert diagnosis is not None  # only ranks of a launcher hear nothing
    try:
        return build_profile(diagnosis, order)
    except InputError as error:
        failed = [
            f"{finding.name}: {finding.value}"
            for finding in diagnosis.findings
            if finding.verdict == "fail"
        ]
        print(f"no prediction: {error}; {'; '.join(failed)}", file=sys.stderr)
        return None


def ranks_of(world_size: int, profile: MeasuredProfile | None) -> Cluster:
    """CPU ranks of this machine, or those of the catalogue's CPU."""
    return parse_cluster(f"{world_size}xCPU", profile=profile)


def catalogued_cluster(device_name: str) -> Cluster | None:
    """One GPU of the catalogue; None, and a line, where it has none of that name."""
    try:
        return parse_cluster(f"1x{find_accelerator(device_name).name}")
    except InputError as error:
        print(f"no prediction: {error}", file=sys.stderr)
        return None


def candidate_of(case: Case) -> Candidate:
    """The planner's word for a case."""
    sharded = case.zero_stage > 0
    layout = Layout(
        dp_shard=case.world_size if sharded else 1,
        dp_replicate=1 if sharded else case.world_size,
        zero_stage=case.zero_stage,  # type: ignore[arg-type]
    )
    return Candidate(
        layout,
        case.sequence_length,
        micro_batch_size=case.micro_batch_size,
        precision=case.precision,
        recompute=case.recompute,
        compile=case.compile,
    )


def predicted_step(shape: ModelShape, candidate: Candidate, cluster: Cluster) -> dict[str, Any]:
    """Seconds of a step in all and by part, tokens/s of all ranks, bytes on the fullest rank: of
    tensors, and what its allocator reserves; and where the rates come from."""
    found = predict(
        shape, candidate, cluster, load_efficiencies().get_efficiency(cluster.accelerator)
    )
    return {
        "step_seconds": found.time.step,
        "tokens_per_second": found.tokens_per_second,
        "parts": {part: seconds for part, seconds in asdict(found.time).items() if seconds},
        "memory_bytes": found.memory.live,
        "reserved_bytes": found.memory.reserved,
        "rates": "measured on these ranks"
        if cluster.profile is not None
        else cluster.accelerator.name,
    }


def predicted_row(
    case: Case, cluster: Cluster, config: dict[str, Any] | None = None
) -> dict[str, Any]:
    """`predicted_step` of a case.

    Args:
        config: the model's; default that of the case's folder of weights.
    """
    if config is None:
        config = json.loads((Path(case.weights_dir) / "config.json").read_text())
    return predicted_step(read_config(config), candidate_of(case), cluster)


def told(row: dict[str, Any]) -> str:
    """A line for the terminal: predicted against measured."""
    guess = row["predicted"]
    error = row["tokens_per_second"] / guess["tokens_per_second"] - 1
    memory = f"{guess['memory_bytes'] / 2**20:.0f} MiB of tensors"
    if measured := row.get("peak_allocated_bytes"):
        memory += f" (measured is {measured / guess['memory_bytes'] - 1:+.1%})"
    return (
        f"  predicted: {guess['tokens_per_second']:.0f} tok/s (measured is {error:+.0%}), {memory}"
    )
