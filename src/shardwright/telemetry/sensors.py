"""Temperature and throttling of NVIDIA devices, read by NVML if nvidia-ml-py is installed."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

THROTTLE_REASONS = {
    0x0000000000000004: "power",  # software power cap: the board is at its power limit
    0x0000000000000008: "hardware",
    0x0000000000000020: "heat",  # software thermal
    0x0000000000000040: "heat (hardware)",
    0x0000000000000080: "power brake",
}
"""NVML's `nvmlClocksThrottleReason*` that slow a device down under load, without idle and
application clocks."""


@dataclass(frozen=True)
class SensorReading:
    """Sensor values of a device at one moment."""

    temperature_celsius: float = 0.0
    """Temperature, 0 if unknown."""
    throttle_bits: int = 0
    """Bit mask of throttle reasons, as defined by NVML."""

    @property
    def throttle_reasons(self) -> str:
        """Reasons for reduced clocks; empty if there are none.

        >>> SensorReading(throttle_bits=0x24).throttle_reasons
        'power, heat'
        """
        return ", ".join(
            reason for bit, reason in THROTTLE_REASONS.items() if self.throttle_bits & bit
        )


class Sensor:
    """Sensors of one device. A reading takes tens of microseconds; if it fails, it is empty."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    def read(self) -> SensorReading:
        """Read temperature and throttling."""
        try:
            return SensorReading(
                float(
                    self._nvml.nvmlDeviceGetTemperature(
                        self._handle, self._nvml.NVML_TEMPERATURE_GPU
                    )
                ),
                int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)),
            )
        except self._nvml.NVMLError:
            return SensorReading()


def open_sensor(uuid: str) -> Sensor | None:
    """Open the sensors of the device with this CUDA UUID; None if NVML is unavailable."""
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
