"""The optimizer over named parameters, and its state by parameter name."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.config.schema import OptimizerSection

logger = logging.getLogger(__name__)


def build_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    section: OptimizerSection,
    *,
    learning_rate: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """AdamW or SGD with decoupled names: every group carries `param_names`, and decays or does not.

    Matrices (two or more dimensions, embeddings included, as nanoGPT and the GPT-3 line do) are decayed; vectors (norms,
    biases) are not. The number of dimensions is that of the whole parameter, so a shard never changes group. Frozen parameters
    are left out.

    Weight decay of AdamW is decoupled (Loshchilov and Hutter 2019); SGD's is added to the gradient, as torch has it.
    """
    named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = []
    for decay, decayed in ((weight_decay, True), (0.0, False)):
        members = [(name, parameter) for name, parameter in named if (parameter.ndim >= 2) == decayed]
        if members:
            groups.append({"params": members, "weight_decay": decay})
    implementation = choose_implementation([parameter for _, parameter in named])
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
    """Fused where torch has it for every parameter's device and dtype, else foreach, else a loop."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    if not local:
        return {"fused": False, "foreach": False}
    if all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in local):
        return {"fused": True}
    if all(p.device.type in ("cuda", "xpu") for p in local):
        return {"foreach": True}
    return {"fused": False, "foreach": False}


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every group this learning rate for the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
