"""An optimizer whose moments are in a store computes the bits of one whose moments are resident."""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.checkpoint.disk import Disk
from shardwright.config.offload import OffloadSection
from shardwright.config.training import OptimizerSection
from shardwright.errors import NonFiniteError, OffloadFailed
from shardwright.offload import (
    BackwardUpdate,
    DeferredUpdate,
    OffloadedOptimizer,
    UpdateOverlap,
)
from shardwright.offload.bucket_stream import BucketStream
from shardwright.offload.disk_store import DiskStore
from shardwright.offload.state_buckets import (
    PAGE_BYTES,
    OffloadedParameter,
    StatePartition,
    partition_state,
)
from shardwright.offload.store import HostStore, Store
from shardwright.optim import (
    build_optimizer,
    collect_optimizer_tensors,
    collect_optimizer_values,
    load_optimizer_values,
    set_learning_rate,
)
from shardwright.optim.sharded_optimizer import StateSpec, UpdateByPiece, UpdateUnit
from tests.unit.optim.test_sharded_optimizer import SingleProcessModel, make_parameters

RULES: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "adamw_8bit": {"name": "adamw_8bit", "block_size": 32},
    "adafactor": {"name": "adafactor"},
    "muon": {"name": "muon"},
    "sgd": {"name": "sgd"},
    "sgd with momentum": {"name": "sgd", "momentum": 0.9},
}
NUM_STEPS = 5
BUFFER_BYTES = 16384
"""Smaller than the moments of the larger parameters, so that these are divided."""
STAGING_BUFFER_BYTES = 2 * BUFFER_BYTES
"""Leaves staging memory for a few buckets that stay in it."""


class Run:
    """Parameters and an optimizer with gradients that depend on the step and the name only."""

    def __init__(
        self,
        rule: str,
        folder: Path | None = None,
        *,
        tier: str | None = None,
        frozen: str = "",
        overlap: str = "",
    ) -> None:
        self.parameters = make_parameters()
        self.modules = {name: nn.Identity() for name in self.parameters}
        """The module that reads each parameter, in the order of their use."""
        units = [UpdateUnit(frozenset({name}), (self.modules[name],)) for name in self.parameters]
        if frozen:
            self.parameters[frozen].requires_grad_(False)
        model = SingleProcessModel()
        self.optimizer = build_optimizer(
            self.parameters.items(),
            OptimizerSection(**RULES[rule]),
            learning_rate=0.01,
            weight_decay=0.1,
            model=model,
        )
        overlaps: dict[str, Callable[[], UpdateOverlap]] = {
            "deferred": lambda: DeferredUpdate(units, None),
            "backward": lambda: BackwardUpdate(units, None),
        }
        self.overlap = overlaps[overlap]() if overlap else None
        if tier is not None:

            def create_store(partition: StatePartition) -> Store:
                self.partition = partition
                if tier == "host":
                    return HostStore.allocate(partition.segment_bytes, is_pinned=False)
                assert folder is not None
                resident_bytes = partition.select_resident_buckets(STAGING_BUFFER_BYTES)
                return DiskStore(
                    folder,
                    partition.segment_bytes,
                    partition.compute_staging_bytes(STAGING_BUFFER_BYTES)
                    - sum(resident_bytes.values()),
                    resident_bytes=resident_bytes,
                )

            self.optimizer = OffloadedOptimizer(
                self.optimizer,  # type: ignore[arg-type]
                model,
                create_store,
                bucket_bytes=BUFFER_BYTES,
                should_fill_buckets=tier == "host",
                device=torch.device("cpu"),
                overlap=self.overlap,
            )

    def draw_gradient(self, number: int, name: str) -> Tensor:
        index = list(self.parameters).index(name)
        generator = torch.Generator().manual_seed(100 * number + index)
        return torch.randn(self.parameters[name].shape, generator=generator)

    def set_gradient(self, number: int, name: str) -> None:
        self.parameters[name].grad = self.draw_gradient(number, name)

    def step(self, number: int, *, without: str = "") -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            if parameter.requires_grad and name != without:
                self.set_gradient(number, name)
        set_learning_rate(self.optimizer, 0.01 * (1 + number))
        self.optimizer.step()

    def collect(self) -> dict[str, Tensor]:
        moments = collect_optimizer_tensors(self.optimizer, self.parameters.items())
        return {
            key: tensor.detach().clone()
            for key, tensor in (*self.parameters.items(), *moments.items())
        }

    def close(self) -> None:
        if isinstance(self.optimizer, OffloadedOptimizer):
            self.optimizer.close()


def assert_same(one: Run, other: Run) -> None:
    expected = one.collect()
    got = other.collect()
    assert expected.keys() == got.keys()
    assert [key for key in expected if not torch.equal(expected[key], got[key])] == []
    assert collect_optimizer_values(one.optimizer) == collect_optimizer_values(other.optimizer)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("rule", RULES)
