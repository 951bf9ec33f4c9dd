"""Runs whose weights are stored in bf16: resumed, converted, offloaded, exported, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shardwright import export
from shardwright.checkpoint.tensor_loading import open_checkpoint, read_tensor
from shardwright.errors import CheckpointError, RecipeError
from shardwright.plans import PrecisionChoice
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.run import train
from tests.unit.training.test_run_checks import build_recipe

BF16 = {"kind": "bf16", "master_weights": "bf16"}


def build(folder: Path, run: str = "run", *, max_steps: int = 2, **sections: Any) -> Any:
    training = {
        "sequence_length": 8,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "learning_rate": 1e-2,
        "schedule": "constant",
        "max_grad_norm": 0.5,
        "max_steps": max_steps,
    }
    return build_recipe(folder, run=run, **{"precision": BF16, "training": training, **sections})


def read_state(folder: Path, step: int) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(str(folder / f"checkpoints/step-{step:08d}"))
    return {name: read_tensor(checkpoint, name) for name in checkpoint.manifest.tensors}


def check_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_resumed_run_continues_bit_by_bit_in_bf16(tmp_path: Path, optimizer: str) -> None:
    section = {"name": optimizer} | ({"momentum": 0.9} if optimizer == "sgd" else {})
    sections = {"optimizer": section}
    train(build(tmp_path, "whole", max_steps=3, **sections))
    train(build(tmp_path, "parts", max_steps=2, **sections))
    train(build(tmp_path, "parts", max_steps=3, **sections), resume=True)
    whole = read_state(tmp_path / "whole", 3)
    assert {tensor.dtype for tensor in whole.values()} == {torch.bfloat16}
    check_equal(whole, read_state(tmp_path / "parts", 3))


def test_moments_on_disk_change_no_bit(tmp_path: Path) -> None:
    train(build(tmp_path, "resident"))
    offload = {"optimizer": "disk", "buffer_bytes": 2**20, "dir": str(tmp_path / "scratch")}
    train(build(tmp_path, "moved", offload=offload))
    check_equal(read_state(tmp_path / "resident", 2), read_state(tmp_path / "moved", 2))


def test_a_run_continues_in_fp32_and_back_by_name(tmp_path: Path) -> None:
    train(build(tmp_path, max_steps=1))
    rounded = read_state(tmp_path / "run", 1)
    wide = {"kind": "bf16"}
    message = r"precision.master_weights: saved 'bf16', now absent"
    with pytest.raises(CheckpointError, match=message):
        train(build(tmp_path, precision=wide), resume=True)
    train(build(tmp_path, precision=wide), resume=True, allow_drift=["precision"])
    state = read_state(tmp_path / "run", 2)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    change = (state["model.model.norm.weight"] - rounded["model.model.norm.weight"].float()).abs()
    assert 0 < float(change.max()) < 0.02
    train(build(tmp_path, max_steps=3), resume=True, allow_drift=["precision"])
    assert read_state(tmp_path / "run", 3)["model.model.norm.weight"].dtype == torch.bfloat16
    values = json.loads((tmp_path / "run/checkpoints/step-00000003/values.json").read_text())
    field = "precision.master_weights"
    assert values["drift"] == [
        {"step": 1, "field": field, "saved": "bf16"},
        {"step": 2, "field": field, "current": "bf16"},
    ]


def test_an_export_has_the_trained_bits(tmp_path: Path) -> None:
    train(build(tmp_path))
    export(tmp_path / "run", tmp_path / "exported")
    written = load_file(tmp_path / "exported/model.safetensors")
    state = read_state(tmp_path / "run", 2)
    for name, tensor in written.items():
        assert torch.equal(tensor, state[f"model.{name}"]), name


def test_adapters_are_trained_in_bf16(tmp_path: Path) -> None:
    train(build(tmp_path, adapters={"rank": 4}))
    state = read_state(tmp_path / "run", 2)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert all("lora" in name for name in state)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"precision": BF16 | {"kind": "fp32"}}, "needs products of bf16, got `kind: fp32`"),
        ({"precision": BF16 | {"kind": "fp8"}}, "needs products of bf16, got `kind: fp8`"),
        ({"precision": BF16 | {"working_weights": True}}, "`working_weights` has no effect"),
        ({"optimizer": {"name": "muon"}}, "does not support `optimizer.name: muon`; use adamw"),
        ({"offload": {"parameters": "disk"}}, "offload only the moments"),
    ],
)
def test_an_unsupported_recipe_is_refused(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **sections)


def test_a_device_without_bf16_is_refused(tmp_path: Path) -> None:
    recipe = build(tmp_path, precision={"kind": "auto", "master_weights": "bf16"})
    with pytest.raises(RecipeError, match=r"products would be in fp32 \(no units\)") as refused:
        validate_run(recipe, 1, auto_precision=PrecisionChoice("fp32", "no units"))
    assert refused.value.field == "precision.master_weights"
