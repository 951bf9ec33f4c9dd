"""Offloaded trained weights on a CUDA device: the bits of resident weights through a whole run."""

from __future__ import annotations

import errno
import math
import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.config import Recipe
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.sample_order import SampleOrder
from shardwright.errors import OffloadFailed
from shardwright.offload import OffloadedOptimizer, ParameterOffload
from shardwright.offload.parameter_store import DiskParameterStore
from shardwright.offload.pinned_parameter_store import PinnedParameterStore
from shardwright.offload.staging_buffer import StagingBuffer
from shardwright.offload.store import TransferCounts
from shardwright.offload.store_update import StagedUpdate
from shardwright.training.checks import offload_checks
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.run import train
from shardwright.training.setup import build_state
from shardwright.training.step import accumulate_gradients, update_parameters
from tests.hostcuda import device
from tests.multiprocess.test_trained_offload import write_pruned_model
from tests.unit.training.test_offload_run import build_run, read_checkpoints

ON_HOST = {"optimizer": "host", "parameters": "host", "buffer_bytes": 8192}
ON_DISK = {"optimizer": "disk", "parameters": "disk", "buffer_bytes": 8192}
UPDATED_ON_HOST = ON_HOST | {"update_on": "host"}
FROM_DISK = ON_DISK | {"update_on": "host"}
COPIED = {"kind": "bf16", "working_weights": True}


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
    ("precision", "recompute", "rule"),
    [("fp32", "none", "muon"), ("bf16", "selective", "adamw"), ("fp32", "full", "adafactor")],
)
def test_a_run_writes_the_checkpoints_of_the_resident_run(
    tmp_path: Path, precision: str, recompute: str, rule: str
) -> None:
    sections = {"recompute": recompute, "precision": precision, "optimizer": {"name": rule}}
    train(build(tmp_path, "resident", {}, **sections))
    expected = read_checkpoints(tmp_path / "resident")
    assert len(expected) == 4
    for run, offload in (("disk", ON_DISK), ("host", ON_HOST)):
        train(build(tmp_path, run, offload, **sections))
        assert read_checkpoints(tmp_path / run) == expected
        assert not device.list_violations()


