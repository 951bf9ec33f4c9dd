"""Runs whose trained weights are on disk: checkpoints, failures, events and refusals."""

from __future__ import annotations

import errno
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.architecture import read_config
from shardwright.config import Recipe
from shardwright.errors import OffloadFailed, RecipeError
from shardwright.model.block_weights import list_block_matrices
from shardwright.offload import ParameterOffload, parameter_store
from shardwright.plans import resolve_plan
from shardwright.telemetry.event_log import MemoryEvent, StepEvent, read_events
from shardwright.training.checks import offload_checks
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.run import train
from shardwright.training.setup import build_state
from shardwright.training.step_policy import find_differing_replicas
from tests.unit.training.test_loop import build_recipe
from tests.unit.training.test_offload_run import read_checkpoints, resume_after_failure
from tests.unit.training.test_parameter_offload_run import FailingDisk

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}  # fmt: skip
BLOCK_BYTES = 4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)
WEIGHT_BYTES = 4 * BLOCK_BYTES
PLACE_BYTES = 4 * 4 * (2 * 1024 + 2 * 1024 + 3 * 2048)
"""Weights in the file: each matrix begins on a page, and two of a block have half of one."""
DISK = {"optimizer": "disk", "parameters": "disk"}
NUM_GROUPS = 4
"""Tests that share the writes of a run."""


def build_run(
    folder: Path, run: str, offload: dict[str, Any], *, max_steps: int = 3, **sections: Any
) -> Recipe:
    """Build a recipe of full training, with evaluations and a checkpoint of every step."""
    recipe = build_recipe(folder, run, max_steps=max_steps, schedule="constant")
    offload = {"buffer_bytes": 8192} | offload if offload else {}
    return Recipe.model_validate(
        recipe.model_dump(mode="json", exclude_unset=True)
        | {
            "model": {"config": CONFIG},
            "offload": offload,
            "checkpoint": {"every_steps": 1, "keep_last": 9},
        }
        | sections
    )


def test_checkpoints_are_those_of_resident_weights_and_open_under_every_setting(
    tmp_path: Path,
) -> None:
    train(build_run(tmp_path, "none", {}))
    expected = read_checkpoints(tmp_path / "none")
    assert len(expected) == 3
    for number, (first, second) in enumerate(((DISK, {}), ({}, DISK), (DISK, DISK))):
        folder = tmp_path / str(number)
        train(build_run(tmp_path, folder.name, first, max_steps=1))
        train(build_run(tmp_path, folder.name, second), resume=True)
        assert read_checkpoints(folder) == expected


