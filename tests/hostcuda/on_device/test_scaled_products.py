"""Quantised products on a CUDA device: arguments of its kernels, and the emulation's numbers."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.architecture import read_config
from shardwright.config.low_precision import (
    FP8Product,
    FP8Section,
    LowPrecisionRecipe,
    NVFP4Section,
)
from shardwright.config.training import PrecisionSection
from shardwright.doctor.rates import scaled_rates
from shardwright.hardware import MatmulRate
from shardwright.hashing import hash_numbers
from shardwright.layout import Layout
from shardwright.model.decoder import Decoder
from shardwright.model.products import fp8
from shardwright.model.products.operand import PRODUCT_SCALINGS, list_scales, quantise
from shardwright.model.products.product import (
    ProductRule,
    WeightGradientStore,
    multiply,
    multiply_by_expert,
)
from shardwright.model.products.scaled_product import ScaledProducts
from shardwright.model.weight_init import initialise_parameter
from shardwright.numerics.recompute import build_recompute_runner
from shardwright.parallel import apply_layout
from shardwright.planner.low_precision import ScaledShares
from shardwright.plans import BatchPlan, build_plan
from tests.hostcuda import device
from tests.multiprocess.scaled_operands import SPARSE, WIDE

GPU = torch.device("cuda", 0)
PRODUCTS = ["compute_output", "compute_input_gradient", "compute_weight_gradient"]
SIZES = [(256, 128, 128), (384, 640, 256), (128, 256, 896)]
"""Tokens, inputs and outputs; whole blocks of 128, and more than one tile of scales."""


def make_operands(size: tuple[int, int, int]) -> dict[str, Tensor]:
    """Draw operands whose rows and columns have magnitudes over twelve powers of two."""
    tokens, inputs, outputs = size
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (tokens, inputs), "w": (outputs, inputs), "g": (tokens, outputs)}

    def draw(shape: tuple[int, int]) -> Tensor:
        rows, columns = (torch.randint(-6, 7, (n,), generator=generator) for n in shape)
        values = torch.randn(shape, generator=generator)
        return (values * torch.exp2(rows[:, None] + columns.float())).bfloat16()

    return {name: draw(shape) for name, shape in shapes.items()}


def select_operands(product: str, operands: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    left, right = dict(zip(PRODUCTS, ("xw", "gw", "gx"), strict=True))[product]
    return operands[left], operands[right]


def assert_equal_but_for_rounding(computed: Tensor, emulated: Tensor) -> None:
    """Compare to one unit in the last place of bf16, or of the largest terms of a sum."""
    limit = 2.0**-7 * emulated.abs() + 1e-6 * emulated.abs().amax(1, keepdim=True)
    assert bool(((computed - emulated).abs() <= limit).all())
    assert (computed == emulated).float().mean() > 0.99


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", PRODUCT_SCALINGS)
def test_kernels_give_the_numbers_of_the_emulation(
    name: str, product: str, size: tuple[int, int, int]
) -> None:
    pair = select_operands(product, make_operands(size))
    emulated = getattr(ScaledProducts(PRODUCT_SCALINGS[name]), product)(*pair)
    on_device = ScaledProducts(PRODUCT_SCALINGS[name], is_emulated=False)
    moved = [each.to(GPU) for each in pair]
    with device.log_synchronisations() as waits:
        computed = getattr(on_device, product)(*moved)
    assert dict(waits) == {}, "a product makes the host wait"
    assert computed.dtype == torch.bfloat16
    assert_equal_but_for_rounding(computed.cpu().float(), emulated.float())


@pytest.mark.parametrize("counts", [[40, 0, 25, 190], [0, 0, 0, 128], [0, 0, 0, 0]])
@pytest.mark.parametrize("product", ["compute_expert_output", "compute_expert_input_gradient"])
@pytest.mark.parametrize("name", ["rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"])
def test_grouped_kernels_give_the_numbers_of_the_emulation(
    name: str, product: str, counts: list[int]
) -> None:
    """Rows of experts begin inside tiles and blocks; only `blockwise` makes the host wait."""
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = (256, 384) if name == "blockwise" else (160, 96)
    w_ENK = torch.randn(4, outputs, inputs, generator=generator)
    w_ENK *= torch.exp2(torch.randint(-6, 7, (4, outputs, inputs), generator=generator))
    width = inputs if product == "compute_expert_output" else outputs
    x = torch.randn(sum(counts), width, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, (sum(counts), 1), generator=generator))
    x, w_ENK = x.bfloat16(), w_ENK.bfloat16()
    counts_E = torch.tensor(counts)
    emulated = getattr(ScaledProducts(PRODUCT_SCALINGS[name]), product)(x, w_ENK, counts_E)
    moved = [each.to(GPU) for each in (x, w_ENK, counts_E)]
    with device.log_synchronisations() as waits:
        computed = getattr(ScaledProducts(PRODUCT_SCALINGS[name], is_emulated=False), product)(
            *moved
        )
    assert sum(waits.values()) == (name == "blockwise" and sum(counts) > 0)
    assert computed.shape == emulated.shape
    if sum(counts):
        assert_equal_but_for_rounding(computed.cpu().float(), emulated.float())


class FastCallRecorder(TorchDispatchMode):
    """Recorder of the accumulation of every call of a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.is_fast: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(("aten._scaled_mm_v2", "aten._scaled_grouped_mm_v2")):
            names = [argument.name for argument in func._schema.arguments]
            passed = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.is_fast.append(passed.get("use_fast_accum", False))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fast_product", get_args(FP8Product))
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_the_chosen_products_accumulate_fast(name: str, fast_product: FP8Product) -> None:
    operands = {key: each.to(GPU) for key, each in make_operands(SIZES[0]).items()}
    calls: dict[str, tuple[Tensor, ...]] = {
        product: select_operands(product, operands) for product in PRODUCTS
    }
    if name != "tensorwise":
        experts = (torch.stack([operands["w"]] * 2), torch.tensor([56, 200]).to(GPU))
        calls["compute_expert_output"] = (operands["x"], *experts)
        calls["compute_expert_input_gradient"] = (operands["g"], *experts)
    scaled = ScaledProducts(
        PRODUCT_SCALINGS[name], is_emulated=False, fast_products=(fast_product,)
    )
    for product, arguments in calls.items():
        with FastCallRecorder() as recorder:
            getattr(scaled, product)(*arguments)
        is_bf16 = (name, product) == ("rowwise_with_gw_hp", "compute_weight_gradient")
        assert recorder.is_fast == ([] if is_bf16 else [product.endswith(fast_product)]), product


