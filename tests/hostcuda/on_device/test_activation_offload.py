"""Offloaded activations on a CUDA device: pinned copies on their own streams, ordered by events,
without a wait of the host.
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
from shardwright.offload import activation_store
from shardwright.training.setup import offload_activations
from shardwright.training.step import accumulate_gradients
from shardwright.verification.rank_pool import RankPool
from tests.hostcuda import device
from tests.hostcuda.ranks import Case, build_case_plan, build_model, draw_micro_batches


def compute_gradients(
    folder: Path, case: Case, tier: str
) -> tuple[dict[str, Tensor], int, int, int]:
    """Return gradients, the host's waits, the peak of the device, and the bytes that left."""
    cuda = torch.device("cuda", torch.cuda.current_device())
    model = build_model(case, case.make_recipe(), case.layout, cuda)
    section = OffloadSection.model_validate({"activations": tier, "buffer_bytes": 16384})
    plan = build_case_plan(case, case.make_recipe(), case.layout)
    offload = offload_activations(model, section, plan, folder)
    batches = [batch.pin_memory() for batch in draw_micro_batches(case, 0)]
    gc.collect()  # the model of an earlier call would be freed during the measurement
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with device.log_synchronisations() as log:
        accumulate_gradients(model, batches, seed=0, step=0)
    peak_bytes = torch.cuda.max_memory_allocated() - before
    gradients = {
        name: parameter.grad.cpu().clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    num_bytes = 0
    if offload is not None:
        num_bytes = offload.peak_bytes
        assert offload.num_bytes == 0
        offload.close()
    assert not device.list_violations()
    return gradients, sum(log.values()), peak_bytes, num_bytes


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_have_the_bits_of_resident_tensors_and_the_host_does_not_wait(
    tmp_path: Path, recompute: RecomputeKind
) -> None:
    case = Case(Layout(), recompute=recompute)
    expected, resident_waits, resident_peak, _ = compute_gradients(tmp_path, case, "none")
    for tier in ("host", "disk"):
        got, waits, peak, num_bytes = compute_gradients(tmp_path, case, tier)
        assert [key for key in expected if not torch.equal(expected[key], got[key])] == []
        assert num_bytes > 0
        if tier == "host":
            assert waits == resident_waits
        if recompute == "none":
            # Three of four blocks leave, and one returns ahead.
            assert resident_peak - peak > 0.5 * num_bytes


def compare_split_passes(folder: Path, case: Case) -> None:
    """Compare a rank's step under a schedule with split backward passes with a resident one."""
    expected, resident_waits, resident_peak, _ = compute_gradients(folder, case, "none")
    for tier in ("host", "disk"):
        got, waits, peak, num_bytes = compute_gradients(folder, case, tier)
        assert expected.keys() == got.keys()
        assert [key for key in expected if not torch.equal(expected[key], got[key])] == []
        if tier == "host":
            assert waits == resident_waits
        # Of two blocks, and of one whose inputs of weight gradients wait.
        assert resident_peak - peak > 0.25 * num_bytes


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        pytest.param(
            schedule,
            recompute,
            marks=[] if (schedule, recompute) == ("zb_h1", "full") else pytest.mark.long,
        )
        for schedule in ("zb_h1", "zbv", "dualpipev")
        for recompute in ("none", "selective", "full")
    ],
)
def test_inputs_of_deferred_weight_gradients_leave_without_a_wait(
    tmp_path: Path, device_ranks: RankPool, schedule: str, recompute: RecomputeKind
) -> None:
    case = Case(Layout(pp=2, schedule=schedule), "deep_llama", recompute=recompute, rounds=2)
    device_ranks.run(2, compare_split_passes, tmp_path, case)


@pytest.mark.parametrize("method", ["read", "write"])
def test_copies_that_no_event_orders_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    original = getattr(activation_store.PinnedStore, method)

    def run_without_waits(self: activation_store.PinnedStore, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda.Stream, "wait_stream", lambda *_: None)
            result, _ = original(self, *arguments)
            return result, lambda: None

    monkeypatch.setattr(activation_store.PinnedStore, method, run_without_waits)
    with pytest.raises((RuntimeError, AssertionError)):
        compute_gradients(tmp_path, Case(Layout()), "host")
    torch.cuda.synchronize()  # checks the interrupted run's copies, which would fail a later test
    device.list_violations()