@pytest.mark.parametrize(
    ("num_operations", "code", "verb"),
    [
        (0, errno.ENOSPC, "written"),
        (60, errno.EIO, "(read|written)"),
        *(
            pytest.param(number, errno.EIO, "(read|written)", marks=pytest.mark.long)
            for number in (33, 50, 100, 150)
        ),
    ],
)
def test_a_failing_disk_ends_the_run_with_one_error_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_operations: int, code: int, verb: str
) -> None:
    train(build_run(tmp_path, "whole", {}))
    store = parameter_store.DiskParameterStore
    with monkeypatch.context() as patch:
        patch.setattr(store.__init__, "__kwdefaults__", {"disk": FailingDisk(num_operations, code)})
        with pytest.raises(OffloadFailed, match=f"could not be {verb}: {os.strerror(code)}"):
            train(build_run(tmp_path, "run", DISK))
    train(build_run(tmp_path, "run", DISK), resume=True)
    assert read_checkpoints(tmp_path / "run") == read_checkpoints(tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize("first", range(NUM_GROUPS))
def test_a_disk_that_is_full_at_any_write_ends_the_run_with_one_error_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    train(build_run(tmp_path, "whole", {}, max_steps=2))
    build = partial(build_run, offload=DISK, max_steps=2)
    store = parameter_store.DiskParameterStore
    num_writes = first
    while resume_after_failure(tmp_path, monkeypatch, num_writes, errno.ENOSPC, build, store):
        shutil.rmtree(tmp_path / f"run-{num_writes}")
        num_writes += NUM_GROUPS
    assert num_writes > 100


def test_events_state_the_bytes_that_move(tmp_path: Path) -> None:
    sections = {"evaluation": {"every_steps": 9}}
    train(build_run(tmp_path, "none", {}, **sections))
    train(build_run(tmp_path, "disk", DISK, **sections))
    events = {tier: read_events(tmp_path / tier) for tier in ("none", "disk")}
    (resident,) = events["none"].filter_by_type(MemoryEvent)
    (offloaded,) = events["disk"].filter_by_type(MemoryEvent)
    assert offloaded.offloaded_parameter_bytes == (2 * PLACE_BYTES,)
    assert resident.weights_bytes[0] - offloaded.weights_bytes[0] == WEIGHT_BYTES
    assert resident.gradients_bytes[0] - offloaded.gradients_bytes[0] == WEIGHT_BYTES
    steps = events["disk"].filter_by_type(StepEvent)
    # Each step writes weights and gradients once. It reads the weights for the forward and the
    # backward pass and the update, but not those of blocks that are present, and the gradients.
    # The last block's write may end in the next step.
    written = [step.parameter_written_bytes or 0 for step in steps]
    assert sum(written) <= 3 * (PLACE_BYTES + WEIGHT_BYTES)
    assert sum(written) >= 3 * (PLACE_BYTES + WEIGHT_BYTES) - PLACE_BYTES // 4
    for step in steps[1:]:
        assert step.parameter_read_bytes is not None
        num_blocks = (step.parameter_read_bytes - WEIGHT_BYTES) / (PLACE_BYTES / 4)
        assert 8 <= num_blocks <= 12
    assert all((step.parameter_waiting_seconds or -1.0) >= 0.0 for step in steps)


def test_weights_and_gradients_leave_the_device(tmp_path: Path) -> None:
    state = build_state(validate_run(build_run(tmp_path, "run", DISK), 1), torch.device("cpu"))
    offload = state.weight_offload
    assert isinstance(offload, ParameterOffload)
    present = []
    model = state.model

    def count(*_: Any) -> None:
        present.append(
            (
                sum(block.is_present for block in offload._blocks.values()),
                sum(parameter.grad is not None for _, parameter in model.named_parameters()),
            )
        )

    for block in model.decoder.blocks:
        block.register_forward_hook(count)
        block.attention.register_full_backward_hook(count)
    for _ in range(2):
        offload.begin_backward(lambda _names: None, ())
        ids = torch.arange(16)[None] % 10
        model.module(input_ids_BT=ids, labels_BT=ids).backward()
        offload.end_backward()
    offload.close()
    assert len(present) == 16
    assert max(num_blocks for num_blocks, _ in present) <= 2
    names = [name for name, parameter in model.named_parameters() if name not in offload.names]
    assert max(num_gradients for _, num_gradients in present) <= len(names) + 2 * 7


def test_weights_are_read_and_compared_by_name(tmp_path: Path) -> None:
    values = {}
    for tier in ("none", "disk"):
        offload = {} if tier == "none" else DISK
        recipe = build_run(tmp_path, tier, offload)
        state = build_state(validate_run(recipe, 1), torch.device("cpu"))
        values[tier] = [state.model.gather_parameter(name).clone() for name in state.model.layouts]
        assert find_differing_replicas(state.model) is None
        if state.weight_offload is not None:
            state.weight_offload.close()
    assert all(map(torch.equal, values["none"], values["disk"]))


def test_weights_without_moments_are_refused_with_a_remedy(tmp_path: Path) -> None:
    recipe = build_run(tmp_path, "run", {"parameters": "disk"})
    message = "return for the update with the moments"
    with pytest.raises(RecipeError, match=rf"offload\.parameters: .*{message}.*allowed: none"):
        validate_run(recipe, 1)


def test_host_moves_nothing_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = build_run(tmp_path, "run", DISK | {"parameters": "host"}, max_steps=1)
    with caplog.at_level("INFO", logger="shardwright"):
        train(recipe)
    assert any("weights stay: the device is the CPU" in line for line in caplog.messages)


def test_too_little_host_memory_for_weights_and_gradients_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = build_run(tmp_path, "run", DISK | {"parameters": "host"})
    plan = resolve_plan(recipe, read_config(CONFIG), 1)
    names = frozenset(list_block_matrices(plan.placement.shape))
    monkeypatch.setattr(offload_checks, "should_use_cuda", lambda *_, **__: True)
    monkeypatch.setattr(offload_checks, "read_available_memory", lambda: 2 * WEIGHT_BYTES)
    offload_checks.check_offload(recipe, plan, names)
    monkeypatch.setattr(offload_checks, "read_available_memory", lambda: 2 * WEIGHT_BYTES - 1)
    with pytest.raises(RecipeError, match=r"offload\.parameters: .*not enough host memory"):
        offload_checks.check_offload(recipe, plan, names)


def test_a_disk_too_small_for_weights_and_gradients_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed_bytes = 2 * WEIGHT_BYTES + 8 * (WEIGHT_BYTES // 4)
    pages = needed_bytes // 4096 - 1
    full = os.statvfs_result((4096, 4096, 10, pages, pages, 0, 0, 0, 0, 255))
    monkeypatch.setattr(offload_checks.os, "statvfs", lambda path: full)
    with pytest.raises(RecipeError, match=r"offload.dir: .*not enough free space"):
        train(build_run(tmp_path, "run", DISK))
