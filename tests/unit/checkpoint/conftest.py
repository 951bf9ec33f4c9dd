"""A small checkpoint of one process, saved once and copied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from shardwright.checkpoint.tensor_saving import save_checkpoint
from tests.unit.checkpoint.sample_values import make_run_values


def make_tensors() -> dict[str, torch.Tensor]:
    return {
        "model.embedding": torch.arange(60, dtype=torch.float32).view(12, 5),
        "model.norm": torch.ones(5, dtype=torch.bfloat16),
        "optimizer.step": torch.tensor(3),
    }


@pytest.fixture(scope="session")
def prepared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 10, 20 and 30; 10 is the best."""
    root = tmp_path_factory.mktemp("prepared") / "checkpoints"
    for step in (10, 20, 30):
        save_checkpoint(
            root, step, make_tensors(), make_run_values(step) | {"note": "ü"}, is_best=step == 10
        )
    return root


@pytest.fixture
def root(prepared_root: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(prepared_root, tmp_path / "checkpoints"))
