"""Training on streamed sources: a resumed run ends with the same weights."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from shardwright.config import Recipe
from shardwright.config.recipe_loading import validate_recipe
from shardwright.errors import CheckpointError
from shardwright.training.run import train
from tests.unit.data.chat_tokenizers import chat_folder
from tests.unit.data.recipes import story, write_json_lines

SCHEDULE = [{"step": 2, "weights": [1, 3]}, {"step": 5, "weights": [0, 1]}]


def build_streamed_recipe(folder: Path, run: str, cache: str, schedule: Any = SCHEDULE) -> Recipe:
    sources = [{"path": str(folder / f"source{n}"), "weight": 1} for n in range(2)]
    return validate_recipe(
        {
            "model": {
                "config": {
                    "model_type": "llama",
                    "hidden_size": 16,
                    "intermediate_size": 32,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "max_position_embeddings": 64,
                }
            },
            "tokenizer": {"path": str(folder / "tokenizer")},
            "data": {
                "sources": sources,
                "weight_schedule": schedule,
                "weight_transition": "linear",
                "streaming": {"cache_bytes": 40_000, "window_files": 2},
                "cache_dir": str(folder / cache),
            },
            "precision": "fp32",
            "training": {
                "sequence_length": 32,
                "micro_batch_size": 4,
                "max_steps": 7,
                "learning_rate": 1e-3,
            },
            "checkpoint": {"every_steps": 3, "keep_last": 9},
            "run": {"dir": str(folder / run)},
        }
    )


def hash_weights(folder: Path, run: str) -> str:
    path = folder / run / "checkpoints" / "step-00000007" / "shard-00000.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_resumed_run_on_streamed_sources_ends_with_the_same_weights(tmp_path: Path) -> None:
    """It resumes from step 3 with an empty cache, in the middle of a changing mixture."""
    chat_folder(tmp_path / "tokenizer")
    for source in range(2):
        for file in range(4):
            texts = [story(10_000 * source + 100 * file + record) for record in range(40)]
            write_json_lines(tmp_path / f"source{source}" / f"{file}.jsonl", texts)
    train(build_streamed_recipe(tmp_path, "whole", "cache"))
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    checkpoints = tmp_path / "resumed" / "checkpoints"
    for name in ("step-00000006", "step-00000007"):
        shutil.rmtree(checkpoints / name)
    other = [SCHEDULE[0], {"step": 6, "weights": [0, 1]}]
    with pytest.raises(CheckpointError, match="weight_schedule: saved"):
        train(build_streamed_recipe(tmp_path, "resumed", "other", other), resume=True)
    train(build_streamed_recipe(tmp_path, "resumed", "other"), resume=True)
    assert hash_weights(tmp_path, "resumed") == hash_weights(tmp_path, "whole")
