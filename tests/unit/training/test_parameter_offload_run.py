"""Runs whose frozen weights are read from disk: checkpoints, failures, events and refusals."""

from __future__ import annotations

import errno
import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.architecture import read_config
from shardwright.checkpoint.disk import Disk
from shardwright.config import Recipe
from shardwright.data.tokens.tokenizer import CharacterTokenizer
from shardwright.errors import OffloadFailed, RecipeError
from shardwright.model.hf.hf_folder import write_hf_folder
from shardwright.model.hf.hf_weights import WEIGHTS_FILE_NAME
from shardwright.model.weight_init import initialise_parameter
from shardwright.offload import weight_store
from shardwright.telemetry.event_log import MemoryEvent, StepEvent, read_events
from shardwright.training.checks import offload_checks
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.run import train
from tests.unit.training.finished import ALPHABET
from tests.unit.training.test_loop import build_recipe
from tests.unit.training.test_offload_run import read_checkpoints, resume_after_failure

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 10, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}  # fmt: skip
FROZEN_BYTES = 4 * 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)


def build_run(
    folder: Path, run: str, offload: dict[str, Any], *, max_steps: int = 3, **sections: Any
) -> Recipe:
    """Build a recipe of adapters on a base model in fp32 files, with evaluations."""
    if not (folder / "base").exists():
        shape = read_config(CONFIG)
        specs = {spec.name: spec for spec in shape.list_parameters()}
        write_hf_folder(
            folder / "base",
            shape,
            lambda name: initialise_parameter(specs[name], 0, dtype=torch.float32),
            dtype=torch.float32,
            tokenizer=CharacterTokenizer(ALPHABET),
        )
    recipe = build_recipe(folder, run, max_steps=max_steps, schedule="constant")
    offload = {"buffer_bytes": 8192} | offload if offload else {}
    return Recipe.model_validate(
        recipe.model_dump(mode="json", exclude_unset=True)
        | {
            "model": {"path": str(folder / "base")},
            "adapters": {"rank": 2},
            "offload": offload,
            "checkpoint": {"every_steps": 1, "keep_last": 9},
        }
        | sections
    )


DISK = {"parameters": "disk"}
EVERYTHING = {"parameters": "disk", "optimizer": "disk", "activations": "disk"}


def test_checkpoints_are_those_of_resident_weights_and_open_under_every_setting(
    tmp_path: Path,
) -> None:
    train(build_run(tmp_path, "none", {}))
    expected = read_checkpoints(tmp_path / "none")
    assert len(expected) == 3
    for number, (first, second) in enumerate(((EVERYTHING, {}), ({}, DISK), (DISK, DISK))):
        folder = tmp_path / str(number)
        train(build_run(tmp_path, folder.name, first, max_steps=1))
        train(build_run(tmp_path, folder.name, second), resume=True)
        assert read_checkpoints(folder) == expected


class FailingDisk(Disk):
    """Disk that fails at the n-th read or write."""

    def __init__(self, num_operations: int, code: int) -> None:
        self.remaining = num_operations
        self.code = code

    def _count(self) -> None:
        self.remaining -= 1
        if self.remaining < 0:
            raise OSError(self.code, os.strerror(self.code))

    def read_until_end(self, descriptor: int, data: memoryview, position: int) -> int:
        self._count()
        return super().read_until_end(descriptor, data, position)

    def write_at(self, descriptor: int, data: memoryview, position: int) -> None:
        self._count()
        super().write_at(descriptor, data, position)


@pytest.mark.parametrize(
    ("adapters", "num_operations", "code", "verb", "place"),
    [
        ({"rank": 2}, 0, errno.EIO, "read", WEIGHTS_FILE_NAME),
        ({"rank": 2}, 60, errno.EIO, "read", WEIGHTS_FILE_NAME),
        ({"rank": 2, "quantize": "nf4"}, 1, errno.ENOSPC, "written", "run"),
        ({"rank": 2, "quantize": "nf4"}, 30, errno.EIO, "read", "run"),
    ],
)
def test_a_failing_disk_ends_the_run_with_one_error_and_the_run_resumes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    adapters: dict[str, Any],
    num_operations: int,
    code: int,
    verb: str,
    place: str,
) -> None:
    train(build_run(tmp_path, "whole", {}, adapters=adapters))
    defaults = weight_store.DiskWeightStore.__init__.__kwdefaults__
    with monkeypatch.context() as patch:
        patch.setattr(
            weight_store.DiskWeightStore.__init__,
            "__kwdefaults__",
            defaults | {"disk": FailingDisk(num_operations, code)},
        )
        with pytest.raises(OffloadFailed, match=f"could not be {verb}: {os.strerror(code)}") as it:
            train(build_run(tmp_path, "run", DISK, adapters=adapters))
    assert place in str(it.value)
    train(build_run(tmp_path, "run", DISK, adapters=adapters), resume=True)
    assert read_checkpoints(tmp_path / "run") == read_checkpoints(tmp_path / "whole")