class ResultRecorder(TorchDispatchMode):
    """Recorder of the operators that compute a tensor of this shape, with its dtype."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.results: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.shape == self.shape:
            self.results.append((func.name().removeprefix("aten::"), result.dtype))
        return result


_PRODUCT_OF_GRADIENT = {
    None: ("mm.dtype", torch.float32),
    "tensorwise": ("_scaled_mm_v2", torch.float32),
    "rowwise": ("_scaled_mm_v2", torch.bfloat16),  # the kernel writes 16 bits only
    "rowwise_with_gw_hp": ("mm.dtype", torch.float32),
}


@pytest.mark.parametrize("has_working_weight", [False, True])
@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", _PRODUCT_OF_GRADIENT)
def test_products_write_gradients_of_fp32_weights_in_fp32(
    name: str | None, transposed: bool, is_deferred: bool, has_working_weight: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (64, 48) if transposed else (48, 64)
    weight = nn.Parameter(torch.randn(shape, generator=generator).to(GPU))
    x = torch.randn(32, 64, generator=generator).bfloat16().to(GPU)
    g = torch.randn(32, 48, generator=generator).bfloat16().to(GPU)
    scaled = None if name is None else ScaledProducts(PRODUCT_SCALINGS[name], is_emulated=False)
    store = WeightGradientStore() if is_deferred else None
    rule = ProductRule(64, transposed, store, scaled)
    working = weight.detach().bfloat16() if has_working_weight else None
    product = multiply(x, weight, None, rule, working)
    with ResultRecorder((64, 48) if transposed and name is None else (48, 64)) as recorder:
        if store is None:
            product.backward(g)
        else:
            with store.defer() as products:
                product.backward(g)
            assert weight.grad is None
            store.accumulate(products)
    operator, dtype = _PRODUCT_OF_GRADIENT[name]
    conversions = [] if dtype == torch.float32 else [("_to_copy", torch.float32)]
    views = ("t", "detach", "view")
    found = [result for result in recorder.results if result[0] not in views]
    assert found == [(operator, dtype), *conversions]
    if "mm.dtype" in operator:
        expected = g.cpu().float().t() @ x.cpu().float()
        assert weight.grad is not None
        actual = weight.grad.cpu()
        torch.testing.assert_close(
            actual.t() if transposed else actual, expected, rtol=1e-5, atol=1e-5
        )


class GroupedCallCounter(TorchDispatchMode):
    """Counter of products of experts."""

    num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += str(func).startswith(
            ("aten._scaled_grouped_mm", "shardwright.scaled_product_by_expert")
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["rowwise", "blockwise", "mxfp8"])
def test_selective_recomputation_saves_the_results_of_grouped_kernels(name: str) -> None:
    run = build_recompute_runner("selective")
    assert run is not None
    weight = nn.Parameter(torch.randn(2, 128, 128).bfloat16().to(GPU))
    rule = ProductRule(128, scaled=ScaledProducts(PRODUCT_SCALINGS[name], is_emulated=False))
    x = torch.randn(48, 128).bfloat16().to(GPU).requires_grad_()
    counts_E = torch.tensor([20, 28]).to(GPU)
    with GroupedCallCounter() as counter:
        # The backward pass of silu reads the product.
        run(lambda x: F.silu(multiply_by_expert(x, weight, counts_E, rule)), x).sum().backward()
    assert counter.num_calls == 2, "output and input gradient"


@pytest.mark.parametrize("name", ["blockwise", "mxfp8", "nvfp4"])
def test_a_value_that_is_not_finite_shows(name: str) -> None:
    operands = make_operands((128, 256, 128))
    operands["x"][3, 40] = torch.inf
    products = ScaledProducts(PRODUCT_SCALINGS[name], is_emulated=False)
    out = products.compute_output(operands["x"].to(GPU), operands["w"].to(GPU)).cpu()
    assert bool(out[3].isnan().all())
    assert bool(out[4:].isfinite().all())


def test_scales_of_mxfp8_are_exact_over_the_whole_range() -> None:
    """Products of one block each have the emulation's bits, from 2^-127 to the largest scale."""
    exponents = torch.arange(-126, 112).float()
    x = (torch.exp2(exponents)[:, None] * torch.ones(32)).repeat(2, 1)[:224]
    w = torch.ones(16, 32)
    x, w = x.bfloat16(), w.bfloat16()
    emulated = ScaledProducts(PRODUCT_SCALINGS["mxfp8"]).compute_output(x, w)
    computed = ScaledProducts(PRODUCT_SCALINGS["mxfp8"], is_emulated=False).compute_output(
        x.to(GPU), w.to(GPU)
    )
    assert torch.equal(computed.cpu(), emulated)
    assert bool((fp8.quantise(x, PRODUCT_SCALINGS["mxfp8"].output[0]).multipliers > 0).all())


