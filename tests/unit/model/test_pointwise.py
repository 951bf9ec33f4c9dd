"""Fused norms, gates, rotations and residual sums compute what separate operations compute."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from shardwright.architecture import read_config
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.config.adapter_section import AdapterSection
from shardwright.config.recipe import RecomputeKind
from shardwright.model import Decoder
from shardwright.model.attention.rope import rotate
from shardwright.model.mlp import apply_clamped_gate, apply_gate
from shardwright.model.norms import LayerNorm, RMSNorm
from shardwright.model.pointwise import formulas, functions, operators
from shardwright.model.pointwise.functions import COMPILED_FUNCTIONS
from shardwright.numerics.compilation import find_compiler_obstacle
from shardwright.numerics.recompute import build_recompute_runner
from tests.reference.cases import CASES
from tests.unit.model.test_saved_results import LiveBytes

FAMILIES = [
    "llama",
    "llama-gelu",
    "qwen2",
    "qwen3",
    "phi3-window-partial",
    "gemma2",
    "gemma3_text-newer",
    "olmo2",
    "granite",
    "smollm3",
    "gpt2",
    "gpt_neox",
    "gpt_neox-sequential-tied",
    "mixtral",
    "qwen3_moe",
    "gpt_oss-clamps-bite",
    "deepseek_v3",
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the formulas themselves in place of their compiled forms."""
    monkeypatch.setattr(operators, "compiled_formulas", {})
    monkeypatch.setattr(operators, "_compile", lambda formula: formula)


@pytest.fixture
def graph_counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Trace formulas to graphs, which are counted, and run their operations one by one."""
    counter = CompileCounter()
    monkeypatch.setattr(operators, "compiled_formulas", {})
    monkeypatch.setattr(operators, "choose_compile_options", lambda: {"backend": counter})
    yield counter
    torch._dynamo.reset()


def build(family: str, dtype: torch.dtype, adapters: AdapterSection | None = None) -> Decoder:
    shape = read_config(CASES[family])
    decoder = Decoder(shape if adapters is None else add_adapters(shape, adapters))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return decoder.to(dtype)


def run_step(decoder: Decoder, num_tokens: int = 14, num_rows: int = 2) -> dict[str, Tensor]:
    """Return the loss and all gradients of a step."""
    ids_BT = torch.randint(
        0, decoder.shape.vocab_size, (num_rows, num_tokens), generator=torch.Generator()
    ).to(next(decoder.parameters()).device)
    decoder.zero_grad()
    loss = decoder(
        ids_BT, labels_BT=ids_BT, row_weight=None if decoder.shape.experts is None else 0.5
    )
    loss.backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in decoder.named_parameters()
        if parameter.grad is not None
    }
    return {"loss": loss.detach(), **gradients}


def measure_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the norm of all gradients' error over their norm."""
    assert found.keys() == exact.keys()
    names = found.keys() - {"loss"}
    error = torch.stack([(found[name].double() - exact[name]).norm() for name in names]).norm()
    return float(error / torch.stack([exact[name].norm() for name in names]).norm())


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_separate_operations(family: str) -> None:
    decoder = build(family, torch.float64)
    expected = run_step(decoder)
    decoder.fuse_functions(COMPILED_FUNCTIONS)
    num_compiled = len(operators.compiled_formulas)
    found = run_step(decoder)
    assert len(operators.compiled_formulas) > num_compiled
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-14, atol=0)
    assert measure_error(found, expected) < 1e-14


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_is_like_that_of_separate_operations(family: str, dtype: torch.dtype) -> None:
    """The error of a whole model of few numbers varies by chance; see the next test."""
    exact = run_step(build(family, dtype).double())  # the weights as rounded
    errors = []
    for is_fused in (False, True):
        decoder = build(family, dtype)
        if is_fused:
            decoder.fuse_functions(COMPILED_FUNCTIONS)
        errors.append(measure_error(run_step(decoder), exact))
    assert 0.5 * errors[0] < errors[1] < 2.0 * errors[0]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


TABLES = (draw(1, 32, 24, dtype=torch.float32), draw(1, 32, 24, dtype=torch.float32).flip(1))
SEPARATE: dict[str, Callable[..., Any]] = {
    "norm": lambda x, u, w: call_norm(RMSNorm(512, 1e-5), x, w),
    "norm with offset": lambda x, u, w: call_norm(RMSNorm(512, 1e-5, 1.0), x, w),
    "sum and norm": lambda x, u, w: call_sum(RMSNorm(512, 1e-5), x, u, w),
    "sum and layer norm": lambda x, u, w: call_sum(LayerNorm(512, 1e-5), x, u, w),
    "gate": lambda x, u, w: apply_gate("silu", x, u, w),
    "gate of Gemma": lambda x, u, w: apply_gate("gelu_tanh", x, u, w),
    "clamped gate": lambda x, u, w: apply_clamped_gate(x, u, 1.0, 1.7, w),
    "rotation": lambda x, u, w: rotate(x.unflatten(-1, (-1, 64)), *TABLES, w),
}
"""(x, u, fused functions or None) -> result, by the modules' functions."""


