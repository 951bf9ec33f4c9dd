"""CPU seconds of planning: one search per model and cluster, and the whole command with its
imports, on one core.

It measures user time of this process and of the command, because other work on the machine
increases it less than the elapsed time.

    python benchmarks/plan.py [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

from shardwright.config import load_recipe
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.planner.memory_settings import search_run_layouts
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.predictor import Predictor
from shardwright.planner.problem import (
    build_problem,
    build_template,
    read_planning_shape,
    resolve_compilation_on,
)
from shardwright.planner.rates.calibration import load_efficiencies

RECIPES = Path(__file__).parents[1] / "recipes"
CASES = (
    ("llama2-13b", "8xA100-80GB", 1),
    ("llama3-70b", "8xH100-80GB", 64),
    ("llama3-405b", "8xH100-80GB", 2048),
    ("deepseek-v3", "8xH100-80GB", 256),
)


def main() -> None:
    """Print a line per case, or all of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [measure(*case) for case in CASES]
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for case in results:
        print(
            f"{case['recipe']:12} {case['gpus']:6} GPUs  search {case['search_seconds']:5.2f} s  "
            f"command {case['command_seconds']:5.2f} s  {case['predicted']:4} predicted  "
            f"{case['chosen']}"
        )


def measure(recipe: str, cluster: str, nodes: int) -> dict[str, object]:
    """Measure the CPU seconds of one case. Every search computes its own facts."""
    path = RECIPES / f"{recipe}.yaml"
    parsed = load_recipe(path)
    cluster_spec = parse_cluster(cluster, num_nodes=nodes)
    predictor = Predictor(
        ModelFacts(read_planning_shape(parsed)),
        cluster_spec,
        load_efficiencies().get_efficiency(cluster_spec.accelerator),
    )
    parsed = resolve_compilation_on(parsed, cluster_spec.accelerator)
    start_seconds = _read_user_seconds(resource.RUSAGE_SELF)
    result = search_run_layouts(
        predictor, build_problem(parsed, build_template(parsed), cluster_spec.num_gpus)
    )
    search_seconds = _read_user_seconds(resource.RUSAGE_SELF) - start_seconds
    start_seconds = _read_user_seconds(resource.RUSAGE_CHILDREN)
    command = [
        sys.executable,
        "-m",
        "shardwright",
        "plan",
        str(path),
        "--cluster",
        cluster,
        "--nodes",
        str(nodes),
        "--json",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {
        "recipe": recipe,
        "gpus": cluster_spec.num_gpus,
        "search_seconds": round(search_seconds, 3),
        "command_seconds": round(_read_user_seconds(resource.RUSAGE_CHILDREN) - start_seconds, 3),
        "predicted": result.num_predicted,
        "chosen": "" if result.chosen is None else result.chosen.candidate.describe(),
    }


def _read_user_seconds(process_group: int) -> float:
    return resource.getrusage(process_group).ru_utime


if __name__ == "__main__":
    main()
