"""Update on the host of weights on a CUDA device: gradients leave during the backward pass through
pinned memory, and the weights return, with the bits of the resident run and no further wait.
"""

from __future__ import annotations

import errno
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.checkpoint.disk import Disk
from shardwright.config import Recipe
from shardwright.config.offload import OffloadSection
from shardwright.errors import NonFiniteError, OffloadFailed, RecipeError
from shardwright.layout import Layout, RankGrid
from shardwright.numerics import get_local_tensor
from shardwright.offload import OffloadedOptimizer, offload_optimizer
from shardwright.offload.backward_update import HostBackwardUpdate
from shardwright.offload.host_update import HostUpdate
from shardwright.offload.update_overlap import UpdateOverlap
from shardwright.optim import build_optimizer, collect_optimizer_tensors, collect_optimizer_values
from shardwright.parallel import ParallelModel, ddp
from shardwright.parallel.update_units import list_update_units
from shardwright.training.moment_offload import overlap_update
from shardwright.training.run import train as run_training
from shardwright.training.step import accumulate_gradients, begin_update, update_parameters
from shardwright.verification.rank_pool import RankPool
from tests.hostcuda import device
from tests.hostcuda.ranks import LEARNING_RATE, Case, build_model, draw_micro_batches
from tests.unit.training.test_offload_run import build_run, read_checkpoints

NUM_STEPS = 4
OVERLAPPED = "overlapped"
"""Updated on the device during the next forward pass."""
IN_BACKWARD = {"host in the backward pass": "host", "disk in the backward pass": "disk"}
"""Updated on the host in the backward pass; tier of the moments."""
BEFORE_MODULES = {"host before modules": "host", "disk before modules": "disk"}
"""Updated on the host in the next forward pass; tier of the moments."""
RULES: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "adamw_8bit": {"name": "adamw_8bit", "block_size": 32},
    "sgd": {"name": "sgd", "momentum": 0.9},
}


@dataclass
class Outcome:
    """Weights, moments and counts of a run, and what its steps did."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    waits: list[int] = field(default_factory=list)
    num_early: int = 0
    """Gradients of the last step that left before the backward pass of the rank's first trained
    block ended."""
    num_buckets: int = 0


@contextmanager
def count_early_gradients(model: ParallelModel, outcome: Outcome) -> Iterator[None]:
    """Count those that are reported when the gradient of the rank's first input is computed.

    Reductions of DDP's buckets end when they are launched, as NCCL's are known to: what follows
    waits for them on its stream. Gloo's end on a thread of their own.
    """
    all_reduce = dist.all_reduce

    def reduce(*arguments: Any, **options: Any) -> Any:
        work = all_reduce(*arguments, **options)
        if work is not None:
            work.wait()
        return work

    def note(_gradient: Tensor) -> None:
        watch = model._gradient_watch
        outcome.num_early = 0 if watch is None else len(watch._versions)

    def hook_input(_module: Any, arguments: tuple[Any, ...]) -> None:
        if arguments[0].requires_grad:
            arguments[0].register_hook(note)

    handles = [block.register_forward_pre_hook(hook_input) for block in model.decoder.blocks]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp.dist, "all_reduce", reduce)
        yield
    for handle in handles:
        handle.remove()


def train(
    case: Case,
    folder: Path,
    tier: str,
    *,
    max_grad_norm: float | None = 0.5,
    skipped_step: int | None = 2,
) -> Outcome:
    """Train this rank's steps; one is skipped, because its gradient is infinite."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    cuda = torch.device("cuda", rank)
    with torch.cuda.device(rank):  # the ranks' processes run other tests too
        return _train_on(cuda, case, folder, tier, rank, max_grad_norm, skipped_step)


