"""What the planner says of a benchmark's case, to stand beside what was measured.

On a GPU of the catalogue from its data sheet and the fitted efficiencies; on CPU ranks, which no data sheet describes, from a
profile that `shardwright doctor --calibrate` measures a moment before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.case import Case
from shardwright.architecture import read_config
from shardwright.errors import InputError
from shardwright.hardware import Cluster
from shardwright.hardware.load import find_accelerator, parse_cluster
from shardwright.hardware.profile import load_profile
from shardwright.layout import Layout
from shardwright.planner import Candidate, predict
from shardwright.planner.achieved import load_efficiencies


def measured_cluster(world_size: int, folder: Path) -> Cluster | None:
    """CPU ranks with rates that are measured now; None, and a line, where they cannot be."""
    path = folder / "profile.json"
    command = [
        sys.executable,
        "-m",
        "shardwright",
        "doctor",
        "--nproc",
        str(world_size),
        "--device",
        "cpu",
        "--calibrate",
        str(path),
    ]
    done = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    if not path.exists():
        print(f"no prediction: the ranks' rates could not be measured: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return parse_cluster(f"{world_size}xCPU", profile=load_profile(path))


def catalogued_cluster(device_name: str) -> Cluster | None:
    """One GPU of the catalogue; None, and a line, where it has none of that name."""
    try:
        return parse_cluster(f"1x{find_accelerator(device_name).name}")
    except InputError as error:
        print(f"no prediction: {error}", file=sys.stderr)
        return None


def predicted_row(case: Case, cluster: Cluster, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """Tokens/s of all ranks, bytes of tensors on the fullest rank, and where the rates come from.

    Args:
        config: the model's; default that of the case's folder of weights.
    """
    if config is None:
        config = json.loads((Path(case.weights_dir) / "config.json").read_text())
    sharded = case.zero_stage > 0
    layout = Layout(
        dp_shard=case.world_size if sharded else 1,
        dp_replicate=1 if sharded else case.world_size,
        zero_stage=case.zero_stage,  # type: ignore[arg-type]
    )
    candidate = Candidate(
        layout,
        case.sequence_length,
        micro_batch_size=case.micro_batch_size,
        precision=case.precision,
        recompute=case.recompute,
        compile=case.compile,
    )
    found = predict(read_config(config), candidate, cluster, load_efficiencies().of(cluster.accelerator))
    return {
        "tokens_per_second": found.tokens_per_second,
        "memory_bytes": found.memory.live,
        "rates": "measured on these ranks" if cluster.profile is not None else cluster.accelerator.name,
    }


def told(row: dict[str, Any]) -> str:
    """A line for the terminal: predicted against measured."""
    guess = row["predicted"]
    error = row["tokens_per_second"] / guess["tokens_per_second"] - 1
    memory = f"{guess['memory_bytes'] / 2**20:.0f} MiB of tensors"
    return f"  predicted: {guess['tokens_per_second']:.0f} tok/s (measured is {error:+.0%}), {memory}"
