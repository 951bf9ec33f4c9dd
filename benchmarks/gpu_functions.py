"""Measure compiled functions, working weights and larger chunks of the loss on against off.

    python -m benchmarks.gpu_functions cuda real RESULT.json
    python -m benchmarks.gpu_functions cpu small RESULT.json

Both sides run alternately on the same tensors, sides in changing order. Writes the median time of
each, the median ratio of neighbouring times with its quartiles, peak bytes, whether the bits of the
results are equal (those of the loss are not) and how far apart they are, and the log line of what
was compiled.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu_kernels import wait
from shardwright.config.training import OptimizerSection
from shardwright.errors import RecipeError
from shardwright.layout import ParameterBox, ParameterLayout
from shardwright.model.attention.rope import rotate
from shardwright.model.mlp import apply_gate
from shardwright.model.norms import RMSNorm
from shardwright.model.pointwise.functions import COMPILED_FUNCTIONS
from shardwright.model.pointwise.operators import differentiate_token_losses
from shardwright.model.products import nf4
from shardwright.model.products.linear import Linear
from shardwright.model.products.working_weights import WorkingWeight, WorkingWeights
from shardwright.numerics import wide_sums
from shardwright.numerics.function_compiler import FunctionCompiler, build_function_compiler
from shardwright.numerics.liger_loss import find_liger_obstacle, liger_cross_entropy
from shardwright.numerics.loss import chunked_cross_entropy
from shardwright.optim import build_optimizer
from shardwright.parallel.context.attention_kernels import (
    AttentionKernel,
    CpuFlashKernel,
    CudaFlashKernel,
    ScoreSettings,
    TileInputs,
    TileVisibility,
)
from shardwright.parallel.context.tile_kernels import choose_kernel

_NUM_CHUNKS = 8
"""Chunks in which the loss of a head is computed."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the cases."""

    matrices: dict[str, tuple[int, ...]]
    product_tokens: int
    head: tuple[int, int, int]
    """Tokens, width and vocabulary."""
    layer: tuple[int, int, int]
    """Tokens, width and feed-forward width of the operations between products."""
    tile: tuple[int, int, int]
    """Tokens, heads and their width."""
    rounds: int = 15


SIZES = {
    "real": Sizes(
        {"up": (14336, 4096), "down": (4096, 14336), "query": (4096, 4096)},
        *(2048, (8192, 4096, 128256), (8192, 4096, 14336), (4096, 32, 128)),
    ),
    "small": Sizes(
        {"up": (1408, 512), "down": (512, 1536), "query": (512, 512)},
        *(512, (2048, 256, 4096), (512, 512, 1408), (256, 4, 64)),
    ),
    "tiny": Sizes(
        {"up": (704, 256), "down": (256, 768), "query": (256, 256)},
        *(64, (256, 64, 1024), (128, 512, 1408), (256, 4, 64)),
        rounds=2,
    ),
}
"""Those of a layer of Llama 3 8B, small ones for a CPU, and such that rehearse the cases only."""

_UNIT_FACTOR = 1.0 - 1e-12
"""Factor of gradients that is one in fp32: multiplied in place, they do not change from call to
call, but the multiplication takes its time."""

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


def build_update(rule: str, sizes: Sizes, device: torch.device, compiler: FunctionCompiler) -> Run:
    """Build the update of a layer's matrices, with clipping and casts to bf16 unless it is
    Adafactor, which does neither."""
    drawn: dict[str, Any] = {
        "generator": torch.Generator(device).manual_seed(0),
        "device": device,
    }
    weights: dict[str, nn.Parameter] = {}
    for name, shape in sizes.matrices.items():
        weights[name] = nn.Parameter(torch.randn(shape, **drawn) * 0.02)
        weights[name].grad = torch.randn(shape, **drawn) * 1e-3
    optimizer: Any = build_optimizer(
        weights.items(),
        OptimizerSection.model_validate({"name": rule}),
        learning_rate=1e-3,
        weight_decay=0.1,
        model=WholeModel(sizes.matrices),  # type: ignore[arg-type]
        compile_function=compiler,
    )
    copies: dict[nn.Parameter, WorkingWeight] = {}
    if optimizer.applies_factor:
        for weight in weights.values():
            copies[weight] = WorkingWeight(weight, torch.empty_like(weight, dtype=torch.bfloat16))
        optimizer.find_copy = copies.get

    def run() -> dict[str, Tensor]:
        for copy in copies.values():
            copy.mark_changed()
        if copies:
            optimizer.gradient_factor = _UNIT_FACTOR
        optimizer.step()
        if stale := [copy for copy in copies.values() if not copy.is_current]:
            with torch.no_grad():
                torch._foreach_copy_(
                    [copy.tensor for copy in stale], [copy.master for copy in stale]
                )
        states = {
            f"{name}.{key}": tensor
            for name, weight in weights.items()
            for key, tensor in optimizer.state[weight].items()
        }
        written = {
            f"{name}.copy": copies[weight].tensor
            for name, weight in weights.items()
            if weight in copies
        }
        return {**weights, **states, **written}

    return run


