"""The goals of `make gpu` on the test device, with tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import gpu_parts
from benchmarks.gpu_functions import CASES, LIGER_CASE

from tests.hostcuda.library import find_obstacle

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(1800)  # ten minutes on a busy machine of two cores
def test_the_goals_run_to_their_end_in_time(tmp_path: Path) -> None:
    obstacle = find_obstacle()
    if obstacle is not None:
        pytest.skip(obstacle)
    options = ["--goals", "--seconds", "1500", "--shapes", "tiny", "--wheels", str(tmp_path / "no")]
    completed = subprocess.run(
        ["make", "gpu", f"PYTHON={sys.executable}", f"ARGS={' '.join(options)}"],
        cwd=ROOT,
        env=os.environ
        | {
            "OUT": str(tmp_path),
            "PYTHONPATH": str(ROOT / "tests/hostcuda/every_process"),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
            "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        },
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stdout[-8000:] + completed.stderr[-4000:]
    steps = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    goals = gpu_parts.list_steps(gpu_parts.parse_arguments(options))
    assert [step["name"] for step in steps] == [step.name for step in goals]
    assert {step["status"] for step in steps} == {"passed"}
    results = {step["name"]: step["result"] for step in steps}
    rows = results["low precision all layers"]["steps"]
    assert rows.keys() >= {f"{recipe}, compiled, all layers" for recipe in ("bf16", "tensorwise")}
    for row in rows.values():
        assert "failed" not in row, row
        assert row["update_kernels"]
    for case in results["speed tiny-64-compile"]["cases"]:
        assert case["contenders"]["shardwright"]["tokens_per_second"] > 0
    measured = results["functions"]["functions"].keys()
    assert measured | {LIGER_CASE} == CASES.keys()
    profiled = results["profile tiny-64-compile"]
    kinds = {kind["name"] for kind in profiled["summary"]["kinds"]}
    assert kinds >= {"products", "attention", "copies", "gradient norm", "update"}
    assert profiled["kernels"]
    assert "## 8-bit and 4-bit products" in (tmp_path / "gpu.md").read_text()
