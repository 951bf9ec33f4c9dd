"""Health of a GPU from its driver: memory, clocks, heat, power, throttling, ECC, NVLink, PCIe.

Read twice, idle and during large matrix products, because GPUs throttle under load only.
Sources: NVIDIA Management Library reference (docs.nvidia.com/deploy/nvml-api); for remapped
rows NVIDIA GPU Memory Error Management, sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.doctor.finding import Finding, Verdict, format_ranks
from shardwright.units import format_bytes

SECTION = "devices"

_MAX_NVLINKS = 18
"""Largest number of NVLinks per GPU of any generation."""
_LOAD_SECONDS = 1.0
_THROTTLE_REASONS: dict[int, tuple[str, Verdict, str]] = {
    0x0008: (
        "hardware slowdown",
        "fail",
        "Check its power supply and cooling (nvidia-smi -q -d PERFORMANCE)",
    ),
    0x0020: ("thermal slowdown (driver)", "warn", "Cool it: fans, air flow, inlet temperature"),
    0x0040: ("thermal slowdown (hardware)", "fail", "Cool it: fans, air flow, inlet temperature"),
    0x0080: ("power brake", "fail", "Check the power supply of rack and node, which throttles"),
}
"""Bits of NVML's clocks event reasons that indicate a problem.

The power cap (0x4) is missing here: large products usually reach it.
"""
_POWER_CAP_BIT = 0x0004


@dataclass(frozen=True)
class GpuState:
    """State of one GPU at one time; None for values that the driver does not report."""

    name: str
    memory_bytes: int
    free_bytes: int
    driver: str | None = None
    temperature_celsius: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    default_power_limit_watts: float | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    throttle_bits: int | None = None
    num_ecc_uncorrected: int | None = None
    """Uncorrected ECC errors since the driver was loaded."""
    num_ecc_corrected: int | None = None
    num_ecc_uncorrected_lifetime: int | None = None
    num_remapped_rows: int | None = None
    has_pending_rows: bool | None = None
    has_failed_rows: bool | None = None
    links_up: tuple[int, ...] = ()
    links_down: tuple[int, ...] = ()
    link_errors: Mapping[str, int] | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    max_pcie_width: int | None = None
    is_mig_enabled: bool | None = None
    process_ids: tuple[int, ...] = ()
    """Ids of other processes that compute on the GPU."""


def read_gpu(device: torch.device, current_process_id: int) -> tuple[GpuState, str | None]:
    """Read the state of a GPU; the second value is the error if NVML cannot be read.

    Then the state contains only what torch reports.
    """
    properties = torch.cuda.get_device_properties(device)
    free_bytes, memory_bytes = torch.cuda.mem_get_info(device)
    basic = GpuState(properties.name, memory_bytes, free_bytes)
    try:
        import pynvml
    except ImportError:
        return basic, "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return basic, f"NVML cannot be initialised: {error}"
    try:
        handle = _find_handle(pynvml, properties)
        return _read_nvml(pynvml, handle, basic, current_process_id), None
    except pynvml.NVMLError as error:
        return basic, f"NVML does not know this device: {error}"
    finally:
        pynvml.nvmlShutdown()


def _find_handle(nvml: Any, properties: Any) -> Any:
    """Find the device by PCI address: CUDA_VISIBLE_DEVICES changes torch's indices."""
    address = (
        f"{properties.pci_domain_id:08X}:{properties.pci_bus_id:02X}"
        f":{properties.pci_device_id:02X}.0"
    )
    return nvml.nvmlDeviceGetHandleByPciBusId(address.encode())


