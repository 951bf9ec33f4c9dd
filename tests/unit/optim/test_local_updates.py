"""Optimizer updates of local shards are bit-equal to torch's updates of whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwright.config.training import OptimizerSection
from shardwright.optim import build_optimizer, local_updates, one_pass_adamw
from shardwright.optim.sharded_optimizer import ParameterPiece, scale_gradients
from tests.unit.optim.test_sharded_optimizer import SingleProcessModel

SHAPES = ((7, 5), (6,), (3, 2, 2))
RULES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "adamw": (local_updates.AdamW, torch.optim.AdamW, {"fused": True, "weight_decay": 0.1}),
    "sgd": (local_updates.SGD, torch.optim.SGD, {"foreach": True, "weight_decay": 0.1}),
    "sgd with momentum": (local_updates.SGD, torch.optim.SGD, {"foreach": True, "momentum": 0.9}),
    "sgd with momentum, fused": (
        local_updates.SGD,
        torch.optim.SGD,
        {"fused": True, "momentum": 0.9},
    ),
}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Return a mesh of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("rule", RULES)
def test_updates_of_sharded_parameters_are_bit_equal_to_torchs(
    mesh: DeviceMesh, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    our_class, torch_class, options = RULES[rule]
    whole = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    sharded = [
        torch.nn.Parameter(distribute_tensor(parameter.detach().clone(), mesh, [Shard(0)]))
        for parameter in whole
    ]
    named = [(str(number), parameter) for number, parameter in enumerate(sharded)]
    our_optimizer = our_class(named, lr=0.1, **options)
    torch_optimizer = torch_class(whole, lr=0.1, **options)
    updated = []
    for name in ("_fused_adamw_", "_foreach_add_", "_fused_sgd_"):
        original = getattr(torch, name)
        monkeypatch.setattr(
            torch,
            name,
            lambda *lists, f=original, **kwargs: (updated.append(lists[0]), f(*lists, **kwargs))[1],
        )
    for _ in range(3):
        for sharded_parameter, whole_parameter in zip(sharded, whole, strict=True):
            whole_parameter.grad = torch.randn_like(whole_parameter)
            sharded_parameter.grad = distribute_tensor(
                whole_parameter.grad.clone(), mesh, [Shard(0)]
            )
        sharded[1].grad = whole[1].grad = None  # a parameter that this step did not use
        our_optimizer.step()
        assert updated
        assert not any(isinstance(tensor, DTensor) for tensors in updated for tensor in tensors), (
            "DTensors would propagate their sharding at each update"
        )
        torch_optimizer.step()
        updated.clear()
    for sharded_parameter, whole_parameter in zip(sharded, whole, strict=True):
        assert torch.equal(sharded_parameter.to_local(), whole_parameter)
        states = (
            our_optimizer.state.get(sharded_parameter, {}),
            torch_optimizer.state.get(whole_parameter, {}),
        )
        assert states[0].keys() == states[1].keys()
        for key, value in states[1].items():
            if value is not None and value.ndim:
                assert isinstance(states[0][key], DTensor)
                assert torch.equal(states[0][key].to_local(), value)


def test_a_factor_of_bf16_gradients_is_not_rounded_to_bf16() -> None:
    gradient = torch.randn(512, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = (gradient.double() * torch.tensor(0.37)).bfloat16()
    piece = ParameterPiece("weight", gradient, gradient.clone(), {}, {})
    scale_gradients([piece], 0.37)
    assert torch.equal(piece.gradient, expected)


def test_numbers_of_one_pass_are_not_computed_without_a_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = []
    compute_numbers = one_pass_adamw.compute_numbers

    def count(steps: Sequence[Tensor], *arguments: Any, **options: Any) -> Any:
        counts.append(len(steps))
        return compute_numbers(steps, *arguments, **options)

    monkeypatch.setattr(one_pass_adamw, "compute_numbers", count)
    monkeypatch.setattr(one_pass_adamw, "_MIN_ELEMENTS", {"cpu": 64})
    parameter = nn.Parameter(torch.ones(64, 64))
    optimizer = build_optimizer(
        [("weight", parameter)],
        OptimizerSection(name="adamw"),
        learning_rate=0.01,
        weight_decay=0.1,
        model=SingleProcessModel(),
        compile_function=lambda _name, _function, otherwise, _make_sample: otherwise,
    )
    for _ in range(3):
        parameter.grad = torch.ones(64, 64)
        optimizer.step()
    assert counts == [1]
