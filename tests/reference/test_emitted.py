"""DeepSpeed's engine and accelerate's launcher read the files of `plan --emit`, on two CPU
ranks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.config.recipe_loading import validate_recipe
from shardwright.convert.conversion import emit
from shardwright.convert.emitted_config import EmitRequest
from shardwright.plans import resolve_degrees

pytestmark = pytest.mark.long
HERE = Path(__file__).parent


def write_emitted_config(
    system: str, path: Path, layout: dict[str, Any], schedule: str = "cosine"
) -> Path:
    training = {
        "sequence_length": 8,
        "max_steps": 9,
        "learning_rate": 1e-2,
        "micro_batch_size": 2,
        "warmup_steps": 2,
    }
    training |= {"gradient_accumulation_steps": 3, "schedule": schedule, "max_grad_norm": 0.5}
    content = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"sources": "corpus.txt"},
        "training": training,
    }
    recipe = validate_recipe(
        content | {"layout": layout, "precision": "bf16", "run": {"device": "cpu"}}
    )
    path.write_text(emit(system, EmitRequest(recipe, *resolve_degrees(recipe, 2))).text)
    return path


def run_and_read_report(*words: str, **variables: str) -> dict[str, Any]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | variables
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=550,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if "REPORT" in line)
    report: dict[str, Any] = json.loads(line[line.index("{") :])
    return report


@pytest.mark.parametrize(("stage", "schedule"), [(0, "constant"), (1, "linear"), (3, "cosine")])
def test_deepspeeds_engine_reads_the_file_and_trains(
    tmp_path: Path, stage: int, schedule: str
) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed (the `bench` extra has it)")
    path = write_emitted_config("deepspeed", tmp_path / "ds.json", {"zero_stage": stage}, schedule)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    report = run_and_read_report(*launcher, str(HERE / "emitted_deepspeed.py"), str(path))
    assert (report["stage"], report["batch"], report["clipping"]) == (stage, [2, 3, 12], 0.5)
    assert report["dtype"] == "torch.bfloat16"
    assert report["steps"] == 3
    assert (
        report["scheduler"]
        == {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}[schedule]
    )
    assert max(report["rates"]) <= 1e-2 * (1 + 1e-9)


def test_accelerates_launcher_reads_the_file(tmp_path: Path) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed (the `bench` extra has it)")
    path = write_emitted_config("accelerate", tmp_path / "accelerate.yaml", {"zero_stage": 0})
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(path)]
    assert "set ACCELERATE_USE_CPU=true" in path.read_text()
    report = run_and_read_report(
        *launcher, str(HERE / "emitted_accelerate.py"), ACCELERATE_USE_CPU="true"
    )
    assert report == {
        "kind": "DistributedType.MULTI_CPU",
        "ranks": 2,
        "precision": "bf16",
        "wrapped": "DistributedDataParallel",
        "gradient": 0.5,
    }
