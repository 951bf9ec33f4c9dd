"""CPU seconds of planning: one search per model and cluster, and the whole command with its
imports, on one core.

User time of this process (and of the command's), which other work on the machine lengthens less
than it does the clock's time.

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
from shardwright.planner.calibration import load_efficiencies
from shardwright.planner.model_costs import ModelFacts
from shardwright.planner.predictor import Predictor
from shardwright.planner.problem import build_problem, build_template, read_planning_shape
from shardwright.planner.search import search_layouts

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
    given = parser.parse_args()
    found = [measure(*case) for case in CASES]
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for case in found:
        print(
            f"{case['recipe']:12} {case['gpus']:6} GPUs  search {case['search_seconds']:5.2f} s  "
            f"command {case['command_seconds']:5.2f} s  {case['predicted']:4} predicted  {case['chosen']}"
        )


def measure(recipe: str, cluster: str, nodes: int) -> dict[str, object]:
    """CPU seconds of one case; nothing is known from a case before, every search having its own
    facts.
    """
    path = RECIPES / f"{recipe}.yaml"
    checked = load_recipe(path)
    where = parse_cluster(cluster, num_nodes=nodes)
    predictor = Predictor(
        ModelFacts(read_planning_shape(checked)),
        where,
        load_efficiencies().get_efficiency(where.accelerator),
    )
    before = _used(resource.RUSAGE_SELF)
    found = search_layouts(
        predictor, build_problem(checked, build_template(checked), where.num_gpus)
    )
    searched = _used(resource.RUSAGE_SELF) - before
    before = _used(resource.RUSAGE_CHILDREN)
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
        "gpus": where.num_gpus,
        "search_seconds": round(searched, 3),
        "command_seconds": round(_used(resource.RUSAGE_CHILDREN) - before, 3),
        "predicted": found.num_predicted,
        "chosen": "" if found.chosen is None else found.chosen.candidate.describe(),
    }


def _used(whose: int) -> float:
    return resource.getrusage(whose).ru_utime


if __name__ == "__main__":
    main()
