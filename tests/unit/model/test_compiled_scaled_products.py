"""Quantised products in compiled blocks: one graph per kind of layer, and the same operands."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from shardwright.architecture import read_config
from shardwright.config.low_precision import LowPrecisionRecipe
from shardwright.config.recipe import RecomputeKind
from shardwright.hashing import hash_numbers
from shardwright.model import Decoder
from shardwright.model.moe import ExpertStack
from shardwright.model.products.fp8 import Scaling
from shardwright.model.products.linear import Linear
from shardwright.model.products.operand import (
    PRODUCT_SCALINGS,
    dequantise,
    list_scales,
    quantise,
    transpose,
)
from shardwright.model.products.scaled_matmul import let_compiler_trace_kernels, multiply_on_device
from shardwright.model.products.scaled_product import RoundingTotals, ScaledProducts
from shardwright.model.products.working_operands import fill_operands
from shardwright.model.products.working_weights import copy_weights
from shardwright.model.routing import ExpertRules
from shardwright.numerics.recompute import build_recompute_runner
from tests.compiled_graphs import GraphCounter
from tests.counted_operands import CountedOperands, record_counted_operands
from tests.reference.cases import CASES
from tests.unit.model.test_fp8 import SCALINGS, make_matrix

NUM_LAYERS = 5
EVERY_RUN = {
    ("llama", "nvfp4", "selective"),
    ("mixtral", "rowwise_with_gw_hp", "selective"),
}
CASES_OF_COMPILATION = [
    pytest.param(*case, marks=() if case in EVERY_RUN else pytest.mark.long, id="-".join(case))
    for model in ("llama", "mixtral")
    for recipe in get_args(LowPrecisionRecipe)
    for recompute in get_args(RecomputeKind)
    if (case := (model, recipe, recompute)) and (model, recipe) != ("mixtral", "tensorwise")
]

# Tracing reads `.grad` of a block's input, and instantiates autograd functions.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def build(model: str, recipe: str, recompute: RecomputeKind) -> Decoder:
    """Build a decoder of five layers in fp64: sums in another order then change no code."""
    shape = read_config(CASES[model] | {"num_hidden_layers": NUM_LAYERS})
    rules = None if shape.experts is None else ExpertRules(0.01, 0.001)
    decoder = Decoder(shape, expert_rules=rules, compute_dtype=torch.float64).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    name_of_weight = {parameter: name for name, parameter in decoder.named_parameters()}
    layers = {
        name_of_weight[module.weight]: module
        for block in decoder.blocks
        for module in block.modules()
        if isinstance(module, Linear | ExpertStack)
    }
    decoder.rounding_totals = RoundingTotals(list(layers))
    if recipe == "nvfp4":
        decoder.rounding_key = hash_numbers()
    for name, module in layers.items():
        module.scaled = ScaledProducts(
            PRODUCT_SCALINGS[recipe],
            name,
            totals=decoder.rounding_totals,
            rounding_key=decoder.rounding_key,
        )
    decoder.set_recompute(build_recompute_runner(recompute))
    return decoder


def run_step(
    decoder: Decoder, step: int, *, counts_repeats: bool = True, num_tokens: int = 16
) -> tuple[list[Tensor], CountedOperands, Tensor]:
    """Return a step's gradients, the operands of its products, and their counts."""
    generator = torch.Generator().manual_seed(step)
    ids_BT = torch.randint(0, decoder.shape.vocab_size, (2, num_tokens), generator=generator)
    decoder.zero_grad()
    assert decoder.rounding_totals is not None
    decoder.rounding_totals.is_counting = True
    if decoder.rounding_key is not None:
        decoder.rounding_key.copy_(hash_numbers(step))
    with record_counted_operands(counts_repeats=counts_repeats) as operands:
        row_weight = None if decoder.shape.experts is None else 0.5
        decoder(ids_BT, labels_BT=ids_BT, row_weight=row_weight).backward()
    gradients = [p.grad.clone() for p in decoder.parameters() if p.grad is not None]
    return gradients, operands, decoder.rounding_totals.pop_table(torch.device("cpu"))