def _train_on(
    cuda: torch.device,
    case: Case,
    folder: Path,
    tier: str,
    rank: int,
    max_grad_norm: float | None,
    skipped_step: int | None,
) -> Outcome:
    recipe = case.make_recipe()
    model = build_model(case, recipe, case.layout, cuda)
    optimizer = build_optimizer(
        model.named_parameters(),
        recipe.optimizer,
        learning_rate=LEARNING_RATE,
        weight_decay=0.1,
        model=model,
    )
    if tier != "none":
        is_overlapped = tier == OVERLAPPED
        section = OffloadSection.model_validate(
            {
                "optimizer": "host"
                if is_overlapped
                else (IN_BACKWARD | BEFORE_MODULES).get(tier, tier),
                "buffer_bytes": 16384,
                "update_on": "device" if is_overlapped else "host",
            }
        )
        overlap: UpdateOverlap | None = None
        if is_overlapped:
            overlap = overlap_update(model, is_deferred=False)
        elif tier in IN_BACKWARD:
            overlap = HostBackwardUpdate(list_update_units(model), cuda)
        elif tier in BEFORE_MODULES:
            overlap = overlap_update(model, is_deferred=False, has_host_update=True)
        optimizer = offload_optimizer(
            optimizer,
            section,
            model,
            device=cuda,
            default_folder=folder,
            overlap=overlap,
        )
    data_rank = RankGrid(case.layout).data_rank(rank)
    outcome = Outcome()
    for step in range(NUM_STEPS):
        batches = [batch.pin_memory() for batch in draw_micro_batches(case, data_rank)]
        with device.log_synchronisations() as log, count_early_gradients(model, outcome):
            begin_update(optimizer, LEARNING_RATE)
            loss = accumulate_gradients(
                model, batches, seed=0, step=step, loss_scale=1e38 if step == skipped_step else 1.0
            )
            before_update = sum(
                log[key] for key in tuple(log) if not key[1].endswith("_update_after")
            )
            update = update_parameters(
                model,
                optimizer,
                learning_rate=LEARNING_RATE,
                max_grad_norm=max_grad_norm,
                router_table=loss.router_table,
                overlaps_forward=True,
            )
        assert update.is_skipped == (step == skipped_step)
        of_thread = sum(log[key] for key in log if key[1].endswith("_update_after"))
        outcome.waits.append(sum(log.values()) - before_update - of_thread)
        if tier in BEFORE_MODULES:
            assert overlap is not None
            assert overlap.is_pending != update.is_skipped
    if isinstance(optimizer, OffloadedOptimizer):
        optimizer.wait_for_update()
    named = dict(model.named_parameters())
    tensors = named | collect_optimizer_tensors(optimizer, named.items())
    outcome.tensors = {
        key: get_local_tensor(tensor.detach()).cpu().clone() for key, tensor in tensors.items()
    }
    outcome.values = collect_optimizer_values(optimizer)
    if isinstance(optimizer, OffloadedOptimizer):
        assert (optimizer.host_update is None) == (tier == OVERLAPPED)
        outcome.num_buckets = optimizer.num_buckets
        optimizer.close()
    assert not device.list_violations()
    return outcome


def find_differences(expected: Outcome, got: Outcome) -> list[str]:
    """List the tensors that differ, and names or counts if they do."""
    wrong = [] if expected.values == got.values else ["values"]
    if expected.tensors.keys() != got.tensors.keys():
        return [*wrong, "names"]
    return wrong + [
        key for key, tensor in expected.tensors.items() if not torch.equal(tensor, got.tensors[key])
    ]


@pytest.mark.parametrize("rule", RULES)
def test_the_bits_are_those_of_the_resident_run_and_the_host_waits_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    # On the test device a query makes the host know the event. Reading the norm has to do that.
    monkeypatch.setattr(torch.cuda.Event, "query", lambda event: True)
    case = Case(Layout(), sections={"optimizer": RULES[rule]})
    expected = train(case, tmp_path, "none")
    for tier in ("host", "disk", *BEFORE_MODULES):
        got = train(case, tmp_path, tier)
        assert find_differences(expected, got) == []
        assert got.num_buckets > 20
        assert got.waits == [1] * NUM_STEPS  # for the norm
        # The embedding has no gradient yet, and the last one waits for one in other memory.
        assert got.num_early == len(got.values["steps"]) - 2


