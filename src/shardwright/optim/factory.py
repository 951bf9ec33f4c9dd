"""Construction of the recipe's optimizer over named parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.config.training import OptimizerName, OptimizerSection
from shardwright.optim.adafactor import Adafactor
from shardwright.optim.adamw_8bit import AdamW8bit
from shardwright.optim.bf16_updates import BF16SGD, BF16AdamW
from shardwright.optim.exact_operations import CompileFunction
from shardwright.optim.local_updates import SGD, AdamW
from shardwright.optim.muon import Muon
from shardwright.optim.sharded_optimizer import ShardedModel, ShardedOptimizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Settings:
    """Arguments of all optimizers."""

    section: OptimizerSection
    groups: list[dict[str, Any]]
    learning_rate: float
    implementation: dict[str, bool]
    """Options of torch's implementation: fused or foreach."""
    model: ShardedModel | None
    compile_function: CompileFunction | None
    rounding_seed: int | None
    """None if weights are not in bf16."""

    def get_model(self) -> ShardedModel:
        """Return the sharding of the parameters."""
        assert self.model is not None, f"{self.section.name} needs the sharding of parameters"
        return self.model


def build_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    section: OptimizerSection,
    *,
    learning_rate: float,
    weight_decay: float,
    model: ShardedModel | None = None,
    compile_function: CompileFunction | None = None,
    rounding_seed: int = 0,
) -> torch.optim.Optimizer:
    """Build the recipe's optimizer, with parameter groups with and without weight decay.

    Each group has `param_names`. Parameters of two or more dimensions decay, embeddings
    included (as in nanoGPT); norms and biases do not, the stacked biases of experts included.
    Dimensions are those of the whole parameter, so sharding never changes a parameter's group.
    Frozen parameters are left out. Decay is decoupled (Loshchilov and Hutter 2019), except for
    SGD, which adds it to the gradient. Works on DTensors. Collective: every rank calls it.

    Args:
        model: how the parameters are sharded; not needed for adamw and sgd of weights that are not
            in bf16, which work element by element.
        compile_function: compiler of the passes of adamw, adamw_8bit, adafactor and the AdamW of
            muon (`numerics.function_compiler`); None runs their operations one by one.
        rounding_seed: seed of the stochastic rounding of weights that are in bf16.
    """
    trainable = [
        (name, parameter) for name, parameter in named_parameters if parameter.requires_grad
    ]
    if section.name == "muon":
        matrices = frozenset() if model is None else model.block_matrices()
        groups = _group_by_decay(
            [item for item in trainable if item[0] in matrices], weight_decay, rule="muon"
        ) + _group_by_decay(
            [item for item in trainable if item[0] not in matrices], weight_decay, rule="adamw"
        )
        groups = groups or [_NO_PARAMETERS | {"rule": "adamw"}]
    else:
        groups = _group_by_decay(trainable, weight_decay)
        groups = groups or [_NO_PARAMETERS]
    implementation = choose_implementation([parameter for _, parameter in trainable])
    if section.name == "sgd" and any(isinstance(parameter, DTensor) for _, parameter in trainable):
        # torch's fused SGD rounds momentum differently; resumed runs must match bit for bit.
        implementation = {"foreach": True}
    optimizer = _OPTIMIZERS[section.name](
        _Settings(
            section,
            groups,
            learning_rate,
            implementation,
            model,
            compile_function,
            rounding_seed if _has_bf16(parameter for _, parameter in trainable) else None,
        )
    )
    label = (
        next((name for name, on in implementation.items() if on), "loop")
        if not isinstance(optimizer, ShardedOptimizer)
        else "own"
    )
    logger.info(
        "optimizer %s (%s): %s",
        section.name,
        label,
        ", ".join(
            f"{len(group['params'])} tensors with weight decay {group['weight_decay']:g}"
            f"{' by ' + group['rule'] if 'rule' in group else ''}"
            for group in groups
        ),
    )
    return optimizer


