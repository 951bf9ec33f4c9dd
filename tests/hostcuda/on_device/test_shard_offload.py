"""Offloaded shards of trained weights on CUDA devices: FSDP2's streams and the copies' are ordered
by events, the bits are those of resident shards, and the devices have less memory in use.
"""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.offload import OffloadSection, OffloadTier
from shardwright.layout import Layout, RankGrid
from shardwright.numerics import get_local_tensor
from shardwright.offload import (
    OffloadedOptimizer,
    ParameterOffload,
    ShardOffload,
    offload_optimizer,
)
from shardwright.offload.optimizer_offload import build_parameter_offload
from shardwright.offload.pinned_parameter_store import PinnedParameterStore
from shardwright.optim import build_optimizer, collect_optimizer_moments
from shardwright.parallel import sharded_weights
from shardwright.training.moment_offload import overlap_update
from shardwright.training.step import accumulate_gradients, update_parameters
from shardwright.verification.rank_pool import RankPool
from tests.hostcuda import device
from tests.hostcuda.ranks import LEARNING_RATE, Case, build_model, draw_micro_batches

NUM_STEPS = 3
NUM_BLOCKS = 4
MATRIX_BYTES = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
"""fp32 weights of one block."""


@dataclass
class Trained:
    """Results of a rank's steps."""

    tensors: dict[str, Tensor]
    waits: int
    peak_bytes: int
    """Most memory of the last step, without what there was before the model."""
    present_bytes: int = 0
    """Bytes of shards on the device after the step."""
    moved_bytes: tuple[int, int] = (0, 0)
    """Bytes that a step reads, and writes; an update may run in the next step."""


def train_shards(case: Case, folder: Path, tier: OffloadTier, update_on: str = "device") -> Trained:
    """Train some steps on this rank; moments are offloaded in any case."""
    section = OffloadSection.model_validate(
        {"optimizer": "host", "parameters": tier, "buffer_bytes": 8192, "update_on": update_on}
    )
    gc.collect()
    cuda = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.memory_allocated()
    offload = None
    if tier != "none":
        offload = build_parameter_offload(
            section,
            device=cuda,
            default_folder=folder,
            kind=ShardOffload if case.layout.is_sharded else ParameterOffload,
        )
    recipe = case.make_recipe()
    if offload is None and case.layout.is_sharded:  # only offloaded shards have working shards
        precision = recipe.precision.model_copy(update={"working_weights": "auto"})
        recipe = recipe.model_copy(update={"precision": precision})
    model = build_model(case, recipe, case.layout, cuda, offload)
    if case.is_compiled:
        torch._dynamo.reset()  # graphs of an earlier case in this process
        model.decoder.compile_blocks(backend="aot_eager", fullgraph=True)
    inner = build_optimizer(
        model.named_parameters(),
        recipe.optimizer,
        learning_rate=LEARNING_RATE,
        weight_decay=0.1,
        model=model,
    )
    overlap = None
    if update_on == "host":
        overlap = overlap_update(model, is_deferred=False, has_host_update=True)
    optimizer = offload_optimizer(
        inner,
        section,
        model,
        device=cuda,
        default_folder=folder,
        parameters=offload,
        overlap=overlap,
    )
    rank = RankGrid(case.layout).data_rank(torch.distributed.get_rank())
    moved_bytes = (0, 0)
    for step in range(NUM_STEPS):
        if offload is not None:
            counts = offload.pop_counts()
            moved_bytes = (counts.read_bytes, counts.written_bytes)
        torch.cuda.reset_peak_memory_stats()
        batches = [batch.pin_memory() for batch in draw_micro_batches(case, rank)]
        with device.log_synchronisations() as log:
            accumulate_gradients(model, batches, seed=0, step=step)
            update_parameters(
                model,
                optimizer,
                learning_rate=LEARNING_RATE,
                max_grad_norm=0.05,
                overlaps_forward=True,
            )
        waits = sum(log.values())
    optimizer.wait_for_update()
    peak_bytes = torch.cuda.max_memory_allocated() - before
    present_bytes = 0 if offload is None else offload.count_device_bytes()
    named = dict(model.named_parameters())
    moments = collect_optimizer_moments(optimizer, named.items())
    tensors = {key: get_local_tensor(part.tensor).cpu().clone() for key, part in moments.items()}
    for name in named:
        local = model.read_parameter(name)
        assert local is not None
        tensors[name] = local.cpu().clone()
    close(optimizer, offload)
    assert not device.list_violations()
    return Trained(tensors, waits, peak_bytes, present_bytes, moved_bytes)


