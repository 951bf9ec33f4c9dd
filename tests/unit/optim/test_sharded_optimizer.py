"""Muon, Adafactor and 8-bit AdamW in one process equal torch's and torchao's; refusals of 8-bit
blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.architecture import read_config
from shardwright.config.training import OptimizerSection
from shardwright.errors import LayoutError, RecipeError
from shardwright.layout import Layout, ParameterBox, ParameterLayout
from shardwright.optim import (
    adamw_8bit,
    build_optimizer,
    check_block_boundaries,
    collect_optimizer_tensors,
    set_learning_rate,
)
from shardwright.parallel.matrix_exchange import DistributedMatrixExchange
from shardwright.placement import build_parameter_layouts

SHAPES = {
    "layers.0.up": (96, 64),
    "layers.0.down": (40, 128),
    "layers.0.stack": (3, 64, 32),
    "embedding": (70, 64),
    "norm": (64,),
}
RATES = (0.02, 0.05, 0.01)


class SingleProcessModel:
    """Model whose parameters are whole in one process."""

    def __init__(self) -> None:
        self.layouts = {name: ParameterLayout(name, shape) for name, shape in SHAPES.items()}

    def local_boxes(self, name: str) -> tuple[ParameterBox, ...]:
        whole = tuple((0, size) for size in SHAPES[name])
        return (ParameterBox(whole, whole),)

    def sum_over(self, tensor: Tensor, axes: Sequence[str]) -> Tensor:
        raise AssertionError(axes)

    def block_matrices(self) -> frozenset[str]:
        return frozenset(name for name in SHAPES if name.startswith("layers."))

    def build_matrix_exchange(self, names: Collection[str]) -> DistributedMatrixExchange:
        return DistributedMatrixExchange(self.layouts, names, None, Layout())


def make_parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator) * 0.1)
        for name, shape in SHAPES.items()
    }


def train(
    parameters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    more_optimizers: Sequence[torch.optim.Optimizer] = (),
) -> None:
    for step, rate in enumerate(RATES):
        for number, parameter in enumerate(parameters.values()):
            parameter.grad = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(100 * step + number)
            )
        for each in (optimizer, *more_optimizers):
            set_learning_rate(each, rate)
            each.step()


def train_ours(rule: str, **options: Any) -> dict[str, nn.Parameter]:
    parameters = make_parameters()
    section = OptimizerSection(name=rule, **options)  # type: ignore[arg-type]
    train(
        parameters,
        build_optimizer(
            parameters.items(),
            section,
            learning_rate=1.0,
            weight_decay=0.1,
            model=SingleProcessModel(),
        ),
    )
    return parameters


def make_decay_groups(parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]


def test_muon_equals_torchs_and_other_parameters_use_adamw() -> None:
    expected = make_parameters()
    stack = [nn.Parameter(part.clone()) for part in expected["layers.0.stack"].detach()]
    matrices = [expected["layers.0.up"], expected["layers.0.down"], *stack]
    rest = {name: expected[name] for name in ("embedding", "norm")}
    muon = torch.optim.Muon(
        matrices, lr=1.0, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(make_decay_groups(rest), lr=1.0, betas=(0.9, 0.95), fused=True)

    class StackGradientSplitter(torch.optim.SGD):
        """Copies the gradient of the stack to its matrices."""

        def step(self, closure: Any = None) -> None:
            for part, gradient in zip(stack, expected["layers.0.stack"].grad, strict=True):
                part.grad = gradient.clone()

    train(expected, StackGradientSplitter([expected["layers.0.stack"]], lr=0.0), [muon, adamw])
    parameters = train_ours("muon")
    for name in ("layers.0.up", "layers.0.down", "embedding", "norm"):
        assert torch.equal(parameters[name], expected[name]), name
    assert torch.equal(parameters["layers.0.stack"], torch.stack(stack))


def test_muon_uses_its_momentum() -> None:
    assert not torch.equal(
        train_ours("muon")["layers.0.up"], train_ours("muon", momentum=0.5)["layers.0.up"]
    )


def test_adafactor_equals_torchs() -> None:
    expected = make_parameters()
    train(expected, torch.optim.Adafactor(make_decay_groups(expected), lr=1.0))
    for name, parameter in train_ours("adafactor").items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=1e-7)


def test_8_bit_adamw_equals_torchaos() -> None:
    lowbit = pytest.importorskip("torchao.optim", reason="the extra `lowbit` is not installed")
    expected = make_parameters()
    with torch.compiler.set_stance("force_eager"):
        train(
            expected,
            lowbit.AdamW8bit(make_decay_groups(expected), lr=1.0, betas=(0.9, 0.95), block_size=32),
        )
    for name, parameter in train_ours("adamw_8bit", block_size=32).items():
        assert torch.equal(parameter, expected[name]), name


def test_8_bit_states_use_one_byte_per_element() -> None:
    pytest.importorskip("torchao.optim", reason="the extra `lowbit` is not installed")
    parameters = make_parameters()
    optimizer = build_optimizer(
        parameters.items(),
        OptimizerSection(name="adamw_8bit", block_size=32),
        learning_rate=1.0,
        weight_decay=0.1,
        model=SingleProcessModel(),
    )
    tensors = collect_optimizer_tensors(optimizer, parameters.items())
    up_tensors = {key: tensor for key, tensor in tensors.items() if ".up." in key}
    assert (
        sum(tensor.numel() * tensor.element_size() for tensor in up_tensors.values())
        == 96 * 64 * 2 + 96 * 2 * 2 * 4
    )
    assert tensors["optimizer.norm.exp_avg"].dtype == torch.float32


CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 512, "intermediate_size": 1408,
    "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 64,
}  # fmt: skip


def test_a_shard_boundary_inside_a_block_is_refused_with_the_size_that_fits() -> None:
    shape = read_config(CONFIG)
    with pytest.raises(
        LayoutError, match=r"down_proj.*blocks of 256.*allowed: optimizer\.block_size 64"
    ) as caught:
        check_block_boundaries(build_parameter_layouts(shape, Layout(tp=2)), Layout(tp=2), 256)
    assert caught.value.field == "optimizer.block_size"
    check_block_boundaries(build_parameter_layouts(shape, Layout(tp=2)), Layout(tp=2), 64)
    with pytest.raises(LayoutError, match="no block size"):
        check_block_boundaries(build_parameter_layouts(shape, Layout(tp=8)), Layout(tp=8), 32)
    zero3_layout = Layout(dp_shard=3, zero_stage=3)
    # Shards of whole rows are allowed, in any number.
    check_block_boundaries(build_parameter_layouts(shape, zero3_layout), zero3_layout, 256)


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw_8bit.util, "find_spec", lambda _name: None)
    with pytest.raises(RecipeError, match=r"shardwright\[lowbit\]"):
        adamw_8bit.require_torchao()


def test_keys_of_other_optimizers_are_refused() -> None:
    for wrong in (
        {"name": "adafactor", "beta1": 0.5},
        {"name": "adamw", "block_size": 64},
        {"name": "adamw_8bit", "momentum": 0.9},
    ):
        with pytest.raises(ValueError, match="has no effect with"):
            OptimizerSection.model_validate(wrong)
    assert OptimizerSection(name="muon").effective_momentum == 0.95
    assert OptimizerSection(name="sgd").effective_momentum == 0.0
