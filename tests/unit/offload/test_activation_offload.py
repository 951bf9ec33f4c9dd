"""Saved tensors of blocks leave after the forward pass: fewer live bytes, the same gradients."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.api import rehearse
from shardwright.checkpoint.disk import Disk
from shardwright.config import Recipe
from shardwright.data.loader import read_step_micro_batches
from shardwright.data.sample_order import SampleOrder
from shardwright.errors import OffloadFailed, RecipeError
from shardwright.layout.saved_results import LayerResults, RecomputeChoice
from shardwright.offload import ActivationOffload
from shardwright.offload.activation_store import ScratchStore
from shardwright.offload.state_buckets import PAGE_BYTES
from shardwright.rehearsal.live_memory import LiveMemoryTracker
from shardwright.telemetry.event_log import MemoryEvent, StepEvent, read_events
from shardwright.training.checks import offload_checks
from shardwright.training.checks.run_checks import validate_run
from shardwright.training.run import train
from shardwright.training.setup import build_state
from shardwright.training.step import accumulate_gradients
from tests.multiprocess.test_offload import DENSE, SPARSE, build_recipe

NUM_LAYERS = 6
TOKENS = 64
ROWS = 4


def build_deep_recipe(folder: Path, config: dict[str, Any], **sections: Any) -> Recipe:
    training = {
        "sequence_length": TOKENS, "micro_batch_size": ROWS, "max_steps": 2, "learning_rate": 1e-2,
        "gradient_accumulation_steps": 1,
    }  # fmt: skip
    model = {"config": config | {"num_hidden_layers": NUM_LAYERS}}
    return build_recipe(folder, {"model": model, "training": training} | sections)


def compute_gradients(
    recipe: Recipe,
    *,
    compile_backend: str | None = None,
    saved: tuple[LayerResults, ...] | None = None,
) -> tuple[dict[str, Tensor], int, ActivationOffload | None]:
    """Return the gradients of a step, its live bytes after the last block, and the offloading.

    Args:
        saved: Results that each layer saves, in place of the recipe's recomputation.
    """
    validated_run = validate_run(recipe, 1)
    if saved is not None:
        choice = RecomputeChoice(saved, "test", "none", 0.0, 0.0, 0.0, 0.0)
        plan = replace(validated_run.plan, recompute="mixed", recompute_choice=choice)
        validated_run = replace(validated_run, plan=plan)
    state = build_state(validated_run, torch.device("cpu"))
    if compile_backend is not None:
        state.model.decoder.compile_blocks(backend=compile_backend)
    order = SampleOrder(recipe.seed, len(validated_run.data.train))
    batches = read_step_micro_batches(
        validated_run.data.train, order, validated_run.plan.batch, 0, 0
    )
    live_bytes = 0
    if compile_backend is None:
        with LiveMemoryTracker() as tracker:

            def measure(*_arguments: Any) -> None:
                nonlocal live_bytes
                live_bytes = tracker.live_bytes

            assert state.model.decoder.final_norm is not None
            state.model.decoder.final_norm.register_forward_hook(measure)
            accumulate_gradients(state.model, batches, seed=0, step=0)
    else:
        accumulate_gradients(state.model, batches, seed=0, step=0)
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in state.model.named_parameters()
        if parameter.grad is not None
    }
    if state.activation_offload is not None:
        state.activation_offload.close()
    return gradients, live_bytes, state.activation_offload


def assert_same(expected: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    assert expected.keys() == got.keys()
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_are_those_of_resident_tensors_and_live_bytes_fall(
    tmp_path: Path, config: dict[str, Any], recompute: str
) -> None:
    options = {"recompute": recompute}
    expected, resident_bytes, _ = compute_gradients(build_deep_recipe(tmp_path, config, **options))
    offload = {"activations": "disk", "buffer_bytes": 8192}
    got, live_bytes, offloaded = compute_gradients(
        build_deep_recipe(tmp_path, config, **options, offload=offload)
    )
    assert_same(expected, got)
    assert offloaded is not None
    counts = offloaded.store.counts
    assert offloaded.num_bytes == 0  # all have been freed
    assert counts.written_bytes == counts.read_bytes == offloaded.peak_bytes
    # All blocks but the last have left; the writing thread may still refer to one tensor.
    assert resident_bytes - live_bytes > 0.75 * offloaded.peak_bytes
    input_bytes = (NUM_LAYERS - 1) * ROWS * TOKENS * 64 * 4
    if recompute == "full":
        assert offloaded.peak_bytes == input_bytes
    else:  # results of products and attention too
        assert offloaded.peak_bytes > 4 * input_bytes


SAVED: tuple[LayerResults, ...] = (
    None,  # everything
    frozenset(),
    frozenset(["attention"]),
    frozenset(["projections"]),
    frozenset(["gate_up"]),
    frozenset(["attention", "projections", "attention_out", "gate_up"]),
)


def test_saved_results_of_each_layer_leave_and_return(tmp_path: Path) -> None:
    plain, _, _ = compute_gradients(build_deep_recipe(tmp_path, DENSE))
    expected, resident_bytes, _ = compute_gradients(build_deep_recipe(tmp_path, DENSE), saved=SAVED)
    offload = {"activations": "disk", "buffer_bytes": 8192}
    got, live_bytes, offloaded = compute_gradients(
        build_deep_recipe(tmp_path, DENSE, offload=offload), saved=SAVED
    )
    assert_same(plain, expected)
    assert_same(expected, got)
    assert offloaded is not None
    counts = offloaded.store.counts
    assert offloaded.num_bytes == 0
    assert counts.written_bytes == counts.read_bytes == offloaded.peak_bytes
    assert resident_bytes - live_bytes > 0.75 * offloaded.peak_bytes
    # Inputs, projections of one layer (queries, and half as many keys and values), both products of
    # another one's gates, attention of a third, and all of the first.
    hidden_bytes = ROWS * TOKENS * 64 * 4
    assert offloaded.peak_bytes > (NUM_LAYERS - 1 + 2 + 4 + 1 + 8) * hidden_bytes


class WaitingDisk(Disk):
    """Disk whose transfers wait for an event."""

    def __init__(self) -> None:
        self.may_transfer = Event()

    def write_at(self, descriptor: int, data: memoryview, position: int) -> None:
        assert self.may_transfer.wait(20)
        super().write_at(descriptor, data, position)

    def read_at(self, descriptor: int, data: memoryview, position: int) -> None:
        assert self.may_transfer.wait(20)
        super().read_at(descriptor, data, position)


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("num_bytes", [2 * PAGE_BYTES, 100], ids=["pages", "staged"])
def test_memory_is_free_once_its_transfer_has_been_waited_for(
    tmp_path: Path, num_bytes: int, direction: str
) -> None:
    """Also if the store's thread runs later: here it stops as soon as the result is set."""
    disk = WaitingDisk()
    store = ScratchStore(tmp_path, 1 << 20, torch.device("cpu"), disk=disk)
    may_continue = Event()
    data = store.allocate(num_bytes)
    place, wait = store.write(data)
    if direction == "read":
        disk.may_transfer.set()
        wait()
        disk.may_transfer.clear()
        data, wait = store.read(place, num_bytes)
    place.jobs[-1].add_done_callback(lambda _job: may_continue.wait(20))
    disk.may_transfer.set()
    wait()
    memory = StorageWeakRef(data.untyped_storage())
    del data
    is_free = memory.expired()
    may_continue.set()
    store.close()
    assert is_free


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # by torch's tracing
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_offload_too(tmp_path: Path, recompute: str) -> None:
    expected, _, _ = compute_gradients(
        build_deep_recipe(tmp_path, DENSE, recompute=recompute), compile_backend="aot_eager"
    )
    got, _, offloaded = compute_gradients(
        build_deep_recipe(tmp_path, DENSE, recompute=recompute, offload={"activations": "disk"}),
        compile_backend="aot_eager",
    )
    assert_same(expected, got)
    assert offloaded is not None
    assert offloaded.num_bytes == 0
    input_bytes = (NUM_LAYERS - 1) * ROWS * TOKENS * 64 * 4
    if recompute == "full":  # the compiler saves the state of the random generator too
        state_bytes = (NUM_LAYERS - 1) * torch.get_rng_state().nbytes
        assert input_bytes <= offloaded.peak_bytes <= input_bytes + state_bytes
    else:
        assert offloaded.peak_bytes > 4 * input_bytes


