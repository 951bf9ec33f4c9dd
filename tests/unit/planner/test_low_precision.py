"""Predicted cost of quantised products: which of them, casts, temporary memory, and reasons."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch

from shardwright.architecture import read_config
from shardwright.config.low_precision import (
    FP8Recipe,
    FP8Section,
    LowPrecisionRecipe,
    NVFP4Section,
)
from shardwright.errors import InputError
from shardwright.hardware import MatmulRate, MeasuredProfile, ScaledProductRate
from shardwright.hardware.catalog_loading import parse_cluster
from shardwright.layout import Layout
from shardwright.model import Decoder
from shardwright.model.products.kernel_support import KernelDevice, explain_missing_kernel
from shardwright.model.products.linear import Linear
from shardwright.model.products.operand import PRODUCT_SCALINGS
from shardwright.model.products.scaled_product import RoundingTotals, ScaledProducts
from shardwright.model.products.working_weights import copy_weights
from shardwright.planner.candidate import Candidate, LowRankAdapter
from shardwright.planner.explanation import explain_gathers
from shardwright.planner.low_precision import (
    COMPILED_BYTES,
    EAGER_4BIT_BYTES,
    EAGER_BYTES,
    STOCHASTIC_BYTES,
    CodeGathers,
    ScaledShares,
    SpanningScales,
    build_scaled_shares,
    explain_missing_kernels,
)
from shardwright.planner.memory.activations import get_layer_activations
from shardwright.planner.memory.block_weights import get_weight_bytes
from shardwright.planner.memory.quantisation import compute_block_temporaries
from shardwright.planner.model_costs import ModelFacts, get_model_facts
from shardwright.planner.planning_result import plan_recipe
from shardwright.planner.predictor import Predictor, remove_kernels
from shardwright.planner.rates.calibration import load_efficiencies
from shardwright.planner.rates.device_rates import DeviceRates
from shardwright.planner.rates.efficiency import Efficiency
from shardwright.planner.time.compute import compute_layer_seconds
from shardwright.planner.time.layer_matmuls import get_layer_matmul_seconds
from shardwright.planner.time.memory_traffic import (
    count_quantisation_bytes,
    count_repeated_quantisation_bytes,
    count_weight_quantisation_bytes,
)
from tests.multiprocess.scaled_operands import SPARSE, WIDE
from tests.unit.planner import models
from tests.unit.test_low_precision_rules import build_recipe

LLAMA = WIDE | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_hidden_layers": 2,
    "head_dim": 128,
}
H100 = parse_cluster("8xH100-80GB")
B200 = parse_cluster("8xB200")
NVFP4 = NVFP4Section(experimental=True)
ROWS = SpanningScales("rows", "rows", "tensors")


def make_candidate(config: dict[str, Any], **section: Any) -> Candidate:
    shares = build_scaled_shares(read_config(config), FP8Section(**section))
    return Candidate(Layout(), 2048, 4, precision="fp8", scaled_shares=shares)


def count_all_bytes(facts: ModelFacts, candidate: Candidate) -> tuple[float, float]:
    """Count bytes moved to quantise all operands of a layer, each weight in each micro-batch."""
    kind = facts.kinds[0]
    (forward, backward), weights = (
        count(facts, kind, candidate)
        for count in (count_quantisation_bytes, count_weight_quantisation_bytes)
    )
    return forward + weights[0], backward + weights[1]


def test_emulation_in_bf16_needs_more_memory_than_kernels() -> None:
    """CPUs have no kernels, and `emulate` uses none. `selective` saves the results in fp32."""
    shape = models.read_shape("llama")
    shares, emulated = (
        build_scaled_shares(shape, FP8Section(emulate=has_emulation))
        for has_emulation in (False, True)
    )
    candidate = Candidate(
        Layout(), 128, precision="fp8", scaled_shares=shares, recompute="selective"
    )
    slow = replace(candidate, scaled_shares=emulated)
    assert remove_kernels(candidate).scaled_shares == emulated
    gpus = models.make_cluster()
    cpus = replace(gpus, accelerator=replace(gpus.accelerator, kind="cpu"))
    peaks = [
        predictor.compute_memory(each, predictor.get_pipeline_stages(each)).live
        for predictor in (Predictor(ModelFacts(shape), on, Efficiency()) for on in (gpus, cpus))
        for each in (candidate, slow)
    ]
    assert peaks[0] < peaks[1]
    assert peaks[2] == peaks[3]


def test_shares_follow_targets_and_exclusions() -> None:
    shape = read_config(LLAMA)

    def build(**section: Any) -> ScaledShares | None:
        return build_scaled_shares(shape, FP8Section(**section))

    rows = partial(CodeGathers, "rowwise_with_gw_hp")
    default = ScaledShares(
        1.0, 1.0, 0.0, True, spanning=ROWS, code_gathers=rows(1.0), recipe="rowwise_with_gw_hp"
    )
    assert build() == default
    gated = build(recipe="mxfp8", targets=("mlp",))
    assert gated is not None
    assert gated.code_gathers is not None
    assert 0.5 < gated.code_gathers.share < 1.0
    assert replace(gated, code_gathers=None, recipe=None) == ScaledShares(0.0, 1.0, 0.0, False)
    half = build(exclude=("model.layers.0.*",))
    assert half == replace(default, attention=0.5, mlp=0.5, code_gathers=rows(0.5))
    thirds = build(exclude=("*.down_proj.weight",))
    assert thirds is not None
    assert thirds.mlp == pytest.approx(2 / 3)
    sparse = build_scaled_shares(read_config(SPARSE), FP8Section(targets=("experts",)))
    assert sparse is not None
    assert (sparse.attention, sparse.experts) == (0.0, 1.0)
    assert sparse.get_share("router") == 0.0
    assert (
        replace(sparse, has_wide_weight_gradients=False).get_weight_gradient_share("expert_down")
        == 0.0
    )
    assert build(exclude=("nothing",)) is None


def test_products_take_the_time_of_their_precision() -> None:
    facts = get_model_facts(read_config(LLAMA))
    efficiency = load_efficiencies().get_efficiency(H100.accelerator)

    def time_weight_gradients(candidate: Candidate) -> float:
        rates = DeviceRates(H100, efficiency, candidate.precision)
        return compute_layer_seconds(facts, facts.kinds[0], candidate, rates).weight_gradient

    wide = time_weight_gradients(Candidate(Layout(), 2048, 4))
    assert time_weight_gradients(make_candidate(LLAMA)) == wide
    narrow = time_weight_gradients(make_candidate(LLAMA, recipe="tensorwise"))
    half = make_candidate(LLAMA, recipe="tensorwise", exclude=("model.layers.0.*",))
    assert narrow < 0.7 * wide
    assert time_weight_gradients(half) == pytest.approx((wide + narrow) / 2)


@pytest.mark.parametrize(
    ("recipe", "measured"),
    [("tensorwise", "tensorwise"), ("rowwise", "rowwise"), ("rowwise_with_gw_hp", "rowwise")],
)
def test_measured_products_take_their_multiple_of_bf16(recipe: FP8Recipe, measured: str) -> None:
    """With a profile, products take 1 / ratio of their time in bf16, and nothing else changes."""
    facts = get_model_facts(read_config(LLAMA))
    efficiency = replace(load_efficiencies().get_efficiency(H100.accelerator), kernel_seconds=0.0)
    candidate = make_candidate(LLAMA, recipe=recipe)
    wide = Candidate(Layout(), 2048, 4)

    def build(*ratios: ScaledProductRate) -> Predictor:
        profile = MeasuredProfile(
            "H100",
            None,
            "today",
            2**36,
            1e15,  # no product waits for memory
            matmuls=(MatmulRate("bf16", 4096, 4096, 4096, 6e14),),
            scaled_products=ratios,
        )
        return Predictor(facts, replace(H100, profile=profile), efficiency)

    def time_products(predictor: Predictor, candidate: Candidate) -> float:
        rates = predictor.get_rates(candidate)
        matmuls = get_layer_matmul_seconds(facts, facts.kinds[0], candidate, rates)
        num_layers = sum(kind.count for kind in facts.kinds)
        return num_layers * candidate.gradient_accumulation_steps * sum(matmuls[:3])

    other = ScaledProductRate("mxfp8", 4096, 3.0)
    assumed, slow, fast = (
        build(other, *(ScaledProductRate(measured, 4096, ratio) for ratio in ratios))
        for ratios in ((), (1.25,), (1.6,))
    )
    flops = time_products(slow, wide)
    gradients = get_layer_matmul_seconds(facts, facts.kinds[0], wide, slow.get_rates(wide))
    stays = flops * gradients.weight_gradients / sum(gradients[:3])
    stays = stays if recipe == "rowwise_with_gw_hp" else 0.0
    for predictor, ratio in ((slow, 1.25), (fast, 1.6)):
        expected = stays + (flops - stays) / ratio
        assert time_products(predictor, candidate) == pytest.approx(expected)
        assert predictor.predict(wide) == assumed.predict(wide)
    saved = slow.predict(candidate).time.compute - fast.predict(candidate).time.compute
    assert saved == pytest.approx((flops - stays) * (1 / 1.25 - 1 / 1.6))
    # Without a measurement the rate is that of the table, whatever other recipes reach.
    bare = Predictor(facts, replace(H100, profile=build().cluster.profile), efficiency)
    assert assumed.predict(candidate) == bare.predict(candidate)


@pytest.mark.parametrize(
    ("ratios", "sentence"),
    [((), "rates of products assumed"), ((1.55,), "products at 1.55 times the rate of bf16")],
)
def test_the_plan_says_if_rates_of_products_are_measured(
    ratios: tuple[float, ...], sentence: str
) -> None:
    profile = MeasuredProfile(
        "H100",
        None,
        "today",
        2**36,
        2e12,
        scaled_products=tuple(ScaledProductRate("rowwise", 4096, ratio) for ratio in ratios),
    )
    recipe = build_recipe(precision="fp8", layout={"auto": True})
    result = plan_recipe(recipe, replace(H100, profile=profile))
    assert result.product_rates is not None
    assert result.product_rates.startswith(f"fp8 rowwise_with_gw_hp: {sentence}")
    plain = build_recipe(precision="bf16", layout={"auto": True})
    assert plan_recipe(plain, replace(H100, profile=profile)).product_rates is None


def test_every_product_quantises_both_of_its_operands() -> None:
    """One matrix of 3 x 5, tokens 7: x and w forward, g and w, then g and x backward."""
    shares = ScaledShares(1.0, 1.0, 1.0, has_wide_weight_gradients=False)
    assert shares.count_operands("up", 7, 3, 5) == (35, 21, 21 + 35)
    assert shares.count_operands("expert_down", 7, 3, 5) == (35, 21, 0)
    assert shares.count_operands("router", 7, 3, 5) == (0, 0, 0)
    facts = get_model_facts(read_config(LLAMA))
    candidate = make_candidate(LLAMA, targets=("mlp",), recipe="mxfp8")
    forward, backward = count_all_bytes(facts, candidate)
    tokens = 2048 * 4
    narrow = tokens * 2048
    wide = tokens * 8192
    matrix = 2048 * 8192
    assert forward == EAGER_BYTES * (2 * narrow + wide + 3 * matrix)
    inputs = 2 * wide + narrow + 3 * matrix
    assert backward == EAGER_BYTES * (inputs + 3 * (wide + narrow))
    compiled = replace(candidate, compile=True)
    share = COMPILED_BYTES / EAGER_BYTES
    assert count_all_bytes(facts, compiled) == pytest.approx((forward * share, backward * share))


def test_working_operands_are_quantised_once_per_step() -> None:
    """As many elements as the engine counts where it writes codes."""
    shape = read_config(WIDE)
    decoder = Decoder(shape, compute_dtype=torch.bfloat16)
    layers = [each for each in decoder.blocks[0].modules() if isinstance(each, Linear)]
    totals = RoundingTotals([str(index) for index in range(len(layers))])
    for name, layer in zip(totals.names, layers, strict=True):
        layer.scaled = ScaledProducts(PRODUCT_SCALINGS["tensorwise"], name, totals=totals)
    totals.is_counting = True
    copy_weights(decoder, torch.bfloat16).update()
    written = float(totals.pop_table(torch.device("cpu"))[:, 3].sum())
    facts = get_model_facts(shape)
    candidate = make_candidate(WIDE, recipe="tensorwise")
    once = count_weight_quantisation_bytes(facts, facts.kinds[0], candidate)
    assert sum(once) == EAGER_BYTES * written
    # `auto` keeps codes with several micro-batches, without ZeRO.
    predictor = Predictor(facts, H100, load_efficiencies().get_efficiency(H100.accelerator))
    accumulated = replace(candidate, gradient_accumulation_steps=4, working_weights="auto")
    never = replace(accumulated, working_weights=False)
    for each, num_bytes in (
        (accumulated, (0.0, 0.0)),
        (never, once),
        (replace(never, recompute="full"), (once[0], 2 * once[0])),
        (
            replace(accumulated, layout=Layout(dp_shard=8, zero_stage=3)),
            (once[0] / 8, once[1] / 8),  # a rank quantises its shard for each gather
        ),
    ):
        assert count_repeated_quantisation_bytes(facts, facts.kinds[0], each) == num_bytes
    step, repeated = (predictor.predict(each).time for each in (accumulated, never))
    rates = predictor.get_rates(accumulated)
    num_layers = sum(kind.count for kind in facts.kinds)
    codes = rates.time_copy(num_layers * sum(once))
    matrices = facts.count_elements(Layout()).layers[0].local_matrices
    casts = rates.time_copy(num_layers * matrices * (4 + 2))
    assert repeated.compute - step.compute == pytest.approx(4 * (codes + casts))
    head_bytes = shape.vocab_size * shape.hidden_size * (4 + 2)
    once_seconds = rates.time_copy(num_layers * sum(once) + head_bytes)
    assert step.optimizer - repeated.optimizer == pytest.approx(once_seconds)


def test_codes_are_gathered_where_shards_are_whole_blocks() -> None:
    """Each rank quantises its shard once per gather; over 64 ranks only gates and up-projections
    have whole blocks."""
    facts = get_model_facts(read_config(LLAMA))
    matrix = 2048 * 8192
    attention = 4 * 2048 * 2048
    coded = 3 * matrix + attention
    rest = 2 * 2048  # norms

    def predict(
        num_ranks: int, stage: Any, changes: dict[str, Any] | None = None, **section: Any
    ) -> tuple[Candidate, float, float]:
        layout = Layout(dp_shard=num_ranks, zero_stage=stage)
        candidate = replace(make_candidate(LLAMA, **section), layout=layout, **changes or {})
        size = candidate.get_gather_bytes(facts.count_elements(layout).layers[0])
        return (
            candidate,
            size * (coded + rest),
            sum(count_all_bytes(facts, candidate)),
        )

    _, plain, all_bytes = predict(16, 2, recipe="mxfp8")
    assert plain == 2 * (coded + rest)
    block, num_bytes, casts = predict(16, 3, recipe="blockwise")
    scales = 4 * coded / 128**2
    assert num_bytes == pytest.approx(coded + scales + 2 * rest)
    saved = 2 * coded * (1 - 1 / 16)
    assert all_bytes - casts == pytest.approx(EAGER_BYTES * saved)
    # Stage 2 gathers once per step, and the backward pass reads the same codes.
    _, _, once = predict(16, 2, recipe="blockwise")
    assert casts - once == pytest.approx(EAGER_BYTES * coded / 16)
    # mxfp8 has other codes in the backward pass: each pass gathers its own, if it needs no others.
    _, narrow_bytes, narrow_casts = predict(16, 3, recipe="mxfp8")
    assert narrow_bytes == pytest.approx(coded * (1 + 1 / 32) + 2 * rest)
    assert narrow_casts == pytest.approx(casts)
    for changes in ({"recompute": "full"}, {"compile": True}):
        candidate, wide_bytes, _ = predict(16, 3, changes, recipe="mxfp8")
        assert wide_bytes == plain
        reason = "different codes for the output and for the input gradient"
        assert reason in explain_gathers(facts, candidate)
    mixed = {"recompute": "mixed", "saved_results": (None, frozenset())}
    _, mixed_bytes, _ = predict(16, 3, mixed, recipe="mxfp8")
    assert mixed_bytes == pytest.approx((narrow_bytes + plain) / 2)
    compiled = [
        sum(count_all_bytes(facts, replace(block, layout=each, compile=True)))
        for each in (block.layout, Layout())
    ]
    shards = 2 * EAGER_BYTES * coded / 16
    assert compiled[1] - compiled[0] == pytest.approx(2 * COMPILED_BYTES * coded - shards)
    _, half, _ = predict(16, 3, recipe="blockwise", targets=("mlp",))
    share = 3 * matrix / coded
    assert half == pytest.approx(2 * (coded + rest) - share * (coded - scales))
    _, partial_bytes, _ = predict(64, 3, recipe="blockwise")
    gates = 2 * matrix * (1 + 4 / 128**2)
    assert partial_bytes == pytest.approx(gates + 2 * (matrix + attention + rest))
    _, shorter, _ = predict(64, 3, recipe="mxfp8")
    assert shorter == narrow_bytes
    efficiency = load_efficiencies().get_efficiency(H100.accelerator)
    predictor = Predictor(facts, H100, efficiency)
    wide = predictor.predict(replace(block, scaled_shares=None))
    narrow = predictor.predict(block)
    assert 0.5 < narrow.memory.gathered / wide.memory.gathered < 0.75
    assert explain_gathers(facts, block).startswith("100% of the blocks' parameters are gathered")
    # The scale of a whole matrix is agreed before the first gather.
    rows = replace(make_candidate(LLAMA), layout=block.layout)
    assert "whole blocks of 1 row on" in explain_gathers(facts, rows)
    # DoRA reads the values of the matrices.
    changes = {"adapter": LowRankAdapter(8, has_magnitudes=True)}
    candidate, wide_bytes, _ = predict(16, 3, changes, recipe="blockwise")
    assert wide_bytes == plain
    assert explain_gathers(facts, candidate).endswith("DoRA computes the norms of their rows.")


def count_temporary_bytes(candidate: Candidate) -> float:
    facts = get_model_facts(read_config(LLAMA))
    return compute_block_temporaries(facts, facts.kinds[0], candidate).down.output


def test_temporary_memory_is_that_of_the_largest_operand() -> None:
    facts = get_model_facts(read_config(LLAMA))
    candidate = make_candidate(LLAMA)
    assert count_temporary_bytes(candidate) == 8 * 2048 * 4 * 8192
    assert count_temporary_bytes(replace(candidate, layout=Layout(tp=2))) == 8 * 2048 * 4 * 4096
    assert count_temporary_bytes(replace(candidate, compile=True)) == 0
    assert count_temporary_bytes(replace(candidate, precision="bf16")) == 0
    efficiency = load_efficiencies().get_efficiency(H100.accelerator)
    predictor = Predictor(facts, H100, efficiency)
    plain = predictor.predict(replace(candidate, precision="bf16"))
    scaled = predictor.predict(candidate)
    assert 0 <= scaled.memory.total - plain.memory.total <= 1.1 * 8 * 2048 * 4 * 8192


@pytest.mark.parametrize(
    ("recipe", "bytes_per_element"),
    [("tensorwise", 2), ("rowwise", 1), ("rowwise_with_gw_hp", 0), ("blockwise", 0)],
)
def test_compiled_blocks_save_codes_of_inputs_or_nothing(
    recipe: LowPrecisionRecipe, bytes_per_element: int
) -> None:
    facts = get_model_facts(read_config(LLAMA))
    (kind,) = facts.kinds
    block = make_candidate(LLAMA, recipe=recipe)

    def count_saved(candidate: Candidate) -> float:
        return get_layer_activations(facts, kind, candidate).saved_bytes

    elements = 2048 * 4 * (2 * LLAMA["hidden_size"] + LLAMA["intermediate_size"])
    compiled = replace(block, compile=True)
    assert count_saved(block) - count_saved(compiled) == bytes_per_element * elements
    for changes in ({"recompute": "full"}, {"layout": Layout(tp=2)}, {"precision": "bf16"}):
        candidate = replace(block, **changes)
        assert count_saved(candidate) == count_saved(replace(candidate, compile=True))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_temporary_memory_is_that_of_all_local_experts(num_ranks: int) -> None:
    facts = get_model_facts(read_config(SPARSE))
    (kind,) = facts.kinds
    layout = Layout(dp_shard=num_ranks, ep=num_ranks)
    candidate = replace(
        make_candidate(SPARSE), layout=layout, sequence_length=16, micro_batch_size=1
    )
    temporaries = compute_block_temporaries(facts, kind, candidate)
    num_experts = SPARSE["num_experts"] // num_ranks
    width = SPARSE["hidden_size"]
    inner = SPARSE["moe_intermediate_size"]
    rows = 16 * SPARSE["num_experts_per_tok"]
    # So few rows that the matrices are the largest operands.
    weight = num_experts * width * inner
    assert temporaries.down.output == 8 * weight + rows * inner
    assert temporaries.down.input_gradient == 8 * weight + rows * width
    assert temporaries.up.output == 8 * 2 * weight + rows * width
    # With 512 times the tokens it is the rows of all local experts.
    many = replace(candidate, sequence_length=8192)
    assert compute_block_temporaries(facts, kind, many).down.output == 8 * 512 * rows * inner


def test_4_bit_products_have_their_own_rates_and_casts() -> None:
    shares = build_scaled_shares(read_config(LLAMA), NVFP4)
    spanning = SpanningScales("rows", "tensors", "tensors")
    plain = ScaledShares(1.0, 1.0, 0.0, True, has_4bit_operands=True, spanning=spanning)
    plain = replace(plain, code_gathers=CodeGathers("nvfp4", 1.0), recipe="nvfp4")
    assert shares == replace(plain, has_stochastic_gradients=True)
    candidate = Candidate(Layout(), 2048, 4, precision="nvfp4", scaled_shares=shares)
    assert candidate.is_runnable
    assert not replace(candidate, scaled_shares=None).is_runnable
    facts = get_model_facts(read_config(LLAMA))
    eight = make_candidate(LLAMA)
    ratio = EAGER_4BIT_BYTES / EAGER_BYTES
    nearest = replace(candidate, scaled_shares=plain)
    forward, backward = count_quantisation_bytes(facts, facts.kinds[0], nearest)
    assert (forward, backward) == pytest.approx(
        [ratio * each for each in count_quantisation_bytes(facts, facts.kinds[0], eight)]
    )
    outputs = 4 * 2048 + 2 * 8192 + 2048
    assert count_quantisation_bytes(facts, facts.kinds[0], candidate) == pytest.approx(
        (forward, backward + STOCHASTIC_BYTES * 2048 * 4 * outputs)
    )
    assert count_quantisation_bytes(
        facts, facts.kinds[0], replace(candidate, compile=True)
    ) == count_quantisation_bytes(facts, facts.kinds[0], replace(nearest, compile=True))
    assert count_temporary_bytes(candidate) == 17 * 2048 * 4 * 8192
    efficiency = load_efficiencies().get_efficiency(B200.accelerator)
    seconds = [
        compute_layer_seconds(
            facts, facts.kinds[0], each, DeviceRates(B200, efficiency, each.precision)
        )
        for each in (candidate, eight, Candidate(Layout(), 2048, 4))
    ]
    # Weight gradients stay in bf16; outputs and input gradients become faster.
    assert len({each.weight_gradient for each in seconds}) == 1
    compiled = [
        compute_layer_seconds(
            facts,
            facts.kinds[0],
            replace(each, compile=True),
            DeviceRates(B200, efficiency, each.precision),
        ).forward
        for each in (candidate, eight, Candidate(Layout(), 2048, 4))
    ]
    assert compiled[0] < compiled[1] < compiled[2]


def test_the_plan_of_4_bit_products_names_their_gain_and_their_device() -> None:
    recipe = build_recipe(
        precision={"kind": "nvfp4", "nvfp4": {"experimental": True}}, layout={"auto": True}
    )
    result = plan_recipe(recipe, B200, should_explain=True)
    assert result.chosen is not None
    assert result.missing_kernels is None
    (sentence,) = [s for s in result.explanation if s.startswith("nvfp4 takes")]
    assert "become 4-bit" in sentence
    assert "gradients of weights, attention" in sentence
    with pytest.raises(InputError, match="no hardware support for fp4"):
        plan_recipe(recipe, H100)
    # A recipe of another precision is planned without the flag.
    assert plan_recipe(build_recipe(precision="bf16"), B200, precision="nvfp4").predictions


def test_the_plan_explains_the_limits_of_the_gain() -> None:
    recipe = build_recipe(precision={"kind": "fp8"})
    sentences = [
        s
        for s in plan_recipe(recipe, H100, should_explain=True).explanation
        if s.startswith("fp8 takes")
    ]
    (sentence,) = sentences
    for text in ("gradients of weights, attention", "of the bf16 step", "not gathered"):
        assert text in sentence
    block_recipe = build_recipe(
        precision={"kind": "fp8", "fp8": {"recipe": "mxfp8"}}, layout={"auto": True}
    )
    (other,) = [
        s
        for s in plan_recipe(block_recipe, H100, should_explain=True).explanation
        if s.startswith("fp8 takes")
    ]
    assert "gradients of weights, attention" not in other
    plain = plan_recipe(build_recipe(precision="bf16"), H100, should_explain=True)
    assert not any("fp8" in s for s in plain.explanation)


@pytest.mark.parametrize(
    ("name", "section", "message"),
    [
        ("H100-80GB", {}, None),
        ("H100-80GB", {"recipe": "blockwise"}, None),
        ("H100-80GB", {"recipe": "mxfp8"}, "no kernel for mxfp8 on H100.*rowwise_with_gw_hp"),
        ("B200", {"recipe": "mxfp8"}, None),
        ("B200", {"recipe": "blockwise"}, "no kernel for blockwise.*kernels for tensorwise"),
        ("L40", {}, "kernels for tensorwise: `train` refuses"),
        ("MI300X", {}, "no 8-bit kernels"),
        ("H100-80GB", {"emulate": True}, "emulation is slow"),
        ("H100-80GB", {"compute": "fp64"}, "compute is fp64, and kernels write bf16"),
    ],
)
def test_a_plan_names_a_device_without_kernels(
    name: str, section: dict[str, Any], message: str | None
) -> None:
    accelerator = parse_cluster(f"8x{name}").accelerator
    fp8 = FP8Section(**section)
    shares = build_scaled_shares(read_config(LLAMA), fp8)
    assert shares is not None
    reason = explain_missing_kernels(fp8, accelerator, shares)
    if message is None:
        assert reason is None
    else:
        assert re.search(message, str(reason))


def test_experts_need_a_grouped_kernel_in_the_plan() -> None:
    shares = ScaledShares(1.0, 0.0, 1.0, has_wide_weight_gradients=False)
    blackwell = parse_cluster("8xB200").accelerator
    ultra = parse_cluster("8xB300").accelerator
    for recipe in ("rowwise_with_gw_hp", "mxfp8"):
        assert explain_missing_kernels(FP8Section(recipe=recipe), blackwell, shares) is None
    reason = explain_missing_kernels(FP8Section(recipe="mxfp8"), ultra, shares)
    assert "no grouped kernel for experts in mxfp8" in str(reason)
    dense = replace(shares, experts=0.0)
    assert explain_missing_kernels(FP8Section(recipe="mxfp8"), ultra, dense) is None


def test_the_two_tables_of_kernels_agree() -> None:
    """Generations of the planner, and capabilities of the check before a run."""
    capabilities = {
        "Ampere": (8, 0),
        "Ada": (8, 9),
        "Hopper": (9, 0),
        "Blackwell": (10, 0),
        "Blackwell Ultra": (10, 3),
        "RTX Blackwell": (12, 0),
    }
    shares = ScaledShares(1.0, 1.0, 1.0, has_wide_weight_gradients=False)
    dense = replace(shares, experts=0.0)
    for generation, capability in capabilities.items():
        device = KernelDevice(generation, capability, (13, 0))
        accelerator = replace(H100.accelerator, generation=generation)
        for recipe in get_args(LowPrecisionRecipe):
            section = NVFP4 if recipe == "nvfp4" else FP8Section(recipe=recipe)
            for each, is_grouped in ((dense, False), (shares, True)):
                planned = explain_missing_kernels(section, accelerator, each) is None
                checked = explain_missing_kernel(recipe, device, is_grouped=is_grouped) is None
                assert planned == checked, (generation, recipe, is_grouped)


@pytest.mark.parametrize(
    ("recipe", "is_wide"),
    [
        (None, True),
        ("tensorwise", True),
        ("rowwise", False),
        ("rowwise_with_gw_hp", True),
        ("blockwise", False),
        ("mxfp8", False),
    ],
)
def test_gradients_of_dense_weights_are_written_in_fp32_where_a_kernel_can(
    recipe: LowPrecisionRecipe | None, is_wide: bool
) -> None:
    shares = recipe and build_scaled_shares(read_config(LLAMA), FP8Section(recipe=recipe))
    candidate = Candidate(
        Layout(), 2048, precision="fp8" if recipe else "bf16", scaled_shares=shares or None
    )
    narrow = (2, 4)
    for each, expected in (
        (candidate, (4, 0) if is_wide else narrow),
        (replace(candidate, has_wide_products=False), narrow),
        (replace(candidate, layout=Layout(tp=2, async_tensor_parallel="chunked")), narrow),
    ):
        dense, experts = get_weight_bytes(each, is_deferred=False)
        assert (dense.result, dense.converted) == expected
        assert (experts.result, experts.converted) == narrow