def build_dequantisation(sizes: Sizes, device: torch.device, compiler: FunctionCompiler) -> Run:
    """Build the dequantisation of a layer's matrices to bf16."""
    generator = torch.Generator().manual_seed(0)
    packed = {
        name: nf4.pack(torch.randn(shape, generator=generator).to(device))
        for name, shape in sizes.matrices.items()
    }

    def run() -> dict[str, Tensor]:
        nf4.compile_unpack(device, torch.bfloat16, compiler)
        return {
            name: nf4.unpack(tensor, sizes.matrices[name][1], torch.bfloat16)
            for name, tensor in packed.items()
        }

    return run


def build_liger_loss(sizes: Sizes, device: torch.device, compiler: FunctionCompiler) -> Run:
    """Build the loss of a head with its gradients: on, by Liger's kernel; off, in one chunk."""
    hidden, weight, labels = _draw_head(sizes, device)
    is_on = compiler.obstacle != "model.compile_functions is false"

    def run() -> dict[str, Tensor]:
        hidden.grad = weight.grad = None
        if is_on:
            loss = liger_cross_entropy(hidden, weight, None, labels)
        else:
            loss = chunked_cross_entropy(
                hidden,
                weight,
                None,
                labels,
                chunk_tokens=len(labels),
                num_supervised=len(labels),
            )
        (loss / len(labels)).backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return {"hidden": hidden.grad, "weight": weight.grad}

    return run