def close(optimizer: OffloadedOptimizer, offload: Any) -> None:
    optimizer.close()
    if offload is not None:
        offload.close()


def compare(
    case: Case, folder: Path, tier: OffloadTier, update_on: str = "device"
) -> tuple[list[str], int, int, int]:
    """List what differs from resident shards; return the further waits and the bytes saved."""
    expected = train_shards(case, folder, "none")
    got = train_shards(case, folder, tier, update_on)
    names = expected.tensors.keys()
    assert names == got.tensors.keys()
    assert len(names) > 40
    different = [key for key in names if not torch.equal(expected.tensors[key], got.tensors[key])]
    return (
        different,
        got.waits - expected.waits,
        expected.peak_bytes - got.peak_bytes,
        got.present_bytes,
    )


COPIED = {"precision": {"kind": "bf16", "working_weights": True}}
CASES = {
    "zero1": Case(Layout(dp_shard=2, zero_stage=1), recompute="full"),
    "zero2": Case(Layout(dp_shard=2, zero_stage=2), kind="bf16"),
    "zero3": Case(Layout(dp_shard=2, zero_stage=3)),
    "experts": Case(Layout(dp_shard=2, ep=2, zero_stage=3), model="qwen3_moe"),
    "working shards of zero1": Case(
        Layout(dp_shard=2, zero_stage=1), recompute="full", sections=COPIED
    ),
    "working shards of zero2": Case(
        Layout(dp_shard=2, zero_stage=2), recompute="selective", sections=COPIED
    ),
    "working shards of zero3": Case(
        Layout(dp_shard=2, zero_stage=3, prefetch_depth=2, max_gathers_in_flight=3),
        sections=COPIED,
        is_compiled=True,
    ),
    "working shards of experts": Case(
        Layout(dp_shard=2, ep=2, zero_stage=3), sections=COPIED, model="qwen3_moe"
    ),
    "working shards in mxfp8": Case(
        Layout(dp_shard=2, zero_stage=3),
        sections={
            "precision": {
                "kind": "fp8",
                "working_weights": True,
                "fp8": {"recipe": "mxfp8", "emulate": True},
            }
        },
    ),
    "prefetch": Case(
        Layout(dp_shard=2, zero_stage=3, prefetch_depth=2, max_gathers_in_flight=3),
        sections={"precision": {"kind": "fp8", "fp8": {"recipe": "mxfp8", "emulate": True}}},
    ),
}


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        ("zero3", "host"),
        ("prefetch", "disk"),
        ("working shards of zero3", "disk"),
        *(
            pytest.param(name, tier, marks=pytest.mark.long)
            for name in CASES
            for tier in ("host", "disk")
        ),
    ],
)
def test_steps_have_the_bits_of_resident_shards(
    tmp_path: Path, device_ranks: RankPool, name: str, tier: OffloadTier
) -> None:
    for different, waits, _, present in device_ranks.run(2, compare, CASES[name], tmp_path, tier):
        assert different == []
        if tier == "host":
            assert waits == 0
        assert present <= 2 * MATRIX_BYTES * (1 + 3 * (name == "experts"))


