"""Compiled updates: bits of the separate operations, one graph for all shapes, and one pass over
memory, with the factor of the gradients and the copies of the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from shardwright.config.training import OptimizerSection
from shardwright.layout import ParameterBox, ParameterLayout
from shardwright.model.products.working_weights import WorkingWeight
from shardwright.numerics.compilation import find_compiler_obstacle
from shardwright.numerics.function_compiler import FunctionCompiler
from shardwright.optim import (
    build_optimizer,
    collect_optimizer_tensors,
    exact_operations,
    one_pass_adamw,
    quantised_calls,
    quantised_update,
    set_learning_rate,
)
from shardwright.optim.sharded_optimizer import DeviceFactor
from tests.unit.optim.test_sharded_optimizer import SingleProcessModel

CPU = torch.device("cpu")
SHAPES = {
    "layers.0.up": (96, 64),
    "layers.0.down": (70, 96),
    "layers.0.stack": (3, 64, 32),
    "layers.0.ragged": (70, 80),
    "embedding": (700, 64),
    "row": (1, 4096),
    "norm": (64,),
}
RULES: dict[str, dict[str, Any]] = {
    "adamw_8bit": {"block_size": 32, "beta2": 0.4},  # both formulas of an interpolation
    "adafactor": {},
    "adamw": {"beta1": 0.4},
    "muon": {},
}
COPIED = {
    "adamw_8bit": ("layers.0.up", "layers.0.ragged", "embedding", "row"),
    "adamw": ("layers.0.up", "layers.0.stack", "embedding", "row"),
    "muon": ("embedding", "row"),
}
"""Parameters whose copies are written by an update, and at once: the others are too small."""
SKIPPED_STEP = 3
NUM_GRAPHS = {"adamw_8bit": 1, "adafactor": 2, "adamw": 2, "muon": 1}
"""AdamW updates four parameters by a call for three and one for one, Muon two by one call."""
NUM_KERNELS = {"adamw_8bit": 2, "adafactor": 2, "adamw": 2, "muon": 1}
"""8-bit AdamW has one before and one after the square root, which PyTorch computes on a CPU. The
tensors of a call share one."""


class Model(SingleProcessModel):
    """Model of this file's shapes."""

    def __init__(self) -> None:
        self.layouts = {name: ParameterLayout(name, shape) for name, shape in SHAPES.items()}

    def local_boxes(self, name: str) -> tuple[ParameterBox, ...]:
        whole = tuple((0, size) for size in SHAPES[name])
        return (ParameterBox(whole, whole),)


@pytest.fixture(autouse=True)
def require_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao.optim", reason="the extra `lowbit` is not installed")
    if obstacle := find_compiler_obstacle(CPU):
        pytest.skip(obstacle)
    monkeypatch.setattr(quantised_calls, "_CPU_CHUNK_ELEMENTS", 4000)
    monkeypatch.setitem(one_pass_adamw._MIN_ELEMENTS, "cpu", 4096)
    monkeypatch.setattr(one_pass_adamw, "_MAX_TENSORS", 3)
    torch._dynamo.reset()
    counters.clear()


def train(rule: str, compiler: FunctionCompiler | None) -> dict[str, Tensor]:
    """Train for four steps; return weights, their copies in bf16, and states.

    Another step is skipped: by the compiled update, if it can, or by the caller.
    """
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: nn.Parameter(torch.randn(shape, generator=generator) * 0.1)
        for name, shape in SHAPES.items()
    }
    copies = {
        parameter: WorkingWeight(parameter, torch.zeros_like(parameter, dtype=torch.bfloat16))
        for parameter in weights.values()
    }
    optimizer: Any = build_optimizer(
        weights.items(),
        OptimizerSection.model_validate({"name": rule, **RULES[rule]}),
        learning_rate=1.0,
        weight_decay=0.1,
        model=Model(),
        compile_function=compiler,
    )
    optimizer.find_copy = copies.get
    for step in range(5):
        for copy in copies.values():
            copy.mark_changed()
        for parameter in weights.values():
            sizes = 10.0 ** torch.randint(-9, 2, parameter.shape[:1], generator=generator)
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = (gradient.mT * sizes).mT if gradient.ndim == 2 else gradient
            parameter.grad[:1] *= step % 2
        set_learning_rate(optimizer, 0.03 / (step + 1))
        is_skipped = step == SKIPPED_STEP
        if compiler and step % 2:
            optimizer.prepare_step()
        if compiler and optimizer.can_skip_on_device() and step >= SKIPPED_STEP:
            optimizer.device_factor = DeviceFactor.from_value(
                torch.tensor(float("nan") if is_skipped else 0.37)
            )
        elif is_skipped:
            optimizer.discard_preparation()
            continue
        elif compiler and optimizer.applies_factor:
            optimizer.gradient_factor = 0.37
        else:
            gradients = [each.grad for each in weights.values() if each.grad is not None]
            torch._foreach_mul_(gradients, 0.37)
        optimizer.step()
        if is_skipped:
            optimizer.undo_counts()
        for name, parameter in weights.items():
            if compiler and name in COPIED.get(rule, ()):
                assert copies[parameter].is_current, name
    tensors = {
        f"copy of {name}": copies[parameter].tensor
        if copies[parameter].is_current
        else parameter.to(torch.bfloat16)
        for name, parameter in weights.items()
    }
    moments = collect_optimizer_tensors(optimizer, weights.items())
    counts = {
        f"count of {name}": optimizer.state[parameter]["step"]
        for name, parameter in weights.items()
    }
    return weights | tensors | moments | counts


def list_compiler_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """List what the compiler of functions has logged: other loggers may write, too."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("shardwright.numerics")
    ]


def count_kernels(sources: Sequence[str]) -> int:
    """Count the kernels that Inductor generated."""
    return sum(source.count("async_compile.cpp_pybinding(") for source in sources)


@pytest.mark.parametrize("rule", RULES)
def test_a_compiled_update_has_the_bits_of_the_separate_operations(
    rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = train(rule, None)
    with caplog.at_level(logging.INFO, "shardwright.numerics"):
        found, sources = run_and_get_code(train, rule, FunctionCompiler(CPU))
    lines = list_compiler_lines(caplog)
    assert len(lines) == NUM_GRAPHS[rule]
    assert all("bits as uncompiled" in line for line in lines), lines
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    # All shapes and steps have one graph per function.
    assert counters["stats"]["unique_graphs"] == NUM_GRAPHS[rule]
    assert count_kernels(sources) == NUM_KERNELS[rule]


def test_a_formula_that_rounds_otherwise_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain multiplication and addition round twice where PyTorch's interpolation rounds once.

    Without PyTorch's root, the update is one pass: that of a GPU.
    """
    monkeypatch.setattr(exact_operations, "multiply_add", lambda a, b, c: a * b + c)
    monkeypatch.setattr(quantised_update, "take_root", torch.sqrt)
    expected = train("adamw_8bit", None)
    with caplog.at_level(logging.INFO, "shardwright.numerics"):
        found, sources = run_and_get_code(train, "adamw_8bit", FunctionCompiler(CPU))
    (line,) = list_compiler_lines(caplog)
    assert "numbers of a sample differ from uncompiled ones" in line
    assert count_kernels(sources) == 1
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_root_of_a_cpu_is_pytorchs() -> None:
    values = torch.rand(100, 10, generator=torch.Generator().manual_seed(2))
    assert torch.equal(exact_operations.take_root(values), values.sqrt())
