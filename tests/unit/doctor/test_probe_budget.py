"""An examination ends within its budget on a device of any speed and names omitted work."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwright.doctor import probe_budget
from shardwright.doctor.diagnosis import Diagnosis, examine
from shardwright.doctor.examination import ExaminationRequest
from shardwright.doctor.finding import Finding
from shardwright.doctor.rates import device_rates, elementwise
from shardwright.doctor.rates.cluster_profile import build_profile, build_request
from shardwright.doctor.rates.device_rates import (
    AttentionWorkload,
    measure_median_seconds,
    reduce_attention,
    time_squares,
)
from shardwright.hardware import (
    AttentionRate,
    ElementwiseRate,
    MatmulRate,
    load_profile,
    save_profile,
)
from shardwright.layout import Layout

CPU = torch.device("cpu")
BUDGET_SECONDS = 60.0


class VirtualDevice:
    """Replaces the probes: takes no time, and advances a clock by the time of a real device.

    Each problem is called at least twice; repeated calls of a short one take 0.2 s.
    """

    def __init__(self, flops_per_second: dict[str, float]) -> None:
        self.flops_per_second = flops_per_second
        self.now_seconds = 0.0
        self.longest_seconds = 0.0

    def _acquire(self, call_seconds: float) -> None:
        self.longest_seconds = max(self.longest_seconds, call_seconds)
        self.now_seconds += max(0.2, 2 * call_seconds)

    def time_product(
        self, precision: str, m: int, n: int, k: int, device: torch.device
    ) -> MatmulRate:
        rate = self.flops_per_second[precision]
        self._acquire(2.0 * m * n * k / rate)
        return MatmulRate(precision, m, n, k, rate)

    def time_attention(
        self, rows: AttentionWorkload, device: torch.device, *, seconds: float = 0.2
    ) -> AttentionRate:
        rate = self.flops_per_second[rows.precision]
        self._acquire(3.5 * rows.flops / rate)
        return AttentionRate(rows.precision, rows.row_tokens, rows.head_dim, rate, rate)

    def time_elementwise(
        self, precision: str, tokens: int, width: int, device: torch.device, *, seconds: float = 0.2
    ) -> ElementwiseRate:
        rate = self.flops_per_second[precision]
        rate_of_tensor = ElementwiseRate(precision, tokens, width, rate, rate)
        self._acquire(elementwise.compute_call_seconds(rate_of_tensor))
        return rate_of_tensor


def examine_virtually(
    monkeypatch: pytest.MonkeyPatch,
    flops_per_second: dict[str, float],
    budget_seconds: float = BUDGET_SECONDS,
) -> tuple[VirtualDevice, Diagnosis, ExaminationRequest]:
    device = VirtualDevice(flops_per_second)
    monkeypatch.setattr(probe_budget, "time", SimpleNamespace(monotonic=lambda: device.now_seconds))
    monkeypatch.setattr(device_rates, "time_matmul", device.time_product)
    monkeypatch.setattr(device_rates, "time_attention", device.time_attention)
    monkeypatch.setattr(elementwise, "time_elementwise", device.time_elementwise)
    request = build_request(
        None, Layout(), device="cpu", should_calibrate=True, budget_seconds=budget_seconds
    )
    request = replace(
        request,
        folders=(),
        scratch_folder=None,
        elementwise=(*request.elementwise, ("bf16", 2**17, 512)),
    )
    diagnosis = examine(request, 1)
    assert diagnosis is not None
    return device, diagnosis, request


def find_finding(diagnosis: Diagnosis, name: str) -> Finding | None:
    return next((each for each in diagnosis.findings if each.name == name), None)


@pytest.mark.parametrize(
    "slow_flops_per_second", [1e7, pytest.param(7e8, marks=pytest.mark.long), 5e9]
)
def test_a_calibration_ends_in_time_on_a_device_of_any_speed(
    slow_flops_per_second: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device, diagnosis, request = examine_virtually(
        monkeypatch, {"fp32": 8e10, "bf16": slow_flops_per_second}
    )
    # In addition to the budget: square products, and one trial of attention and of elementwise
    # operations per precision.
    trials_seconds = (
        2 * 2.0 * 128**3 / slow_flops_per_second
        + 2 * (3.5 * device_rates.TRIAL_FLOPS["cpu"] + 2 * 54 * 2**18) / slow_flops_per_second
    )
    assert device.now_seconds < BUDGET_SECONDS + trials_seconds + 5.0
    assert device.longest_seconds <= max(60.0 / 12 * 1.01, trials_seconds)
    truncated = find_finding(diagnosis, "products")
    assert (truncated is not None) == (slow_flops_per_second < 1e9)
    if truncated is not None:
        assert "bf16" in truncated.value
        assert "fp32" not in truncated.value
    emulated = find_finding(diagnosis, "products, bf16")
    assert emulated is not None
    assert f"{8e10 / slow_flops_per_second:.0f} times slower than fp32" in emulated.value
    profile = build_profile(diagnosis, request)
    save_profile(profile, tmp_path / "here.json")
    profile = load_profile(tmp_path / "here.json")
    assert profile.find_matmul_flops_per_second("bf16", 10**5, 10**5, 10**4) == pytest.approx(
        slow_flops_per_second
    )
    assert profile.find_matmul_flops_per_second("fp32", 10**5, 10**5, 10**4) == pytest.approx(8e10)


def test_a_fast_device_measures_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    _, diagnosis, request = examine_virtually(monkeypatch, {"fp32": 1e12, "bf16": 2e12})
    assert [each for each in diagnosis.findings if each.section == "calibration"] == []
    measured = {
        (rate["precision"], rate["m"], rate["n"], rate["k"]) for rate in diagnosis.rates["products"]
    }
    assert set(request.matmuls) <= measured
    assert len(diagnosis.rates["attention"]) == len(request.attention)
    assert len(diagnosis.rates["elementwise"]) == len(request.elementwise)


def test_without_time_the_profile_has_square_products_only(monkeypatch: pytest.MonkeyPatch) -> None:
    _, diagnosis, request = examine_virtually(
        monkeypatch, {"fp32": 8e10, "bf16": 7e8}, budget_seconds=1e-6
    )
    profile = build_profile(diagnosis, request)
    assert {rate.precision for rate in profile.matmuls} == {"fp32", "bf16"}
    assert all(rate.m == rate.n == rate.k for rate in profile.matmuls)
    assert profile.attention == profile.elementwise == ()
    for kind in ("products", "attention", "elementwise"):
        (finding,) = [
            each
            for each in diagnosis.findings
            if (each.section, each.name) == ("calibration", kind)
        ]
        assert (finding.verdict, finding.remedy != "") == ("warn", True)
    assert (
        profile.find_attention_flops_per_second("bf16", 128, 64, is_backward=False) is None
    )  # the catalogue answers


def test_square_products_stop_if_any_rank_would_take_too_long() -> None:
    sides = [rate.m for rate in time_squares("fp32", CPU, lambda seconds: min(seconds, 0.1))]
    assert sides == [128, 256, 512, 1024]
    sides_with_slow_rank = [rate.m for rate in time_squares("fp32", CPU, lambda seconds: 60.0)]
    assert sides_with_slow_rank == [128]


def test_slow_work_is_called_twice() -> None:
    calls: list[float] = []

    def sleep_briefly() -> None:
        calls.append(time.perf_counter())
        time.sleep(0.02)

    assert measure_median_seconds(sleep_briefly, CPU, seconds=0.01) >= 0.02
    assert len(calls) == 2


def test_neither_a_fast_nor_a_slow_round_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = iter([0.01, 0.05, 0.01, 0.04, 0.03, 0.02])
    monkeypatch.setattr(device_rates, "_time_round", lambda *_: next(rounds))
    assert measure_median_seconds(lambda: None, CPU, seconds=1.0) == pytest.approx(0.03 / 20)


def test_attention_is_reduced_by_rows_then_heads_and_keeps_its_length() -> None:
    rows = AttentionWorkload(
        "bf16", num_rows=8, row_tokens=256, num_heads=8, num_kv_heads=4, head_dim=32
    )
    assert reduce_attention(rows, rows.flops) == rows
    assert reduce_attention(rows, rows.flops / 3) == replace(rows, num_rows=2)
    assert reduce_attention(rows, rows.flops / 16) == replace(
        rows, num_rows=1, num_heads=4, num_kv_heads=2
    )


def test_fast_bf16_is_not_called_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        return options["out"] if a.dtype == torch.bfloat16 else product(a, b, **options)

    monkeypatch.setattr(torch, "mm", mm)
    diagnosis = examine(ExaminationRequest(Layout(), device="cpu"), 1)
    assert diagnosis is not None
    finding = find_finding(diagnosis, "products, bf16")
    assert finding is not None
    assert finding.verdict == "pass"
    assert "emulated" not in finding.value
    assert finding.numbers["times_slower_than_fp32"][0] < 1