WHOLE_CASES = {
    "replicas": Case(Layout(dp_replicate=2), sections=COPIED, is_compiled=True),
    "replicas in fp32": Case(Layout(dp_replicate=2), recompute="full"),
    "tensor": Case(Layout(tp=2), sections=COPIED, recompute="selective"),
    "chunked tensor": Case(
        Layout(tp=2, async_tensor_parallel="chunked"), sections=COPIED, is_compiled=True
    ),
    "split pipeline": Case(Layout(pp=2, schedule="zb_h1"), sections=COPIED, rounds=2),
    "experts of replicas": Case(Layout(dp_replicate=2), sections=COPIED, model="qwen3_moe"),
}
"""Whole matrices that no rank shards."""


@pytest.mark.parametrize("update_on", ["host", "device"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name.startswith("replicas") else pytest.mark.long)
        for name in WHOLE_CASES
    ],
)
def test_working_weights_stay_with_the_bits_of_resident_master_weights(
    tmp_path: Path, device_ranks: RankPool, name: str, update_on: str
) -> None:
    case = WHOLE_CASES[name]
    for different, _, _, present in device_ranks.run(2, compare, case, tmp_path, "host", update_on):
        assert different == []
        if case.sections:  # an update on the device leaves the last block until the next pass
            num_blocks = (update_on == "device") * (1 + 3 * name.startswith("experts"))
            assert present <= num_blocks * MATRIX_BYTES


SHORT_CASES = ("zero3", "working shards of zero3")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SHORT_CASES else pytest.mark.long) for name in CASES],
)
def test_the_host_updates_shards_where_they_are(
    tmp_path: Path,
    device_ranks: RankPool,
    name: str,
) -> None:
    for different, waits, _, present in device_ranks.run(
        2, compare_without_queries, CASES[name], tmp_path
    ):
        assert different == []
        assert waits == 0
        if name.startswith("working shards"):
            assert present == 0
        assert present <= 2 * MATRIX_BYTES * (1 + 3 * (name == "experts"))


def count_moved(case: Case, folder: Path, update_on: str) -> tuple[int, int]:
    """Return the bytes that a step of this rank reads, and writes."""
    return train_shards(case, folder, "host", update_on).moved_bytes


@pytest.mark.parametrize(
    ("name", "update_on", "read", "written"),
    [
        ("working shards of zero3", "host", 2, 2),
        pytest.param("working shards of zero3", "device", 3, 3, marks=pytest.mark.long),
        pytest.param("working shards of zero1", "host", 1, 1, marks=pytest.mark.long),
        pytest.param("working shards of zero2", "host", 2, 2, marks=pytest.mark.long),
    ],
)
def test_only_gradients_and_new_weights_of_working_shards_move(
    tmp_path: Path, device_ranks: RankPool, name: str, update_on: str, read: int, written: int
) -> None:
    """Gradients leave after each reduction, and return for the next; weights that the host has
    updated arrive once. An update on the device reads weights and gradients, and writes weights."""
    shard_bytes = NUM_BLOCKS * MATRIX_BYTES // 2
    for moved in device_ranks.run(2, count_moved, CASES[name], tmp_path, update_on):
        assert moved == (read * shard_bytes, written * shard_bytes)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SHORT_CASES else pytest.mark.long) for name in CASES],
)
def test_the_host_updates_shards_that_are_on_disk(
    tmp_path: Path, device_ranks: RankPool, name: str
) -> None:
    for different, _, _, present in device_ranks.run(
        2, compare, CASES[name], tmp_path, "disk", "host"
    ):
        assert different == []
        if name.startswith("working shards"):
            assert present == 0


