"""Updates of weights in bf16: unbiased rounding by a hash of each element's place, and the same
bits in one compiled pass.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.config.training import OptimizerSection
from shardwright.layout import ParameterBox, ParameterLayout
from shardwright.numerics.compilation import find_compiler_obstacle
from shardwright.numerics.compiled_casts import rounds_casts_on_cpu
from shardwright.numerics.function_compiler import FunctionCompiler
from shardwright.optim import bf16_updates, build_optimizer, collect_optimizer_tensors
from shardwright.optim.sharded_optimizer import DeviceFactor, ParameterPiece
from shardwright.optim.stochastic_rounding import (
    PlaceTable,
    StochasticRounding,
    draw_bits,
    find_runs,
    round_to_bf16,
    tabulate_places,
)
from tests.unit.optim.test_sharded_optimizer import SingleProcessModel

CPU = torch.device("cpu")
RULES = ("adamw", "adamw_8bit", "sgd")


class Model(SingleProcessModel):
    """Model of one parameter, of which the rank has the boxes."""

    def __init__(self, shape: tuple[int, ...], *boxes: ParameterBox) -> None:
        self.layouts = {"weight": ParameterLayout("weight", shape)}
        whole = tuple((0, size) for size in shape)
        self.boxes = boxes or (ParameterBox(whole, whole),)

    def local_boxes(self, name: str) -> tuple[ParameterBox, ...]:
        return self.boxes


def build(
    rule: str,
    weight: Tensor,
    model: Model,
    *,
    seed: int = 0,
    weight_decay: float = 0.1,
    compiler: FunctionCompiler | None = None,
    **options: Any,
) -> tuple[nn.Parameter, Any]:
    if rule == "adamw_8bit":
        pytest.importorskip("torchao.optim", reason="the extra `lowbit` is not installed")
        options["block_size"] = 32
    if rule == "sgd":
        options["momentum"] = 0.9
    parameter = nn.Parameter(weight.clone())
    optimizer = build_optimizer(
        [("weight", parameter)],
        OptimizerSection.model_validate({"name": rule, **options}),
        learning_rate=0.01,
        weight_decay=weight_decay,
        model=model,
        rounding_seed=seed,
        compile_function=compiler,
    )
    return parameter, optimizer


def make_gradients(shape: tuple[int, ...], num_steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).bfloat16() for _ in range(num_steps)]


def train(
    parameter: nn.Parameter, optimizer: Any, gradients: list[Tensor], *, on_device: bool = False
) -> dict[str, Tensor]:
    """Update with the gradients times 0.37; return the weight and its moments.

    With `on_device` the factor is a tensor, and a skipped step precedes each other one.
    """
    for gradient in gradients:
        for factor in (torch.nan, 0.37) if on_device else (0.37,):
            parameter.grad = gradient.clone()
            optimizer.prepare_step()
            if on_device:
                optimizer.device_factor = DeviceFactor.from_value(torch.tensor(factor))
            else:
                optimizer.gradient_factor = factor
            optimizer.step()
            if factor != 0.37:
                optimizer.undo_counts()
    moments = collect_optimizer_tensors(optimizer, [("weight", parameter)])
    return {"weight": parameter.detach(), **moments}


def test_rounding_is_unbiased_and_leaves_bf16_numbers() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(64, generator=generator) * 10.0 ** torch.arange(-32, 32)
    num_draws = 4096
    places = torch.arange(num_draws * 64, dtype=torch.int32).view(num_draws, 64)
    below = values.bfloat16()
    for bits in draw_bits(places, torch.tensor(12345, dtype=torch.int32)):
        assert bits.min() >= 0
        assert bits.max() <= 0xFFFF
        rounded = round_to_bf16(values.expand(num_draws, 64), bits)
        step = (rounded.amax(0).double() - rounded.amin(0).double()).abs()
        error = (rounded.double().mean(0) - values.double()) / step
        assert error.abs().max() < 4 * 0.5 / num_draws**0.5
        assert torch.equal(round_to_bf16(below.float().expand(num_draws, 64), bits)[7], below)
    special = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, torch.nan])
    special = torch.cat(
        [
            special,
            torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32)
            .view_as(special[:2].int())
            .view(torch.float32),
        ]
    )
    rounded = round_to_bf16(special, torch.full((7,), 0xFFFF, dtype=torch.int32))
    assert torch.equal(rounded[:4], special[:4].bfloat16())
    assert rounded[4:].isnan().all()


def test_random_numbers_of_one_element_are_pairwise_independent() -> None:
    bits = draw_bits(torch.arange(1 << 16, dtype=torch.int32), torch.tensor(7, dtype=torch.int32))
    numbers = torch.stack([each.double() for each in bits])
    assert (torch.corrcoef(numbers) - torch.eye(3)).abs().max() < 0.02
    assert (numbers.mean(1) / 65535 - 0.5).abs().max() < 0.005


@pytest.mark.parametrize("rule", RULES)
def test_seed_update_and_name_change_the_random_numbers(rule: str) -> None:
    """A weight far below whose step the update is moves by chance, otherwise in each update."""
    weight = torch.full((64, 64), 64.0).bfloat16()
    gradients = [torch.ones(64, 64).bfloat16()] * 2
    results = []
    for seed in (0, 1):
        parameter, optimizer = build(rule, weight, Model((64, 64)), seed=seed, weight_decay=0.0)
        first = train(parameter, optimizer, gradients[:1])["weight"] != 64.0
        parameter.data.copy_(weight)
        second = train(parameter, optimizer, gradients[1:])["weight"] != 64.0
        results += [first, second]
    assert all(0 < int(moved.sum()) < 4096 for moved in results)
    for index, moved in enumerate(results):
        assert not any(torch.equal(moved, other) for other in results[:index])
    rounding = StochasticRounding(0, Model((64, 64)), {})
    keys = {int(rounding.compute_key(name, step)) for name in "ab" for step in (1, 2)}
    assert len(keys) == 4


def test_moments_fall_by_less_than_half_a_step() -> None:
    """With beta2 = 0.999 a mean square falls by a thousandth, less than half a step of bf16."""
    weight = torch.zeros(64, 64).bfloat16()
    gradients = [torch.ones(64, 64).bfloat16(), *[torch.zeros(64, 64).bfloat16()] * 100]
    parameter, optimizer = build("adamw", weight, Model((64, 64)), beta2=0.999)
    square = train(parameter, optimizer, gradients)["optimizer.weight.exp_avg_sq"].double()
    expected = 0.001 * 0.37**2 * 0.999**100
    assert abs(float(square.mean()) / expected - 1) < 0.01


CASES: dict[str, tuple[tuple[int, ...], list[tuple[Any, Any]]]] = {
    # (whole shape, [(local bounds, global bounds)])
    "rows": ((96, 64), [(((0, 40), (0, 64)), ((32, 40), (0, 64)))]),
    "columns": ((96, 128), [(((0, 96), (0, 64)), ((0, 96), (64, 64)))]),
    "both": ((96, 128), [(((0, 30), (0, 64)), ((50, 30), (64, 64)))]),
    "experts": ((4, 32, 64), [(((0, 2), (0, 32), (0, 32)), ((2, 2), (0, 32), (32, 32)))]),
    "experts' rows": ((4, 32, 64), [(((0, 2), (0, 16), (0, 64)), ((1, 2), (16, 16), (0, 64)))]),
    "all dims": ((4, 32, 64), [(((0, 2), (0, 8), (0, 32)), ((1, 2), (16, 8), (32, 32)))]),
    "sections": (
        (96, 64),
        [
            (((0, 16), (0, 64)), ((16, 16), (0, 64))),
            (((16, 32), (0, 64)), ((64, 32), (0, 64))),
        ],
    ),
    "columns of sections": (
        (32, 192),
        [
            (((0, 32), (0, 32)), ((0, 32), (32, 32))),
            (((0, 32), (32, 64)), ((0, 32), (128, 64))),
        ],
    ),
}
IRREGULAR = {"all dims", "sections", "columns of sections"}


def take_part(whole: Tensor, boxes: list[tuple[Any, Any]]) -> Tensor:
    """Return the local part of a tensor."""
    shape = [
        max(start + size for start, size in sides)
        for sides in zip(*(local for local, _ in boxes), strict=True)
    ]
    part = torch.empty(shape, dtype=whole.dtype)
    for local, bounds in boxes:
        source = whole[tuple(slice(start, start + size) for start, size in bounds)]
        part[tuple(slice(start, start + size) for start, size in local)] = source
    return part


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> FunctionCompiler:
    if obstacle := find_compiler_obstacle(CPU):
        pytest.skip(obstacle)
    if not rounds_casts_on_cpu():
        pytest.skip("this torch leaves out casts to 16 bits in compiled code of a CPU")
    monkeypatch.setitem(bf16_updates._MIN_ELEMENTS, "cpu", 1)
    torch._dynamo.reset()
    return FunctionCompiler(CPU)


def check_parts(rule: str, compiler: FunctionCompiler | None) -> None:
    for name, (shape, boxes) in CASES.items():
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(5)).bfloat16()
        gradients = make_gradients(shape)
        whole = train(*build(rule, weight, Model(shape)), gradients)
        local = [ParameterBox(*pair) for pair in boxes]
        assert (find_runs(take_part(weight, boxes).shape, shape, local) is None) == (
            name in IRREGULAR
        )
        part = train(
            *build(rule, take_part(weight, boxes), Model(shape, *local), compiler=compiler),
            [take_part(gradient, boxes) for gradient in gradients],
            on_device=True,
        )
        for key, tensor in part.items():
            if whole[key].shape == shape:  # not scales of blocks
                assert torch.equal(tensor, take_part(whole[key], boxes)), (name, key)


@pytest.mark.parametrize("rule", RULES)
def test_a_part_is_rounded_as_in_the_whole(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bf16_updates._CHUNK_ELEMENTS, "cpu", 1000)
    check_parts(rule, None)


@pytest.mark.parametrize(
    "rule", ["adamw", *(pytest.param(rule, marks=pytest.mark.long) for rule in RULES[1:])]
)
def test_compiled_updates_have_the_bits_of_separate_operations(
    rule: str, compiler: FunctionCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "shardwright.numerics"):
        check_parts(rule, compiler)
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("shardwright.numerics")
    ]
    assert len(lines) == 2  # one run, and several
    assert all("bits as uncompiled" in line for line in lines), lines


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_pieces_are_rounded_as_the_whole(rule: str) -> None:
    shape, boxes = CASES["columns"]
    local = [ParameterBox(*pair) for pair in boxes]
    weight = take_part(torch.randn(shape).bfloat16(), boxes)
    gradient = torch.randn(weight.shape).bfloat16()
    expected = train(*build(rule, weight, Model(shape, *local)), [gradient])["weight"]
    parameter, optimizer = build(rule, weight, Model(shape, *local))
    optimizer.gradient_factor = 0.37
    (group,) = optimizer.param_groups
    for start, stop in ((0, 1000), (1000, weight.numel())):
        state: dict[str, Any] = {
            key: torch.zeros(stop - start, dtype=spec.dtype)
            for key, spec in optimizer.list_state(parameter, group).items()
        }
        state["step"] = torch.zeros(())
        flat = parameter.detach().view(-1)[start:stop]
        piece = ParameterPiece(
            "weight", flat, gradient.view(-1)[start:stop], state, group, first_element=start
        )
        optimizer.update_pieces([piece])
    assert torch.equal(parameter.detach(), expected)


@pytest.mark.parametrize("name", sorted(IRREGULAR))
def test_places_of_irregular_parts_are_tabulated_once_by_runs(name: str) -> None:
    shape, boxes = CASES[name]
    whole = torch.arange(math.prod(shape)).view(shape)
    expected = take_part(whole, boxes).view(-1)
    local = torch.zeros(len(expected)).view(take_part(whole, boxes).shape)
    model = Model(shape, *(ParameterBox(*pair) for pair in boxes))
    rounding = StochasticRounding(0, model, {"weight": local})
    piece = ParameterPiece("weight", local, local, {}, {})
    prepared = rounding.prepare(piece, 1)
    for begin, end in ((0, len(expected)), (7, 8), (40, 500), (5, 5)):
        places = prepared.list_places(begin, end, CPU)
        assert torch.equal(places, expected[begin:end].int()), (begin, end)
    runs = rounding.prepare(piece, 2).runs
    assert runs is prepared.runs
    assert isinstance(runs, PlaceTable)
    assert len(runs.starts) == {"all dims": 16, "sections": 2, "columns of sections": 64}[name]


def test_places_beyond_32_bits_wrap_around() -> None:
    shape = (1 << 20, 1 << 14)
    box = ParameterBox(((0, 2), (0, 1 << 13)), (((1 << 20) - 2, 2), (1 << 13, 1 << 13)))
    local = torch.zeros(2, 1 << 13)
    rounding = StochasticRounding(0, Model(shape, box), {"weight": local})
    piece = ParameterPiece("weight", local, local, {}, {})
    prepared = rounding.prepare(piece, 1)
    rows = prepared.describe_rows(64)
    assert rows is not None
    places = bf16_updates.compute_places(rows, (local.numel() // 64, 64), CPU)
    assert torch.equal(places.view(-1), prepared.list_places(0, local.numel(), CPU))
    table = tabulate_places(local.shape, shape, [box])
    assert torch.equal(places.view(-1), table.list_places(0, local.numel(), CPU))
    first = ((1 << 20) - 2 << 14) + (1 << 13)
    assert int(places[0, 0]) & 0xFFFFFFFF == first & 0xFFFFFFFF


def test_an_exact_update_rounds_as_fp32_does() -> None:
    """Powers of two need no rounding: weights equal those of fp32."""
    weight = torch.full((64, 64), 2.0).bfloat16()
    gradients = [torch.full((64, 64), 0.25).bfloat16()]
    parameter, optimizer = build("sgd", weight, Model((64, 64)), weight_decay=0.0)
    parameter.grad = gradients[0]
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.full((64, 64), 1.75).bfloat16())
