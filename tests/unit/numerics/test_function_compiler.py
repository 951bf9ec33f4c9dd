"""Functions compiled by themselves are used only if their bits are those of uncompiled code."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from shardwright.numerics import function_compiler
from shardwright.numerics.function_compiler import (
    FunctionCompiler,
    build_function_compiler,
    compile_function,
)
from shardwright.optim import one_pass_adamw

CPU = torch.device("cpu")


def double(values: Tensor) -> Tensor:
    return values * 2.0


def double_in_place(values: Tensor) -> None:
    values.mul_(2.0)


def negate_zeros(values: Tensor) -> Tensor:
    return torch.where(values == 0.0, -0.0, values * 2.0)


def change_the_last_bit(values: Tensor) -> None:
    values.mul_(2.0)
    values[3] = values[3].nextafter(torch.tensor(9.0))


class Pair(NamedTuple):
    """Two tensors as one argument."""

    first: Tensor
    second: Tensor


def change_the_second(pair: Pair) -> None:
    pair.second.mul_(2.0)


def change_nothing(pair: Pair) -> None:
    """Leave the second tensor as it is."""


def fail(values: Tensor) -> Tensor:
    raise NotImplementedError("no kernel for this")


def make_sample(device: torch.device) -> tuple[Tensor]:
    return (torch.arange(8.0, device=device),)


@pytest.fixture(autouse=True)
def compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use functions as they are in place of compiled code."""
    monkeypatch.setattr(function_compiler, "compile_function", lambda function: function)


@pytest.mark.parametrize(
    ("formulation", "eager", "message"),
    [
        (double, double, "bits as uncompiled"),
        (negate_zeros, double, "1 numbers of a sample differ"),
        (change_the_last_bit, double_in_place, "1 numbers of a sample differ"),
        (fail, double, "the compiler failed: NotImplementedError: no kernel for this"),
    ],
)
def test_a_function_with_other_bits_is_not_used(
    formulation: Callable[..., Any],
    eager: Callable[..., Any],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiler = FunctionCompiler(CPU)
    with caplog.at_level(logging.INFO, "shardwright"):
        for _ in range(3):
            chosen = compiler("doubling", formulation, eager, make_sample)
    assert chosen is (formulation if message.startswith("bits") else eager)
    (line,) = caplog.messages
    assert line.startswith("doubling: ")
    assert message in line


def test_tensors_within_an_argument_are_compared() -> None:
    def make_pair(device: torch.device) -> tuple[Pair]:
        return (Pair(*make_sample(device), *make_sample(device)),)

    choose = FunctionCompiler(CPU)
    assert choose("pair", change_nothing, change_the_second, make_pair) is change_the_second


@pytest.mark.parametrize(
    ("setting", "device", "obstacle"),
    [
        (False, "cuda", "model.compile_functions is false"),
        ("auto", "cpu", "the device is a CPU"),
        ("auto", "cuda", "Triton is not installed"),
        (True, "cpu", None),
    ],
)
def test_the_setting_decides_per_device(
    monkeypatch: pytest.MonkeyPatch, setting: Any, device: str, obstacle: str | None
) -> None:
    monkeypatch.setattr(
        function_compiler,
        "find_compiler_obstacle",
        lambda device: "Triton is not installed" if device.type == "cuda" else None,
    )
    compiler = build_function_compiler(setting, torch.device(device))
    assert compiler.obstacle == obstacle
    if obstacle is not None:
        assert compiler("doubling", negate_zeros, double, make_sample) is double


def test_a_process_may_have_the_graphs_of_several_optimizers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """AdamW has graphs for two dtypes of copies, and for one and a few numbers of tensors."""
    monkeypatch.setattr(torch, "compile", lambda function, **_options: function)
    limits: list[int] = []

    def record_limit(_values: Tensor) -> None:
        limits.append(torch._dynamo.config.recompile_limit)

    compile_function(record_limit)(torch.zeros(1))
    assert limits[0] >= 4 * 2 * (1 + one_pass_adamw._MAX_LENGTHS)
