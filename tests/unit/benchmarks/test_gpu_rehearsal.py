"""`benchmarks.gpu` without a GPU: exit codes, and figures in the results file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import isfinite, log
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gpu

ROOT = Path(__file__).resolve().parents[3]

QUICK = ["--device", "cpu", "--shapes", "tiny", "--rounds", "1", "--steps", "2", "--warmup", "1"]
TINY_VOCABULARY = 512


def run_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def read_cases(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "one-gpu.json").read_text())
    assert result["precision"] == "fp32"
    return {case["name"]: case for case in result["cases"]}


def check_figures(case: dict[str, Any], row: dict[str, Any]) -> None:
    assert "failed" not in row, row
    assert row["tokens_per_second"] > 0
    assert row["mfu"] == pytest.approx(
        row["tokens_per_second"] * case["flops_per_token"] / case["matmul_flops_per_second"]
    )
    assert 0 < row["mfu"] < 1
    assert row["peak_rss_bytes"] > 2**26
    assert row["first_loss"] == pytest.approx(log(TINY_VOCABULARY), rel=0.02)
    assert isfinite(row["last_loss"])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_case_runs_to_the_end(tmp_path: Path) -> None:
    completed = run_gpu(*QUICK, "--no-tests", "--time-limit", "600", "--out", str(tmp_path))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    cases = read_cases(tmp_path)
    assert cases.keys() == {
        "tiny-64",
        "tiny-64-compile",
        "tiny-64-recompute",
        "tiny-64-compile-recompute",
        "tiny-lora-64",
    }
    assert cases["tiny-lora-64"]["options"] == ["recompute", "LoRA of rank 4", "2 of 2 layers"]
    for case in cases.values():
        for row in case["contenders"].values():
            check_figures(case, row)


@pytest.mark.timeout(600)
def test_a_failing_contender_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace an installed requirement by one that raises when it is imported."""
    broken = tmp_path / "site" / "pydantic"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('broken on purpose')\n")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent), prepend=os.pathsep)
    ceiling = {"name": "CPU", "matmul_flops_per_second": 1e11, "copy_bytes_per_second": 1e10}
    monkeypatch.setattr(gpu, "measure_ceiling", lambda device, precision, shapes: ceiling)
    selection = [
        "--no-tests",
        "--case",
        "tiny-64",
        "--contender",
        "shardwright",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["gpu", *QUICK, *selection])
    assert gpu.main() == 1
    failure = read_cases(tmp_path)["tiny-64"]["contenders"]["shardwright"]["failed"]
    assert "broken on purpose" in failure
    assert failure in (tmp_path / "one-gpu.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "no-such-case"], "No case matches"),
        (["--shapes", "imaginary"], "invalid choice"),
    ],
)
def test_arguments_without_a_match_are_refused(arguments: list[str], message: str) -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 2
    assert message in completed.stderr