def _draw_head(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states in bf16, a head's weight in fp32, and labels."""
    num_tokens, width, vocab_size = sizes.head
    # On the device: a core takes seconds for so many numbers.
    drawn: dict[str, Any] = {
        "generator": torch.Generator(device).manual_seed(0),
        "device": device,
    }
    hidden = torch.randn(num_tokens, width, **drawn).bfloat16()
    weight = torch.randn(vocab_size, width, **drawn) * 0.02
    labels = torch.randint(0, vocab_size, (num_tokens,), **drawn)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def build_loss(sizes: Sizes, device: torch.device, compiler: FunctionCompiler) -> Run:
    """Build the loss of a head with its gradients: on, larger chunks and sums in one kernel each.

    Off are smaller chunks, whose products are rounded to 16 bits before they are summed.
    """
    hidden, weight, labels = _draw_head(sizes, device)
    num_tokens = len(labels)
    is_on = compiler.obstacle != "model.compile_functions is false"

    def run() -> dict[str, Tensor]:
        hidden.grad = weight.grad = None
        key = (device, hidden.dtype, False)
        is_unsupported = mock.patch.dict(wide_sums._wide_sum_support, {key: False})
        with nullcontext() if is_on else is_unsupported:
            loss = chunked_cross_entropy(
                hidden,
                weight,
                None,
                labels,
                chunk_tokens=num_tokens if is_on else num_tokens // _NUM_CHUNKS,
                num_supervised=num_tokens,
            )
            (loss / num_tokens).backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return {"hidden": hidden.grad, "weight": weight.grad}

    return run


def build_fused_losses(sizes: Sizes, device: torch.device, compiler: FunctionCompiler) -> Run:
    """Build the loss of a head with its gradients: on, losses and gradient in one pass."""
    hidden, weight, labels = _draw_head(sizes, device)
    is_on = compiler.obstacle != "model.compile_functions is false"

    def run() -> dict[str, Tensor]:
        hidden.grad = weight.grad = None
        loss = chunked_cross_entropy(
            hidden,
            weight,
            None,
            labels,
            chunk_tokens=len(labels) // _NUM_CHUNKS,
            num_supervised=len(labels),
            fused_losses=differentiate_token_losses if is_on else None,
        )
        (loss / len(labels)).backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return {"hidden": hidden.grad, "weight": weight.grad}

    return run


def build_pointwise(sizes: Sizes, device: torch.device, compiler: FunctionCompiler) -> Run:
    """Build the norms, residual sums, rotations and gate of a layer, in both passes.

    On, as with `model.fused_pointwise: compiled`; off, in separate operations.
    """
    num_tokens, width, inner = sizes.layer
    fused = COMPILED_FUNCTIONS if compiler.obstacle is None else None
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        return x.requires_grad_()

    x, update = (draw(1, num_tokens, width) for _ in range(2))
    gate, up = (draw(1, num_tokens, inner) for _ in range(2))
    angles = torch.rand(1, num_tokens, 64, generator=generator).to(device)
    norms = nn.ModuleList([RMSNorm(width, 1e-5), RMSNorm(width, 1e-5)]).to(device)
    for norm in norms:
        nn.init.ones_(norm.get_parameter("weight"))
        norm.fused = fused  # type: ignore[assignment]
    first, second = norms

    def run() -> dict[str, Tensor]:
        inputs = [x, update, gate, up, *norms.parameters()]
        normed = first(x)
        queries = rotate(normed.unflatten(-1, (-1, 128)), angles.cos(), angles.sin(), fused)
        if fused is None:
            total = x + update
            outputs = [queries, total, second(total)]
        else:
            outputs = [queries, *second.add_and_normalise(x, update, 1.0)]  # type: ignore[operator]
        outputs.append(apply_gate("silu", gate, up, fused))
        gradients = torch.autograd.grad(outputs, inputs, [each.detach() for each in outputs])
        named = enumerate((*outputs, *gradients))
        return {str(index): tensor.detach() for index, tensor in named}

    return run


def build_products(
    recompute: bool, sizes: Sizes, device: torch.device, compiler: FunctionCompiler
) -> Run:
    """Build a step of four micro-batches of products: on, with weights cast once per step."""
    generator = torch.Generator().manual_seed(0)
    layers = nn.ModuleList(
        Linear(columns, rows, bias=False) for rows, columns in sizes.matrices.values()
    )
    for layer in layers:
        nn.init.normal_(layer.get_parameter("weight"), std=0.02, generator=generator)
    layers.to(device)
    copies = None
    if compiler.obstacle != "model.compile_functions is false":
        copies = WorkingWeights(layers, torch.bfloat16)
    inputs = [
        torch.randn(sizes.product_tokens, columns, generator=generator).to(device, torch.bfloat16)
        for _, columns in sizes.matrices.values()
    ]

    def run() -> dict[str, Tensor]:
        layers.zero_grad()
        if copies is not None:
            copies.mark_changed()
        for _ in range(4):
            if copies is not None:
                copies.update()
            for layer, x in zip(layers, inputs, strict=True):
                x = x.requires_grad_()
                y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
                y.sum().backward()
        return {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}

    return run


def build_tiles(sizes: Sizes, device: torch.device, compiler: FunctionCompiler) -> Run:
    """Build a causal tile of a row that ranks share: on, with the kernel of plain attention."""
    num_tokens, num_heads, width = sizes.tile
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        shape = (1, heads, num_tokens, width)
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    operands = (draw(num_heads), draw(num_heads // 4), draw(num_heads // 4))
    d_out = draw(num_heads)
    scores = ScoreSettings(width**-0.5)
    places = torch.arange(num_tokens, device=device)
    visibility = TileVisibility(True, None, slice(0, num_tokens), places)
    tile = TileInputs(*operands, visibility, scores)
    kernel: AttentionKernel = CudaFlashKernel() if device.type == "cuda" else CpuFlashKernel()
    if compiler.obstacle != "model.compile_functions is false":
        kernel = choose_kernel(tile, is_explicit=False)

    def run() -> dict[str, Tensor]:
        part = kernel.forward(tile)
        gradients = kernel.backward(d_out, tile, part)
        return {**part._asdict(), **gradients._asdict()}

    return run


LIGER_CASE = "loss of the head by Liger's kernel, bf16"
CASES: dict[str, Callable[[Sizes, torch.device, FunctionCompiler], Run]] = {
    "AdamW, clipping and casts": lambda *arguments: build_update("adamw", *arguments),
    "8-bit AdamW": lambda *arguments: build_update("adamw_8bit", *arguments),
    "Adafactor": lambda *arguments: build_update("adafactor", *arguments),
    "NF4 to bf16": build_dequantisation,
    "loss of the head, bf16": build_loss,
    "loss of the head, one pass, bf16": build_fused_losses,
    LIGER_CASE: build_liger_loss,
    "norms, gate, rotation and residual sum of a layer, bf16": build_pointwise,
    "tile of a shared row": build_tiles,
    "weights cast once per step": partial(build_products, False),
    "weights cast once per step, recomputed": partial(build_products, True),
}


def measure(name: str, sizes: Sizes, device: torch.device) -> dict[str, Any]:
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
    for number in range(sizes.rounds):
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", type=torch.device, help="cuda or cpu")
    parser.add_argument("sizes", choices=sorted(SIZES))
    parser.add_argument("out", type=Path, metavar="RESULT.json")
    options = parser.parse_args()
    device = options.device
    sizes = SIZES[options.sizes]
    elements = sum(rows * columns for rows, columns in sizes.matrices.values())
    result: dict[str, Any] = {"num_elements": elements, "functions": {}}
    failures = []
    for name in CASES:
        if name == LIGER_CASE and (obstacle := find_liger_obstacle(device)):
            print(f"{name}: not measured, {obstacle}")
            continue
        try:
            result["functions"][name] = measure(name, sizes, device)
        except RecipeError as error:  # a package that this Python lacks
            print(f"{name}: not measured, {error}")
        except Exception as error:  # the other cases are still measured
            traceback.print_exc()
            failures.append(f"{name}: {type(error).__name__}: {error}")
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    if failures:
        sys.exit("; ".join(failures))


if __name__ == "__main__":
    main()
