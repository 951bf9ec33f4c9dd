"""The optimizer over named parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.config.training import OptimizerSection

logger = logging.getLogger(__name__)


def build_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    section: OptimizerSection,
    *,
    learning_rate: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """AdamW or SGD, parameters in one group that decays and one that does not, each carrying its `param_names`.

    Matrices are decayed (whatever has two or more dimensions, so embeddings too, as nanoGPT has it); norms and biases are not,
    the stacked biases of experts included. Dimensions are those of the whole parameter, so a cut never moves one to the other
    group. Frozen ones are left out.
    AdamW's decay is decoupled (Loshchilov and Hutter 2019); SGD's is added to the gradient. Works on DTensors.
    """
    named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = []
    for decay, decayed in ((weight_decay, True), (0.0, False)):
        members = [(name, parameter) for name, parameter in named if (parameter.ndim >= 2 and not name.endswith("bias")) == decayed]
        if members:
            groups.append({"params": members, "weight_decay": decay})
    if not groups:  # a pipeline rank whose stages are frozen
        groups.append({"params": [], "weight_decay": 0.0})
    implementation = choose_implementation([parameter for _, parameter in named])
    if section.name == "sgd" and any(isinstance(parameter, DTensor) for _, parameter in named):
        implementation = {"foreach": True}  # torch's fused SGD, unlike its fused AdamW, refuses DTensors
    optimizer: torch.optim.Optimizer
    if section.name == "adamw":
        optimizer = torch.optim.AdamW(
            groups, lr=learning_rate, betas=(section.beta1, section.beta2), eps=section.eps, **implementation
        )
    else:
        optimizer = torch.optim.SGD(groups, lr=learning_rate, momentum=section.momentum, **implementation)
    shown = next((name for name, on in implementation.items() if on), "loop")
    logger.info(
        "optimizer %s (%s): %s",
        section.name,
        shown,
        ", ".join(f"{len(g['params'])} tensors at decay {g['weight_decay']:g}" for g in groups),
    )
    return optimizer


def choose_implementation(parameters: list[torch.nn.Parameter]) -> dict[str, bool]:
    """The fastest form that torch has for all of the parameters' devices and dtypes: fused, else foreach, else a loop.

    Fused updates run one kernel over all parameters and need no temporary copies; torch has them for floating-point
    parameters on CPU and CUDA, and raises on others.
    """
    kinds = {parameter.device.type for parameter in parameters}
    if kinds and kinds <= {"cpu", "cuda"} and all(parameter.is_floating_point() for parameter in parameters):
        return {"fused": True}
    if kinds and kinds <= {"cuda", "xpu"}:
        return {"foreach": True}
    return {"foreach": False}


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every group this learning rate for the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
