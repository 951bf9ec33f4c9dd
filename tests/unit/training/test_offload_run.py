"""Runs with offloaded optimizer states: the same checkpoints, byte for byte, and refusals."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.architecture.config_reading import read_recipe_shape
from shardwright.checkpoint import background_save
from shardwright.checkpoint.disk import Disk
from shardwright.config import Recipe
from shardwright.errors import OffloadFailed, RecipeError
from shardwright.offload import disk_store
from shardwright.telemetry.event_log import MemoryEvent, StepEvent, WarningEvent, read_events
from shardwright.training.checks import offload_checks
from shardwright.training.run import train
from tests.unit.training.test_loop import build_recipe

TIERS: dict[str, dict[str, Any]] = {
    "none": {},
    "host": {"optimizer": "host", "buffer_bytes": 8192},
    "disk": {"optimizer": "disk", "buffer_bytes": 16384},
}


def build_run(
    folder: Path, run: str, tier: str, *, max_steps: int = 4, every_steps: int = 1
) -> Recipe:
    """Build a run that saves and evaluates every so many steps. In between updates overlap."""
    recipe = build_recipe(folder, run, max_steps=max_steps, schedule="constant")
    return Recipe.model_validate(
        recipe.model_dump(mode="json", exclude_unset=True)
        | {
            "offload": TIERS[tier],
            "checkpoint": {"every_steps": every_steps, "keep_last": 9},
            "evaluation": {"every_steps": every_steps},
        }
    )


build_disk_run = partial(build_run, tier="disk")


def read_checkpoints(folder: Path) -> dict[str, bytes]:
    """Return the tensors of all checkpoints of a run by step."""
    return {
        path.parent.name: path.read_bytes()
        for path in folder.glob("checkpoints/step-*/shard-*.safetensors")
    }


def test_every_tier_writes_the_same_checkpoints_and_resumes_those_of_the_others(
    tmp_path: Path,
) -> None:
    train(build_run(tmp_path, "none", "none"))
    expected = read_checkpoints(tmp_path / "none")
    assert len(expected) == 4
    for first, second in (("disk", "host"), ("host", "none"), ("none", "disk")):
        folder = tmp_path / f"{first}-{second}"
        train(build_run(tmp_path, folder.name, first, max_steps=2))
        train(build_run(tmp_path, folder.name, second), resume=True)
        assert read_checkpoints(folder) == expected


def test_an_update_waits_until_a_background_save_has_written_the_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states are written from the store, which the update changes."""
    finish = background_save.finish_save
    events: list[str] = []

    def finish_slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.2)
        result = finish(*arguments, **options)
        events.append("saved")
        return result

    swap_out = disk_store.DiskStore.swap_out

    def record(self: disk_store.DiskStore, *arguments: Any) -> None:
        if events[-1:] != ["update"]:
            events.append("update")
        swap_out(self, *arguments)

    monkeypatch.setattr(background_save, "finish_save", finish_slowly)
    monkeypatch.setattr(disk_store.DiskStore, "swap_out", record)
    train(build_run(tmp_path, "run", "disk", max_steps=3))
    assert events == ["update", "saved"] * 3


class FailingDisk(Disk):
    """Disk that fails at the n-th write of a scratch file, or reservation of its blocks."""

    def __init__(self, num_writes: int, code: int) -> None:
        self.remaining = num_writes
        self.code = code

    def _count(self) -> None:
        self.remaining -= 1
        if self.remaining < 0:
            raise OSError(self.code, os.strerror(self.code))

    def reserve(self, descriptor: int, num_bytes: int, position: int = 0) -> None:
        self._count()
        super().reserve(descriptor, num_bytes, position)

    def write_at(self, descriptor: int, data: memoryview, position: int) -> None:
        self._count()
        super().write_at(descriptor, data, position)


