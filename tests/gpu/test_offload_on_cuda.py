"""Runs with offloaded states end with the bits of the resident run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.checkpoint.tensor_loading import open_checkpoint, read_tensor
from shardwright.config import Recipe
from shardwright.training.run import train
from tests.gpu.test_training_on_cuda import build_content

NUM_STEPS = 4


def read_end(
    folder: Path, device: torch.device, offload: dict[str, Any], *, num_steps: int = NUM_STEPS
) -> dict[str, Tensor]:
    """Train and return the tensors of the last checkpoint: weights and moments."""
    folder.mkdir()
    options = {"max_steps": num_steps, "sequence_length": 32, "deterministic": True}
    content = build_content(folder, device, **options) | {"offload": offload}
    train(Recipe.model_validate(content))
    checkpoint = open_checkpoint(folder / f"run/checkpoints/step-{num_steps:08d}")
    return {name: read_tensor(checkpoint, name) for name in checkpoint.manifest.tensors}


@pytest.mark.parametrize(
    "offload",
    [
        {"optimizer": "host", "update_on": "device"},
        {"optimizer": "disk", "update_on": "device"},
        {"optimizer": "host", "parameters": "host", "update_on": "device"},
        {"optimizer": "disk", "parameters": "disk", "update_on": "device"},
        {"activations": "host"},
        {"activations": "disk"},
    ],
    ids=lambda offload: ",".join(f"{key}={value}" for key, value in offload.items()),
)
def test_offloaded_states_end_with_the_bits_of_resident_ones(
    device: torch.device, tmp_path: Path, offload: dict[str, Any]
) -> None:
    resident = read_end(tmp_path / "resident", device, {})
    found = read_end(tmp_path / "offloaded", device, offload | {"buffer_bytes": 65536})
    assert found.keys() == resident.keys()
    assert [name for name in found if not torch.equal(found[name], resident[name])] == []


def test_an_update_on_the_host_equals_the_devices_within_rounding(
    device: torch.device, tmp_path: Path
) -> None:
    """After one step: later gradients differ by what the weights do."""
    resident = read_end(tmp_path / "resident", device, {}, num_steps=1)
    section = {"optimizer": "host", "update_on": "host", "buffer_bytes": 65536}
    found = read_end(tmp_path / "offloaded", device, section, num_steps=1)
    for name, tensor in resident.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7, msg=name)