def test_weights_moments_and_counts_are_those_of_a_resident_run(
    tmp_path: Path, rule: str, tier: str
) -> None:
    resident = Run(rule)
    offloaded = Run(rule, tmp_path, tier=tier)
    for number in range(NUM_STEPS):
        resident.step(number)
        offloaded.step(number)
    assert_same(resident, offloaded)
    offloaded.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rule", ["adamw", "adamw_8bit", "sgd with momentum"])
def test_a_deferred_update_runs_as_far_as_a_module_needs_it(tmp_path: Path, rule: str) -> None:
    resident = Run(rule)
    deferred = Run(rule, tmp_path, tier="disk", overlap="deferred")
    names = list(deferred.parameters)
    for number in range(NUM_STEPS):
        for run in (resident, deferred):
            run.step(number)
            run.optimizer.zero_grad()
            set_learning_rate(run.optimizer, 7.0)  # of a later step
        before = deferred.parameters[names[-1]].detach().clone()
        for name in names[:-2]:  # two are used by no forward pass
            deferred.modules[name](None)
            assert torch.equal(deferred.parameters[name], resident.parameters[name])
            assert torch.equal(deferred.parameters[names[-1]], before)
    assert_same(resident, deferred)
    deferred.close()


@pytest.mark.parametrize("overlap", ["", "deferred"])
@pytest.mark.parametrize("rule", ["adamw", "adamw_8bit", "muon"])
def test_gradients_are_multiplied_in_the_update_of_their_bucket(
    tmp_path: Path, rule: str, overlap: str
) -> None:
    resident = Run(rule)
    offloaded = Run(rule, tmp_path, tier="disk", overlap="" if rule == "muon" else overlap)
    last = list(offloaded.parameters)[-1]
    for number in range(NUM_STEPS):
        for run in (resident, offloaded):
            assert isinstance(run.optimizer, UpdateByPiece)
            assert run.optimizer.applies_factor
            run.optimizer.gradient_factor = 0.37 / (number + 1) if number % 2 else 1.0
            run.step(number)
            assert run.optimizer.gradient_factor == 1.0
        if offloaded.overlap is not None:
            gradient = offloaded.parameters[last].grad
            assert gradient is not None
            assert torch.equal(gradient, offloaded.draw_gradient(number, last))
    assert_same(resident, offloaded)
    offloaded.close()


@pytest.mark.parametrize("rule", ["adamw", "adamw_8bit", "sgd with momentum"])
def test_an_update_in_the_backward_pass_follows_the_gradients(tmp_path: Path, rule: str) -> None:
    """In one step a parameter has no gradient: those after it wait for the end. One step does not
    begin in the backward pass."""
    resident = Run(rule)
    run = Run(rule, tmp_path, tier="disk", overlap="backward")
    assert isinstance(run.optimizer, OffloadedOptimizer)
    assert isinstance(run.overlap, BackwardUpdate)
    backwards = list(run.parameters)[::-1]
    for number in range(NUM_STEPS):
        without = "embedding" if number == 2 else ""
        resident.step(number, without=without)
        if number == 3:
            run.step(number)
            continue
        set_learning_rate(run.optimizer, 0.01 * (1 + number))
        run.optimizer.begin_step()
        for name in backwards:
            if name != without:
                run.set_gradient(number, name)
                run.overlap.take_gradient(name)
        run.overlap.end_gradients()
        freed = [name for name in backwards if run.parameters[name].grad is None]
        assert (freed == backwards) == (not without)
        assert run.optimizer.is_updating
        run.optimizer.end_step(1.0)
        assert not run.optimizer.is_updating
    assert_same(resident, run)
    run.optimizer.begin_step()
    for name in backwards:
        run.set_gradient(0, name)
        run.overlap.take_gradient(name)
    last = backwards[0]
    run.set_gradient(0, last)
    with pytest.raises(AssertionError, match="has changed after its update"):
        run.overlap.take_gradient(last)
    with pytest.raises(NonFiniteError, match="the gradient norm is nan"):
        run.optimizer.end_step(math.nan)
    with pytest.raises(OffloadFailed, match="has failed"):
        run.collect()
    run.close()


def test_a_failed_update_is_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("adamw", tmp_path, tier="disk", overlap="deferred")
    run.step(0)
    run.step(1)

    def fail(*_arguments: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Disk, "read_at", fail)
    with pytest.raises(OffloadFailed, match="could not be read"):
        run.modules[list(run.parameters)[-1]](None)
    with pytest.raises(OffloadFailed, match="has failed"):
        run.collect()
    with pytest.raises(OffloadFailed, match="has failed"):
        run.step(2)
    run.close()


