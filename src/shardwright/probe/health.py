"""Health of a GPU as its driver tells it: memory, clocks, heat, power, throttling, ECC, NVLink, PCIe.

Read twice: at rest, and while large products run, because what throttles shows under load only. Source of the names and of what
they mean: NVIDIA Management Library reference (docs.nvidia.com/deploy/nvml-api), and for remapped rows NVIDIA GPU Memory Error
Management, sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.probe.finding import Finding, Verdict, name_ranks
from shardwright.units import format_bytes

SECTION = "devices"

_MOST_LINKS = 18
"""NVLinks of a GPU, most of any generation."""
_THROTTLES: dict[int, tuple[str, Verdict, str]] = {
    0x0008: ("hardware slowdown", "fail", "Look at its power supply and cooling (nvidia-smi -q -d PERFORMANCE)"),
    0x0020: ("thermal slowdown (driver)", "warn", "Cool it: fans, air flow, inlet temperature"),
    0x0040: ("thermal slowdown (hardware)", "fail", "Cool it: fans, air flow, inlet temperature"),
    0x0080: ("power brake", "fail", "The rack's or the node's power supply asks for less load: look at it"),
}
"""Bits of NVML's clocks event reasons that are no ordinary state. The power cap (0x4) is one: large products reach it."""
_POWER_CAP = 0x0004


@dataclass(frozen=True)
class Gpu:
    """One GPU at one moment; None where the driver does not tell."""

    name: str
    memory_bytes: int
    free_bytes: int
    driver: str | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    default_limit_watts: float | None = None
    clock_mhz: int | None = None
    most_clock_mhz: int | None = None
    throttle_bits: int | None = None
    ecc_uncorrected: int | None = None
    """Since the driver was loaded."""
    ecc_corrected: int | None = None
    ecc_uncorrected_ever: int | None = None
    rows_remapped: int | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    links_up: tuple[int, ...] = ()
    links_down: tuple[int, ...] = ()
    link_errors: Mapping[str, int] | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    most_pcie_width: int | None = None
    mig: bool | None = None
    processes: tuple[int, ...] = ()
    """Ids of other processes that compute there."""


def read_gpu(device: torch.device, own_process: int) -> tuple[Gpu, str | None]:
    """The GPU, and why its driver told nothing, if so.

    Without nvidia-ml-py, or without a driver that answers it, only what torch knows.
    """
    properties = torch.cuda.get_device_properties(device)
    free_bytes, memory_bytes = torch.cuda.mem_get_info(device)
    plain = Gpu(properties.name, memory_bytes, free_bytes)
    try:
        import pynvml
    except ImportError:
        return plain, "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return plain, f"NVML does not answer: {error}"
    try:
        handle = _find_handle(pynvml, properties)
        return _read(pynvml, handle, plain, own_process), None
    except pynvml.NVMLError as error:
        return plain, f"NVML does not know this device: {error}"
    finally:
        pynvml.nvmlShutdown()


def _find_handle(nvml: Any, properties: Any) -> Any:
    """By PCI address: indices differ from torch's under CUDA_VISIBLE_DEVICES."""
    address = f"{properties.pci_domain_id:08X}:{properties.pci_bus_id:02X}:{properties.pci_device_id:02X}.0"
    return nvml.nvmlDeviceGetHandleByPciBusId(address.encode())


def _read(nvml: Any, handle: Any, plain: Gpu, own_process: int) -> Gpu:
    def ask(question: Callable[..., Any], *words: Any) -> Any:
        """None where this device or driver does not support the question."""
        try:
            return question(handle, *words)
        except (nvml.NVMLError, AttributeError):
            return None

    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    corrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
    rows = ask(nvml.nvmlDeviceGetRemappedRows)
    states = {link: ask(nvml.nvmlDeviceGetNvLinkState, link) for link in range(_MOST_LINKS)}
    up = tuple(link for link, state in states.items() if state == nvml.NVML_FEATURE_ENABLED)
    mig = ask(nvml.nvmlDeviceGetMigMode)
    version = nvml.nvmlSystemGetDriverVersion()
    milliwatts = [
        ask(question)
        for question in (
            nvml.nvmlDeviceGetPowerUsage,
            nvml.nvmlDeviceGetEnforcedPowerLimit,
            nvml.nvmlDeviceGetPowerManagementDefaultLimit,
        )
    ]
    watts = [None if value is None else value / 1000 for value in milliwatts]
    return Gpu(
        name=plain.name,
        memory_bytes=plain.memory_bytes,
        free_bytes=plain.free_bytes,
        driver=version.decode() if isinstance(version, bytes) else version,
        temperature_celsius=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        power_watts=watts[0],
        power_limit_watts=watts[1],
        default_limit_watts=watts[2],
        clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        most_clock_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
        throttle_bits=ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        ecc_uncorrected=ask(nvml.nvmlDeviceGetTotalEccErrors, uncorrected, nvml.NVML_VOLATILE_ECC),
        ecc_corrected=ask(nvml.nvmlDeviceGetTotalEccErrors, corrected, nvml.NVML_VOLATILE_ECC),
        ecc_uncorrected_ever=ask(nvml.nvmlDeviceGetTotalEccErrors, uncorrected, nvml.NVML_AGGREGATE_ECC),
        rows_remapped=None if rows is None else int(rows[0]) + int(rows[1]),
        rows_pending=None if rows is None else bool(rows[2]),
        rows_failed=None if rows is None else bool(rows[3]),
        links_up=up,
        links_down=tuple(link for link, state in states.items() if state == nvml.NVML_FEATURE_DISABLED),
        link_errors=_link_errors(nvml, ask, up),
        pcie_generation=ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration),
        pcie_width=ask(nvml.nvmlDeviceGetCurrPcieLinkWidth),
        most_pcie_width=ask(nvml.nvmlDeviceGetMaxPcieLinkWidth),
        mig=None if mig is None else bool(mig[0]),
        processes=tuple(found.pid for found in ask(nvml.nvmlDeviceGetComputeRunningProcesses) or () if found.pid != own_process),
    )


