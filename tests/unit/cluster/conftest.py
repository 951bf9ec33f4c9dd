"""A recipe to launch, and the `launch` verb without an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.cli.main import run
from shardwright.errors import ExitCode


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    document: dict[str, Any] = {
        "name": "small",
        "model": {"config": {"model_type": "llama"}},
        "data": {"sources": "corpus.txt"},
        "training": {
            "sequence_length": 8,
            "max_steps": 3,
            "learning_rate": 1e-3,
            "micro_batch_size": 1,
        },
        "elastic": {"max_restarts": 2},
    }
    path = tmp_path / "a recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def run_launch(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["launch", *words]) == ExitCode.DONE, capsys.readouterr().err
    return capsys.readouterr().out
