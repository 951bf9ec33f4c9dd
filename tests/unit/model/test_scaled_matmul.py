"""torch's kernels for 8-bit operands: the emulation's numbers, and the layouts that CUDA takes."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from functorch.compile import (  # type: ignore[import-untyped]
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compile_utils import fx_graph_cse
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.model.products.kernel_support import explain_missing_cpu_kernel
from shardwright.model.products.linear import Linear
from shardwright.model.products.operand import PRODUCT_SCALINGS
from shardwright.model.products.scaled_product import RoundingTotals, ScaledProducts
from shardwright.numerics.recompute import build_recompute_runner
from tests.compiled_graphs import compile_boxed

KERNEL_RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
NEEDS_CPU_KERNEL = pytest.mark.skipif(
    explain_missing_cpu_kernel("rowwise") is not None, reason="torch lacks 8-bit CPU kernels"
)
PRODUCTS = ["compute_output", "compute_input_gradient", "compute_weight_gradient"]


def make_operands() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (48, 64), "w": (32, 64), "g": (48, 32)}
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


def select_operands(product: str, operands: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    left, right = dict(zip(PRODUCTS, ("xw", "gw", "gx"), strict=True))[product]
    return operands[left], operands[right]


@NEEDS_CPU_KERNEL
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", KERNEL_RECIPES)
def test_the_cpu_kernel_gives_the_emulations_numbers(name: str, product: str) -> None:
    pair = select_operands(product, make_operands())
    emulated = getattr(ScaledProducts(PRODUCT_SCALINGS[name]), product)(*pair)
    computed = getattr(ScaledProducts(PRODUCT_SCALINGS[name], is_emulated=False), product)(*pair)
    # One unit in the last place of bf16: the sums are rounded once, in another order.
    torch.testing.assert_close(computed, emulated, rtol=2.0**-7, atol=1e-6)
    assert (computed == emulated).float().mean() > 0.99


@pytest.mark.parametrize("sizes", [(128, 128, 128), (256, 384, 640)])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", PRODUCT_SCALINGS)
def test_operands_have_the_layout_of_the_cuda_kernels(
    name: str, product: str, sizes: tuple[int, int, int]
) -> None:
    """Meta tensors pass through the checks of shapes, strides and dtypes for CUDA."""
    tokens, inputs, outputs = sizes
    shapes = {"x": (tokens, inputs), "w": (outputs, inputs), "g": (tokens, outputs)}
    operands = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for name, shape in shapes.items()
    }
    pair = select_operands(product, operands)
    expected = getattr(ScaledProducts(PRODUCT_SCALINGS[name]), product)(*pair)
    out = getattr(ScaledProducts(PRODUCT_SCALINGS[name], is_emulated=False), product)(*pair)
    assert (out.shape, out.dtype) == (expected.shape, torch.bfloat16)


def build_layer(name: str) -> Linear:
    """Build a layer whose products the kernels compute."""
    layer = Linear(64, 32, bias=False).bfloat16()
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    totals = RoundingTotals(["w"])
    layer.scaled = ScaledProducts(PRODUCT_SCALINGS[name], "w", totals=totals, is_emulated=False)
    return layer


class CallCounter(TorchDispatchMode):
    """Counter of calls of the kernels."""

    num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += "_scaled_mm" in str(func)
        return func(*args, **(kwargs or {}))


@NEEDS_CPU_KERNEL
@pytest.mark.parametrize(("recompute", "num_calls"), [("selective", 3), ("full", 4)])
def test_selective_recomputation_saves_the_kernels_results(recompute: Any, num_calls: int) -> None:
    run = build_recompute_runner(recompute)
    assert run is not None
    layer = build_layer("rowwise")
    x = make_operands()["x"].requires_grad_()
    with CallCounter() as counter:
        # The backward pass of silu reads the product.
        run(lambda x: torch.nn.functional.silu(layer(x)), x).sum().backward()
    assert counter.num_calls == num_calls


@NEEDS_CPU_KERNEL
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tensorwise", marks=pytest.mark.long),
        "rowwise",
        "rowwise_with_gw_hp",
    ],
)
def test_compiled_layers_call_the_kernels_with_the_same_operands(name: str) -> None:
    results = []
    for is_compiled in (False, True):
        layer = build_layer(name)
        assert layer.scaled is not None
        totals = layer.scaled.totals
        assert totals is not None
        totals.is_counting = True
        torch._dynamo.reset()
        forward: Any = compile_boxed(layer.forward) if is_compiled else layer.forward
        x = make_operands()["x"].requires_grad_()
        y = forward(x)
        y.float().square().sum().backward()
        table = totals.pop_table(x.device)
        assert table[0, 3] > 0
        results.append((y.detach(), x.grad, layer.weight.grad, table))
    for plain, compiled in zip(*results, strict=True):
        assert torch.equal(plain, compiled)


@NEEDS_CPU_KERNEL
@pytest.mark.skipif(
    "extra_node_key" in inspect.signature(fx_graph_cse).parameters,
    reason="torch 2.14 does not merge values of the forward pass with those of the backward pass",
)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_maximum_of_a_weight_follows_from_those_of_its_rows() -> None:
    """Compiled code reads a weight once for the scales of the output and the input gradient."""
    reduced: list[list[tuple[int, ...]]] = []

    def record(graph: Any, _inputs: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if node.target == torch.ops.aten.amax.default]
        reduced.append([tuple(node.args[0].meta["val"].shape) for node in nodes])
        return make_boxed_func(graph.forward)

    layer = build_layer("rowwise_with_gw_hp")
    assert layer.scaled is not None
    layer.scaled.totals = None
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=record, bw_compiler=record, partition_fn=min_cut_rematerialization_partition
    )
    compiled: Any = torch.compile(layer.forward, backend=backend, fullgraph=True)
    compiled(make_operands()["x"].requires_grad_()).float().square().sum().backward()
    whole = [shape for graph in reduced for shape in graph if math.prod(shape) == 32 * 64]
    assert whole == [(32, 1, 1, 64)]
