"""Training with offloading under a hard memory limit, and the planner's prediction of it.

    python -m benchmarks.offload_run recipes/qwen2.5-1.5b-on-disk.yaml --run-dir /scratch/run \
        --limit-gib 12 --profile here.json --out docs/benchmarks/offload-run.json

The limit holds for the process's data (`RLIMIT_DATA`) and, if `--cgroup` names a memory cgroup
that exists, also for all its memory with the page cache. The profile is of `doctor --calibrate`
with the same recipe.

    python -m benchmarks.offload_run recipes/qwen2.5-1.5b-on-disk.yaml --run-dir /scratch/twin \
        --twin-layers 4

trains a model of fewer layers for three steps twice, with offloading and without, and compares the
bytes of their checkpoints, which have weights and moments.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.conditions import format_rows, read_conditions

_STEP_FIELDS = (
    "step", "loss", "step_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds",
    "offload_read_bytes", "offload_written_bytes", "offload_waiting_seconds",
    "parameter_read_bytes", "parameter_written_bytes", "parameter_waiting_seconds",
)  # fmt: skip


def main() -> None:
    """Train within the limit, and write what each step took next to the prediction."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.offload_run", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--run-dir", type=Path, required=True, help="run folder on the disk to use")
    parser.add_argument("--limit-gib", type=float, default=12.0)
    parser.add_argument("--twin-layers", type=int, help="layers of a twin to compare instead")
    parser.add_argument("--cgroup", type=Path, help="folder of a memory cgroup to limit and use")
    parser.add_argument("--profile", type=Path, help="rates that doctor measured, for a prediction")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    if options.twin_layers is not None:
        differing = compare_with_resident(options.recipe, options.run_dir, options.twin_layers)
        print("equal" if not differing else f"differ: {differing}")
        return
    limit_bytes = int(options.limit_gib * 2**30)
    changes = [item for change in options.changes for item in ("--set", change)]
    command = ["train", str(options.recipe), "--run-dir", str(options.run_dir), *changes]
    memory = train_within_limit(command, limit_bytes, options.cgroup)
    result = {
        "conditions": read_conditions(),
        "changes": options.changes,
        "limit_bytes": limit_bytes,
        "memory": memory,
        "predicted": predict(options.recipe, changes, options.profile),
        "steps": read_steps(options.run_dir),
    }
    text = format_rows(result)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


def compare_with_resident(recipe: Path, folder: Path, num_layers: int) -> list[str]:
    """Train a twin offloaded and resident; list the checkpoint files that differ."""
    changes = [f"model.config.num_hidden_layers={num_layers}", "training.max_steps=3"]
    resident = ["offload.optimizer=none", "offload.parameters=none"]
    for name, more in (("offloaded", []), ("resident", resident)):
        command = [sys.executable, "-m", "shardwright", "train", str(recipe)]
        command += ["--run-dir", str(folder / name)]
        command += [item for change in changes + more for item in ("--set", change)]
        subprocess.run(command, check=True)
    shards = {
        name: sorted((folder / name).glob("checkpoints/step-*/shard-*.safetensors"))
        for name in ("offloaded", "resident")
    }
    assert shards["resident"]
    assert [path.name for path in shards["resident"]] == [path.name for path in shards["offloaded"]]
    return [
        path.name
        for path, other in zip(shards["resident"], shards["offloaded"], strict=True)
        if not filecmp.cmp(path, other, shallow=False)
    ]


def train_within_limit(
    arguments: list[str], limit_bytes: int, cgroup: Path | None
) -> dict[str, Any]:
    """Run the command line within a limit; return resident bytes, before steps and during them."""
    if cgroup is not None:
        _write_limit(cgroup, limit_bytes)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
        if cgroup is not None:
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))

    process = subprocess.Popen([sys.executable, "-m", "shardwright", *arguments], preexec_fn=limit)
    status = Path(f"/proc/{process.pid}/status")
    samples: list[int] = []
    peak_bytes = 0
    while process.poll() is None:
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        if "VmHWM" in fields:
            samples.append(int(fields["VmRSS"].split()[0]) * 1024)
            peak_bytes = int(fields["VmHWM"].split()[0]) * 1024
        time.sleep(1.0)
    if process.returncode:
        raise SystemExit(f"training ended with code {process.returncode}")
    result = {
        "peak_resident_bytes": peak_bytes,
        "median_resident_bytes": sorted(samples)[len(samples) // 2],
        "seconds": len(samples),
    }
    if cgroup is not None:
        result["cgroup_peak_bytes"] = _read_cgroup_peak(cgroup)
    return result


def _write_limit(cgroup: Path, limit_bytes: int) -> None:
    name = "memory.limit_in_bytes" if _is_version_1(cgroup) else "memory.max"
    (cgroup / name).write_text(str(limit_bytes))


def _read_cgroup_peak(cgroup: Path) -> int:
    name = "memory.max_usage_in_bytes" if _is_version_1(cgroup) else "memory.peak"
    return int((cgroup / name).read_text())


def _is_version_1(cgroup: Path) -> bool:
    return (cgroup / "memory.limit_in_bytes").exists()


def predict(recipe: Path, changes: list[str], profile: Path | None) -> dict[str, Any] | None:
    """Return the planner's memory and time of the recipe's layout by the measured rates."""
    if profile is None:
        return None
    command = [sys.executable, "-m", "shardwright", "plan", str(recipe), "--json", *changes]
    done = subprocess.run(
        [*command, "--cluster", "1xCPU", "--profile", str(profile)],
        capture_output=True,
        text=True,
        check=True,
    )
    planned = json.loads(done.stdout)["as_the_recipe_has_it"]
    return {key: planned[key] for key in ("memory_bytes", "step_seconds")}


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return what the run logged of each step."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [
        {key: event[key] for key in _STEP_FIELDS if key in event}
        for event in events
        if event.get("kind") == "step"
    ]


if __name__ == "__main__":
    main()