@pytest.mark.parametrize(
    ("method", "verb"), [("reserve", "enlarged"), ("read_at", "read"), ("write_at", "written")]
)
def test_a_failing_disk_ends_the_step_with_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, verb: str
) -> None:
    def fail(*_arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Disk, method, fail)
    with pytest.raises(OffloadFailed, match=f"offload.activations: .* could not be {verb}"):
        compute_gradients(build_deep_recipe(tmp_path, DENSE, offload={"activations": "disk"}))


def test_events_state_the_bytes_that_left_and_returned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = build_deep_recipe(
        tmp_path, DENSE, offload={"activations": "disk"}, evaluation={"every_steps": 2}
    )
    with caplog.at_level("INFO", logger="shardwright"):
        train(recipe)
    events = read_events(tmp_path / "run")
    (memory,) = events.filter_by_type(MemoryEvent)
    assert memory.offloaded_activation_bytes is not None
    for step in events.filter_by_type(StepEvent):
        assert step.activation_read_bytes == memory.offloaded_activation_bytes[0]
        assert step.activation_waiting_seconds is not None
    assert any("of activations read and" in line for line in caplog.messages)


def test_the_rehearsal_counts_the_bytes_that_leave_in_a_run(tmp_path: Path) -> None:
    for recompute in ("none", "selective", "full"):
        recipe = build_deep_recipe(
            tmp_path,
            DENSE,
            recompute=recompute,
            offload={"activations": "disk", "optimizer": "disk"},
            run={"dir": str(tmp_path / recompute)},
        )
        train(recipe)
        (memory,) = read_events(tmp_path / recompute).filter_by_type(MemoryEvent)
        (report,) = rehearse(recipe, 1).reports
        assert memory.offloaded_activation_bytes == (report.offloaded_activation_bytes,)
        assert memory.offloaded_bytes == (report.offloaded_bytes,)


