"""Checks of the settings that a model can run with: attention kernels, transformers' classes."""

from __future__ import annotations

import torch

from shardwright.architecture import HFClassInit, HFShape, ModelShape
from shardwright.config import Recipe
from shardwright.errors import RecipeError
from shardwright.launch.devices import should_use_cuda
from shardwright.model.forward_context import choose_layer_kernels
from shardwright.numerics.compilation import compiles_wide_attention
from shardwright.numerics.compiled_casts import rounds_casts_on_cpu
from shardwright.numerics.precision import resolve_dtypes
from shardwright.placement.compilation import check_blocks
from shardwright.plans import Plan


def check_attention(recipe: Recipe, plan: Plan) -> None:
    """Raise if the requested attention kernel cannot compute the model on this machine."""
    attention = recipe.model.attention
    if isinstance(plan.shape, HFShape) or attention in ("auto", "explicit"):
        return
    context = plan.placement.context
    if context is not None and context.method != "ulysses":
        raise RecipeError(
            f"context parallelism by {context.method} uses its own tile kernels",
            field="model.attention",
            got=attention,
            allowed="auto or explicit",
            remedy="Remove it, or use layout.cp_method: ulysses",
        )
    has_cuda = should_use_cuda(recipe.run.device, field="run.device")
    choose_layer_kernels(
        plan.shape,
        attention,
        torch.device("cuda" if has_cuda else "cpu"),
        resolve_dtypes(plan.precision).compute,
        num_keys=plan.batch.sequence_length,
        is_packed=recipe.data.packing == "documents" or recipe.preference is not None,
        has_dropout=True,
    )


def check_compilation(recipe: Recipe, plan: Plan) -> None:
    """Raise if blocks shall be compiled for a CPU, and torch miscompiles them.

    torch 2.11 and 2.12 take the sums of fp64 attention, which the backward pass reads, as fp32.
    They also leave out casts, so that quantised values depend on what a layout lets them fuse.
    """
    if recipe.model.compile is not True:
        return
    compute = resolve_dtypes(plan.precision).compute
    if compute == torch.float64 and not compiles_wide_attention():
        obstacle = "cannot compile fp64 attention for a CPU"
    elif plan.precision.low_precision is not None and not rounds_casts_on_cpu():
        obstacle = "leaves out casts to 16 bits in compiled code of a CPU"
    else:
        return
    if not should_use_cuda(recipe.run.device, field="run.device"):
        raise RecipeError(
            f"torch {torch.__version__} {obstacle}",
            field="model.compile",
            got=True,
            allowed=f"false with precision.kind: {recipe.precision.kind}",
            remedy="Or install torch 2.13 or newer",
        )


def check_hf_model(recipe: Recipe, shape: ModelShape) -> None:
    """Raise for settings that transformers' own model code does not support."""
    if not isinstance(shape, HFShape):
        return
    check_blocks(recipe.model.compile, shape)
    by_class = [spec.name for spec in shape.list_parameters() if isinstance(spec.init, HFClassInit)]
    refusals = {
        "model.attention": (
            recipe.model.attention not in ("auto", "explicit"),
            "its class chooses the kernel",
            "Use auto or explicit",
        ),
        "training.label_smoothing": (
            recipe.training.label_smoothing > 0.0,
            "its loss cannot be smoothed",
            "Remove it",
        ),
        "training.neftune_noise_alpha": (
            recipe.training.neftune_noise_alpha > 0.0,
            "its embeddings cannot get noise",
            "Remove it",
        ),
        "model.init": (
            bool(by_class) and not recipe.model.is_pretrained,
            f"only its own class can initialise {', '.join(by_class[:3])}",
            "Save it once with transformers (from_config, save_pretrained) and start from that",
        ),
    }
    for field, (refused, reason, remedy) in refusals.items():
        if refused:
            raise RecipeError(
                f"{shape.family} runs through transformers' {shape.class_name}: {reason}",
                field=field,
                remedy=remedy,
            )
