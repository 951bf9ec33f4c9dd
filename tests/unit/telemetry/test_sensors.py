"""Temperature and throttling, with a stand-in for NVML: what a driver says is its own to test."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

from shardwright.telemetry.sensors import SensorReading, open_sensor


class NVMLError(Exception):
    pass


def stand_in(**functions: object) -> SimpleNamespace:
    known: dict[str, object] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda name: name,
        "nvmlDeviceGetTemperature": lambda handle, kind: 61,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x21,
    }
    return SimpleNamespace(NVMLError=NVMLError, NVML_TEMPERATURE_GPU=0, **(known | functions))


def fail(*_: object) -> None:
    raise NVMLError("no driver")


def test_a_device_is_found_by_its_uuid_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setitem(
        sys.modules, "pynvml", stand_in(nvmlDeviceGetHandleByUUID=lambda name: asked.append(name))
    )
    sensor = open_sensor("1234-ab")
    assert sensor is not None
    assert asked == [b"GPU-1234-ab"]
    reading = sensor.read()
    assert (reading.temperature_celsius, reading.throttle_reasons) == (
        61.0,
        "heat",
    )  # idle, bit 1, is no throttling


def test_a_reading_that_fails_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", stand_in(nvmlDeviceGetTemperature=fail))
    sensor = open_sensor("x")
    assert sensor is not None
    assert sensor.read() == SensorReading()


@pytest.mark.parametrize("module", [None, stand_in(nvmlInit=fail)], ids=["no package", "no driver"])
def test_without_nvml_there_is_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: object
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with caplog.at_level(logging.INFO):
        assert open_sensor("x") is None
    assert "temperature and throttling are not recorded" in caplog.text