@pytest.mark.parametrize(
    ("capability", "measured"),
    [((8, 0), set()), ((9, 0), {"tensorwise", "rowwise", "blockwise"}),
     ((10, 0), {"tensorwise", "rowwise", "mxfp8", "nvfp4"})],
)  # fmt: skip
def test_the_doctor_measures_the_kernels_of_a_device(
    capability: tuple[int, int], measured: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: capability)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setitem(scaled_rates._SECONDS, "cuda", 0.001)
    rates = list(scaled_rates.time_scaled_products(GPU, [MatmulRate("bf16", 128, 128, 128, 1e9)]))
    assert {rate.recipe for rate in rates if rate.obstacle is None} == measured
    assert not any(rate.is_unexpected for rate in rates)


def compute_gradients(
    config: dict[str, Any], recipe: LowPrecisionRecipe, **options: Any
) -> tuple[float, dict[str, Tensor]]:
    """Compute loss and gradients of a decoder whose plan is applied on the device."""
    shape = read_config(config)
    section = PrecisionSection.of_low_precision(
        # Other last bits of a sum change the random numbers of a block.
        NVFP4Section(experimental=True, gradient_rounding="nearest", **options)
        if recipe == "nvfp4"
        else FP8Section(recipe=recipe, **options)
    )
    specs = {spec.name: spec for spec in shape.list_parameters()}
    with torch.device("meta"):
        decoder = Decoder(shape, compute_dtype=torch.bfloat16)
    model = apply_layout(
        decoder,
        build_plan(shape, Layout(), BatchPlan(128, 1, 1, 1), section),
        None,
        GPU,
        read_slice=lambda name, narrow: initialise_parameter(
            specs[name], 0, dtype=torch.float32, narrow=narrow
        ),
    )
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(0, config["vocab_size"], (1, 128), generator=generator).to(GPU)
    loss = model.decoder(ids_BT, labels_BT=ids_BT)
    loss.backward()
    gradients = {
        name: parameter.grad.cpu()
        for name, parameter in model.decoder.named_parameters()
        if parameter.grad is not None
    }
    return float(loss.detach()), gradients


