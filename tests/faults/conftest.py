"""A small run, its result without faults, and a fixture that runs it with faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from shardwright.checkpoint.tensor_loading import find_newest_checkpoint, read_tensor
from shardwright.errors import ExitCode
from shardwright.telemetry.event_log import read_events, select_surviving_steps
from tests import forked
from tests.faults.worker import MARKS, PLAN

STEPS = 12
BATCH = 4
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps, saved every second one, in the background."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "corpus.txt").write_text(
        "".join(f"{a} + {b} = {a + b}\n" for a in range(40) for b in range(20))
    )
    sizes = {
        "hidden_size": 20,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "head_dim": 6,
        "max_position_embeddings": 32,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": 0.1}
    settings = {
        "seed": 3,
        "model": {"config": {"model_type": "llama"} | sizes | heads},
        "tokenizer": {"kind": "character"},
        "data": {"sources": str(folder / "corpus.txt"), "cache_dir": str(folder / "cache")},
        "precision": "fp32",
        "training": {
            "sequence_length": 16,
            "global_batch_size": BATCH,
            "gradient_accumulation_steps": 1,
            "max_steps": STEPS,
            "learning_rate": 1e-2,
        },
        "checkpoint": {"every_steps": 2, "keep_last": 3},
        "run": {"device": "cpu", "timeout_seconds": 300.0},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> Run:
    """`run(*words, faults=[...])`: train two ranks in `tmp_path/run`."""

    def train(
        *words: str, faults: list[dict[str, Any]] | None = None, ranks: int = 2
    ) -> subprocess.CompletedProcess[str]:
        marks = tmp_path / "marks"
        marks.mkdir(exist_ok=True)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            PLAN: json.dumps(faults or []),
            MARKS: str(marks),
        }
        command = [
            sys.executable,
            "-m",
            "tests.faults.run",
            str(recipe),
            "--run-dir",
            str(tmp_path / "run"),
            *words,
        ]
        command += ["--nproc", str(ranks)]
        return forked.run(
            command, capture_output=True, text=True, timeout=600, env=environment, cwd=ROOT
        )

    return train


def run_alone(recipe: Path, folder: Path, *words: str, is_forked: bool = False) -> None:
    """Train two ranks under ZeRO-3 without faults, in real processes as users start them unless
    `is_forked`; forked runs must end with the same result.
    """
    command = [
        sys.executable,
        "-m",
        "shardwright",
        "train",
        str(recipe),
        "--run-dir",
        str(folder),
        "--nproc",
        "2",
        *words,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run_command = forked.run if is_forked else subprocess.run
    done = run_command(
        command, capture_output=True, text=True, timeout=600, env=environment, check=False
    )
    assert done.returncode == ExitCode.DONE, done.stderr


@pytest.fixture(scope="session")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run without faults."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run_alone(recipe, folder)
    return folder


def read_final_state(folder: Path, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Read every tensor of the last checkpoint, weights and moments, gathered."""
    newest = find_newest_checkpoint(folder / "checkpoints")
    assert newest is not None
    assert newest.step == steps
    return {name: read_tensor(newest, name) for name in newest.manifest.tensors}


def assert_same_end(
    folder: Path,
    other: Path,
    marks: Path | None = None,
    *,
    steps: int = STEPS,
    num_readers: int = 1,
) -> None:
    """Assert that both runs end with the same bits and that the surviving steps used each sample
    exactly once.

    Args:
        marks: folder with the ledgers of `folder`'s ranks, which record the samples really used.
        num_readers: number of ranks that read each sample, several under tp and pp.
    """
    tensors = read_final_state(folder, steps)
    expected = read_final_state(other, steps)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    progress = [
        (step.step, step.samples_seen, step.loss)
        for step in select_surviving_steps(read_events(folder))
    ]
    assert [seen for _, seen, _ in progress] == [BATCH * step for step in range(1, steps + 1)]
    assert progress == [
        (step.step, step.samples_seen, step.loss)
        for step in select_surviving_steps(read_events(other))
    ]
    if marks is not None:
        used = [index for step in range(1, steps + 1) for index in list_used_samples(marks, step)]
        assert sorted(used) == sorted(num_readers * list(range(BATCH * steps)))


def list_used_samples(marks: Path, step: int) -> list[int]:
    """List the sample positions that the last attempt at a step used, over all ranks of its
    generation.
    """
    last: dict[str, list[dict[str, Any]]] = {}
    for ledger in sorted(marks.glob("ledger-*.jsonl")):
        attempts = [json.loads(line) for line in ledger.read_text().splitlines()]
        attempts_of_rank = {
            attempt["generation"]: attempt for attempt in attempts if attempt["step"] == step
        }
        for generation, attempt in attempts_of_rank.items():
            last.setdefault(generation, []).append(attempt)
    newest = max(
        last.values(), key=lambda attempts: max(attempt["at"] for attempt in attempts), default=[]
    )
    return [index for attempt in newest for index in attempt["used"]]