@pytest.mark.parametrize("rule", ["adamw", "muon", "adamw_8bit"])
def test_states_pass_between_resident_and_offloaded_runs(tmp_path: Path, rule: str) -> None:
    runs = [
        Run(rule),
        Run(rule, tmp_path, tier="disk"),
        Run(rule, tmp_path, tier="host"),
        Run(rule),
    ]
    runs[0].step(0)
    for before, after in pairwise(runs):
        tensors = collect_optimizer_tensors(after.optimizer, after.parameters.items())
        with torch.no_grad():
            for key, tensor in before.collect().items():
                (after.parameters[key] if key in after.parameters else tensors[key]).copy_(tensor)
        load_optimizer_values(after.optimizer, collect_optimizer_values(before.optimizer))
        number = runs.index(after)
        runs[0].step(number)
        after.step(number)
        assert_same(runs[0], after)
    for run in runs:
        run.close()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_parameter_without_gradient_keeps_its_state(tmp_path: Path, tier: str) -> None:
    runs = [Run("adamw", frozen="norm"), Run("adamw", tmp_path, tier=tier, frozen="norm")]
    for run in runs:
        run.step(0)
        run.step(1, without="layers.0.up")  # of the first bucket, which is read already
        run.step(2)
        run.step(3, without="embedding")
    assert_same(*runs)
    runs[1].close()


def test_a_state_loaded_between_steps_replaces_buckets_read_ahead(
    tmp_path: Path,
) -> None:
    resident = Run("adamw")
    offloaded = Run("adamw", tmp_path, tier="disk")
    resident.step(0)
    for number in (2, 3):
        offloaded.step(number)
    tensors = collect_optimizer_tensors(offloaded.optimizer, offloaded.parameters.items())
    with torch.no_grad():
        for key, tensor in resident.collect().items():
            (offloaded.parameters | tensors)[key].copy_(tensor)
    load_optimizer_values(offloaded.optimizer, collect_optimizer_values(resident.optimizer))
    for run in (resident, offloaded):
        run.step(1)
    assert_same(resident, offloaded)
    offloaded.close()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_buckets_fill_the_buffer_and_divide_larger_parameters(tmp_path: Path, tier: str) -> None:
    run = Run("adamw", tmp_path, tier=tier)
    buckets = run.partition.buckets
    assert max(bucket.num_bytes for bucket in buckets) <= BUFFER_BYTES
    rows: dict[str, list[int]] = {}
    for bucket in buckets:
        for piece in bucket.pieces:
            if piece.num_rows is not None:
                rows.setdefault(piece.name, [0])
                assert piece.first_row == rows[piece.name][-1]
                rows[piece.name].append(piece.first_row + piece.num_rows)
    elements = {"layers.0.up": 96 * 64, "layers.0.down": 40 * 128}
    assert elements.items() <= {name: ends[-1] for name, ends in rows.items()}.items()
    if tier == "host":  # as many bytes are read ahead as buffers have
        least_bytes = BUFFER_BYTES - 2 * PAGE_BYTES  # a page of each moment is too much
        assert min(bucket.num_bytes for bucket in buckets[:-1]) > least_bytes
    places = [place for bucket in buckets for place in bucket.ranges]
    assert all(place.offset_bytes % PAGE_BYTES == 0 for place in places)
    assert all(place.buffer_bytes % PAGE_BYTES == 0 for place in places)
    run.close()


