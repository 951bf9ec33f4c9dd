"""Temperature and throttling, with a fake NVML."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

from shardwright.telemetry.sensors import SensorReading, open_sensor


class NVMLError(Exception):
    pass


def make_fake_nvml(**functions: object) -> SimpleNamespace:
    defaults: dict[str, object] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda name: name,
        "nvmlDeviceGetTemperature": lambda handle, kind: 61,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x21,
    }
    return SimpleNamespace(NVMLError=NVMLError, NVML_TEMPERATURE_GPU=0, **(defaults | functions))


def fail(*_: object) -> None:
    raise NVMLError("no driver")


def test_a_device_is_opened_by_uuid_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []
    monkeypatch.setitem(
        sys.modules,
        "pynvml",
        make_fake_nvml(nvmlDeviceGetHandleByUUID=lambda name: requested.append(name)),
    )
    sensor = open_sensor("1234-ab")
    assert sensor is not None
    assert requested == [b"GPU-1234-ab"]
    reading = sensor.read()
    # Bit 1, idle, does not count as throttling.
    assert (reading.temperature_celsius, reading.throttle_reasons) == (61.0, "heat")


def test_a_reading_that_fails_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", make_fake_nvml(nvmlDeviceGetTemperature=fail))
    sensor = open_sensor("x")
    assert sensor is not None
    assert sensor.read() == SensorReading()


@pytest.mark.parametrize(
    "module", [None, make_fake_nvml(nvmlInit=fail)], ids=["no package", "no driver"]
)
def test_missing_nvml_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: object
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with caplog.at_level(logging.INFO):
        assert open_sensor("x") is None
    assert "temperature and throttling are not recorded" in caplog.text