@pytest.mark.parametrize("rule", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize(
    ("precision", "offloads"),
    [
        ("fp32", [UPDATED_ON_HOST, UPDATED_ON_HOST | {"optimizer": "disk"}, FROM_DISK]),
        (COPIED, [UPDATED_ON_HOST, ON_HOST, ON_DISK, FROM_DISK, FROM_DISK | {"optimizer": "host"}]),
    ],
    ids=["master weights", "working weights"],
)
def test_a_run_with_master_weights_in_host_memory_writes_the_checkpoints_of_the_resident_run(
    tmp_path: Path, rule: str, precision: object, offloads: list[dict[str, object]]
) -> None:
    sections = {"precision": precision, "optimizer": {"name": rule}}
    train(build(tmp_path, "resident", {}, **sections))
    expected = read_checkpoints(tmp_path / "resident")
    assert len(expected) == 4
    for index, offload in enumerate(offloads):
        train(build(tmp_path, f"run{index}", offload, **sections))
        assert read_checkpoints(tmp_path / f"run{index}") == expected, offload
        assert not device.list_violations()


def test_a_block_without_an_update_is_brought_while_others_are_updated(tmp_path: Path) -> None:
    """No save ends an update in its step, so the next forward pass begins during it."""
    config = build_run(tmp_path, "config", "none").model.config
    sections = {
        "model": {"config": config, "freeze": ["*layers.0.*"]},
        "checkpoint": {"every_steps": 4},
        "evaluation": {"every_steps": 4},
    }
    train(build(tmp_path, "resident", {}, **sections))
    train(build(tmp_path, "run", UPDATED_ON_HOST, **sections))
    expected = read_checkpoints(tmp_path / "resident")
    assert len(expected) == 1
    assert read_checkpoints(tmp_path / "run") == expected
    assert not device.list_violations()


@pytest.mark.parametrize(
    ("rule", "offloads"),
    [("muon", [ON_DISK, ON_HOST]), ("adamw_8bit", [UPDATED_ON_HOST, FROM_DISK])],
)
def test_a_pruned_model_stays_pruned(
    tmp_path: Path, rule: str, offloads: list[dict[str, object]]
) -> None:
    model = {"path": write_pruned_model(tmp_path), "keep_zeros": True}
    sections: dict[str, object] = {"model": model, "optimizer": {"name": rule}}
    if rule != "muon":
        sections["precision"] = COPIED
    train(build(tmp_path, "resident", {}, **sections))
    expected = read_checkpoints(tmp_path / "resident")
    for index, offload in enumerate(offloads):
        train(build(tmp_path, f"run{index}", offload, **sections))
        assert read_checkpoints(tmp_path / f"run{index}") == expected, offload
        assert not device.list_violations()


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (ON_HOST, ON_DISK),
        (ON_DISK, ON_HOST),
        (ON_HOST, {}),
        pytest.param(FROM_DISK, {}, marks=pytest.mark.long),
        pytest.param({}, FROM_DISK, marks=pytest.mark.long),
        pytest.param(FROM_DISK, UPDATED_ON_HOST, marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_opens_under_any_tier(
    tmp_path: Path, first: dict[str, object], then: dict[str, object]
) -> None:
    train(build(tmp_path, "whole", {}))
    recipe = build(tmp_path, "run", first)
    shorter = recipe.training.model_copy(update={"max_steps": 2})
    train(recipe.model_copy(update={"training": shorter}))
    train(build(tmp_path, "run", then), resume=True)
    assert read_checkpoints(tmp_path / "run") == read_checkpoints(tmp_path / "whole")
    assert not device.list_violations()


def count_waits(
    folder: Path, offload: dict[str, object], **sections: object
) -> tuple[int, int, int, bool]:
    """Return the host's waits of the second step, its bytes read and written, and True if
    pinned."""
    recipe = build(folder, "waits", offload, recompute="none", **sections)
    validated_run = validate_run(recipe, 1)
    state = build_state(validated_run, torch.device("cuda", 0))
    order = SampleOrder(recipe.seed, len(validated_run.data.train))
    plan = validated_run.plan
    counts = TransferCounts()
    for step in range(2):
        if isinstance(state.weight_offload, ParameterOffload):
            state.weight_offload.pop_counts()
        batches = read_step_micro_batches(validated_run.data.train, order, plan.batch, step, 0)
        batches = [batch.pin_memory() for batch in batches]
        with device.log_synchronisations() as log:
            accumulate_gradients(state.model, batches, seed=0, step=step)
            update_parameters(state.model, state.optimizer, learning_rate=1e-3, max_grad_norm=0.5)
    is_pinned = False
    if isinstance(state.weight_offload, ParameterOffload):
        store = state.weight_offload.store
        assert isinstance(store, PinnedParameterStore)
        counts = state.weight_offload.pop_counts()
        is_pinned = all(place.memory.is_pinned() for place in store._places)
        state.weight_offload.close()
    if isinstance(state.optimizer, OffloadedOptimizer):
        state.optimizer.close()
    assert not device.list_violations()
    return sum(log.values()), counts.read_bytes, counts.written_bytes, is_pinned


WEIGHT_BYTES = 2 * 7 * 4096
"""Of the places of two blocks: each matrix begins on a page."""
GRADIENT_BYTES = 15360
MOVED_BYTES: dict[str, tuple[dict[str, object], object, tuple[float, int], tuple[int, int]]] = {
    "weights and gradients": (ON_HOST, "fp32", (3.0, 2), (1, 2)),
    "updated on the host": (UPDATED_ON_HOST, "fp32", (2.5, 1), (0, 2)),
    "working weights": (ON_HOST, COPIED, (1.0, 2), (1, 2)),
    "working weights, updated on the host": (UPDATED_ON_HOST, COPIED, (1.0, 1), (0, 2)),
}
"""Offloading, precision, and how often a step of two micro-batches reads, and writes, weights and
gradients. Passes read weights; a block that two passes use in turn stays in between. The second
backward pass reads gradients. An update on the device reads both, one on the host weights for
working weights."""


@pytest.mark.parametrize("name", MOVED_BYTES)
def test_the_host_waits_as_often_as_with_resident_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # On the test device a query makes the host know that a stream has ended. Reading the norm has
    # to do that.
    monkeypatch.setattr(torch.cuda.Stream, "query", lambda stream: True)
    monkeypatch.setattr(torch.cuda.Event, "query", lambda event: True)
    offload, precision, read, written = MOVED_BYTES[name]
    sections = {"precision": precision}
    resident = {"optimizer": "host", "buffer_bytes": 8192}
    resident_waits, *_ = count_waits(tmp_path, resident, **sections)
    waits, read_bytes, written_bytes, is_pinned = count_waits(tmp_path, offload, **sections)
    assert waits == resident_waits
    assert is_pinned
    assert read_bytes == read[0] * WEIGHT_BYTES + read[1] * GRADIENT_BYTES
    assert written_bytes == written[0] * WEIGHT_BYTES + written[1] * GRADIENT_BYTES


@pytest.mark.parametrize("method", ["read", "write"])
def test_copies_that_no_event_orders_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    original = getattr(PinnedParameterStore, method)

    def run_without_waits(self: PinnedParameterStore, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None)
            patch.setattr(torch.cuda.Stream, "wait_event", lambda *_: None)
            original(self, *arguments)
            return lambda: None

    monkeypatch.setattr(PinnedParameterStore, method, run_without_waits)
    with pytest.raises((RuntimeError, AssertionError)):
        count_waits(tmp_path, ON_HOST)
    with suppress(RuntimeError):
        torch.cuda.synchronize()  # checks the interrupted run's copies
    device.list_violations()


def test_transfers_that_do_not_wait_for_the_computation_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = StagingBuffer._copy

    def copy_without_wait(buffer: StagingBuffer, pairs: Any, _ready: torch.cuda.Event) -> None:
        original(buffer, pairs, torch.cuda.Event())  # nothing was recorded in it

    monkeypatch.setattr(StagingBuffer, "_copy", copy_without_wait)
    with pytest.raises(RuntimeError, match="missing event"):
        train(build(tmp_path, "run", ON_DISK))
    device.list_violations()  # those of the interrupted run


def train_two_steps(folder: Path, offload: dict[str, object], precision: object) -> TransferCounts:
    """Train two steps of two micro-batches; return what weights and gradients moved."""
    recipe = build(folder, "run", offload, recompute="none", precision=precision)
    validated_run = validate_run(recipe, 1)
    state = build_state(validated_run, torch.device("cuda", 0))
    assert isinstance(state.weight_offload, ParameterOffload)
    assert isinstance(state.optimizer, OffloadedOptimizer)
    order = SampleOrder(recipe.seed, len(validated_run.data.train))
    batch = validated_run.plan.batch
    for step in range(2):
        batches = read_step_micro_batches(validated_run.data.train, order, batch, step, 0)
        batches = [each.pin_memory() for each in batches]
        accumulate_gradients(state.model, batches, seed=0, step=step)
        update_parameters(
            state.model,
            state.optimizer,
            learning_rate=1e-3,
            max_grad_norm=0.5,
            overlaps_forward=True,
        )
    state.optimizer.wait_for_update()
    state.weight_offload.store.synchronise()
    counts = state.weight_offload.pop_counts()
    state.weight_offload.close()
    state.optimizer.close()
    torch.cuda.synchronize()
    assert not device.list_violations()
    return counts


def test_new_working_weights_are_not_read_from_the_disk(tmp_path: Path) -> None:
    """The first pass reads the weights, each second micro-batch the gradients, and each update
    both, in whole pages. Updated weights go to the device from the memory of the update."""
    counts = train_two_steps(tmp_path, FROM_DISK, COPIED)
    assert counts.read_bytes == WEIGHT_BYTES + 2 * (GRADIENT_BYTES + 2 * WEIGHT_BYTES)
    assert counts.written_bytes == 2 * (2 * GRADIENT_BYTES + WEIGHT_BYTES)


def test_staging_memory_holds_three_buckets(tmp_path: Path) -> None:
    recipe = build(tmp_path, "run", FROM_DISK | {"buffer_bytes": 4096})
    state = build_state(validate_run(recipe, 1), torch.device("cuda", 0))
    assert isinstance(state.weight_offload, ParameterOffload)
    update = state.weight_offload.store_update
    assert isinstance(update, StagedUpdate)
    assert update._ring is not None
    num_bytes = update._ring._memory.numel()
    assert num_bytes == state.weight_offload.count_staging_bytes(4096)
    largest = max(
        2 * 4096 * sum(update.has_weight(piece.name) for piece in bucket.pieces)
        for bucket in update._partition.buckets
    )
    assert num_bytes == 3 * largest < 2 * WEIGHT_BYTES
    state.weight_offload.close()
    assert isinstance(state.optimizer, OffloadedOptimizer)
    state.optimizer.close()


def test_staging_memory_and_copies_are_counted_before_a_run(tmp_path: Path) -> None:
    """Weights and gradients of all parameters, if the staging memory has room for all."""
    recipe = build(tmp_path, "run", FROM_DISK | {"buffer_bytes": 2**20})
    validated_run = validate_run(recipe, 1)
    specs = validated_run.shape.list_parameters()
    num_elements = sum(math.prod(spec.shape) for spec in specs)
    counted = offload_checks._count_update_bytes(
        recipe, validated_run.plan, {spec.name for spec in specs}
    )
    assert counted == 2 * 4 * num_elements


@pytest.mark.parametrize("method", ["_wait_for_copies", "_give_back"])
def test_updated_weights_that_no_event_orders_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The device waits for new weights; their host memory is used again when it has them."""
    original = getattr(StagedUpdate, method)

    def run_without_wait(self: StagedUpdate, *arguments: Any) -> None:
        if method == "_give_back":
            original(self, arguments[0], None)

    monkeypatch.setattr(StagedUpdate, method, run_without_wait)
    with pytest.raises((RuntimeError, AssertionError)):
        train_two_steps(tmp_path, FROM_DISK, COPIED)
    with suppress(RuntimeError):
        torch.cuda.synchronize()
    device.list_violations()


def test_a_disk_that_fails_in_an_update_on_the_host_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = DiskParameterStore.run_after_writes

    def fail_from_now(self: DiskParameterStore, function: Any) -> None:
        original(self, function)

        def fail(descriptor: int, data: Any, position: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(
            self, "_disk", SimpleNamespace(read_at=fail, write_at=fail, close=ignore)
        )

    monkeypatch.setattr(DiskParameterStore, "run_after_writes", fail_from_now)
    with pytest.raises(OffloadFailed, match=r"the scratch file of weights in .* could not be"):
        train(build(tmp_path, "run", FROM_DISK))
    device.list_violations()


def ignore(_descriptor: int) -> None:
    """Leave a file open."""