def partition_pages(bucket_pages: int, *parameter_pages: int) -> StatePartition:
    parameters = []
    for index, num_pages in enumerate(parameter_pages):
        spec = StateSpec((num_pages * PAGE_BYTES // 4,), torch.float32)
        parameters.append(OffloadedParameter(str(index), spec.shape[0], 1, {"sum": spec}))
    return partition_state(parameters, bucket_pages * PAGE_BYTES)


def assert_ends(stream: BucketStream, update: Callable[[], None]) -> None:
    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    thread.join(timeout=10)
    has_ended = not thread.is_alive()
    stream.close()  # so that its threads end
    assert has_ended


def open_buckets(stream: BucketStream, order: Sequence[int]) -> None:
    for index in order:
        with stream.open_bucket(index):
            pass
    stream.end()


def test_an_update_ends_if_buckets_of_many_sizes_do_not_fit_next_to_each_other(
    tmp_path: Path,
) -> None:
    """The first update reads buckets that stay, while others wait for memory behind them."""
    partition = partition_pages(4, 3, 3, 4, 3, 3, 3, 2, 1, 1, 3, 2, 4, 2, 2, 2)
    resident_bytes = partition.select_resident_buckets(8 * PAGE_BYTES)
    capacity_bytes = partition.compute_staging_bytes(8 * PAGE_BYTES) - sum(resident_bytes.values())
    store = DiskStore(
        tmp_path, partition.segment_bytes, capacity_bytes, resident_bytes=resident_bytes
    )
    stream = BucketStream(partition, store, None)

    def update() -> None:
        order = range(len(partition.buckets))
        stream.begin(order)
        open_buckets(stream, order)

    assert_ends(stream, update)


def test_an_update_ends_if_its_first_bucket_had_no_gradient_before(tmp_path: Path) -> None:
    """The first one stays in memory of its own. Of ten pages that two others of five could fill, a
    slow write takes four, so the second waits until the first of them is updated."""
    partition = partition_pages(5, 1, 5, 5, 4)
    is_read = threading.Event()

    class SlowDisk(Disk):
        def write_at(self, descriptor: int, data: memoryview, position: int) -> None:
            if position == sum(partition.segment_bytes[:3]):
                is_read.wait(timeout=10)
            super().write_at(descriptor, data, position)

    store = DiskStore(
        tmp_path,
        partition.segment_bytes,
        10 * PAGE_BYTES,
        resident_bytes={0: PAGE_BYTES},
        disk=SlowDisk(),
    )
    stream = BucketStream(partition, store, None)

    def update_twice() -> None:
        stream.begin((1, 2, 3))
        open_buckets(stream, (1, 2, 3))
        stream.begin((0, 1, 2, 3))
        stream.swaps[0].parts.result()
        is_read.set()
        open_buckets(stream, (0, 1, 2, 3))

    assert_ends(stream, update_twice)


def test_the_end_of_a_step_reads_all_that_staging_memory_can_take(tmp_path: Path) -> None:
    """The next update waits only for the rest."""
    run = Run("adamw", tmp_path, tier="disk")
    run.step(0)
    assert isinstance(run.optimizer, OffloadedOptimizer)
    stream = run.optimizer._stream
    open_bytes = sum(swap.bucket.num_bytes for swap in stream.swaps)
    moving = [
        bucket
        for index, bucket in enumerate(run.partition.buckets)
        if index not in stream._store.resident_buckets
    ]
    following = moving[len(stream.swaps)]
    capacity_bytes = stream._store.capacity_bytes
    assert open_bytes <= capacity_bytes < open_bytes + following.num_bytes
    run.close()


def test_resident_buckets_move_only_for_a_checkpoint(tmp_path: Path) -> None:
    run = Run("adamw", tmp_path, tier="disk")
    optimizer = run.optimizer
    assert isinstance(optimizer, OffloadedOptimizer)
    resident_bytes = run.partition.select_resident_buckets(STAGING_BUFFER_BYTES)
    resident = sum(resident_bytes.values())
    staging = run.partition.compute_staging_bytes(STAGING_BUFFER_BYTES)
    assert 0 < resident <= staging - STAGING_BUFFER_BYTES
    assert min(resident_bytes) > 0  # the buckets that are read ahead come first

    def count_written(number: int) -> int:
        run.step(number)
        optimizer._store._wait_for_writes()  # type: ignore[attr-defined]
        return optimizer.pop_counts().written_bytes

    assert [count_written(number) for number in range(2)] == [optimizer.num_bytes - resident] * 2
    run.collect()
    run.collect()
    assert optimizer.pop_counts().written_bytes == resident
    assert count_written(2) == optimizer.num_bytes - resident
    run.close()


def test_no_bucket_is_read_after_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save finds the failure first. The next step finds it again."""
    run = Run("adamw", tmp_path, tier="disk")
    last = run.partition.buckets[-1].ranges[-1]
    position = sum(run.partition.segment_bytes[: last.segment]) + last.offset_bytes
    write_at = Disk.write_at

    def fail_at_last(disk: Disk, descriptor: int, data: memoryview, offset: int) -> None:
        if offset == position:
            raise OSError(errno.EIO, "Input/output error")
        write_at(disk, descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "write_at", fail_at_last)
        run.step(0)
        for _ in range(2):
            with pytest.raises(OffloadFailed, match="could not be written"):
                run.collect()
    with pytest.raises(OffloadFailed, match="could not be written"):
        run.step(1)
    run.close()


def test_buckets_on_disk_are_smaller_than_buffers_in_the_same_memory(tmp_path: Path) -> None:
    run = Run("adamw", tmp_path, tier="host")
    for pages, bucket_pages in ((1, 1), (9, 2), (2**10, 2**8), (2**13, 2**10), (2**18, 2**14)):
        section = OffloadSection(optimizer="disk", buffer_bytes=pages * PAGE_BYTES)
        assert section.bucket_bytes == bucket_pages * PAGE_BYTES
    partition = run.partition
    assert partition.compute_staging_bytes(4 * BUFFER_BYTES) == partition.num_bytes
    assert partition.compute_staging_bytes(BUFFER_BYTES) == 3 * BUFFER_BYTES
    run.close()