def test_too_little_space_for_rows_of_one_length_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The need is what a step writes. Documents without packing may be shorter: a warning."""
    recipe = build_deep_recipe(tmp_path, DENSE, offload={"activations": "disk"})
    validate_run(recipe, 1)
    _, _, offloaded = compute_gradients(recipe)
    assert offloaded is not None
    status = os.statvfs(tmp_path)
    num_pages = 0
    monkeypatch.setattr(
        offload_checks.os,
        "statvfs",
        lambda path: os.statvfs_result((4096, 4096, 10, num_pages, num_pages, *status[5:10])),
    )
    num_pages = int(1.04 * offloaded.peak_bytes) // 4096
    validate_run(recipe, 1)
    num_pages = int(0.9 * offloaded.peak_bytes) // 4096
    assert "need up to" not in caplog.text
    with pytest.raises(RecipeError, match=r"offload\.dir: .*for the saved tensors.*allowed: at le"):
        validate_run(recipe, 1)
    data = recipe.data.model_copy(update={"packing": "none"})
    validate_run(recipe.model_copy(update={"data": data}), 1)
    assert "the saved tensors of the ranks of this node need up to" in caplog.text


def test_on_a_cpu_the_host_tier_moves_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="shardwright"):
        _, _, offloaded = compute_gradients(
            build_deep_recipe(tmp_path, DENSE, offload={"activations": "host"})
        )
    assert offloaded is None
    assert any("saved tensors stay: the device is the CPU" in line for line in caplog.messages)


def test_settings_that_cannot_offload_are_refused(tmp_path: Path) -> None:
    recipe = build_deep_recipe(
        tmp_path, DENSE, offload={"activations": "disk", "dir": str(tmp_path / "corpus.txt")}
    )
    with pytest.raises(RecipeError, match=r"offload.dir: scratch files cannot be written here"):
        validate_run(recipe, 1)
