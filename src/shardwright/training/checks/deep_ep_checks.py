"""Check that DeepEP's kernels can exchange the rows of a run."""

from __future__ import annotations

from shardwright.config import Recipe
from shardwright.errors import RecipeError
from shardwright.launch.devices import should_use_cuda
from shardwright.layout.degrees import DEEP_EP_ROW_UNIT
from shardwright.parallel.experts.deep_ep import PACKAGE, find_version_obstacle
from shardwright.plans import Plan

_MAX_CHOICES = 32
"""Limit of the kernels (`csrc/kernels/intranode.cu` of version 1.2.1)."""


def check_deep_ep(recipe: Recipe, plan: Plan) -> None:
    """Check `expert_dispatch: deep_ep` against precision, model, device and installed package.

    Raises:
        RecipeError: names what the kernels cannot do here, or the missing package.
    """
    experts = plan.shape.experts
    if plan.layout.expert_dispatch != "deep_ep" or experts is None:
        return
    width = plan.shape.hidden_size
    obstacles = {
        f"DeepEP's kernels add rows in bf16 only, and precision.kind is {plan.precision.kind}": (
            plan.precision.kind != "bf16"
        ),
        "with training.deterministic PyTorch fills new memory while DeepEP writes to it": (
            recipe.training.deterministic
        ),
        f"a token chooses {experts.experts_per_token} experts, and DeepEP's kernels send at most "
        f"{_MAX_CHOICES}": experts.experts_per_token > _MAX_CHOICES,
        f"DeepEP's kernels send rows of a multiple of {DEEP_EP_ROW_UNIT} elements, and these have "
        f"{width}": width % DEEP_EP_ROW_UNIT != 0,
    }
    obstacle = next((text for text, is_true in obstacles.items() if is_true), None)
    if obstacle is None and not should_use_cuda(recipe.run.device, field="run.device"):
        obstacle = "DeepEP's kernels need CUDA, and the device is a CPU"
    if obstacle is None:
        obstacle = find_version_obstacle()
    if obstacle is not None:
        raise RecipeError(
            obstacle,
            field="layout.expert_dispatch",
            got="deep_ep",
            allowed="whole, halves, once_per_rank, padded, auto",
            remedy="Use once_per_rank, which sends the same rows, or bf16 on CUDA with "
            f"{PACKAGE} 1 or 2 from github.com/deepseek-ai/DeepEP",
        )
