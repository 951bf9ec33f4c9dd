"""Parameter groups, implementations and updates of the optimizers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardwright.config.training import OptimizerName, OptimizerSection
from shardwright.optim import build_optimizer, set_learning_rate
from shardwright.optim.factory import _OPTIMIZERS, choose_implementation


class TinyModel(nn.Module):
    """An embedding, a norm, a matrix with a bias."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)
        self.to(dtype)


def build(module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    section = OptimizerSection(**options)
    return build_optimizer(module.named_parameters(), section, learning_rate=1e-2, weight_decay=0.1)


def test_only_matrices_have_weight_decay() -> None:
    optimizer = build(TinyModel())
    by_name = {
        name: group["weight_decay"]
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert by_name == {
        "embedding.weight": 0.1,
        "head.weight": 0.1,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "head.bias": 0.0,
    }


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_rank_without_trained_parameters_has_an_optimizer(name: str) -> None:
    """So has a pipeline rank whose stages are frozen."""
    module = TinyModel()
    module.requires_grad_(False)
    optimizer: Any = build(module, name=name)
    assert [group["param_names"] for group in optimizer.param_groups] == [[]]
    optimizer.prepare_step()
    optimizer.step()


def test_frozen_parameters_are_omitted() -> None:
    module = TinyModel()
    module.norm.requires_grad_(False)
    optimizer = build(module)
    assert {name for group in optimizer.param_groups for name in group["param_names"]} == {
        "embedding.weight",
        "head.weight",
        "head.bias",
    }


def test_the_implementation_depends_on_device_and_dtype_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="shardwright"):
        optimizer = build(TinyModel())
    assert optimizer.param_groups[0]["fused"]
    assert (
        "adamw (fused): 2 tensors with weight decay 0.1, 3 tensors with weight decay 0"
        in caplog.text
    )
    assert choose_implementation([nn.Parameter(torch.empty(1, device="meta"))]) == {
        "foreach": False
    }


@pytest.mark.parametrize(
    ("name", "options"), [("adamw", {}), ("sgd", {}), ("sgd", {"momentum": 0.9})]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_are_those_of_the_textbook(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    module = TinyModel(dtype)
    optimizer = build(module, name=name, **options)
    beta1 = 0.9
    beta2 = 0.95
    eps = 1e-8
    decay = {True: 0.1, False: 0.0}
    expected = {key: p.detach().double().clone() for key, p in module.named_parameters()}
    first = {key: torch.zeros_like(value) for key, value in expected.items()}
    second = {key: torch.zeros_like(value) for key, value in expected.items()}
    generator = torch.Generator().manual_seed(5)
    for step in range(1, 6):
        rate = 1e-2 / step
        for key, parameter in module.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
                dtype
            )
            parameter.grad = gradient
            g = gradient.double()
            value = expected[key]
            d = decay[parameter.ndim >= 2]
            if name == "adamw":
                value.mul_(1 - rate * d)
                first[key].mul_(beta1).add_(g, alpha=1 - beta1)
                second[key].mul_(beta2).addcmul_(g, g, value=1 - beta2)
                value -= (
                    rate
                    * first[key]
                    / (1 - beta1**step)
                    / ((second[key] / (1 - beta2**step)).sqrt() + eps)
                )
            else:
                g = g + d * value
                first[key].mul_(options.get("momentum", 0.0)).add_(g)
                value -= rate * first[key]
        set_learning_rate(optimizer, rate)
        optimizer.step()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for key, parameter in module.named_parameters():
        torch.testing.assert_close(
            parameter.detach().double(), expected[key], rtol=tolerance, atol=tolerance
        )


@pytest.fixture
def one_rank_mesh() -> Iterator[Any]:
    """Return a mesh of this process only; it suffices for the DTensor paths."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    finally:
        dist.destroy_process_group()


def test_dtensors_are_updated_like_tensors(one_rank_mesh: Any) -> None:
    plain = TinyModel()
    sharded = TinyModel()
    for module in sharded.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(
                module,
                name,
                nn.Parameter(distribute_tensor(parameter.detach(), one_rank_mesh, [Shard(0)])),
            )
    for module in (plain, sharded):
        optimizer = build(module)
        for step in range(3):
            for index, (_, parameter) in enumerate(module.named_parameters()):
                gradient = torch.full(parameter.shape, 0.1 * (index + 1) * (-1) ** step)
                is_sharded = isinstance(parameter, DTensor)
                parameter.grad = (
                    distribute_tensor(gradient, one_rank_mesh, [Shard(0)])
                    if is_sharded
                    else gradient
                )
            optimizer.step()
    for (_, plain_parameter), (_, sharded_parameter) in zip(
        plain.named_parameters(), sharded.named_parameters(), strict=True
    ):
        assert isinstance(sharded_parameter, DTensor)
        assert torch.equal(plain_parameter, sharded_parameter.to_local())


def test_every_optimizer_of_the_recipe_can_be_built() -> None:
    assert set(_OPTIMIZERS) == set(get_args(OptimizerName))
