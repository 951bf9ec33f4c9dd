"""Refusals of quantised products: layouts that change a scale, sizes, devices, patterns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from shardwright.architecture import read_config
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.config.adapter_section import AdapterSection
from shardwright.config.low_precision import FP8Recipe, FP8Section, NVFP4Section
from shardwright.config.model import ModelSection
from shardwright.config.recipe_loading import validate_recipe
from shardwright.config.training import PrecisionSection
from shardwright.convert.conversion import emit
from shardwright.convert.emitted_config import EmitRequest
from shardwright.errors import InputError, LayoutError, RecipeError, ShardwrightError
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.layout import Layout
from shardwright.model.hf.hf_model import read_model_shape
from shardwright.model.products.kernel_support import KernelDevice
from shardwright.placement import place_model, select_scaled_weights
from shardwright.placement.compilation import CompileChoice
from shardwright.planner.auto_layout import choose_layout
from shardwright.planner.model_costs import get_model_facts
from shardwright.planner.planning_result import plan_recipe
from shardwright.planner.problem import build_template
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.planner.rates.device_rates import DeviceRates
from shardwright.planner.time.compute import compute_layer_seconds
from shardwright.plans import (
    BatchPlan,
    Plan,
    build_plan,
    complete_plan,
    resolve_degrees,
    resolve_plan,
)
from shardwright.training.checks.kernel_checks import check_low_precision_kernels
from tests.multiprocess.models import DEEPSEEK
from tests.multiprocess.scaled_operands import DENSE, SPARSE, WIDE
from tests.unit.model.hf_models import HF_CONFIGS


def plan(config: dict[str, Any], layout: Layout, tokens: int = 128, **section: Any) -> Plan:
    batch = BatchPlan(tokens, 1, 4, layout.data_ranks)
    is_4bit = section.get("recipe") == "nvfp4"
    options = {name: value for name, value in section.items() if not is_4bit or name != "recipe"}
    precision = PrecisionSection.of_low_precision(
        NVFP4Section(experimental=True, **options) if is_4bit else FP8Section(**options)
    )
    return build_plan(read_config(config), layout, batch, precision)


RING = Layout(cp=2, cp_method="ring")
PADDED = Layout(dp_shard=2, ep=2, expert_dispatch="padded", zero_stage=3)
NVFP4 = {"kind": "nvfp4", "nvfp4": {"experimental": True}}
REFUSED = [
    (DENSE, Layout(dp_replicate=2), 128, "tensorwise", r"activations span .* 2 ranks"),
    (DENSE, RING, 128, "tensorwise", r"precision\.fp8\.recipe.*rowwise_with_gw_hp"),
    (DENSE, Layout(dp_shard=2, zero_stage=3), 128, "rowwise", r"weight gradients span"),
    (SPARSE, Layout(), 128, "tensorwise", r"rows of an expert"),
    (SPARSE, PADDED, 128, "rowwise_with_gw_hp", r"expert_dispatch.*padding.*fp8\.targets"),
    (SPARSE, PADDED, 128, "nvfp4", r"expert_dispatch.*padding.*nvfp4\.targets"),
    (DENSE, Layout(tp=4), 128, "rowwise_with_gw_hp", r"at most 2 .*targets to"),
    (DEEPSEEK, Layout(tp=2), 32, "rowwise_with_gw_hp", r"latent projections"),
    (DENSE, Layout(), 100, "mxfp8", r"sequence_length.*multiples of 32.*Use 96"),
    (DENSE, RING, 96, "mxfp8", r"one rank's part.*multiples of 128"),
    (DENSE, replace(RING, cp_split="work"), 128, "mxfp8", r"multiples of 512"),
    (DENSE, Layout(), 128, "blockwise", r"not whole blocks of 128 x 128"),
    (WIDE | {"num_key_value_heads": 4, "head_dim": 32}, Layout(tp=2), 128, "blockwise",
     r"inside blocks of 128 of blockwise.*Use tp=1"),
    (DENSE | {"intermediate_size": 96}, Layout(tp=2), 128, "mxfp8", r"48|inside blocks of 32"),
    (DENSE, Layout(tp=4), 128, "nvfp4", r"at most 2 with 4-bit .*precision\.nvfp4\.targets to"),
    (DENSE | {"intermediate_size": 72}, Layout(), 128, "nvfp4",
     r"precision\.kind.*72 x 64, not whole blocks of 16.*kind: fp8 with recipe: rowwise_with_gw_hp"
     r".*precision\.nvfp4\.exclude"),
    (DENSE | {"intermediate_size": 80}, Layout(tp=2), 128, "nvfp4",
     r"layout\.tp.*80 x 64.*inside blocks of 16 of nvfp4.*Use tp=1, or precision\.kind: fp8"),
    (DENSE | {"intermediate_size": 96, "num_key_value_heads": 4}, Layout(tp=4), 128, "nvfp4",
     r"96 x 64.*inside blocks of 16 of nvfp4.*Use tp=2, or"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "layout", "tokens", "recipe", "message"), REFUSED)
def test_layouts_that_change_a_scale_are_refused(
    config: dict[str, Any], layout: Layout, tokens: int, recipe: Any, message: str
) -> None:
    with pytest.raises((LayoutError, RecipeError), match=message):
        plan(config, layout, tokens, recipe=recipe)


def test_nvfp4_supports_any_tokens() -> None:
    for layout in (Layout(), RING, Layout(dp_replicate=2), Layout(pp=2, schedule="zb_h1")):
        plan(DENSE, layout, 100 if layout.cp == 1 else 96, recipe="nvfp4")


def test_targets_lift_a_refusal() -> None:
    plan(DENSE, Layout(tp=4), targets=("mlp",))
    plan(SPARSE, Layout(), recipe="tensorwise", targets=("attention",))
    plan(SPARSE, replace(PADDED, zero_stage=1), targets=("attention",))
    plan(DEEPSEEK, Layout(tp=2), tokens=32, targets=("mlp", "experts"))


def test_blocks_over_packed_weights_are_refused_under_tp() -> None:
    shape = add_adapters(
        read_config(DENSE | {"hidden_size": 256}), AdapterSection(rank=4, quantize="nf4")
    )
    for section in (FP8Section(recipe="mxfp8"), NVFP4Section(experimental=True)):
        precision = PrecisionSection.of_low_precision(section)
        with pytest.raises(LayoutError, match="packed 4-bit weights"):
            build_plan(shape, Layout(tp=2), BatchPlan(128, 1, 1, 1), precision)
        build_plan(shape, Layout(), BatchPlan(128, 1, 1, 1), precision)


def test_targets_and_patterns_select_weights() -> None:
    shape = read_config(SPARSE)
    every = select_scaled_weights(shape, FP8Section())
    assert set(every.values()) == {"attention", "experts"}
    assert not any("router" in name or "norm" in name or "embed" in name for name in every)
    first = select_scaled_weights(shape, FP8Section(exclude=("model.layers.0.*",)))
    assert {name for name in every if ".1." in name} == set(first)
    with pytest.raises(RecipeError, match=r"fp8\.exclude: matches no weight"):
        select_scaled_weights(shape, FP8Section(exclude=("lm_head*",)))
    with pytest.raises(RecipeError, match="no weight is left"):
        select_scaled_weights(shape, FP8Section(exclude=("*",)))


def build_recipe(**sections: Any) -> Any:
    return validate_recipe(
        {
            "model": {"config": DENSE} | sections.pop("model", {}),
            "data": {"sources": "unread"},
            "training": {
                "sequence_length": 32, "micro_batch_size": 1, "max_steps": 1, "learning_rate": 1.0,
            },
            **sections,
        }
    )  # fmt: skip


def test_the_recipe_refuses_unused_and_unknown_keys() -> None:
    assert build_recipe(precision="fp8").precision.low_precision == FP8Section()
    assert build_recipe(precision="bf16").precision.low_precision is None
    with pytest.raises(ShardwrightError, match="set `kind: fp8`"):
        build_recipe(precision={"kind": "bf16", "fp8": {}})
    with pytest.raises(ShardwrightError, match="tensorwise"):
        build_recipe(precision={"kind": "fp8", "fp8": {"recipe": "delayed"}})


def test_kernels_that_add_blocks_in_fp32_refuse_fast_accumulation() -> None:
    fast_products = {name: FP8Section(recipe=name).fast_products for name in get_args(FP8Recipe)}
    outputs = dict.fromkeys(("tensorwise", "rowwise", "rowwise_with_gw_hp"), ("output",))
    assert fast_products == outputs | {"blockwise": (), "mxfp8": ()}
    assert FP8Section(fast_accumulation=()).fast_products == ()
    assert FP8Section(recipe="mxfp8", fast_accumulation=()).fast_products == ()
    products = ("output", "weight_gradient")
    assert FP8Section(recipe="rowwise", fast_accumulation=products).fast_products == products
    for options, message in (
        ({"recipe": "blockwise", "fast_accumulation": ["output"]}, r"got .*output.*allowed: \[\]"),
        ({"fast_accumulation": ["weight_gradient"]}, "allowed: output, input_gradient"),
        ({"fast_accumulation": ["outputs"]}, "input_gradient"),
    ):
        with pytest.raises(ShardwrightError, match=message) as error:
            build_recipe(precision={"kind": "fp8", "fp8": options})
        assert "precision.fp8" in str(error.value)


def test_nvfp4_needs_its_flag() -> None:
    for precision in ("nvfp4", {"kind": "nvfp4", "nvfp4": {}}):
        with pytest.raises(ShardwrightError, match=r"set `precision\.nvfp4\.experimental: true`"):
            build_recipe(precision=precision)
    section = build_recipe(precision=NVFP4).precision.low_precision
    assert (section.kind, section.recipe) == ("nvfp4", "nvfp4")
    with pytest.raises(ShardwrightError, match="set `kind: nvfp4`"):
        build_recipe(precision={"kind": "fp8", "nvfp4": {"experimental": True}})
    with pytest.raises(ShardwrightError, match="recipe"):
        build_recipe(precision={"kind": "nvfp4", "nvfp4": {"recipe": "nvfp4"}})


def test_blocks_with_8_bit_products_are_compiled() -> None:
    shape = read_config(DENSE)
    explicit = build_recipe(precision="fp8", model={"compile": True})
    assert resolve_plan(explicit, shape, 1).is_compiled
    recipe = build_recipe(precision="fp8")
    assert not resolve_plan(recipe, shape, 1).is_compiled
    placement = place_model(shape, Layout(), 32)
    automatic = CompileChoice(True, "Triton is installed")
    batch = BatchPlan(32, 1, 1, 1)
    assert complete_plan(recipe, placement, batch, None, automatic).is_compiled


def test_other_systems_configurations_are_refused() -> None:
    for precision in ("fp8", NVFP4):
        recipe = build_recipe(precision=precision)
        request = EmitRequest(recipe, Layout(), BatchPlan(32, 1, 1, 1), "none", 1)
        with pytest.raises(InputError, match="not converted"):
            emit("deepspeed", request)


def test_models_of_transformers_classes_are_refused() -> None:
    config = HF_CONFIGS["opt"]
    shape = read_model_shape(config, ModelSection(config=config, dropout="off"))
    precision = PrecisionSection(kind="fp8")
    with pytest.raises(RecipeError, match="run in transformers' own"):
        build_plan(shape, Layout(), BatchPlan(16, 1, 1, 1), precision)


def test_the_planner_counts_products_that_stay_in_bf16() -> None:
    gw_hp, tensorwise, bf16 = (
        build_template(build_recipe(precision=precision))
        for precision in ("fp8", {"kind": "fp8", "fp8": {"recipe": "tensorwise"}}, "bf16")
    )
    assert [
        None if each.scaled_shares is None else each.scaled_shares.has_wide_weight_gradients
        for each in (gw_hp, tensorwise, bf16)
    ] == [True, False, None]
    assert build_template(build_recipe(precision="bf16"), precision="fp8") == gw_hp
    facts = get_model_facts(read_config(WIDE))
    cluster = parse_cluster("8xH100-80GB")
    efficiency = load_efficiencies().get_efficiency(cluster.accelerator)
    gradient_seconds = [
        compute_layer_seconds(
            facts,
            facts.kinds[0],
            replace(candidate, micro_batch_size=512),
            DeviceRates(cluster, efficiency, candidate.precision),
        ).weight_gradient
        for candidate in (gw_hp, tensorwise, bf16)
    ]
    assert gradient_seconds[0] == gradient_seconds[2] > gradient_seconds[1]


def test_an_automatic_layout_keeps_the_scales() -> None:
    batch = {"sequence_length": 128, "global_batch_size": 8, "max_steps": 1, "learning_rate": 1.0}
    recipe = build_recipe(
        precision={"kind": "fp8", "fp8": {"recipe": "tensorwise"}},
        training=batch,
        layout={"auto": True},
    )
    chosen = choose_layout(recipe, parse_cluster("8xH100-80GB"), 4).recipe
    layout, _ = resolve_degrees(chosen, 4)
    assert layout.data_ranks * layout.cp == 1
    assert layout.world_size == 4
    result = plan_recipe(recipe, parse_cluster("4xH100-80GB"))
    layouts = [prediction.candidate.layout for prediction in result.predictions]
    assert layouts
    assert all(layout.data_ranks * layout.cp == 1 for layout in layouts)


H100 = KernelDevice("NVIDIA H100", (9, 0), (12, 9))
OLD_BUILD = KernelDevice("NVIDIA H100", (9, 0), (12, 8))
B200 = KernelDevice("NVIDIA B200", (10, 0), (13, 0))
RTX_5090 = KernelDevice("NVIDIA GeForce RTX 5090", (12, 0), (13, 0))
L40 = KernelDevice("NVIDIA L40", (8, 9), (12, 6))
A100 = KernelDevice("NVIDIA A100", (8, 0), (12, 6))
V100 = KernelDevice("Tesla V100", (7, 0), (12, 6))
MI300X = KernelDevice("AMD Instinct MI300X", (9, 4), None)
UNSUPPORTED = [
    ({}, A100, r"A100 .*no 8-bit floating-point units: it multiplies bf16.*emulate: true"),
    ({"recipe": "tensorwise"}, V100, r"V100 .* it multiplies fp16 and fp32"),
    ({}, L40, r"no kernel for rowwise_with_gw_hp scales on NVIDIA L40 .*kernels for tensorwise"),
    ({"recipe": "mxfp8"}, H100, r"no kernel for mxfp8 .*rowwise_with_gw_hp, blockwise"),
    ({"recipe": "blockwise"}, B200, r"no kernel for blockwise .*rowwise_with_gw_hp, mxfp8"),
    ({"recipe": "blockwise"}, OLD_BUILD, r"need CUDA 12\.9.* built for CUDA 12\.8"),
    ({}, MI300X, r"MI300X.*ROCm.*emulation only"),
    ({"compute": "fp32"}, H100, "write bf16"),
    ({"recipe": "nvfp4"}, H100, r"precision\.kind: .*H100 .*no 4-bit floating-point units.*10\.0"
     r".*fp8 with recipe tensorwise.*nvfp4\.emulate: true"),
    ({"recipe": "nvfp4"}, A100, r"A100 .*no 4-bit floating-point units.*emulation only"),
    ({"recipe": "nvfp4"}, MI300X, r"MI300X.*ROCm.*emulation only"),
    ({"recipe": "nvfp4", "compute": "fp32"}, B200, r"nvfp4\.compute: 4-bit kernels write bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "device", "message"), UNSUPPORTED)
def test_devices_without_kernels_are_refused_unless_emulated(
    section: dict[str, Any], device: KernelDevice, message: str
) -> None:
    config = WIDE if section.get("recipe") == "blockwise" else DENSE
    with pytest.raises(RecipeError, match=message):
        check_low_precision_kernels(plan(config, Layout(), **section), device)
    check_low_precision_kernels(plan(config, Layout(), **section, emulate=True), device)


@pytest.mark.parametrize(
    ("recipe", "device"),
    [
        ("tensorwise", L40),
        ("rowwise", H100),
        ("blockwise", H100),
        ("mxfp8", B200),
        ("nvfp4", B200),
        ("nvfp4", RTX_5090),
    ],
)
def test_devices_with_kernels_are_used(recipe: str, device: KernelDevice) -> None:
    check_low_precision_kernels(plan(WIDE, Layout(), recipe=recipe), device)


@pytest.mark.parametrize(
    ("recipe", "device", "config"),
    [
        ("mxfp8", replace(B200, has_grouped_blocks=False), SPARSE),
        ("mxfp8", replace(B200, capability=(10, 3)), SPARSE),
        ("rowwise", RTX_5090, SPARSE),
        ("rowwise", MI300X, SPARSE),
    ],
)
def test_experts_need_a_grouped_kernel(
    recipe: str, device: KernelDevice, config: dict[str, Any]
) -> None:
    with pytest.raises(RecipeError, match=r"no grouped kernel|ROCm"):
        check_low_precision_kernels(plan(config, Layout(), recipe=recipe), device)
    for grouped in (H100, B200):
        check_low_precision_kernels(plan(config, Layout()), grouped)
    check_low_precision_kernels(plan(config, Layout(), recipe="mxfp8"), B200)


def test_kernels_refuse_experts_and_sizes() -> None:
    check_low_precision_kernels(plan(DENSE, Layout()), H100)
    check_low_precision_kernels(plan(DENSE, Layout(), recipe="tensorwise"), L40)
    with pytest.raises(RecipeError, match=r"targets: \[.attention., .mlp.\]"):
        check_low_precision_kernels(plan(SPARSE, Layout(), recipe="rowwise"), RTX_5090)
    with pytest.raises(RecipeError, match=r"nvfp4\.targets: torch has no grouped kernel.*experts"):
        check_low_precision_kernels(plan(SPARSE, Layout(), recipe="nvfp4"), B200)
    uneven = DENSE | {"intermediate_size": 80}
    with pytest.raises(RecipeError, match=r"nvfp4\.exclude.*multiples of 32"):
        check_low_precision_kernels(plan(uneven, Layout(), recipe="nvfp4"), B200)
    narrow = DENSE | {"intermediate_size": 48}
    check_low_precision_kernels(plan(narrow, Layout()), H100)
    with pytest.raises(RecipeError, match=r"24 x 64 on a tensor-parallel rank|64 x 24"):
        check_low_precision_kernels(plan(narrow, Layout(tp=2)), H100)
    with pytest.raises(RecipeError, match="sum over 40 tokens"):
        check_low_precision_kernels(plan(DENSE, Layout(), 40, recipe="tensorwise"), H100)
