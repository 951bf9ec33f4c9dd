"""Blocks save the results that a policy names, repeat the others, and compute the same gradients
bit by bit.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.architecture import ModelShape, read_config
from shardwright.layout import Layout
from shardwright.layout.saved_results import LayerResults, ResultName, SavedResults
from shardwright.model import Decoder
from shardwright.model.result_names import get_result_name
from shardwright.model.routing import ExpertRules
from shardwright.numerics.packed_results import PackedResult
from shardwright.numerics.recompute import build_saved_results_runner
from shardwright.planner.candidate import Candidate
from shardwright.planner.memory.activations import get_layer_activations
from shardwright.planner.model_costs import ModelFacts
from tests.reference.cases import CASES

NUM_LAYERS = 4
ROWS = 2
TOKENS = 16
NOTHING: SavedResults = frozenset()
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": CASES["llama"] | {"num_hidden_layers": NUM_LAYERS},
    "gpt2": CASES["gpt2"] | {"n_layer": NUM_LAYERS},
    "gemma2": CASES["gemma2"] | {"num_hidden_layers": NUM_LAYERS, "layer_types": None},
    "mixtral": CASES["mixtral"] | {"num_hidden_layers": NUM_LAYERS},
    "deepseek_v3": (
        CASES["deepseek_v3"] | {"num_hidden_layers": NUM_LAYERS, "first_k_dense_replace": 1}
    ),
}
CHOICES: dict[str, tuple[LayerResults, ...]] = {
    "nothing": (NOTHING,) * NUM_LAYERS,
    "by layer": (
        frozenset(["attention", "experts"]),
        frozenset(["attention", "projections", "gate_up"]),
        frozenset(["attention_out", "down"]),
        None,
    ),
}


def build(
    name: str, choice: Sequence[LayerResults] | None, dtype: torch.dtype, **options: Any
) -> Decoder:
    shape = read_config(CONFIGS[name])
    rules = None if shape.experts is None else ExpertRules(0.01, 0.001, None)
    decoder = Decoder(shape, expert_rules=rules).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
            parameter.copy_(values)
    if choice is not None:
        set_choice(decoder, choice, **options)
    return decoder


def set_choice(decoder: Decoder, choice: Sequence[LayerResults], **options: Any) -> None:
    runners = {
        results: None
        if results is None
        else build_saved_results_runner(results, get_result_name, **options)
        for results in choice
    }
    for block in decoder.blocks:
        block.set_recompute(runners[choice[block.layer_index]])


def compute_loss(decoder: Decoder) -> Tensor:
    ids_BT = torch.randint(
        0, decoder.shape.vocab_size, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1)
    )
    sparse = decoder.shape.experts is not None
    loss: Tensor = decoder(ids_BT, labels_BT=ids_BT, row_weight=0.5 if sparse else None)
    return loss


def run(decoder: Decoder) -> list[Tensor]:
    loss = compute_loss(decoder)
    loss.backward()
    gradients = [p.grad for p in decoder.parameters() if p.grad is not None]
    return [loss.detach(), *gradients]


def assert_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    assert len(first) == len(second) > 10
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_equal_bit_by_bit(name: str, choice: str) -> None:
    plain = run(build(name, None, torch.float64))
    assert_equal(plain, run(build(name, CHOICES[choice], torch.float64)))


class _Packed:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def unpack(self) -> Tensor:
        return self._tensor


def test_packed_results_give_equal_gradients() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> PackedResult:
        packed.append(tensor)
        return _Packed(tensor.clone())

    plain = run(build("llama", None, torch.float64))
    assert_equal(plain, run(build("llama", CHOICES["by layer"], torch.float64, pack=pack)))
    assert len(packed) > 5


class _Calls(TorchDispatchMode):
    """Count the calls of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def count_backward_calls(name: str, results: LayerResults) -> Counter[str]:
    loss = compute_loss(build(name, (results,) * NUM_LAYERS, torch.float32))
    with _Calls() as calls:
        loss.backward()
    return calls.counts


ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("name", "results", "num_products", "num_attentions", "num_grouped"),
    [
        # Of a layer's seven products the last one is not needed again.
        ("llama", NOTHING, 6, 1, 0),
        ("llama", frozenset(["attention"]), 6, 0, 0),
        ("llama", frozenset(["projections"]), 3, 1, 0),
        ("llama", frozenset(["attention_out"]), 5, 1, 0),
        ("llama", frozenset(["gate_up"]), 4, 1, 0),
        ("llama", frozenset(["attention", "projections", "attention_out", "gate_up"]), 0, 0, 0),
        # Four projections, the router, and two grouped products of the experts.
        ("mixtral", NOTHING, 5, 1, 2),
        ("mixtral", frozenset(["experts"]), 5, 1, 0),
    ],
)
def test_only_results_that_are_not_saved_are_computed_again(
    name: str, results: SavedResults, num_products: int, num_attentions: int, num_grouped: int
) -> None:
    plain = count_backward_calls(name, None)
    calls = count_backward_calls(name, results)
    products = sum(calls[key] - plain[key] for key in ("aten::mm", "aten::addmm"))
    grouped = "shardwright::grouped_product"
    assert products == NUM_LAYERS * num_products
    assert calls[ATTENTION] == NUM_LAYERS * num_attentions
    assert calls[grouped] - plain[grouped] == NUM_LAYERS * num_grouped