def _read_nvml(nvml: Any, handle: Any, basic: GpuState, current_process_id: int) -> GpuState:
    def query(function: Callable[..., Any], *arguments: Any) -> Any:
        """Call an NVML function; None if device or driver does not support it."""
        try:
            return function(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    corrected = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
    remapped_rows = query(nvml.nvmlDeviceGetRemappedRows)
    link_states = {link: query(nvml.nvmlDeviceGetNvLinkState, link) for link in range(_MAX_NVLINKS)}
    active_links = tuple(
        link for link, state in link_states.items() if state == nvml.NVML_FEATURE_ENABLED
    )
    mig_mode = query(nvml.nvmlDeviceGetMigMode)
    driver_version = nvml.nvmlSystemGetDriverVersion()
    return GpuState(
        name=basic.name,
        memory_bytes=basic.memory_bytes,
        free_bytes=basic.free_bytes,
        driver=driver_version.decode() if isinstance(driver_version, bytes) else driver_version,
        temperature_celsius=query(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        power_watts=_to_watts(query(nvml.nvmlDeviceGetPowerUsage)),
        power_limit_watts=_to_watts(query(nvml.nvmlDeviceGetEnforcedPowerLimit)),
        default_power_limit_watts=_to_watts(query(nvml.nvmlDeviceGetPowerManagementDefaultLimit)),
        clock_mhz=query(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        max_clock_mhz=query(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
        throttle_bits=query(nvml.nvmlDeviceGetCurrentClocksThrottleReasons),
        num_ecc_uncorrected=query(
            nvml.nvmlDeviceGetTotalEccErrors, uncorrected, nvml.NVML_VOLATILE_ECC
        ),
        num_ecc_corrected=query(
            nvml.nvmlDeviceGetTotalEccErrors, corrected, nvml.NVML_VOLATILE_ECC
        ),
        num_ecc_uncorrected_lifetime=query(
            nvml.nvmlDeviceGetTotalEccErrors, uncorrected, nvml.NVML_AGGREGATE_ECC
        ),
        num_remapped_rows=None
        if remapped_rows is None
        else int(remapped_rows[0]) + int(remapped_rows[1]),
        has_pending_rows=None if remapped_rows is None else bool(remapped_rows[2]),
        has_failed_rows=None if remapped_rows is None else bool(remapped_rows[3]),
        links_up=active_links,
        links_down=tuple(
            link for link, state in link_states.items() if state == nvml.NVML_FEATURE_DISABLED
        ),
        link_errors=_count_link_errors(nvml, query, active_links),
        pcie_generation=query(nvml.nvmlDeviceGetCurrPcieLinkGeneration),
        pcie_width=query(nvml.nvmlDeviceGetCurrPcieLinkWidth),
        max_pcie_width=query(nvml.nvmlDeviceGetMaxPcieLinkWidth),
        is_mig_enabled=None if mig_mode is None else bool(mig_mode[0]),
        process_ids=tuple(
            process.pid
            for process in query(nvml.nvmlDeviceGetComputeRunningProcesses) or ()
            if process.pid != current_process_id
        ),
    )


def _to_watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _count_link_errors(
    nvml: Any, query: Callable[..., Any], links: tuple[int, ...]
) -> dict[str, int] | None:
    """Count the errors of all links by kind; None if the driver reports none of them.

    Replays and recoveries repair themselves but take time.
    """
    kinds = {
        "replays": nvml.NVML_NVLINK_ERROR_DL_REPLAY,
        "recoveries": nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
        "flit CRC errors": nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
        "data CRC errors": nvml.NVML_NVLINK_ERROR_DL_CRC_DATA,
    }
    counts = {
        kind: [query(nvml.nvmlDeviceGetNvLinkErrorCounter, link, number) for link in links]
        for kind, number in kinds.items()
    }
    totals = {
        kind: sum(value for value in values if value is not None) for kind, values in counts.items()
    }
    return (
        totals if any(value is not None for values in counts.values() for value in values) else None
    )


@contextmanager
def run_under_load(device: torch.device) -> Iterator[None]:
    """Run the block under load: queue bf16 products for about a second of device time."""
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
    product_seconds = start.elapsed_time(end) / 1000 / 8
    for _ in range(max(1, round(_LOAD_SECONDS / product_seconds))):
        torch.mm(a_MK, b_KN, out=out_MN)
    try:
        yield
    finally:
        torch.cuda.synchronize(device)


def judge_gpus(
    idle: Mapping[int, GpuState], loaded: Mapping[int, GpuState], driver_errors: Mapping[int, str]
) -> list[Finding]:
    """Judge GPUs by rank, idle and under load; `driver_errors` has the errors of NVML by rank."""
    findings = [_judge_models(idle)]
    for rank in sorted(idle):
        findings += _judge_memory(rank, idle[rank])
        findings += _judge_errors(rank, idle[rank])
        findings += _judge_gpu_links(rank, idle[rank])
        if rank in loaded:
            findings += _judge_throttling(rank, loaded[rank])
    for reason in sorted(set(driver_errors.values())):
        ranks = format_ranks(rank for rank, error in driver_errors.items() if error == reason)
        remedy = "Check that nvidia-smi works"
        if "not installed" in reason:
            remedy = "pip install 'shardwright[nvml]'"
        value = f"{ranks}: {reason}: heat, throttling, ECC and link errors are not checked"
        findings.append(Finding(SECTION, "driver", "warn", value, remedy))
    if not any(finding.verdict != "pass" for finding in findings) and loaded:
        findings.append(Finding(SECTION, "errors, heat, power", "pass", _describe_hottest(loaded)))
    return findings


def _describe_hottest(loaded: Mapping[int, GpuState]) -> str:
    """Describe the hottest GPU under load."""
    hottest = max(loaded.values(), key=lambda gpu: gpu.temperature_celsius or 0)
    parts = []
    if hottest.temperature_celsius is not None:
        parts.append(f"at most {hottest.temperature_celsius} C under load")
    if hottest.power_watts is not None and hottest.power_limit_watts is not None:
        parts.append(f"{hottest.power_watts:.0f} of {hottest.power_limit_watts:.0f} W")
    if hottest.clock_mhz is not None and hottest.max_clock_mhz is not None:
        parts.append(f"{hottest.clock_mhz} of {hottest.max_clock_mhz} MHz")
    if any((gpu.throttle_bits or 0) & _POWER_CAP_BIT for gpu in loaded.values()):
        parts.append("at the power cap, which is usual for large products")
    return ", ".join([*parts, "no errors"])


def _judge_models(gpus: Mapping[int, GpuState]) -> Finding:
    by_name: dict[str, list[int]] = {}
    for rank, gpu in gpus.items():
        by_name.setdefault(f"{gpu.name}, {format_bytes(gpu.memory_bytes)}", []).append(rank)
    value = "; ".join(f"{len(ranks)} x {name}" for name, ranks in by_name.items())
    drivers = sorted({gpu.driver for gpu in gpus.values() if gpu.driver})
    if drivers:
        value += f", driver {', '.join(drivers)}"
    if len(by_name) > 1 or len(drivers) > 1:
        remedy = "Every step waits for the slowest: use GPUs of one model and one driver"
        return Finding(SECTION, "kind", "warn", value, remedy)
    return Finding(SECTION, "kind", "pass", value)


def _judge_memory(rank: int, gpu: GpuState) -> Iterator[Finding]:
    free = f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.memory_bytes)} free"
    if gpu.process_ids:
        pids = ", ".join(map(str, gpu.process_ids))
        value = f"{free}; processes {pids} use this GPU, too"
        remedy = f"End them (kill {pids}), or use other devices"
        yield Finding(SECTION, f"memory, rank {rank}", "warn", value, remedy)
    elif gpu.free_bytes < 0.9 * gpu.memory_bytes:
        remedy = "See nvidia-smi for its users; dead processes keep memory until reaped"
        yield Finding(SECTION, f"memory, rank {rank}", "warn", free, remedy)
    if gpu.is_mig_enabled:
        remedy = "NCCL cannot connect two slices of one GPU: nvidia-smi -mig 0"
        yield Finding(SECTION, f"MIG, rank {rank}", "warn", "a slice of a GPU", remedy)


def _judge_errors(rank: int, gpu: GpuState) -> Iterator[Finding]:
    if gpu.has_failed_rows:
        value = "a row could not be remapped"
        yield Finding(SECTION, f"memory rows, rank {rank}", "fail", value, "Replace the GPU")
    if gpu.has_pending_rows:
        value = "a remapped row needs a reset to take effect"
        remedy = "Drain the node, then nvidia-smi --gpu-reset, or reboot"
        yield Finding(SECTION, f"memory rows, rank {rank}", "fail", value, remedy)
    if gpu.num_ecc_uncorrected:
        value = f"{gpu.num_ecc_uncorrected} uncorrected errors since the driver was loaded"
        remedy = "Drain the node, reset the GPU, and run dcgmi diag -r 3"
        yield Finding(SECTION, f"ECC, rank {rank}", "fail", value, remedy)
    elif gpu.num_ecc_corrected:
        value = f"{gpu.num_ecc_corrected} corrected errors since the driver was loaded"
        remedy = "Check again after a day: a growing count precedes uncorrected errors"
        yield Finding(SECTION, f"ECC, rank {rank}", "warn", value, remedy)


def _judge_gpu_links(rank: int, gpu: GpuState) -> Iterator[Finding]:
    if gpu.links_up and gpu.links_down:
        num_links = len(gpu.links_up) + len(gpu.links_down)
        value = f"links {', '.join(map(str, gpu.links_down))} of {num_links} are down"
        remedy = "Check nvidia-smi nvlink -s; reset the GPU, then reseat it or its switch"
        yield Finding(SECTION, f"NVLink, rank {rank}", "fail", value, remedy)
    errors = {kind: count for kind, count in (gpu.link_errors or {}).items() if count}
    if errors:
        value = ", ".join(f"{count} {kind}" for kind, count in errors.items())
        verdict: Verdict = "fail" if errors.get("recoveries") else "warn"
        remedy = "Watch nvidia-smi nvlink -e: growing counts indicate a bad link or seat"
        yield Finding(SECTION, f"NVLink, rank {rank}", verdict, value, remedy)
    if (
        gpu.pcie_width is not None
        and gpu.max_pcie_width is not None
        and gpu.pcie_width < gpu.max_pcie_width
    ):
        value = f"{gpu.pcie_width} lanes of {gpu.max_pcie_width}"
        remedy = "Reseat the GPU; lspci -vv shows the link state (LnkSta: downgraded)"
        yield Finding(SECTION, f"PCIe, rank {rank}", "warn", value, remedy)


def _judge_throttling(rank: int, gpu: GpuState) -> Iterator[Finding]:
    for bit, (name, verdict, remedy) in _THROTTLE_REASONS.items():
        if (gpu.throttle_bits or 0) & bit:
            heat = f" at {gpu.temperature_celsius} C" if gpu.temperature_celsius is not None else ""
            clock = (
                f", {gpu.clock_mhz} of {gpu.max_clock_mhz} MHz" if gpu.clock_mhz is not None else ""
            )
            yield Finding(SECTION, f"throttling, rank {rank}", verdict, name + heat + clock, remedy)
    limit = gpu.power_limit_watts
    default_limit = gpu.default_power_limit_watts
    if limit is not None and default_limit is not None and limit < 0.98 * default_limit:
        value = f"limited to {limit:.0f} W of {default_limit:.0f} W"
        remedy = f"nvidia-smi -pl {default_limit:.0f}"
        yield Finding(SECTION, f"power, rank {rank}", "warn", value, remedy)
