"""Run folder as training leaves it, without training: recipe, config, tokenizer, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardwright.architecture import ModelShape, read_config
from shardwright.checkpoint.run_folder import RunFolder
from shardwright.checkpoint.tensor_saving import save_checkpoint
from shardwright.config import Recipe
from shardwright.data.tokens.tokenizer import CharacterTokenizer
from shardwright.model.weight_init import initialise_parameter
from tests.unit.checkpoint.sample_values import make_run_values

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
ALPHABET = "abcdefghij"


def build_weights(shape: ModelShape, step: int) -> dict[str, torch.Tensor]:
    """Build the weights of a step, with the step's number as seed."""
    return {
        spec.name: initialise_parameter(spec, step, dtype=torch.float32)
        for spec in shape.list_parameters()
    }


def make_run(
    path: Path, *, steps: tuple[int, ...] = (1, 2, 3), best: int | None = 2, precision: str = "bf16"
) -> RunFolder:
    """Write the folder; `build_weights(shape, step)` gives the weights of each checkpoint."""
    folder = RunFolder(path)
    shape = read_config(CONFIG)
    recipe = Recipe.model_validate(
        {
            "name": "made",
            "model": {"config": CONFIG},
            "tokenizer": {"kind": "character"},
            "data": {"sources": "corpus.txt"},
            "training": {
                "sequence_length": 8,
                "micro_batch_size": 1,
                "max_steps": 3,
                "learning_rate": 1e-3,
            },
            "precision": precision,
        }
    )
    folder.write_metadata(recipe, {}, shape.to_config())
    CharacterTokenizer(ALPHABET).save(folder.tokenizer_path)
    for step in steps:
        tensors = {f"model.{name}": tensor for name, tensor in build_weights(shape, step).items()}
        tensors |= {f"optimizer.{name}.momentum": torch.zeros(3) for name in ("a", "b")}
        save_checkpoint(
            folder.checkpoints, step, tensors, make_run_values(step), is_best=step == best
        )
    return folder