class LiveBytes(TorchDispatchMode):
    """Track the bytes of live memory that operations allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.live:
                    self.live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, storage._cdata, None)
        return result


def measure_saved_bytes(name: str, choice: Sequence[LayerResults]) -> int:
    """Return the bytes that live between the forward and the backward pass."""
    decoder = build(name, choice, torch.float32)
    gc.collect()
    with LiveBytes() as live:
        loss = compute_loss(decoder)
        gc.collect()
        num_bytes = sum(live.live.values())
    assert loss.requires_grad
    return num_bytes


@pytest.mark.parametrize(
    ("name", "results"),
    [
        ("llama", ["attention"]),
        ("llama", ["projections"]),
        ("llama", ["attention_out"]),
        ("llama", ["attention", "projections", "attention_out", "gate_up", "down"]),
        ("gpt2", ["attention", "projections", "gate_up"]),
        ("mixtral", ["attention", "projections"]),
        ("mixtral", ["experts"]),
        ("deepseek_v3", ["attention_out"]),
    ],
)
def test_saved_bytes_are_those_that_the_planner_predicts(
    name: str, results: list[ResultName]
) -> None:
    """Exactly: the input of each layer and its kept results."""
    shape = read_config(CONFIGS[name])
    choice = (NOTHING, frozenset(results), NOTHING, frozenset(results))
    base = measure_saved_bytes(name, (NOTHING,) * NUM_LAYERS)
    predict = partial(_predict_saved_bytes, shape)
    expected = predict(choice) - predict((NOTHING,) * NUM_LAYERS)
    assert expected > 0
    assert measure_saved_bytes(name, choice) - base == expected


def _predict_saved_bytes(shape: ModelShape, choice: tuple[LayerResults, ...]) -> float:
    candidate = Candidate(
        Layout(),
        TOKENS,
        ROWS,
        precision="fp32",
        recompute="mixed",
        saved_results=choice,
        has_fused_norms=False,
    )
    facts = ModelFacts(shape, choice)
    return sum(
        kind.count * get_layer_activations(facts, kind, candidate).saved_bytes
        for kind in facts.kinds
    )


class _ProductCounter:
    """Backend of torch.compile that counts the matrix products of backward graphs."""

    def __init__(self) -> None:
        self.products: list[int] = []

    def compile(self, decoder: Decoder) -> None:
        torch._dynamo.reset()
        decoder.compile_blocks(
            backend=aot_autograd(
                fw_compiler=lambda graph, _inputs: make_boxed_func(graph.forward),
                bw_compiler=self._count,
            ),
            fullgraph=True,
        )

    def _count(self, graph: Any, _inputs: Sequence[Tensor]) -> Callable[..., Any]:
        targets = [str(node.target) for node in graph.graph.nodes]
        self.products.append(sum(t in ("aten.mm.default", "aten.addmm.default") for t in targets))
        return make_boxed_func(graph.forward)


# Tracing reads `.grad` of a block's input, and instantiates autograd functions.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_blocks_keep_the_named_results_in_one_graph_per_choice() -> None:
    choice = (NOTHING, NOTHING, frozenset(["projections", "gate_up"]), None)
    plain = run(build("llama", None, torch.float64))
    decoder = build("llama", choice, torch.float64)
    counter = _ProductCounter()
    counter.compile(decoder)
    compiled = run(decoder)
    assert len(compiled) == len(plain)
    assert all(
        torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(compiled, plain, strict=True)
    )
    # The backward pass begins with the last layer. The compiler also omits the last product.
    num_gradients = 2 * 7
    assert counter.products == [num_gradients, num_gradients + 1, num_gradients + 6]
