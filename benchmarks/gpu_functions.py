"""Measure `model.compile_functions` on against off, and the loss with larger chunks.

    python -m benchmarks.gpu_functions cuda real RESULT.json
    python -m benchmarks.gpu_functions cpu tiny RESULT.json

Both sides run alternately on the same tensors, sides in changing order. Writes the median time of
each, the median ratio of neighbouring times with its quartiles, peak bytes, whether the bits of the
results are equal (those of the loss are not) and how far apart they are, and the log line of what
was compiled.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_profile import wait
from shardwright.config.training import OptimizerSection
from shardwright.layout import ParameterBox, ParameterLayout
from shardwright.model.products import nf4
from shardwright.numerics import wide_sums
from shardwright.numerics.function_compiler import FunctionCompiler, build_function_compiler
from shardwright.numerics.loss import chunked_cross_entropy
from shardwright.optim import build_optimizer

_ROUNDS = 15
_SHAPES = {
    "real": {"up": (14336, 4096), "down": (4096, 14336), "query": (4096, 4096)},
    "tiny": {"up": (1408, 512), "down": (512, 1536), "query": (512, 512)},
}
"""Matrices of a layer of Llama 3 8B, and small ones for a CPU."""

Run = Callable[[], dict[str, Tensor]]
"""One call of a side; returns what it has computed."""


class WholeModel:
    """Matrices that one process holds whole."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.layouts = {name: ParameterLayout(name, shape) for name, shape in shapes.items()}

    def local_boxes(self, name: str) -> tuple[ParameterBox, ...]:
        """Return the box of the whole parameter."""
        whole = tuple((0, size) for size in self.layouts[name].shape)
        return (ParameterBox(whole, whole),)

    def sum_over(self, tensor: Tensor, axes: object) -> Tensor:
        """Return the sum over one process."""
        return tensor


def build_update(rule: str, sizes: str, device: torch.device, compiler: FunctionCompiler) -> Run:
    """Build the update of a layer's matrices."""
    generator = torch.Generator().manual_seed(0)
    weights: dict[str, nn.Parameter] = {}
    for name, shape in _SHAPES[sizes].items():
        weights[name] = nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(device))
        weights[name].grad = (torch.randn(shape, generator=generator) * 1e-3).to(device)
    optimizer = build_optimizer(
        weights.items(),
        OptimizerSection.model_validate({"name": rule}),
        learning_rate=1e-3,
        weight_decay=0.1,
        model=WholeModel(_SHAPES[sizes]),  # type: ignore[arg-type]
        compile_function=compiler,
    )

    def run() -> dict[str, Tensor]:
        optimizer.step()
        states = {
            f"{name}.{key}": tensor
            for name, weight in weights.items()
            for key, tensor in optimizer.state[weight].items()
        }
        return {**weights, **states}

    return run


def build_dequantisation(sizes: str, device: torch.device, compiler: FunctionCompiler) -> Run:
    """Build the dequantisation of a layer's matrices to bf16."""
    generator = torch.Generator().manual_seed(0)
    packed = {
        name: nf4.pack(torch.randn(shape, generator=generator)).to(device)
        for name, shape in _SHAPES[sizes].items()
    }

    def run() -> dict[str, Tensor]:
        nf4.compile_unpack(device, torch.bfloat16, compiler)
        return {
            name: nf4.unpack(tensor, _SHAPES[sizes][name][1], torch.bfloat16)
            for name, tensor in packed.items()
        }

    return run


def build_loss(sizes: str, device: torch.device, compiler: FunctionCompiler) -> Run:
    """Build the loss of a head with its gradients: on, larger chunks and sums in one kernel each.

    Off are chunks of 1,024 tokens, whose products are rounded to 16 bits before they are summed.
    """
    is_tiny = sizes == "tiny"
    num_tokens, width, vocab_size = (2048, 256, 4096) if is_tiny else (8192, 4096, 128256)
    is_on = compiler.obstacle != "model.compile_functions is false"
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, width, generator=generator).to(device, torch.bfloat16)
    weight = (torch.randn(vocab_size, width, generator=generator) * 0.02).to(device)
    labels = torch.randint(0, vocab_size, (num_tokens,), generator=generator).to(device)
    hidden.requires_grad_()
    weight.requires_grad_()

    def run() -> dict[str, Tensor]:
        hidden.grad = weight.grad = None
        key = (device, hidden.dtype, False)
        if is_on:
            wide_sums._wide_sum_support.pop(key, None)
        else:
            wide_sums._wide_sum_support[key] = False
        loss = chunked_cross_entropy(
            hidden,
            weight,
            None,
            labels,
            chunk_tokens=num_tokens if is_on else 1024,
            num_supervised=num_tokens,
        )
        (loss / num_tokens).backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return {"hidden": hidden.grad, "weight": weight.grad}

    return run


CASES: dict[str, Callable[[str, torch.device, FunctionCompiler], Run]] = {
    "8-bit AdamW": lambda *arguments: build_update("adamw_8bit", *arguments),
    "Adafactor": lambda *arguments: build_update("adafactor", *arguments),
    "NF4 to bf16": build_dequantisation,
    "loss of the head, bf16": build_loss,
}


def measure(name: str, sizes: str, device: torch.device) -> dict[str, Any]:
    """Measure one case; both sides have made equally many calls when their results are compared."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardwright.numerics.function_compiler")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    runs = {
        side: CASES[name](sizes, device, build_function_compiler(side == "on", device))
        for side in ("off", "on")
    }
    results = {side: run() for side, run in runs.items()}  # compiles
    logger.removeHandler(handler)
    seconds: dict[str, list[float]] = {side: [] for side in runs}
    peaks: dict[str, int | None] = {}
    for number in range(_ROUNDS):
        for side in ("off", "on") if number % 2 else ("on", "off"):
            wait(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                bytes_before = torch.cuda.memory_allocated()
            start_seconds = time.perf_counter()
            results[side] = runs[side]()
            wait(device)
            seconds[side].append(time.perf_counter() - start_seconds)
            if device.type == "cuda":
                peaks[side] = torch.cuda.max_memory_allocated() - bytes_before
    ratios = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    return {
        "off_seconds": statistics.median(seconds["off"]),
        "on_seconds": statistics.median(seconds["on"]),
        "ratio_quartiles": statistics.quantiles(ratios, n=4),
        "temporary_bytes": peaks,
        "has_equal_bits": all(
            torch.equal(results["off"][key], results["on"][key]) for key in results["off"]
        ),
        "distance": max(
            measure_distance(results["on"][key], results["off"][key])
            for key in results["off"]
            if results["off"][key].is_floating_point()
        ),
        "log": [line for line in lines if "compile_functions is false" not in line],
    }


def measure_distance(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of the expected numbers."""
    exact = expected.detach().double()
    norm = float(exact.norm())
    return float((found.detach().double() - exact).norm()) / norm if norm else 0.0


def main() -> None:
    """Measure every case and write the result."""
    device = torch.device(sys.argv[1])
    sizes = sys.argv[2]
    elements = sum(rows * columns for rows, columns in _SHAPES[sizes].values())
    result: dict[str, Any] = {"num_elements": elements, "functions": {}}
    for name in CASES:
        result["functions"][name] = measure(name, sizes, device)
        Path(sys.argv[3]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