WITHOUT_NORM: dict[str, Any] = {"max_grad_norm": None, "skipped_step": None}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tier", IN_BACKWARD)
def test_an_update_in_the_backward_pass_has_the_bits_of_the_resident_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, tier: str
) -> None:
    """Each step's update ends while the norm is not known, and another thread runs it."""
    threads: list[str] = []
    num_updated: list[int] = []
    copy_back = HostUpdate.copy_back
    end_gradients = HostBackwardUpdate.end_gradients

    def note_copy(self: HostUpdate, weights: Tensor, target: Tensor) -> None:
        threads.append(threading.current_thread().name)
        copy_back(self, weights, target)

    def wait_for_thread(self: HostBackwardUpdate) -> None:
        for task in self._tasks:
            task.result()
        num_updated.append(len(threads))
        end_gradients(self)

    monkeypatch.setattr(HostUpdate, "copy_back", note_copy)
    monkeypatch.setattr(HostBackwardUpdate, "end_gradients", wait_for_thread)
    case = Case(Layout(), sections={"optimizer": RULES[rule]})
    expected = train(case, tmp_path, "none", **WITHOUT_NORM)
    got = train(case, tmp_path, tier, **WITHOUT_NORM)
    assert find_differences(expected, got) == []
    assert got.waits == [1] * NUM_STEPS  # for the norm
    assert set(threads) == {"host update_0"}
    num_pieces = len(threads) // NUM_STEPS
    assert num_updated == [num_pieces * (1 + step) for step in range(NUM_STEPS)]


def test_an_update_in_the_backward_pass_waits_for_copies_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: None)
    with pytest.raises(RuntimeError, match=r"missing event: .* writes memory"):
        train(Case(Layout()), tmp_path, "host in the backward pass", **WITHOUT_NORM)
    device.list_violations()  # those of the interrupted run


def test_training_waits_for_weights_on_its_own_stream(tmp_path: Path) -> None:
    case = Case(Layout())
    expected = train(case, tmp_path, "none", **WITHOUT_NORM)
    stream = torch.cuda.Stream(torch.device("cuda", 0))
    with torch.cuda.stream(stream):
        got = train(case, tmp_path, "host in the backward pass", **WITHOUT_NORM)
    assert find_differences(expected, got) == []


def test_an_update_in_the_backward_pass_cannot_skip_a_step(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="the weights were updated in the backward pass"):
        train(Case(Layout()), tmp_path, "host in the backward pass", max_grad_norm=None)
    assert not device.list_violations()


def test_a_failing_disk_ends_a_step_with_an_update_in_the_backward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Disk, "read_at", fail)
    with pytest.raises(OffloadFailed, match="could not be read"):
        train(Case(Layout()), tmp_path, "disk in the backward pass", **WITHOUT_NORM)
    device.list_violations()


@pytest.mark.parametrize("name", ["zero0", "zero3"])
def test_passes_before_the_copies_of_their_weights_are_detected(
    own_device_ranks: RankPool, tmp_path: Path, name: str
) -> None:
    found = own_device_ranks.run(2, train_without_order, LAYOUTS[name], tmp_path)
    assert all("missing event" in error for error in found), found


