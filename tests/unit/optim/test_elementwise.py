"""Rules on local parts: the bits of torch's own, whether parameters are DTensors or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwright.optim import local_updates

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
    """One rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("rule", RULES)
def test_updates_of_sharded_parameters_are_torchs_to_the_bit(
    mesh: DeviceMesh, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs, options = RULES[rule]
    whole = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    sharded = [
        torch.nn.Parameter(distribute_tensor(parameter.detach().clone(), mesh, [Shard(0)]))
        for parameter in whole
    ]
    one = ours(sharded, lr=0.1, **options)
    other = theirs(whole, lr=0.1, **options)
    seen = []
    for name in ("_fused_adamw_", "_foreach_add_", "_fused_sgd_"):
        former = getattr(torch, name)
        monkeypatch.setattr(
            torch,
            name,
            lambda *lists, f=former, **more: (seen.append(lists[0]), f(*lists, **more))[1],
        )
    for _ in range(3):
        for mine, yours in zip(sharded, whole, strict=True):
            yours.grad = torch.randn_like(yours)
            mine.grad = distribute_tensor(yours.grad.clone(), mesh, [Shard(0)])
        sharded[1].grad = whole[1].grad = None  # a parameter that this step did not use
        one.step()
        assert seen
        assert not any(isinstance(tensor, DTensor) for tensors in seen for tensor in tensors), (
            "its sharding would be propagated"
        )
        other.step()
        seen.clear()
    for mine, yours in zip(sharded, whole, strict=True):
        assert torch.equal(mine.to_local(), yours)
        states = one.state.get(mine, {}), other.state.get(yours, {})
        assert states[0].keys() == states[1].keys()
        for key, value in states[1].items():
            if value is not None and value.ndim:
                assert isinstance(states[0][key], DTensor)
                assert torch.equal(states[0][key].to_local(), value)
