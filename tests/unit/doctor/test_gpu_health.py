"""Verdicts from driver readings: those of a healthy H100, and changed ones; a fake module replaces
NVML.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.doctor.gpu_health import GpuState, judge_gpus, read_gpu

HEALTHY = GpuState(
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=85_017_493_504,
    free_bytes=84_400_000_000,
    driver="550.90.07",
    temperature_celsius=58,
    power_watts=688.0,
    power_limit_watts=700.0,
    default_power_limit_watts=700.0,
    clock_mhz=1410,
    max_clock_mhz=1980,
    throttle_bits=0x4,
    num_ecc_uncorrected=0,
    num_ecc_corrected=0,
    num_ecc_uncorrected_lifetime=0,
    num_remapped_rows=0,
    has_pending_rows=False,
    has_failed_rows=False,
    links_up=tuple(range(18)),
    link_errors={"replays": 0, "recoveries": 0},
    pcie_generation=5,
    pcie_width=16,
    max_pcie_width=16,
    is_mig_enabled=False,
)


def judge_rank_1(
    idle_changes: dict[str, Any] | None = None, load_changes: dict[str, Any] | None = None
) -> dict[str, str]:
    """Return the verdicts by name of a changed rank 1 next to a healthy rank 0."""
    at_rest = {0: HEALTHY, 1: replace(HEALTHY, **(idle_changes or {}))}
    loaded = {0: HEALTHY, 1: replace(HEALTHY, **(load_changes or {}))}
    return {
        finding.name: finding.verdict
        for finding in judge_gpus(at_rest, loaded, {})
        if finding.verdict != "pass"
    }


def test_a_healthy_gpu_at_its_power_cap_passes() -> None:
    findings = judge_gpus({0: HEALTHY}, {0: HEALTHY}, {})
    assert {finding.verdict for finding in findings} == {"pass"}
    assert "688 of 700 W" in findings[-1].value
    assert "power cap" in findings[-1].value


@pytest.mark.parametrize(
    ("idle_changes", "name", "verdict"),
    [
        ({"num_ecc_uncorrected": 2}, "ECC, rank 1", "fail"),
        ({"num_ecc_corrected": 40}, "ECC, rank 1", "warn"),
        ({"has_pending_rows": True}, "memory rows, rank 1", "fail"),
        ({"has_failed_rows": True}, "memory rows, rank 1", "fail"),
        ({"links_up": tuple(range(17)), "links_down": (17,)}, "NVLink, rank 1", "fail"),
        ({"link_errors": {"replays": 3, "recoveries": 0}}, "NVLink, rank 1", "warn"),
        ({"link_errors": {"replays": 3, "recoveries": 1}}, "NVLink, rank 1", "fail"),
        ({"pcie_width": 8}, "PCIe, rank 1", "warn"),
        ({"free_bytes": 20_000_000_000}, "memory, rank 1", "warn"),
        ({"process_ids": (4711,)}, "memory, rank 1", "warn"),
        ({"is_mig_enabled": True}, "MIG, rank 1", "warn"),
        ({"name": "NVIDIA H200"}, "kind", "warn"),
        ({"driver": "535.1"}, "kind", "warn"),
    ],
)
def test_problems_of_an_idle_gpu_name_its_rank(
    idle_changes: dict[str, Any], name: str, verdict: str
) -> None:
    assert judge_rank_1(idle_changes) == {name: verdict}


@pytest.mark.parametrize(
    ("load_changes", "name", "verdict"),
    [
        ({"throttle_bits": 0x44}, "throttling, rank 1", "fail"),
        ({"throttle_bits": 0x20}, "throttling, rank 1", "warn"),
        ({"throttle_bits": 0x80}, "throttling, rank 1", "fail"),
        ({"power_limit_watts": 500.0}, "power, rank 1", "warn"),
    ],
)
def test_throttling_under_load_is_reported(
    load_changes: dict[str, Any], name: str, verdict: str
) -> None:
    assert judge_rank_1(load_changes=load_changes) == {name: verdict}


def test_without_nvml_the_remedy_names_the_extra() -> None:
    plain = GpuState("NVIDIA H100 80GB HBM3", 85_017_493_504, 84_400_000_000)
    findings = judge_gpus(
        {0: plain, 1: plain}, {}, dict.fromkeys((0, 1), "nvidia-ml-py is not installed")
    )
    (problem,) = [finding for finding in findings if finding.verdict != "pass"]
    assert problem.remedy == "pip install 'shardwright[nvml]'"
    assert "ranks 0-1" in problem.value


class _NVMLError(Exception):
    pass


def fake_nvml(answers: dict[str, Any]) -> ModuleType:
    """Return a module with NVML's names; functions without an answer raise NVMLError, as on an old
    device.
    """
    module = ModuleType("pynvml")
    names = {"NVMLError": _NVMLError, "NVML_FEATURE_ENABLED": 1, "NVML_FEATURE_DISABLED": 0}
    constants = (
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_MEMORY_ERROR_TYPE_CORRECTED",
        "NVML_VOLATILE_ECC", "NVML_AGGREGATE_ECC",
        "NVML_TEMPERATURE_GPU", "NVML_CLOCK_SM", "NVML_NVLINK_ERROR_DL_REPLAY",
        "NVML_NVLINK_ERROR_DL_RECOVERY",
        "NVML_NVLINK_ERROR_DL_CRC_FLIT", "NVML_NVLINK_ERROR_DL_CRC_DATA",
    )  # fmt: skip
    for number, name in enumerate(constants):
        setattr(module, name, number)
    for name, value in names.items():
        setattr(module, name, value)

    def get_function(name: str) -> Any:
        def call(*words: Any) -> Any:
            if name not in answers:
                raise _NVMLError(f"{name} is not supported")
            answer = answers[name]
            return answer(*words) if callable(answer) else answer

        return call

    module.__getattr__ = get_function  # type: ignore[method-assign]
    return module


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (84_400_000_000, 85_017_493_504))


@pytest.mark.usefixtures("fake_gpu")
def test_nvml_is_read_by_pci_address_and_unsupported_values_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses: list[bytes] = []
    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetHandleByPciBusId": lambda address: addresses.append(address) or "handle",
        "nvmlSystemGetDriverVersion": "550.90.07",
        "nvmlDeviceGetTemperature": 58,
        "nvmlDeviceGetPowerUsage": 688_000,
        "nvmlDeviceGetRemappedRows": (1, 2, 1, 0),
        "nvmlDeviceGetNvLinkState": lambda handle, link: {0: 1, 1: 0}.get(link, 5),
        "nvmlDeviceGetNvLinkErrorCounter": 4,
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=1), SimpleNamespace(pid=2)],
    }
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(answers))
    gpu, reason = read_gpu(torch.device("cuda", 0), current_process_id=1)
    assert reason is None
    assert addresses == [b"00000000:1B:00.0"]
    assert (gpu.temperature_celsius, gpu.power_watts, gpu.power_limit_watts) == (58, 688.0, None)
    assert (gpu.num_remapped_rows, gpu.has_pending_rows, gpu.has_failed_rows) == (3, True, False)
    assert (gpu.links_up, gpu.links_down, gpu.process_ids) == ((0,), (1,), (2,))
    assert gpu.link_errors == {
        "replays": 4,
        "recoveries": 4,
        "flit CRC errors": 4,
        "data CRC errors": 4,
    }
    assert gpu.num_ecc_uncorrected is None


@pytest.mark.usefixtures("fake_gpu")
def test_without_the_package_or_the_driver_only_torch_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpu, reason = read_gpu(torch.device("cuda", 0), current_process_id=1)
    assert gpu == GpuState("NVIDIA H100 80GB HBM3", 85_017_493_504, 84_400_000_000)
    assert reason == "nvidia-ml-py is not installed"
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml({}))
    _, reason = read_gpu(torch.device("cuda", 0), current_process_id=1)
    assert reason is not None
    assert reason.startswith("NVML cannot be initialised")