def call_norm(norm: Any, x: Tensor, fused: Any) -> Tensor:
    norm.fused = fused
    torch.nn.init.ones_(norm.weight)
    normed: Tensor = norm.to(x.dtype)(x)
    return normed


def call_sum(norm: Any, x: Tensor, update: Tensor, fused: Any) -> Tensor:
    norm.to(x.dtype).fused = fused
    torch.nn.init.ones_(norm.weight)
    if isinstance(norm, LayerNorm):
        torch.nn.init.zeros_(norm.bias)
    if fused is None:
        total = x + update
        return torch.cat([total, norm(total)])
    return torch.cat(norm.add_and_normalise(x, update, 1.0))


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SEPARATE)
def test_each_function_rounds_no_more_than_separate_operations(
    name: str, dtype: torch.dtype
) -> None:
    x = draw(2, 32, 512, dtype=dtype)
    update = draw(2, 33, 512, dtype=dtype)[:, :32]
    outputs = []
    for fused, kind in ((None, torch.float64), (None, dtype), (COMPILED_FUNCTIONS, dtype)):
        inputs = [each.to(kind).requires_grad_() for each in (x, update)]
        result = SEPARATE[name](*inputs, fused)
        gradient = draw(*result.shape, dtype=dtype).to(kind)
        gradients = torch.autograd.grad(result, inputs, gradient, allow_unused=True)
        outputs.append([result.detach(), *(each for each in gradients if each is not None)])
    for exact, separate, found in zip(*outputs, strict=True):
        errors = [float((each.double() - exact).norm()) for each in (separate, found)]
        assert errors[0] > 0
        assert errors[1] <= 1.01 * errors[0]


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt_oss-clamps-bite"])
def test_no_more_bytes_are_saved_under_any_recomputation(family: str, kind: RecomputeKind) -> None:
    results = []
    for is_fused in (False, True):
        decoder = build(family, torch.float32)
        decoder.set_recompute(build_recompute_runner(kind))
        if is_fused:
            decoder.fuse_functions(COMPILED_FUNCTIONS)
        results.append((_measure_saved_bytes(decoder), run_step(decoder)))
    (separate_bytes, expected), (fused_bytes, found) = results
    assert fused_bytes == separate_bytes
    assert measure_error(found, {k: v.double() for k, v in expected.items()}) < 1e-5


def _measure_saved_bytes(decoder: Decoder) -> int:
    """Return the bytes that live between forward and backward pass, results of policies too."""
    ids_BT = torch.arange(28).view(2, 14) % decoder.shape.vocab_size
    gc.collect()
    with LiveBytes() as live:
        loss = decoder(
            ids_BT, labels_BT=ids_BT, row_weight=None if decoder.shape.experts is None else 0.5
        )
        gc.collect()
        num_bytes = sum(live.live.values())
    assert loss.requires_grad
    return num_bytes