def count_gather_kernels(case: Case, folder: Path) -> list[int]:
    """Count the kernels of each copy of shards into a gather.

    ATen's CUDA kernel (`ForeachBinaryOpList.cu`) takes sources of one dtype; otherwise it copies
    each by itself. The test device has no kernel of that kind.
    """
    counts = []
    original = torch._foreach_copy_

    def count(targets: Any, sources: Any, *options: Any) -> None:
        if sys._getframe(1).f_code.co_filename.endswith("_fsdp_collectives.py"):
            num_dtypes = len({source.dtype for source in sources})
            counts.append(1 if num_dtypes == 1 else len(sources))
        original(targets, sources, *options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", count)
        train_shards(case, folder, "host", "host")
    return counts


def test_one_kernel_copies_working_shards_into_a_gather(
    tmp_path: Path, device_ranks: RankPool
) -> None:
    """Shards of norms, which stay on the device, are copied with them."""
    case = replace(CASES["working shards of zero3"], is_compiled=False)
    for counts in device_ranks.run(2, count_gather_kernels, case, tmp_path):
        assert len(counts) >= 2 * 2 * NUM_BLOCKS * NUM_STEPS  # two copies of a gather, two passes
        assert set(counts) == {1}


def compare_without_queries(case: Case, folder: Path) -> tuple[list[str], int, int, int]:
    """Compare an update on the host. On the test device a query makes the host know that a stream
    has ended; reading the norm has to do that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.Event, "query", lambda _event: True)
        patch.setattr(torch.cuda.Stream, "query", lambda _stream: True)
        return compare(case, folder, "host", "host")


def test_the_device_has_the_shards_of_two_blocks(tmp_path: Path, device_ranks: RankPool) -> None:
    """Weights and gradients of four blocks leave; two blocks' weights, and the gradients of three
    that return and of one that leaves, remain on the device at most."""
    case = replace(CASES["zero3"], recompute="full")
    shard_bytes = MATRIX_BYTES // 2
    for different, _, saved_bytes, present_bytes in device_ranks.run(
        2, compare, case, tmp_path, "host"
    ):
        assert different == []
        assert present_bytes <= 2 * shard_bytes
        sums_of_squares = 4 * 7
        assert saved_bytes >= (2 * NUM_BLOCKS - 6) * shard_bytes - sums_of_squares


def run_without_order(case: Case, folder: Path, method: str) -> str:
    """Train without the events of one kind of copy; return the error."""
    original = getattr(PinnedParameterStore, method)

    def run_without_waits(self: PinnedParameterStore, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None)
            patch.setattr(torch.cuda.Stream, "wait_event", lambda *_: None)
            original(self, *arguments)
            return lambda: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PinnedParameterStore, method, run_without_waits)
        return run_until_error(case, folder)


def run_without_gather_order(case: Case, folder: Path) -> str:
    """Train with gathers that do not wait for the shards; return the error."""
    original = sharded_weights._bring_before_gather

    def bring(group: Any, *arguments: Any) -> None:
        original(group, *arguments)
        unshard = group.unshard

        def run(async_op: bool = False) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None)
                unshard(async_op)

        group.unshard = run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_weights, "_bring_before_gather", bring)
        return run_until_error(case, folder)


def run_until_error(case: Case, folder: Path) -> str:
    torch.cuda.synchronize()  # fails without the device
    try:
        train_shards(case, folder, "host")
        torch.cuda.synchronize()
    except (RuntimeError, AssertionError) as error:
        return str(error)
    finally:
        with suppress(RuntimeError):
            torch.cuda.synchronize()  # checks the interrupted run's copies
        device.list_violations()
    return ""


@pytest.mark.parametrize("method", ["read", pytest.param("write", marks=pytest.mark.long)])
def test_copies_that_no_event_orders_are_detected(
    tmp_path: Path, own_device_ranks: RankPool, method: str
) -> None:
    found = own_device_ranks.run(2, run_without_order, CASES["zero3"], tmp_path, method)
    assert all("missing event" in error for error in found), found


@pytest.mark.long
def test_gathers_that_do_not_wait_for_shards_are_detected(
    tmp_path: Path, own_device_ranks: RankPool
) -> None:
    found = own_device_ranks.run(2, run_without_gather_order, CASES["zero3"], tmp_path)
    assert all("missing event" in error for error in found), found