def train_without_order(case: Case, folder: Path) -> str:
    """Train with modules and gathers that do not wait for their weights; return the error."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostUpdate, "order_after_copies", lambda *_: None)
            train(case, folder, "host before modules")
    except (RuntimeError, AssertionError) as error:
        return str(error)
    finally:
        device.list_violations()  # those of the interrupted run
    return ""


def test_gradients_without_clipping_have_the_bits_of_the_resident_run(tmp_path: Path) -> None:
    case = Case(Layout())
    expected = train(case, tmp_path, "none", max_grad_norm=None)
    assert find_differences(expected, train(case, tmp_path, "host", max_grad_norm=None)) == []


SMALL_BUCKET_BYTES = 65536
LAYOUTS: dict[str, Case] = {
    "zero0": Case(Layout(dp_replicate=2, bucket_size_bytes=SMALL_BUCKET_BYTES)),
    "zero1": Case(Layout(dp_shard=2, zero_stage=1)),
    "zero2": Case(Layout(dp_shard=2, zero_stage=2)),
    "zero3": Case(Layout(dp_shard=2, zero_stage=3)),
    "tp2": Case(Layout(tp=2, async_tensor_parallel="chunked")),
    "cp2": Case(Layout(cp=2, bucket_size_bytes=SMALL_BUCKET_BYTES)),
    "pp2": Case(Layout(pp=2)),
    "pp2 zb_h1": Case(Layout(pp=2, schedule="zb_h1")),
    "pp2 x zero1": Case(Layout(pp=2, dp_shard=2, zero_stage=1), model="deep_llama"),
    "ep2": Case(Layout(dp_shard=2, ep=2, zero_stage=1), model="qwen3_moe"),
    "adapters": Case(Layout(dp_shard=2, zero_stage=3), sections={"adapters": {"rank": 4}}),
}
LATE_LAYOUTS = {"pp2 zb_h1"}
"""Layouts whose last weight gradients are computed after the gradients of all inputs."""


def compare_on_rank(case: Case, folder: Path) -> tuple[list[str], int]:
    """Compare this rank's runs; return what differs, and the gradients that left early."""
    expected = train(case, folder, "none")
    got = train(case, folder, "host")
    differences = find_differences(expected, got)
    for tier in (OVERLAPPED, "host before modules"):
        differences += find_differences(expected, train(case, folder, tier))
    return differences, got.num_early


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_bits_of_the_resident_run(
    device_ranks: RankPool, tmp_path: Path, name: str
) -> None:
    case = LAYOUTS[name]
    size = case.layout.world_size
    for differences, num_early in device_ranks.run(size, compare_on_rank, case, tmp_path):
        assert differences == []
        assert (num_early > 0) == (name not in LATE_LAYOUTS)


BACKWARD_LAYOUTS = {
    name: LAYOUTS[name] for name in ("zero1", "zero2", "zero3", "tp2", "ep2", "adapters")
} | {
    "zero3 in bf16": Case(Layout(dp_shard=2, zero_stage=3), kind="bf16"),
}


def compare_backward_updates_on_rank(case: Case, folder: Path) -> list[str]:
    """Compare this rank's run, whose update is in the backward pass, with the resident run."""
    expected = train(case, folder, "none", **WITHOUT_NORM)
    return find_differences(
        expected, train(case, folder, "host in the backward pass", **WITHOUT_NORM)
    )


@pytest.mark.parametrize("name", BACKWARD_LAYOUTS)
def test_updates_in_the_backward_pass_have_the_bits_of_the_resident_run_under_layouts(
    device_ranks: RankPool, tmp_path: Path, name: str
) -> None:
    case = BACKWARD_LAYOUTS[name]
    size = case.layout.world_size
    found = device_ranks.run(size, compare_backward_updates_on_rank, case, tmp_path)
    assert found == [[]] * size


def test_copies_are_pinned_and_moments_are_not_on_the_device(tmp_path: Path) -> None:
    case = Case(Layout())
    recipe = case.make_recipe()
    cuda = torch.device("cuda", 0)
    model = build_model(case, recipe, case.layout, cuda)
    named = dict(model.named_parameters())
    gc.collect()  # the model of an earlier test would be freed during the measurement
    before = torch.cuda.memory_allocated()
    optimizer = offload_optimizer(
        build_optimizer(
            named.items(), recipe.optimizer, learning_rate=0.1, weight_decay=0.0, model=model
        ),
        OffloadSection(optimizer="host", update_on="host"),
        model,
        device=cuda,
        default_folder=tmp_path,
    )
    assert optimizer.host_update is not None
    assert optimizer.host_update.num_bytes == 2 * sum(tensor.nbytes for tensor in named.values())
    assert torch.cuda.memory_allocated() == before
    copies = optimizer.host_update._copies.values()
    assert all(copy.weights.is_pinned() and copy.gradient.is_pinned() for copy in copies)
    optimizer.close()