def _link_errors(nvml: Any, ask: Callable[..., Any], links: tuple[int, ...]) -> dict[str, int] | None:
    """Errors of all links by kind, where there is any answer; replays and recoveries mend themselves, and cost time."""
    kinds = {
        "replays": nvml.NVML_NVLINK_ERROR_DL_REPLAY,
        "recoveries": nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
        "flit CRC errors": nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
        "data CRC errors": nvml.NVML_NVLINK_ERROR_DL_CRC_DATA,
    }
    counts = {kind: [ask(nvml.nvmlDeviceGetNvLinkErrorCounter, link, number) for link in links] for kind, number in kinds.items()}
    told = {kind: sum(value for value in values if value is not None) for kind, values in counts.items()}
    return told if any(value is not None for values in counts.values() for value in values) else None


@contextmanager
def under_load(device: torch.device, seconds: float = 1.0) -> Iterator[None]:
    """Large bf16 products are queued for about so many seconds of device time, so that what is read inside is read under load."""
    size = 8192
    a_MK, b_KN = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out_MN = torch.empty_like(a_MK)
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.mm(a_MK, b_KN, out=out_MN)
    start.record()
    for _ in range(8):
        torch.mm(a_MK, b_KN, out=out_MN)
    end.record()
    end.synchronize()
    one_seconds = start.elapsed_time(end) / 1000 / 8
    for _ in range(max(1, round(seconds / one_seconds))):
        torch.mm(a_MK, b_KN, out=out_MN)
    try:
        yield
    finally:
        torch.cuda.synchronize(device)


def judge_gpus(at_rest: Mapping[int, Gpu], loaded: Mapping[int, Gpu], silent: Mapping[int, str]) -> list[Finding]:
    """GPUs by rank, at rest and under load; `silent` says of which ranks the driver told nothing, and why."""
    findings = [_judge_kinds(at_rest)]
    for rank in sorted(at_rest):
        findings += _judge_memory(rank, at_rest[rank])
        findings += _judge_errors(rank, at_rest[rank])
        findings += _judge_links(rank, at_rest[rank])
        if rank in loaded:
            findings += _judge_load(rank, loaded[rank])
    for reason in sorted(set(silent.values())):
        ranks = name_ranks(rank for rank, why in silent.items() if why == reason)
        remedy = "pip install 'shardwright[nvml]'" if "not installed" in reason else "nvidia-smi: does the driver answer?"
        findings.append(
            Finding(SECTION, "driver", "warn", f"{ranks}: {reason}: no heat, throttling, ECC or link errors are read", remedy)
        )
    if not any(finding.verdict != "pass" for finding in findings) and loaded:
        findings.append(Finding(SECTION, "errors, heat, power", "pass", _describe(loaded)))
    return findings


def _describe(loaded: Mapping[int, Gpu]) -> str:
    """The hottest under load, in a line."""
    hottest = max(loaded.values(), key=lambda gpu: gpu.temperature_celsius or 0)
    told = [f"under load at most {hottest.temperature_celsius} C"] if hottest.temperature_celsius is not None else []
    if hottest.power_watts is not None and hottest.power_limit_watts is not None:
        told.append(f"{hottest.power_watts:.0f} of {hottest.power_limit_watts:.0f} W")
    if hottest.clock_mhz is not None and hottest.most_clock_mhz is not None:
        told.append(f"{hottest.clock_mhz} of {hottest.most_clock_mhz} MHz")
    capped = any((gpu.throttle_bits or 0) & _POWER_CAP for gpu in loaded.values())
    return ", ".join([*told, *(["at the power cap, as large products are"] if capped else []), "no errors"])


