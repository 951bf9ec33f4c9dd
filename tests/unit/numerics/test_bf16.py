"""Speed of bf16 on this machine, and `precision: auto` on each kind of device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from shardwright.hardware.catalog_loading import find_accelerator
from shardwright.numerics import bf16
from shardwright.planner.problem import choose_precision_on

CPU = torch.device("cpu")
OTHER_MACHINE = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""A CPU with AVX2 only, for oneDNN and for torch."""


def fake_bf16_ratio(monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    """Make bf16 products appear `ratio` times as fast as those of fp32."""
    monkeypatch.setattr(bf16, "measure_bf16_ratio", lambda _device: ratio)


def test_auto_is_bf16_on_a_cpu_with_faster_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_bf16_ratio(monkeypatch, 3.2)
    assert (
        str(bf16.choose_precision(CPU))
        == "bf16 (auto: bf16 products are 3.2 times as fast as fp32 on this CPU)"
    )
    assert bf16.build_bf16_warning(CPU) is None


@pytest.mark.parametrize(
    ("ratio", "message"), [(0.025, "40 times slower"), (0.99, "1 times slower")]
)
def test_auto_is_fp32_with_a_reason_on_a_cpu_that_emulates_bf16(
    monkeypatch: pytest.MonkeyPatch, ratio: float, message: str
) -> None:
    fake_bf16_ratio(monkeypatch, ratio)
    choice = bf16.choose_precision(CPU)
    assert choice.kind == "fp32"
    assert message in choice.reason
    warning = bf16.build_bf16_warning(CPU)
    assert warning is not None
    assert message in warning


@pytest.mark.parametrize(
    ("capability", "kind"),
    [((7, 5), "fp32"), ((7, 0), "fp32"), ((8, 0), "bf16"), ((9, 0), "bf16"), ((12, 0), "bf16")],
)
def test_auto_follows_the_compute_capability_on_cuda(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kind: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    choice = bf16.choose_precision(torch.device("cuda", 0))
    assert choice.kind == kind
    assert f"{capability[0]}.{capability[1]}" in choice.reason


@pytest.mark.parametrize(
    ("name", "kind"),
    [("H100", "bf16"), ("A100", "bf16"), ("T4", "fp32"), ("V100", "fp32"), ("EPYC 9654", "bf16")],
)
def test_auto_follows_the_catalogue_in_a_plan(name: str, kind: str) -> None:
    assert choose_precision_on(find_accelerator(name)).kind == kind


def test_the_measured_ratio_agrees_with_products_timed_by_hand() -> None:
    """A factor of three suffices: emulation is ten or more times slower, native bf16 up to sixteen
    times faster.
    """
    ratio = bf16.measure_bf16_ratio(CPU)
    with bf16._use_one_thread():
        fp32, half = (
            bf16._time_products(256, CPU, dtype) for dtype in (torch.float32, torch.bfloat16)
        )
    assert ratio / 3 < fp32 / half < 3 * ratio
    assert torch.get_num_threads() >= 1


def test_auto_is_fp32_on_a_machine_without_bf16_units() -> None:
    script = (
        "import torch; from shardwright.numerics.bf16 import choose_precision;"
        "print(choose_precision(torch.device('cpu')))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | OTHER_MACHINE,
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout.startswith("fp32 (auto: bf16 is emulated on this CPU, ")