@pytest.mark.parametrize("method", ["take_gradient", "end_update"])
def test_copies_that_no_event_orders_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    original = getattr(HostUpdate, method)

    def run_without_waits(self: HostUpdate, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None)
            return original(self, *arguments)

    monkeypatch.setattr(HostUpdate, method, run_without_waits)
    with pytest.raises(RuntimeError, match="missing event"):
        train(Case(Layout()), tmp_path, "host")
    device.list_violations()  # those of the interrupted run


def test_an_update_without_a_norm_waits_for_the_gradients(tmp_path: Path) -> None:
    case = Case(Layout())
    cuda = torch.device("cuda", 0)
    model = build_model(case, case.make_recipe(), case.layout, cuda)
    named = dict(model.named_parameters())
    optimizer = offload_optimizer(
        build_optimizer(
            named.items(),
            case.make_recipe().optimizer,
            learning_rate=0.1,
            weight_decay=0.0,
            model=model,
        ),
        OffloadSection(optimizer="host", update_on="host"),
        model,
        device=cuda,
        default_folder=tmp_path,
    )
    batches = [batch.pin_memory() for batch in draw_micro_batches(case, 0)]
    accumulate_gradients(model, batches, seed=0, step=0)
    optimizer.step()  # reads nan from memory to which a copy is under way
    assert all(bool(parameter.isfinite().all()) for parameter in named.values())
    optimizer.close()
    assert not device.list_violations()


@pytest.mark.parametrize("is_in_backward", [False, True])
def test_a_run_writes_the_checkpoints_of_the_resident_run_and_resumes_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_in_backward: bool
) -> None:
    def build(run: str, tier: str, max_steps: int) -> Recipe:
        recipe = build_run(tmp_path, run, tier, max_steps=max_steps)
        on_host = {"update_on": "host"} if tier != "none" else {}
        sections: dict[str, dict[str, Any]] = {"run": {"device": "cuda"}, "offload": on_host}
        if is_in_backward:
            sections["training"] = {"max_grad_norm": None, "max_skipped_steps": 0}
            sections["precision"] = {"kind": "bf16", "working_weights": True}
        return recipe.model_copy(
            update={
                name: getattr(recipe, name).model_copy(update=changed)
                for name, changed in sections.items()
            }
        )

    run_training(build("resident", "none", 4))
    with caplog.at_level("INFO", logger="shardwright"):
        run_training(build("run", "disk", 2))
    assert any("the host updates them, with" in line for line in caplog.messages)
    assert "offload.update_on: host: the recipe says so" in caplog.messages
    line = (
        "offload: the update runs in the backward pass"
        if is_in_backward
        else "offload: the next forward pass begins during the update"
    )
    assert line in caplog.messages
    run_training(build("run", "host", 4), resume=True)
    expected = read_checkpoints(tmp_path / "resident")
    assert len(expected) == 4
    assert read_checkpoints(tmp_path / "run") == expected
    assert not device.list_violations()


@pytest.mark.parametrize("rule", ["adafactor", "muon"])
def test_optimizers_that_need_whole_matrices_are_refused(tmp_path: Path, rule: str) -> None:
    recipe = build_run(tmp_path, "run", "host")
    recipe = Recipe.model_validate(
        recipe.model_dump(mode="json", exclude_unset=True)
        | {
            "optimizer": {"name": rule},
            "offload": {"optimizer": "host", "update_on": "host"},
            "run": {"dir": str(tmp_path / "run"), "device": "cuda"},
        }
    )
    with pytest.raises(RecipeError, match=f"offload.update_on: the update of {rule} needs whole"):
        run_training(recipe)