@pytest.mark.usefixtures("uncompiled")
def test_frozen_norms_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters, the sums over all tokens for the weights of norms are not computed."""
    decoder = build("llama", torch.float64, AdapterSection(rank=2))
    expected = run_step(decoder)
    decoder.fuse_functions(COMPILED_FUNCTIONS)
    found = run_step(decoder)
    assert all(".lora_" in name for name in found if name != "loss")
    assert measure_error(found, expected) < 1e-14
    switches = [
        key[2] for key in operators.compiled_formulas if key[0] is formulas.differentiate_rms
    ]
    assert switches == [(False,)]


def test_changing_lengths_and_rows_make_no_graph_after_the_first_steps(
    graph_counter: CompileCounter,
) -> None:
    """One graph per formula and kind of tensors, and one more for single rows."""
    decoder = build("qwen3", torch.float32)
    decoder.fuse_functions(COMPILED_FUNCTIONS)
    num_graphs = 0
    for step in range(50):
        run_step(decoder, num_tokens=2 + step * 7 % 23, num_rows=1 + step % 3)
        if step == 2:
            num_graphs = graph_counter.frame_count
    assert graph_counter.frame_count == num_graphs
    assert num_graphs <= len(operators.compiled_formulas) + 4


def test_layers_share_graphs(graph_counter: CompileCounter) -> None:
    counts = []
    for num_layers in (1, 12):
        operators.compiled_formulas.clear()
        before = graph_counter.frame_count
        decoder = Decoder(read_config(CASES["llama"] | {"num_hidden_layers": num_layers}))
        for parameter in decoder.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        decoder.fuse_functions(COMPILED_FUNCTIONS)
        run_step(decoder)
        counts.append(graph_counter.frame_count - before)
    assert counts[0] == counts[1] == len(operators.compiled_formulas)


def list_calls(dtype: torch.dtype) -> dict[Callable[..., Any], tuple[Any, ...]]:
    """Return formulas with arguments for `run_formula`."""
    wide = torch.promote_types(dtype, torch.float32)
    x, update, gradient = (draw(24, width, dtype=dtype)[:, :40] for width in (40, 41, 42))
    weight = draw(40, dtype=dtype)
    bias = draw(40, dtype=dtype).flip(0)
    scale = draw(24, 1, dtype=wide).abs() + 0.5
    cos = draw(1, 12, 3, dtype=wide)
    sin = cos.flip(1)
    return {
        formulas.normalise_rms: ((x,), (weight,), (1e-5,)),
        formulas.differentiate_rms: ((gradient, x, scale), (weight,), (True,)),
        formulas.add_normalise_rms: ((x, update), (weight,), (1e-5, 0.7)),
        formulas.add_differentiate_rms: ((update, gradient, x, scale), (weight,), (True,)),
        formulas.add_normalise_layer: ((x, update), (weight, bias), (1e-5, 1.0)),
        formulas.add_differentiate_layer: (
            (update, gradient, x, scale - 1, scale),
            (weight,),
            (True,),
        ),
        formulas.apply_gate: ((x, update), (), ("silu",)),
        formulas.differentiate_gate: ((gradient, x, update), (), ("gelu_tanh",)),
        formulas.apply_clamped_gate: ((x, update), (), (1.0, 1.7)),
        formulas.differentiate_clamped_gate: ((gradient, x, update), (), (1.0, 1.7)),
        formulas.rotate: ((draw(2, 12, 3, 8, dtype=dtype), cos, sin), (), (-1.0,)),
    }


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        *(pytest.param(d, marks=pytest.mark.long) for d in (torch.float32, torch.float64)),
    ],
    ids=str,
)
def test_compiled_formulas_compute_their_bits(dtype: torch.dtype) -> None:
    """Sums over features and tokens may add in another order."""
    if obstacle := find_compiler_obstacle(torch.device("cpu")):
        pytest.skip(obstacle)
    for formula, (tensors, others, constants) in list_calls(dtype).items():
        expected = formula(*tensors, *others, *constants)
        found = operators.run_formula(formula, tensors, others, constants)
        for got, want in zip(found, expected, strict=True):
            assert got.stride() == want.stride()
            if want.dtype == torch.bfloat16:
                assert (got != want).double().mean() <= 0.01, formula.__name__
            error = (got.double() - want.double()).norm() / want.double().norm()
            assert error <= 4 * torch.finfo(want.dtype).eps, formula.__name__


def test_single_tokens_and_inference_are_not_compiled(graph_counter: CompileCounter) -> None:
    x = draw(1, 1, 40)
    weight = draw(40)
    normed = functions.normalise_rms(x, weight, 1e-5)
    with torch.inference_mode():
        normed_rows = functions.normalise_rms(draw(2, 1, 40), weight, 1e-5)
    assert graph_counter.frame_count == 0
    assert normed.shape == x.shape
    assert normed_rows.shape == (2, 1, 40)
    functions.normalise_rms(draw(2, 1, 40), weight, 1e-5)
    assert graph_counter.frame_count == 1


def test_tables_of_one_row_rotate_all_rows(graph_counter: CompileCounter) -> None:
    x = draw(3, 5, 2, 8, dtype=torch.float64)
    cos = draw(1, 5, 3, dtype=torch.float64)
    sin = cos.flip(1)
    shared = functions.rotate(x, cos, sin)
    own = functions.rotate(x, cos.repeat(3, 1, 1), sin.repeat(3, 1, 1))
    torch.testing.assert_close(shared, own, rtol=0, atol=0)
    rest = torch.cat([functions.rotate(row[None], cos, sin) for row in x])
    torch.testing.assert_close(shared, rest, rtol=0, atol=0)
    # Rows with tables of their own and single rows are tokens one after another.
    assert graph_counter.frame_count == 2
