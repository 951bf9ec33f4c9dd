"""Check that `model.loss_kernel` computes the loss of a run."""

from __future__ import annotations

import torch

from shardwright.architecture import HFShape
from shardwright.config import Recipe
from shardwright.errors import RecipeError
from shardwright.launch.devices import should_use_cuda
from shardwright.numerics.liger_loss import MIN_VERSION, PACKAGE, find_liger_obstacle
from shardwright.plans import Plan


def check_loss_kernel(recipe: Recipe, plan: Plan) -> None:
    """Check the kernel against model, layout, objective, precision and this machine.

    Raises:
        RecipeError: Liger's loss is named and cannot compute this run's loss.
    """
    if recipe.model.loss_kernel == "chunked":
        return
    shape = plan.shape
    reasons = {
        "ranks share the vocabulary under tensor parallelism": plan.layout.tp > 1,
        f"the model's logits have a factor ({shape.logit_scale:g})": shape.logit_scale != 1.0,
        "the loss of preferences needs the loss of each token": recipe.preference is not None,
        "the model runs through transformers' own class": isinstance(shape, HFShape),
        "it sums in fp32, and the precision is fp64": plan.precision.kind == "fp64",
    }
    for reason, is_true in reasons.items():
        if is_true:
            raise RecipeError(
                f"{PACKAGE}'s loss cannot compute this run's: {reason}",
                field="model.loss_kernel",
                got="liger",
                allowed="chunked",
                remedy="Remove the key",
            )
    has_cuda = should_use_cuda(recipe.run.device, field="run.device")
    obstacle = find_liger_obstacle(torch.device("cuda" if has_cuda else "cpu"))
    if obstacle is not None:
        raise RecipeError(
            obstacle,
            field="model.loss_kernel",
            got="liger",
            allowed="chunked",
            remedy=f"Remove the key, or install {PACKAGE} {MIN_VERSION} or later on a CUDA machine",
        )