def _judge_kinds(gpus: Mapping[int, Gpu]) -> Finding:
    by_name: dict[str, list[int]] = {}
    for rank, gpu in gpus.items():
        by_name.setdefault(f"{gpu.name}, {format_bytes(gpu.memory_bytes)}", []).append(rank)
    value = "; ".join(f"{len(ranks)} x {name}" for name, ranks in by_name.items())
    drivers = sorted({gpu.driver for gpu in gpus.values() if gpu.driver})
    if drivers:
        value += f", driver {', '.join(drivers)}"
    if len(by_name) > 1 or len(drivers) > 1:
        return Finding(
            SECTION, "kind", "warn", value, "Every step waits for the slowest: give the job devices and drivers of one kind"
        )
    return Finding(SECTION, "kind", "pass", value)


def _judge_memory(rank: int, gpu: Gpu) -> Iterator[Finding]:
    if gpu.processes:
        pids = ", ".join(map(str, gpu.processes))
        told = f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.memory_bytes)} free; processes {pids} compute there, too"
        yield Finding(SECTION, f"memory, rank {rank}", "warn", told, f"End them (kill {pids}), or take other devices")
    elif gpu.free_bytes < 0.9 * gpu.memory_bytes:
        told = f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.memory_bytes)} free"
        yield Finding(
            SECTION,
            f"memory, rank {rank}",
            "warn",
            told,
            "nvidia-smi shows who holds it; a dead process's stays until it is reaped",
        )
    if gpu.mig:
        yield Finding(
            SECTION, f"MIG, rank {rank}", "warn", "a slice of a GPU", "NCCL joins no two slices of one GPU: nvidia-smi -mig 0"
        )


def _judge_errors(rank: int, gpu: Gpu) -> Iterator[Finding]:
    if gpu.rows_failed:
        yield Finding(SECTION, f"memory rows, rank {rank}", "fail", "a row could not be remapped", "Replace the GPU")
    if gpu.rows_pending:
        told = "a remapped row waits for a reset"
        yield Finding(SECTION, f"memory rows, rank {rank}", "fail", told, "Drain the node, then nvidia-smi --gpu-reset, or reboot")
    if gpu.ecc_uncorrected:
        told = f"{gpu.ecc_uncorrected} uncorrected since the driver was loaded"
        yield Finding(SECTION, f"ECC, rank {rank}", "fail", told, "Drain the node, reset the GPU, and run dcgmi diag -r 3")
    elif gpu.ecc_corrected:
        told = f"{gpu.ecc_corrected} corrected since the driver was loaded"
        yield Finding(
            SECTION, f"ECC, rank {rank}", "warn", told, "Look again after a day: a growing count precedes uncorrected errors"
        )


def _judge_links(rank: int, gpu: Gpu) -> Iterator[Finding]:
    if gpu.links_up and gpu.links_down:
        told = f"links {', '.join(map(str, gpu.links_down))} of {len(gpu.links_up) + len(gpu.links_down)} are down"
        yield Finding(
            SECTION, f"NVLink, rank {rank}", "fail", told, "nvidia-smi nvlink -s; reset the GPU, then reseat it or its switch"
        )
    errors = {kind: count for kind, count in (gpu.link_errors or {}).items() if count}
    if errors:
        told = ", ".join(f"{count} {kind}" for kind, count in errors.items())
        verdict: Verdict = "fail" if errors.get("recoveries") else "warn"
        yield Finding(
            SECTION, f"NVLink, rank {rank}", verdict, told, "nvidia-smi nvlink -e: counts that grow are a bad link or seat"
        )
    if gpu.pcie_width is not None and gpu.most_pcie_width is not None and gpu.pcie_width < gpu.most_pcie_width:
        told = f"{gpu.pcie_width} lanes of {gpu.most_pcie_width}"
        yield Finding(SECTION, f"PCIe, rank {rank}", "warn", told, "Reseat it; lspci -vv shows LnkSta, downgraded")


def _judge_load(rank: int, gpu: Gpu) -> Iterator[Finding]:
    for bit, (name, verdict, remedy) in _THROTTLES.items():
        if (gpu.throttle_bits or 0) & bit:
            heat = f" at {gpu.temperature_celsius} C" if gpu.temperature_celsius is not None else ""
            clock = f", {gpu.clock_mhz} of {gpu.most_clock_mhz} MHz" if gpu.clock_mhz is not None else ""
            yield Finding(SECTION, f"throttling, rank {rank}", verdict, name + heat + clock, remedy)
    limit = gpu.power_limit_watts
    usual = gpu.default_limit_watts
    if limit is not None and usual is not None and limit < 0.98 * usual:
        told = f"limited to {limit:.0f} W of {usual:.0f} W"
        yield Finding(SECTION, f"power, rank {rank}", "warn", told, f"nvidia-smi -pl {usual:.0f}")
