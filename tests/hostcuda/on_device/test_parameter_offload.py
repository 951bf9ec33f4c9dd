"""Offloaded frozen weights on a CUDA device: pinned copies on a stream of their own, ordered by
events, without a wait of the host.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.offload import OffloadSection
from shardwright.config.recipe import RecomputeKind
from shardwright.layout import Layout
from shardwright.numerics import get_local_tensor
from shardwright.offload import weight_store
from shardwright.offload.weight_offload import build_weight_offload
from shardwright.training.setup import offload_activations
from shardwright.training.step import accumulate_gradients
from shardwright.verification.rank_pool import RankPool
from tests.hostcuda import device
from tests.hostcuda.ranks import Case, build_case_plan, build_model, draw_micro_batches

NUM_BLOCKS = 4
BLOCK_BYTES = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96)
CUDA = torch.device("cuda", 0)


def compute_gradients(
    folder: Path,
    recompute: RecomputeKind,
    tier: str,
    activations: str = "none",
    layout: Layout | None = None,
) -> tuple[dict[str, Tensor], int, int, int]:
    """Return gradients, the host's waits, the device's peak from the model on, and bytes read."""
    case = Case(layout or Layout(), recompute=recompute, sections={"adapters": {"rank": 4}})
    section = OffloadSection.model_validate(
        {"parameters": tier, "activations": activations, "buffer_bytes": 16384}
    )
    gc.collect()  # the model of an earlier call would be freed during the measurement
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    offload = build_weight_offload(
        section, device=CUDA, default_folder=folder, open_stored=lambda: None
    )
    model = build_model(case, case.make_recipe(), case.layout, CUDA, offload)
    plan = build_case_plan(case, case.make_recipe(), case.layout)
    saved = offload_activations(model, section, plan, folder)
    batches = [batch.pin_memory() for batch in draw_micro_batches(case, 0)]
    with device.log_synchronisations() as log:
        accumulate_gradients(model, batches, seed=0, step=0)
    peak_bytes = torch.cuda.max_memory_allocated() - before
    gradients = {
        name: get_local_tensor(parameter.grad).cpu().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    num_bytes = 0
    if offload is not None:
        num_bytes = offload.store.counts.read_bytes
        offload.close()
    if saved is not None:
        saved.close()
    assert not device.list_violations()
    return gradients, sum(log.values()), peak_bytes, num_bytes


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_have_the_bits_of_resident_weights_and_the_host_does_not_wait(
    tmp_path: Path, recompute: RecomputeKind
) -> None:
    expected, resident_waits, resident_peak, _ = compute_gradients(tmp_path, recompute, "none")
    for tier in ("host", "disk"):
        got, waits, peak, num_bytes = compute_gradients(tmp_path, recompute, tier)
        assert [key for key in expected if not torch.equal(expected[key], got[key])] == []
        # Two micro-batches: forward passes read all blocks, backward passes all but the last,
        # and the first block stays for the next forward pass. The last one's neighbours are
        # not known in the first pass.
        assert num_bytes == (2 * NUM_BLOCKS + 2 * (NUM_BLOCKS - 1) - 1) * BLOCK_BYTES
        buffers = 0.1 * BLOCK_BYTES
        assert resident_peak - peak > (NUM_BLOCKS - 2) * BLOCK_BYTES - buffers
        if tier == "host":
            assert waits == resident_waits


def find_differences(folder: Path) -> tuple[list[str], int]:
    """List the gradients that differ on this rank under ZeRO; return the bytes it has read."""
    layout = Layout(dp_shard=2, zero_stage=3)
    expected, *_ = compute_gradients(folder, "none", "none", layout=layout)
    got, _, _, num_bytes = compute_gradients(folder, "none", "host", layout=layout)
    assert expected.keys() == got.keys()
    return [name for name in expected if not torch.equal(expected[name], got[name])], num_bytes


def test_ranks_that_share_weights_read_a_part_each_and_gather(
    tmp_path: Path, device_ranks: RankPool
) -> None:
    expected_bytes = (2 * NUM_BLOCKS + 2 * (NUM_BLOCKS - 1) - 1) * BLOCK_BYTES // 2
    assert device_ranks.run(2, find_differences, tmp_path) == [([], expected_bytes)] * 2


def test_weights_and_saved_tensors_leave_together(tmp_path: Path) -> None:
    expected, *_ = compute_gradients(tmp_path, "none", "none")
    got, _, _, num_bytes = compute_gradients(tmp_path, "none", "host", "host")
    assert [key for key in expected if not torch.equal(expected[key], got[key])] == []
    assert num_bytes > 0


def test_copies_that_no_event_orders_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = weight_store.PinnedWeightStore.read

    def run_without_waits(self: weight_store.PinnedWeightStore, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None)
            original(self, *arguments)
            return lambda: None

    monkeypatch.setattr(weight_store.PinnedWeightStore, "read", run_without_waits)
    with pytest.raises((RuntimeError, AssertionError)):
        compute_gradients(tmp_path, "none", "host")
    torch.cuda.synchronize()  # checks the interrupted run's copies, which would fail a later test
    device.list_violations()