def resume_after_failure(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_writes: int,
    code: int,
    build: Callable[[Path, str], Recipe] = build_disk_run,
    store: type = disk_store.DiskStore,
) -> bool:
    """Train on a disk that fails, resume and compare with the run `whole`.

    Args:
        build: Builds the recipe of a run with this name.
        store: Store whose disk fails.

    Returns:
        False if the run ends before the failure.
    """
    name = f"run-{num_writes}"
    with monkeypatch.context() as patch:
        patch.setattr(
            store.__init__,
            "__kwdefaults__",
            store.__init__.__kwdefaults__ | {"disk": FailingDisk(num_writes, code)},
        )
        try:
            train(build(folder, name))
        except OffloadFailed as error:
            message = str(error)
        else:
            return False
    assert str(folder / name) in message
    verb = r"could not be (written|enlarged|extended to [^:]+)|cannot be reserved in [^:]+"
    assert re.search(rf"({verb}): {os.strerror(code)}", message)
    train(build(folder, name), resume=True)
    assert read_checkpoints(folder / name) == read_checkpoints(folder / "whole")
    return True


def test_a_failing_disk_ends_the_run_with_one_error_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(build_run(tmp_path, "whole", "none"))
    for num_writes, code in ((0, errno.ENOSPC), (9, errno.EIO), (25, errno.ENOSPC)):
        assert resume_after_failure(tmp_path, monkeypatch, num_writes, code)


@pytest.mark.long
def test_a_disk_that_is_full_at_any_write_ends_the_run_with_one_error_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(build_run(tmp_path, "whole", "none"))
    num_writes = 0
    while resume_after_failure(tmp_path, monkeypatch, num_writes, errno.ENOSPC):
        num_writes += 1
    assert num_writes > 20