@pytest.mark.parametrize(("model", "recipe", "recompute"), CASES_OF_COMPILATION)
def test_layers_share_one_graph_and_quantise_the_same(
    model: str, recipe: str, recompute: RecomputeKind
) -> None:
    decoder = build(model, recipe, recompute)
    expected = [run_step(decoder, step) for step in (0, 1)]
    least = [run_step(decoder, step, counts_repeats=False)[-1] for step in (0, 1)]
    counter = GraphCounter()
    counter.compile(decoder, fullgraph=decoder.shape.experts is None)
    for step in (0, 1):
        gradients, operands, counts = run_step(decoder, step)
        expected_gradients, expected_operands, expected_counts = expected[step]
        assert operands.keys() == expected_operands.keys()
        assert [name for name in operands if operands[name] != expected_operands[name]] == []
        for got, want in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        # Uncompiled, full recomputation quantises and counts the forward operands twice.
        is_flushed = counts[:, 1] > 0
        assert torch.equal(is_flushed, expected_counts[:, 1] > 0)
        if recompute == "none":
            # Each pass counts once what several of its products of a weight quantise.
            assert (least[step] <= counts).all()
            assert (counts <= expected_counts).all()
    # A step that does not count runs the same graph.
    assert decoder.rounding_totals is not None
    decoder.rounding_totals.is_counting = False
    ids_BT = torch.zeros(2, 16, dtype=torch.long)
    decoder(ids_BT, labels_BT=ids_BT, row_weight=0.5 if model == "mixtral" else None).backward()
    assert not decoder.rounding_totals.pop_table(torch.device("cpu")).any()
    assert counter.counts == (1, 1)


@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", "nvfp4"])
def test_rows_of_changing_lengths_share_a_graph(recipe: str) -> None:
    decoder = build("llama", recipe, "none")
    lengths = (32, 48, 16)
    expected = [run_step(decoder, 0, num_tokens=length) for length in lengths]
    counter = GraphCounter()
    counter.compile(decoder, dynamic=True)
    for length, (expected_gradients, expected_operands, _) in zip(lengths, expected, strict=True):
        gradients, operands, _ = run_step(decoder, 0, num_tokens=length)
        assert operands == expected_operands
        for got, want in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    assert counter.counts == (1, 1)


@pytest.mark.parametrize("scaling", [*SCALINGS, *PRODUCT_SCALINGS["nvfp4"].output], ids=str)
def test_compiled_code_quantises_an_operand_of_several_products_once(scaling: Scaling) -> None:
    def trace(num_products: int) -> int:
        def quantise_for_products(values: Tensor) -> list[Tensor]:
            return [quantise(values, scaling).codes.float() + n for n in range(num_products)]

        graph = make_fx(quantise_for_products, tracing_mode="fake")(torch.ones(256, 384))
        return len(fx_graph_cse(graph.graph).nodes)

    assert trace(2) == trace(1) + 1, "what reads the codes"


