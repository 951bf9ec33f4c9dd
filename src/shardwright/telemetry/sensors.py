"""Temperature and throttling of an NVIDIA device, through NVML where its Python package (nvidia-ml-py) is installed."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

THROTTLE_REASONS = {
    0x0000000000000004: "power",  # software power cap: the board is at its limit
    0x0000000000000008: "hardware",
    0x0000000000000020: "heat",  # software thermal
    0x0000000000000040: "heat (hardware)",
    0x0000000000000080: "power brake",
}
"""NVML's `nvmlClocksThrottleReason*` that slow a device down under load; idle and application clocks are none of these."""


@dataclass(frozen=True)
class Reading:
    """What a device says of itself now."""

    temperature_celsius: float = 0.0
    """0 where it does not say."""
    throttle_bits: int = 0
    """As NVML gives them."""

    @property
    def throttled(self) -> str:
        """Why its clocks are held down; empty where they are not.

        >>> Reading(throttle_bits=0x24).throttled
        'power, heat'
        """
        return ", ".join(reason for bit, reason in THROTTLE_REASONS.items() if self.throttle_bits & bit)


class Sensor:
    """One device's sensors. A reading takes some tens of microseconds; one that fails is empty."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def read(self) -> Reading:
        """Temperature and throttling now."""
        try:
            return Reading(
                float(self._nvml.nvmlDeviceGetTemperature(self._handle, self._nvml.NVML_TEMPERATURE_GPU)),
                int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)),
            )
        except self._nvml.NVMLError:
            return Reading()


def open_sensor(uuid: str) -> Sensor | None:
    """The sensors of the device with this UUID (as CUDA spells it); None, with a line in the log, where there is no NVML."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        logger.info("temperature and throttling are not recorded: pip install 'shardwright[nvml]'")
        return None
    try:
        nvml.nvmlInit()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return Sensor(nvml, nvml.nvmlDeviceGetHandleByUUID(name.encode()))
    except nvml.NVMLError as error:
        logger.info("temperature and throttling are not recorded: %s", error)
        return None
