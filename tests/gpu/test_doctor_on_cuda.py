"""The doctor: reports of the driver, rates within the limits of the device, and a whole examination
of one rank.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from shardwright.doctor.diagnosis import examine
from shardwright.doctor.examination import ExaminationRequest
from shardwright.doctor.gpu_health import read_gpu, run_under_load
from shardwright.doctor.rates import device_rates
from shardwright.doctor.rates.cluster_profile import build_profile, build_request
from shardwright.doctor.rates.device_rates import list_precisions, time_copies, time_matmul
from shardwright.doctor.storage import OutputFolder
from shardwright.errors import InputError
from shardwright.hardware.catalog_loading import find_accelerator
from shardwright.layout import Layout
from tests.gpu.conftest import is_gpu


def test_matmul_rates_are_near_the_data_sheet_and_not_above(device: torch.device) -> None:
    size = 8192 if is_gpu(device) else 256
    for precision in list_precisions(device):
        rate = time_matmul(precision, size, size, size, device)
        assert rate.flops_per_second > 0
        if is_gpu(device):
            try:
                peak = find_accelerator(
                    torch.cuda.get_device_name(device)
                ).get_peak_flops_per_second(precision)
            except InputError:
                continue
            assert 0.3 * peak < rate.flops_per_second < 1.05 * peak


def test_copies(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cuda" and not is_gpu(device):
        monkeypatch.setattr(device_rates, "MIB_BYTES", 2**14)  # GiBs are for a GPU's caches
    rates = {rate.kind: rate.bytes_per_second for rate in time_copies(device)}
    assert set(rates) == (
        {"memory", "to device", "from device", "host memory"}
        if device.type == "cuda"
        else {"memory"}
    )
    if is_gpu(device):
        assert rates["memory"] > rates["to device"] > 1e9


def test_the_driver_reports_load(device: torch.device) -> None:
    if not is_gpu(device):
        pytest.skip("NVML reads NVIDIA's GPUs only")
    if importlib.util.find_spec("pynvml") is None:
        gpu, reason = read_gpu(device, os.getpid())
        assert reason == "nvidia-ml-py is not installed"
        assert gpu.memory_bytes > gpu.free_bytes > 0
        return
    idle, reason = read_gpu(device, os.getpid())
    assert reason is None
    with run_under_load(device):
        loaded, _ = read_gpu(device, os.getpid())
    assert idle.driver
    assert loaded.clock_mhz is not None
    assert idle.power_watts is not None
    assert loaded.power_watts is not None
    assert loaded.power_watts > idle.power_watts


def test_one_rank_is_examined_and_calibrated(device: torch.device, tmp_path: Path) -> None:
    if device.type == "cuda" and not is_gpu(device):
        pytest.skip("a GPU's problem sizes take minutes on the test device")
    kind = "cuda" if device.type == "cuda" else "cpu"
    # A rank that times out ends its process, here that of the tests: allow for a busy machine.
    request = ExaminationRequest(
        Layout(), (OutputFolder("runs", str(tmp_path), True),), timeout_seconds=240.0, device=kind
    )
    diagnosis = examine(request, 1)
    assert diagnosis is not None
    assert diagnosis.device_kind == device.type
    assert {"software", "host", "rates", "storage"} <= {
        finding.section for finding in diagnosis.findings
    }
    assert ("devices" in {finding.section for finding in diagnosis.findings}) == (
        device.type == "cuda"
    )
    profile = build_profile(diagnosis, build_request(None, Layout(), device=kind))
    assert profile.memory_bytes > 0
    assert {rate.precision for rate in profile.matmuls} == set(list_precisions(device))
