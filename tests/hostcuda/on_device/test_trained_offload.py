"""Offloaded trained weights on a CUDA device: the bits of resident weights through a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwright.config import Recipe
from shardwright.errors import RecipeError
from shardwright.offload import scratch_transfers
from shardwright.training.run import train
from tests.hostcuda import device
from tests.unit.training.test_offload_run import build_run, read_checkpoints

ON_DISK = {"optimizer": "disk", "parameters": "disk", "buffer_bytes": 8192}


def build(folder: Path, run: str, offload: dict[str, object], **sections: object) -> Recipe:
    recipe = build_run(folder, run, "none").model_dump(mode="json", exclude_unset=True)
    training = recipe["training"] | {
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
    }
    training.pop("global_batch_size", None)
    changed = {"training": training, "offload": offload, "run": recipe["run"] | {"device": "cuda"}}
    return Recipe.model_validate(recipe | changed | sections)


@pytest.mark.parametrize(
    ("precision", "recompute"), [("fp32", "none"), ("bf16", "selective"), ("fp32", "full")]
)
def test_a_run_writes_the_checkpoints_of_the_resident_run(
    tmp_path: Path, precision: str, recompute: str
) -> None:
    sections = {"recompute": recompute, "precision": precision}
    train(build(tmp_path, "resident", {}, **sections))
    train(build(tmp_path, "run", ON_DISK, **sections))
    expected = read_checkpoints(tmp_path / "resident")
    assert len(expected) == 4
    assert read_checkpoints(tmp_path / "run") == expected
    assert not device.list_violations()


def test_transfers_that_do_not_wait_for_the_computation_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = scratch_transfers._copy

    def copy_without_wait(
        target: Tensor, source: Tensor, stream: torch.cuda.Stream, _ready: torch.cuda.Event
    ) -> None:
        original(target, source, stream, torch.cuda.Event())  # nothing was recorded in it

    monkeypatch.setattr(scratch_transfers, "_copy", copy_without_wait)
    with pytest.raises(RuntimeError, match="missing event"):
        train(build(tmp_path, "run", ON_DISK))
    device.list_violations()  # those of the interrupted run


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"offload": ON_DISK | {"update_on": "host"}}, "updated on the device"),
        (
            {"precision": {"kind": "bf16", "working_weights": True}},
            "copies of trained weights in the compute precision would stay",
        ),
        ({"offload": ON_DISK | {"parameters": "host"}}, "on disk only"),
    ],
)
def test_settings_that_would_keep_weights_on_the_device_are_refused(
    tmp_path: Path, sections: dict[str, object], message: str
) -> None:
    with pytest.raises(RecipeError, match=f"offload.parameters: .*{message}"):
        train(build(tmp_path, "run", **({"offload": ON_DISK} | sections)))