@pytest.mark.parametrize(
    ("config", "recipe"),
    [(SPARSE, "rowwise_with_gw_hp"), (WIDE, "blockwise"), (SPARSE, "mxfp8"), (WIDE, "nvfp4")],
)
def test_a_decoder_computes_as_it_does_with_emulation(
    config: dict[str, Any], recipe: LowPrecisionRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums round to bf16 in another order, and nothing else differs."""
    called: list[str] = []
    is_fast: list[bool] = []

    def count(name: str) -> None:
        kernel = getattr(F, name)

        def call(*arguments: Any, **options: Any) -> Tensor:
            called.append(name)
            is_fast.append(options.get("use_fast_accum", False))
            product: Tensor = kernel(*arguments, **options)
            return product

        monkeypatch.setattr(F, name, call)

    count("scaled_mm")
    count("scaled_grouped_mm")
    loss, gradients = compute_gradients(config, recipe, emulate=False)
    assert ("scaled_mm" in called, "scaled_grouped_mm" in called) == (True, config is SPARSE)
    num_outputs = len(called) // 2 if recipe == "rowwise_with_gw_hp" else 0
    assert is_fast == [True] * num_outputs + [False] * (len(called) - num_outputs)
    called.clear()
    expected_loss, expected = compute_gradients(config, recipe, emulate=True)
    assert not called
    assert loss == pytest.approx(expected_loss, rel=1e-3)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        distance = (gradient - expected[name]).norm() / expected[name].norm()
        assert distance < 1e-2, f"{name}: {distance}"


@pytest.mark.parametrize("name", PRODUCT_SCALINGS)
def test_a_quantisation_needs_the_memory_that_the_planner_counts(name: str) -> None:
    shares = ScaledShares(1.0, 1.0, 1.0, False, has_4bit_operands=name == "nvfp4")
    for tokens, width in ((512, 1024), (1024, 256)):
        x = torch.randn(tokens, width).bfloat16().to(GPU)
        for key in (None, hash_numbers(1)) if name == "nvfp4" else (None,):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            matrix = quantise(x, PRODUCT_SCALINGS[name].output[0], key=key)
            peak = torch.cuda.max_memory_allocated() - before
            scales = sum(4 * each.numel() for each in list_scales(matrix))
            counted = shares.temporary_bytes * tokens * width
            assert counted <= peak <= counted + 4 * scales
            del matrix
