"""Optimizer state by parameter name: a run resumed from it is bit-equal."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.config.training import OptimizerSection
from shardwright.errors import CheckpointError
from shardwright.optim import (
    build_optimizer,
    collect_optimizer_tensors,
    collect_optimizer_values,
    load_optimizer_values,
)

RULES: list[dict[str, Any]] = [{"name": "adamw"}, {"name": "sgd"}, {"name": "sgd", "momentum": 0.9}]


class FakeRun:
    """Model and optimizer with gradients that depend on the step only."""

    def __init__(self, rule: dict[str, Any], *, reverse: bool = False, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        named = list(self.module.named_parameters())
        self.named = named[::-1] if reverse else named
        self.optimizer = build_optimizer(
            self.named, OptimizerSection(**rule), learning_rate=1e-2, weight_decay=0.1
        )

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for _, parameter in self.module.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.optimizer.step()

    def save(self) -> tuple[dict[str, torch.Tensor], str]:
        tensors = collect_optimizer_tensors(self.optimizer, self.named) | {
            f"model.{n}": p.detach() for n, p in self.named
        }
        return {name: tensor.clone() for name, tensor in tensors.items()}, json.dumps(
            collect_optimizer_values(self.optimizer)
        )

    def load(self, tensors: dict[str, torch.Tensor], values: str) -> None:
        own_tensors = collect_optimizer_tensors(self.optimizer, self.named) | {
            f"model.{n}": p.detach() for n, p in self.named
        }
        assert own_tensors.keys() == tensors.keys()
        for name, tensor in own_tensors.items():
            tensor.copy_(tensors[name])
        load_optimizer_values(self.optimizer, json.loads(values))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("steps_before", [0, 1, 4])
@pytest.mark.parametrize("reverse", [False, True])
def test_resumed_run_is_bit_equal(rule: dict[str, Any], steps_before: int, reverse: bool) -> None:
    # The resumed run has the reverse order: states by position would go to wrong parameters.
    whole = FakeRun(rule)
    for number in range(steps_before):
        whole.step(number)
    resumed = FakeRun(rule, reverse=reverse, seed=99)
    resumed.load(*whole.save())
    for number in range(steps_before, steps_before + 3):
        whole.step(number)
        resumed.step(number)
    for (name, expected), (_, actual) in zip(
        whole.module.named_parameters(), resumed.module.named_parameters(), strict=True
    ):
        assert torch.equal(expected, actual), name
    whole_state = whole.save()
    resumed_state = resumed.save()
    assert all(torch.equal(whole_state[0][name], resumed_state[0][name]) for name in whole_state[0])
    assert json.loads(whole_state[1]) == json.loads(resumed_state[1])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_collecting_state_before_the_first_step_changes_no_update(
    rule: dict[str, Any],
) -> None:
    plain = FakeRun(rule)
    prepared = FakeRun(rule)
    prepared.save()
    for number in range(3):
        plain.step(number)
        prepared.step(number)
    for (_, expected), (_, actual) in zip(plain.named, prepared.named, strict=True):
        assert torch.equal(expected, actual)


def test_names_contain_parameter_and_moment() -> None:
    run = FakeRun({"name": "adamw"})
    names = collect_optimizer_tensors(run.optimizer, run.named)
    assert "optimizer.0.weight.exp_avg" in names
    assert "optimizer.1.bias.exp_avg_sq" in names
    assert len(names) == 12
    assert collect_optimizer_tensors(FakeRun({"name": "sgd"}).optimizer, []) == {}


def test_values_contain_steps_and_hyperparameters_by_name() -> None:
    run = FakeRun({"name": "adamw"})
    for number in range(3):
        run.step(number)
    values = collect_optimizer_values(run.optimizer)
    assert values["steps"]["0.weight"] == 3
    assert values["hyperparameters"]["0.weight"]["weight_decay"] == 0.1
    assert values["hyperparameters"]["0.bias"]["weight_decay"] == 0.0
    assert values["hyperparameters"]["1.weight"]["betas"] == [0.9, 0.95]


def test_state_of_another_optimizer_is_refused() -> None:
    with pytest.raises(CheckpointError, match="another optimizer"):
        load_optimizer_values(
            FakeRun({"name": "sgd"}).optimizer,
            collect_optimizer_values(FakeRun({"name": "adamw"}).optimizer),
        )


def test_state_of_other_parameters_is_refused_by_name() -> None:
    run = FakeRun({"name": "adamw"})
    values = collect_optimizer_values(run.optimizer)
    values["steps"]["head.weight"] = values["steps"].pop("2.bias")
    with pytest.raises(
        CheckpointError, match=r"missing in the checkpoint: 2\.bias; missing here: head\.weight"
    ):
        load_optimizer_values(run.optimizer, values)


class ScalarReads(TorchDispatchMode):
    """Counts reads of single numbers; on a GPU the host waits at each."""

    count = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += operation is torch.ops.aten._local_scalar_dense.default
        return operation(*args, **(kwargs or {}))


def test_step_counts_are_read_together() -> None:
    run = FakeRun({"name": "adamw"})
    run.step(0)
    with ScalarReads() as reads:
        values = collect_optimizer_values(run.optimizer)
    assert set(values["steps"].values()) == {1}
    assert reads.count == 0