_NO_PARAMETERS: dict[str, Any] = {"params": [], "param_names": [], "weight_decay": 0.0}
"""Group of a pipeline rank whose stages are frozen. Torch names the members of other groups."""


def _has_bf16(parameters: Iterable[torch.nn.Parameter]) -> bool:
    return any(parameter.dtype == torch.bfloat16 for parameter in parameters)


def _group_by_decay(
    members: Sequence[tuple[str, torch.nn.Parameter]], weight_decay: float, **fields: str
) -> list[dict[str, Any]]:
    """Return the non-empty groups of parameters with and without decay, each with `fields`."""
    decayed = [(name, parameter) for name, parameter in members if _has_decay(name, parameter)]
    others = [(name, parameter) for name, parameter in members if not _has_decay(name, parameter)]
    return [
        {"params": group, "weight_decay": decay, **fields}
        for group, decay in ((decayed, weight_decay), (others, 0.0))
        if group
    ]


def _has_decay(name: str, parameter: torch.nn.Parameter) -> bool:
    return parameter.ndim >= 2 and not name.endswith("bias")


def _create_adamw(settings: _Settings) -> torch.optim.Optimizer:
    section = settings.section
    if settings.rounding_seed is not None:
        return BF16AdamW(
            settings.groups,
            {
                "lr": settings.learning_rate,
                "betas": (section.beta1, section.beta2),
                "eps": section.eps,
            },
            settings.get_model(),
            seed=settings.rounding_seed,
            compile_function=settings.compile_function,
        )
    return AdamW(
        settings.groups,
        lr=settings.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        compile_function=settings.compile_function,
        **settings.implementation,
    )


def _create_sgd(settings: _Settings) -> torch.optim.Optimizer:
    if settings.rounding_seed is not None:
        return BF16SGD(
            settings.groups,
            {"lr": settings.learning_rate, "momentum": settings.section.effective_momentum},
            settings.get_model(),
            seed=settings.rounding_seed,
            compile_function=settings.compile_function,
        )
    return SGD(
        settings.groups,
        lr=settings.learning_rate,
        momentum=settings.section.effective_momentum,
        **settings.implementation,
    )


def _create_adafactor(settings: _Settings) -> torch.optim.Optimizer:
    return Adafactor(
        settings.groups,
        settings.get_model(),
        lr=settings.learning_rate,
        compile_function=settings.compile_function,
    )


def _create_adamw_8bit(settings: _Settings) -> torch.optim.Optimizer:
    section = settings.section
    return AdamW8bit(
        settings.groups,
        settings.get_model(),
        lr=settings.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        block_size=section.block_size,
        compile_function=settings.compile_function,
        rounding_seed=settings.rounding_seed,
    )


def _create_muon(settings: _Settings) -> torch.optim.Optimizer:
    section = settings.section
    return Muon(
        settings.groups,
        settings.get_model(),
        lr=settings.learning_rate,
        momentum=section.effective_momentum,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        fused=settings.implementation.get("fused", False),
        compile_function=settings.compile_function,
    )


_OPTIMIZERS: dict[OptimizerName, Callable[[_Settings], torch.optim.Optimizer]] = {
    "adamw": _create_adamw,
    "adamw_8bit": _create_adamw_8bit,
    "adafactor": _create_adafactor,
    "muon": _create_muon,
    "sgd": _create_sgd,
}


def choose_implementation(parameters: list[torch.nn.Parameter]) -> dict[str, bool]:
    """Choose torch's fastest implementation for the parameters: fused, foreach, or a loop.

    Fused updates run one kernel over all parameters and need no temporary copies; torch
    supports them for floating-point parameters on CPU and CUDA and raises an error for others.
    """
    kinds = {parameter.device.type for parameter in parameters}
    if (
        kinds
        and kinds <= {"cpu", "cuda"}
        and all(parameter.is_floating_point() for parameter in parameters)
    ):
        return {"fused": True}
    if kinds and kinds <= {"cuda", "xpu"}:
        return {"foreach": True}
    return {"foreach": False}


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every group for the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
