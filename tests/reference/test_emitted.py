"""What `plan --emit` writes, given to those it is for: DeepSpeed's engine and accelerate's
launcher, on two CPU ranks.
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
from shardwright.convert.emit import emit
from shardwright.convert.emitted_config import EmitRequest
from shardwright.plan import resolve_plan

pytestmark = pytest.mark.long
HERE = Path(__file__).parent


def written(system: str, path: Path, layout: dict[str, Any], schedule: str = "cosine") -> Path:
    training = {
        "sequence_length": 8,
        "max_steps": 9,
        "learning_rate": 1e-2,
        "micro_batch_size": 2,
        "warmup_steps": 2,
    }
    training |= {"gradient_accumulation_steps": 3, "schedule": schedule, "max_grad_norm": 0.5}
    told = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"sources": "corpus.txt"},
        "training": training,
    }
    recipe = validate_recipe(
        told | {"layout": layout, "precision": "bf16", "run": {"device": "cpu"}}
    )
    path.write_text(emit(system, EmitRequest(recipe, resolve_plan(recipe, 2))).text)
    return path


def told_by(*words: str, **variables: str) -> dict[str, Any]:
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
    line = next(line for line in done.stdout.splitlines() if "TOLD" in line)
    told: dict[str, Any] = json.loads(line[line.index("{") :])
    return told


@pytest.mark.parametrize(("stage", "schedule"), [(0, "constant"), (1, "linear"), (3, "cosine")])
def test_deepspeeds_engine_takes_it_and_trains(tmp_path: Path, stage: int, schedule: str) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed (the `bench` extra has it)")
    path = written("deepspeed", tmp_path / "ds.json", {"zero_stage": stage}, schedule)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    told = told_by(*launcher, str(HERE / "emitted_deepspeed.py"), str(path))
    assert (told["stage"], told["batch"], told["clipping"]) == (stage, [2, 3, 12], 0.5)
    assert told["dtype"] == "torch.bfloat16"
    assert told["steps"] == 3
    assert (
        told["scheduler"]
        == {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}[schedule]
    )
    assert max(told["rates"]) <= 1e-2 * (1 + 1e-9)


def test_accelerates_launcher_takes_it(tmp_path: Path) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed (the `bench` extra has it)")
    path = written("accelerate", tmp_path / "accelerate.yaml", {"zero_stage": 0})
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(path)]
    assert "set ACCELERATE_USE_CPU=true" in path.read_text()
    told = told_by(*launcher, str(HERE / "emitted_accelerate.py"), ACCELERATE_USE_CPU="true")
    assert told == {
        "kind": "DistributedType.MULTI_CPU",
        "ranks": 2,
        "precision": "bf16",
        "wrapped": "DistributedDataParallel",
        "gradient": 0.5,
    }