def test_a_disk_that_cannot_be_read_during_a_save_ends_the_run_with_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that ends before its mapping makes a page unreadable, as a defective disk does."""
    view = disk_store.DiskStore.view_segment

    def truncate(self: disk_store.DiskStore, segment: int) -> torch.Tensor:
        tensor = view(self, segment)
        if self.counts.written_bytes:
            os.ftruncate(self._descriptor, 4096)
        return tensor

    monkeypatch.setattr(disk_store.DiskStore, "view_segment", truncate)
    with pytest.raises(OffloadFailed, match="could not be read"):
        train(build_run(tmp_path, "run", "disk"))
    (warning,) = read_events(tmp_path / "run").filter_by_type(WarningEvent)
    assert f"older checkpoints in {tmp_path / 'run' / 'checkpoints'} are intact" in warning.message
    assert "offloaded states could not be read from disk" in warning.message


def test_events_state_the_bytes_of_each_tier_and_the_log_the_hidden_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = {}
    for tier in ("none", "disk"):
        with caplog.at_level("INFO", logger="shardwright"):
            train(build_run(tmp_path, tier, tier))
        events[tier] = read_events(tmp_path / tier)
    moments_bytes = 2 * 4 * 4080
    (resident,) = events["none"].filter_by_type(MemoryEvent)
    (offloaded,) = events["disk"].filter_by_type(MemoryEvent)
    assert resident.offloaded_bytes is None
    assert resident.optimizer_bytes[0] >= moments_bytes
    assert offloaded.optimizer_bytes[0] < 100  # step counts
    assert offloaded.offloaded_bytes is not None
    assert offloaded.offloaded_bytes[0] == 11 * 4096  # buckets of a page
    assert [step.offload_read_bytes for step in events["none"].filter_by_type(StepEvent)] == [
        None
    ] * 4
    steps = events["disk"].filter_by_type(StepEvent)
    assert all(
        step.offload_read_bytes is not None and step.offload_read_bytes > 0.5 * moments_bytes
        for step in steps
    )
    written = [step.offload_written_bytes or 0 for step in steps]
    assert sum(written) <= 4 * offloaded.offloaded_bytes[0]
    assert all(
        0.0 <= (step.offload_waiting_seconds or 0.0) <= (step.optimizer_seconds or 0.0)
        for step in steps
    )
    lines = [line for line in caplog.messages if line.startswith("offload:")]
    assert "begins during the update" in lines[0]
    assert "in a scratch file" in lines[1]
    assert "of the transfer time was hidden" in lines[2]


def test_host_and_device_are_the_same_on_a_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(build_run(tmp_path, "device", "disk", max_steps=2))
    recipe = build_run(tmp_path, "host", "disk", max_steps=2)
    offload = recipe.offload.model_copy(update={"update_on": "host"})
    with caplog.at_level("INFO", logger="shardwright"):
        train(recipe.model_copy(update={"offload": offload}))
    assert any("so host and device are the same" in line for line in caplog.messages)
    assert read_checkpoints(tmp_path / "host") == read_checkpoints(tmp_path / "device")


def test_no_space_to_reserve_is_an_error_with_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Disk, descriptor: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Disk, "reserve", refuse)
    with pytest.raises(OffloadFailed, match=r"offload.dir: .*KiB of scratch space .* are free"):
        train(build_run(tmp_path, "run", "disk"))


def test_too_little_disk_or_memory_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((4096, 4096, 10, 2, 2, 0, 0, 0, 0, 255))
    monkeypatch.setattr(offload_checks.os, "statvfs", lambda path: full)
    with pytest.raises(RecipeError, match=r"8.00 KiB free; allowed: at least 31\.\d+ KiB"):
        train(build_run(tmp_path, "disk", "disk"))
    # Muon has one moment of each matrix of a block, and two of all else.
    muon = Recipe.model_validate(
        build_run(tmp_path, "disk", "disk").model_dump(mode="json", exclude_unset=True)
        | {"optimizer": {"name": "muon"}}
    )
    specs = read_recipe_shape(muon).list_parameters()
    num_bytes = sum(spec.num_elements * (4 if "_proj" in spec.name else 8) for spec in specs)
    with pytest.raises(RecipeError, match=f"allowed: at least {num_bytes / 1024:.2f} KiB"):
        train(muon)
    monkeypatch.setattr(offload_checks, "read_available_memory", lambda: 1000)
    with pytest.raises(RecipeError, match=r"host, with .* available; allowed: at least 31"):
        train(build_run(tmp_path, "host", "host"))
    assert not (tmp_path / "disk").exists() or not list((tmp_path / "disk").glob("checkpoints/*"))


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    recipe = build_run(tmp_path, "run", "host").model_dump(mode="json", exclude_unset=True)
    with pytest.raises(ValueError, match=r"`dir` .* nothing is offloaded to disk"):
        Recipe.model_validate(recipe | {"offload": {"optimizer": "host", "dir": "x"}})
    with pytest.raises(ValueError, match="multiple of 4096"):
        Recipe.model_validate(recipe | {"offload": {"optimizer": "host", "buffer_bytes": 5000}})
    with pytest.raises(ValueError, match=r"`update_on: host` needs `optimizer: host`"):
        Recipe.model_validate(recipe | {"offload": {"update_on": "host"}})
    stateless = Recipe.model_validate(recipe | {"optimizer": {"name": "sgd"}})
    with pytest.raises(RecipeError, match="sgd without momentum has no states to offload"):
        train(stateless)
    for name in ("muon", "adafactor"):  # on a CPU, too
        on_host = {
            "optimizer": {"name": name},
            "offload": {"optimizer": "disk", "update_on": "host"},
        }
        with pytest.raises(RecipeError, match=rf"the update of {name} needs whole matrices"):
            train(Recipe.model_validate(recipe | on_host))
    here = tmp_path / "file"
    here.touch()
    offload = {"optimizer": "disk", "dir": str(here)}
    with pytest.raises(RecipeError, match=r"offload.dir: scratch files cannot be written here"):
        train(Recipe.model_validate(recipe | {"offload": offload}))


@pytest.mark.parametrize(
    ("kind", "words"), [("nfs4", "network file system"), ("tmpfs", "in host memory")]
)
def test_an_unsuitable_file_system_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    words: str,
) -> None:
    monkeypatch.setattr(offload_checks, "read_file_system", lambda folder: kind)
    train(build_run(tmp_path, "run", "disk", max_steps=1))
    assert any(words in record.getMessage() for record in caplog.records)