def test_compiled_products_read_codes_that_are_in_memory() -> None:
    let_compiler_trace_kernels()
    scaling = Scaling(None, None)
    weight = transpose(quantise(make_matrix(64, 128), scaling))
    graphs: list[GraphModule] = []

    def keep_graph(graph: GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return lambda *_inputs: [torch.empty(0)] * 2  # torch 2.11 has no such kernel for CPUs

    def multiply(x: Tensor) -> tuple[Tensor, Tensor]:
        operand = quantise(x, scaling)
        output = multiply_on_device(operand, weight, torch.bfloat16)
        return output, multiply_on_device(transpose(operand), operand, torch.bfloat16)

    torch.compile(multiply, backend=keep_graph, fullgraph=True)(make_matrix(32, 128).bfloat16())
    output, gradient = [node for node in graphs[0].graph.nodes if "scaled_mm" in str(node.target)]
    x_codes, w_codes = output.args[:2]
    assert [x_codes.target, w_codes.args[0].target] == ["as_strided"] * 2
    left_codes, right_codes = gradient.args[:2]
    for codes in (left_codes, right_codes.args[0]):
        chain = [codes]
        while chain[-1].target != "to":
            chain.append(chain[-1].args[0])
        targets = [node.target for node in chain if node.target != "t"]
        assert targets == ["as_strided", "contiguous", "as_strided", "to"], "transposed in memory"


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_compiled_codes_are_products_with_multipliers_that_are_in_memory(scaling: Scaling) -> None:
    torch.compiler.reset()  # more kinds than graphs of one function
    graphs: list[GraphModule] = []

    def keep_graph(graph: GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def compute_codes(values: Tensor) -> Tensor:
        return quantise(values, scaling).codes

    torch.compile(compute_codes, backend=keep_graph, fullgraph=True)(make_matrix(256, 128))
    (multipliers,) = [node for node in graphs[0].graph.nodes if node.target == "as_strided"]
    (by_block,) = multipliers.users
    (product,) = by_block.users
    assert product.target in (torch.mul, operator.mul)


def test_kernels_read_inverses_that_the_counting_operator_has_computed() -> None:
    let_compiler_trace_kernels()
    scaling = PRODUCT_SCALINGS["tensorwise"]
    scaled = ScaledProducts(scaling, "w", totals=RoundingTotals(["w"]), is_emulated=False)
    graphs: list[GraphModule] = []

    def keep_graph(graph: GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return lambda *_inputs: [torch.empty(0)]

    operands = [make_matrix(rows, 128).bfloat16() for rows in (32, 64)]
    torch.compile(scaled.compute_output, backend=keep_graph, fullgraph=True)(*operands)
    (product,) = [node for node in graphs[0].graph.nodes if "scaled_mm" in str(node.target)]
    for scales in (node for argument in product.args[2:] for node in _list_tensors(argument)):
        chain = [scales]
        while chain[-1].target in ("view", "t"):
            chain.append(chain[-1].args[0])
        assert "count_operand" in str(chain[-1].target)


def _list_tensors(argument: Any) -> list[Node]:
    listed = argument if isinstance(argument, list | tuple) else [argument]
    return [each for each in listed if isinstance(each, Node)]


@cache
def compile_quantise() -> Any:
    """Compile all scalings to one graph by Inductor."""

    scalings = [*SCALINGS, *PRODUCT_SCALINGS["nvfp4"].output]

    key = hash_numbers(1)

    def quantise_all(values: Tensor) -> list[list[Tensor]]:
        matrices = [quantise(values, scaling) for scaling in scalings]
        matrices.append(quantise(values, PRODUCT_SCALINGS["nvfp4"].input_gradient[0], key=key))
        return [[m.codes, *list_scales(m), dequantise(m)] for m in matrices]

    return torch.compile(quantise_all, fullgraph=True), quantise_all


@pytest.mark.long  # compiles C++
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generated_code_quantises_the_same_bytes(dtype: torch.dtype) -> None:
    compiled, quantise_all = compile_quantise()
    values = make_matrix(256, 384).to(dtype)
    values[3] = 0.0
    for got, want in zip(compiled(values), quantise_all(values), strict=True):
        for left, right in zip(got, want, strict=True):
            assert left.dtype == right.dtype
            left_bytes, right_bytes = (
                each.contiguous().view(torch.uint8) for each in (left, right)
            )
            assert torch.equal(left_bytes, right_bytes)


def test_graphs_of_all_recipes_in_one_process_have_fixed_sizes() -> None:
    torch.compiler.reset()
    graphs: list[GraphModule] = []

    def keep_graph(graph: GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    x = make_matrix(128, 256).bfloat16().requires_grad_()
    for recipe in ("tensorwise", "rowwise", "blockwise"):
        layer = Linear(256, 512, bias=False)
        layer.scaled = ScaledProducts(PRODUCT_SCALINGS[recipe], "w")
        copy_weights(layer, torch.bfloat16, fill_operands).update()
        torch.compile(layer.forward, backend=keep_graph, fullgraph=True)(x).sum().backward()
    assert len(graphs) == 3
    inputs = [node for graph in graphs for node in graph.graph.nodes if node.op == "placeholder"]
    sizes = [size for node in inputs for size in node.meta["example_value"].shape]
    assert {type(size) for size in sizes} == {int}