@pytest.mark.parametrize("first", [20, pytest.param(None, marks=pytest.mark.long)])
def test_a_disk_that_is_full_at_any_write_ends_the_run_with_one_error_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int | None
) -> None:
    """NF4 codes are in a scratch file; `first` is the only write that fails, None is all."""
    sections: dict[str, Any] = {"adapters": {"rank": 2, "quantize": "nf4"}, "max_steps": 2}
    train(build_run(tmp_path, "whole", {}, **sections))
    build = partial(build_run, offload=DISK, **sections)
    numbers = itertools.count() if first is None else [first]
    num_failed = 0
    for number in numbers:
        if not resume_after_failure(
            tmp_path, monkeypatch, number, errno.ENOSPC, build, weight_store.DiskWeightStore
        ):
            break
        num_failed += 1
    assert num_failed > (0 if first is not None else 30)


def test_a_model_file_that_changes_during_the_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = build_run(tmp_path, "run", DISK)
    path = tmp_path / "base" / WEIGHTS_FILE_NAME
    read = Disk.read_until_end

    def change(self: Disk, descriptor: int, data: memoryview, position: int) -> int:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\1")
        return read(self, descriptor, data, position)

    monkeypatch.setattr(Disk, "read_until_end", change)
    with pytest.raises(OffloadFailed, match=r"model\.safetensors has changed since the run began"):
        train(recipe)


def test_events_state_the_bytes_and_the_log_their_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="shardwright"):
        train(build_run(tmp_path, "disk", DISK))
    train(build_run(tmp_path, "none", {}))
    events = {tier: read_events(tmp_path / tier) for tier in ("none", "disk")}
    (resident,) = events["none"].filter_by_type(MemoryEvent)
    (offloaded,) = events["disk"].filter_by_type(MemoryEvent)
    assert resident.offloaded_parameter_bytes is None
    assert offloaded.offloaded_parameter_bytes == (FROZEN_BYTES,)
    assert resident.weights_bytes[0] - offloaded.weights_bytes[0] == FROZEN_BYTES
    steps = events["disk"].filter_by_type(StepEvent)
    # Forward and backward pass read all blocks but the one that is present already; an
    # evaluation of some passes lies between two steps.
    least_bytes = 2 * FROZEN_BYTES * 2 // 3
    assert all((step.parameter_read_bytes or 0) >= least_bytes for step in steps)
    assert all((step.parameter_waiting_seconds or -1.0) >= 0.0 for step in steps)
    assert [step.parameter_read_bytes for step in events["none"].filter_by_type(StepEvent)] == [
        None
    ] * 3
    lines = [line for line in caplog.messages if line.startswith("offload:")]
    assert "(0 B in a scratch file, the rest in the model's own)" in lines[0]
    assert "of frozen weights read per step" in lines[1]


def test_a_scratch_file_is_explained_by_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sections = {"precision": "bf16"}
    with caplog.at_level("INFO", logger="shardwright"):
        train(build_run(tmp_path, "run", DISK, max_steps=1, **sections))
    assert any(
        "are in a scratch file: stored as F32, computed in bfloat16" in line
        for line in caplog.messages
    )


def test_host_on_a_cpu_moves_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="shardwright"):
        train(build_run(tmp_path, "run", {"parameters": "host"}, max_steps=2))
    assert any("frozen weights stay: the device is the CPU" in line for line in caplog.messages)
    (memory,) = read_events(tmp_path / "run").filter_by_type(MemoryEvent)
    assert memory.offloaded_parameter_bytes is None


@pytest.mark.parametrize(
    ("kind", "words"), [("nfs4", "network file system"), ("tmpfs", "in host memory")]
)
def test_an_unsuitable_file_system_of_the_model_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    words: str,
) -> None:
    monkeypatch.setattr(offload_checks, "read_file_system", lambda folder: kind)
    validate_run(build_run(tmp_path, "run", DISK), 1)
    assert any(line.startswith("model.path: ") and words in line for line in caplog.messages)


def test_a_full_disk_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((4096, 4096, 10, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(offload_checks.os, "statvfs", lambda path: full)
    with pytest.raises(RecipeError, match=r"offload.dir: .*0 B free"):
        train(build_run(tmp_path, "run", DISK, precision="bf16"))
    train(build_run(tmp_path, "run", DISK, max_steps=1))  # needs no space of its own
