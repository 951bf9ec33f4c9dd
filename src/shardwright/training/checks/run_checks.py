"""Checks before ranks start: layout, model, tokenizer, data, weights."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from typing import Any

from shardwright.architecture import (
    ExpertShape,
    HFShape,
    LatentShape,
    ModelShape,
    ParameterSpec,
)
from shardwright.architecture.flop_count import ModelFlops
from shardwright.architecture.frozen_names import match_frozen
from shardwright.config import Recipe
from shardwright.config.low_precision import select_fast_products
from shardwright.data.model_data import prepare_for_model
from shardwright.data.prepared_data import PreparedData
from shardwright.data.scheduled_mixture import describe_weight_schedule
from shardwright.data.sources.source_files import ProgressCallback
from shardwright.errors import RecipeError
from shardwright.launch.auto_layout import (
    choose_compilation_here,
    choose_precision_here,
    resolve_expert_dispatch_here,
    resolve_recompute_here,
)
from shardwright.launch.devices import should_use_cuda
from shardwright.model.hf.hf_model import read_model_shape
from shardwright.model.hf.hf_weights import WeightsFolder
from shardwright.model.products.kernel_support import describe_device
from shardwright.model.routing import resolve_expert_rules
from shardwright.numerics.precision import PrecisionDtypes, resolve_dtypes
from shardwright.placement import place_model
from shardwright.placement.compilation import CompileChoice
from shardwright.plans import (
    Plan,
    PrecisionChoice,
    balance_work,
    complete_plan,
    count_steps,
    pad_to_longest_row,
    resolve_degrees,
)
from shardwright.training.checks.async_tensor_parallel import resolve_async_tensor_parallel
from shardwright.training.checks.deep_ep_checks import check_deep_ep
from shardwright.training.checks.kernel_checks import check_low_precision_kernels
from shardwright.training.checks.loss_kernel_checks import check_loss_kernel
from shardwright.training.checks.model_checks import (
    check_attention,
    check_compilation,
    check_hf_model,
)
from shardwright.training.checks.offload_checks import check_offload
from shardwright.training.checks.peer_copy_checks import check_peer_copies
from shardwright.training.checks.row_lengths import has_short_rows

logger = logging.getLogger(__name__)

FIXED_TRAINING_FIELDS = (
    "learning_rate", "min_learning_rate", "schedule", "warmup_steps", "decay_steps",
    "batch_scaling", "base_batch_size", "weight_decay", "max_grad_norm", "label_smoothing",
    "neftune_noise_alpha",
)  # fmt: skip
"""Fields of the recipe's training section that a resumed run cannot change."""


@dataclass(frozen=True)
class ValidatedRun:
    """Recipe that passed all checks, with everything that ranks build from.

    Its precision and `model.compile` are those of the plan, never `auto`.
    """

    recipe: Recipe
    plan: Plan
    data: PreparedData
    total_steps: int
    frozen_names: frozenset[str]
    planned_recipe: Recipe | None = None
    """Recipe before a setting took free memory; None if none did."""

    @property
    def shape(self) -> ModelShape:
        """Shape of the whole model."""
        return self.plan.shape

    @cached_property
    def dtypes(self) -> PrecisionDtypes:
        """Dtypes of the plan's precision."""
        return resolve_dtypes(self.plan.precision)

    @property
    def data_hash(self) -> str:
        """Hash of the sample order: equal if and only if the samples and their order are equal."""
        parts = (
            self.data.content_hash,
            self.recipe.seed,
            self.plan.batch.sequence_length,
            self.plan.batch.global_batch_size,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def count_flops_per_token(self, sequence_length: int) -> float:
        """Count the model FLOPs of training per token of a row; frozen weights need fewer."""
        return self._model_flops.count_per_token(sequence_length)

    @cached_property
    def _model_flops(self) -> ModelFlops:
        return self.shape.count_flops(self.frozen_names)

    @property
    def drift_fields(self) -> dict[str, Any]:
        """Values that must not change when a run is resumed."""
        recipe = self.recipe
        batch = self.plan.batch
        return {
            **_describe_adapters(recipe, self.shape),
            "model": _describe_shape(self.shape),
            "tokenizer": self.data.tokenizer.content_hash,
            "data": self.data.content_hash,
            **(
                {"weight_schedule": describe_weight_schedule(recipe.data)}
                if recipe.data.weight_schedule
                else {}
            ),
            "seed": recipe.seed,
            "sequence_length": batch.sequence_length,
            "global_batch_size": batch.global_batch_size,
            "optimizer": recipe.optimizer.model_dump(mode="json"),
            "precision": _describe_precision(recipe),
            **(
                {"precision.master_weights": recipe.precision.master_weights}
                if recipe.precision.master_weights != "fp32"
                else {}
            ),
            **(
                {}
                if recipe.preference is None
                else {"preference": recipe.preference.model_dump(mode="json")}
            ),
            "freeze": sorted(self.frozen_names),
            "training": recipe.training.model_dump(mode="json", include=set(FIXED_TRAINING_FIELDS)),
        }


def validate_run(
    recipe: Recipe,
    world_size: int,
    *,
    auto_precision: PrecisionChoice | None = None,
    auto_compilation: CompileChoice | None = None,
    progress: ProgressCallback | None = None,
) -> ValidatedRun:
    """Check a recipe against its ranks, model, tokenizer and data; tokenise uncached data.

    Args:
        auto_precision: Precision to use for `precision: auto`; None chooses the best one
            for this machine's device.
        auto_compilation: Choice that `auto` of `model.compile` and `model.fused_pointwise`
            stands for, likewise.

    Raises:
        InputError: First problem found, with its field.
    """
    if recipe.precision.kind == "auto" and auto_precision is None:
        auto_precision = choose_precision_here(recipe)
    if auto_compilation is None:
        auto_compilation = choose_compilation_here(recipe)
    layout, batch = resolve_degrees(recipe, world_size)
    _check_preference(recipe)
    shape, data = prepare_for_model(
        recipe, partial(read_model_shape, section=recipe.model), progress=progress
    )
    placement = place_model(shape, layout, batch.sequence_length)
    plan = complete_plan(recipe, placement, batch, auto_precision, auto_compilation)
    plan = resolve_async_tensor_parallel(recipe, plan)
    plan = resolve_expert_dispatch_here(recipe, plan)
    plan = resolve_recompute_here(recipe, plan)
    recipe = _replace_auto_values(recipe, plan)
    if recipe.model.is_pretrained:
        assert recipe.model.path is not None
        WeightsFolder(recipe.model.path).check(shape.base_shape)
    check_hf_model(recipe, shape)
    check_attention(recipe, plan)
    check_compilation(recipe, plan)
    check_loss_kernel(recipe, plan)
    check_deep_ep(recipe, plan)
    if recipe.evaluation.num_samples:
        from shardwright.training.sample_texts import check_samples  # imports the engine

        has_validation_data = data.validation is not None
        check_samples(recipe, shape, data.tokenizer, has_validation_data=has_validation_data)
    rules = resolve_expert_rules(recipe.moe, shape)  # raises for rules that the model cannot use
    if has_short_rows(recipe, data.report.packing, rules):
        plan = pad_to_longest_row(plan, recipe.data.pad_to_multiple_of)
    _check_work_balance(recipe, data)
    if recipe.data.assignment == "work":
        has_documents = data.train.get_sample(0).document_ids is not None
        plan = balance_work(plan, has_documents=has_documents)
    if recipe.model.keep_zeros and shape.adapters is not None:
        raise RecipeError(
            "adapters leave the model's zeros unchanged, but merging them makes the zeros nonzero",
            field="model.keep_zeros",
            got=True,
            remedy="Remove it, or fine-tune without adapters",
        )
    frozen = match_frozen(recipe.model.freeze, shape)
    _check_optimizer(recipe, plan, shape, frozen)
    if plan.precision.low_precision is not None and should_use_cuda(
        recipe.run.device, field="run.device"
    ):
        check_low_precision_kernels(plan, describe_device())
    check_offload(recipe, plan, _list_trained(shape, frozen))
    check_peer_copies(recipe, plan, _list_trained(shape, frozen))
    return ValidatedRun(
        recipe=recipe,
        plan=plan,
        data=data,
        total_steps=count_steps(recipe.training, len(data.train), plan.batch.global_batch_size),
        frozen_names=frozen,
    )


def _replace_auto_values(recipe: Recipe, plan: Plan) -> Recipe:
    """Return the recipe with the precision and the compilation that the plan chose."""
    choices = {"compile": plan.is_compiled, "fused_pointwise": plan.pointwise.kind}
    model = recipe.model.model_copy(update=choices)
    return recipe.model_copy(update={"precision": plan.precision, "model": model})


def _check_work_balance(recipe: Recipe, data: PreparedData) -> None:
    """Check that rows differ in work if the recipe asks to distribute them by work."""
    if recipe.data.assignment == "work" and data.report.packing == "windows":
        raise RecipeError(
            "all windows need the same amount of work",
            field="data.assignment",
            got=recipe.data.assignment,
            allowed="length",
            remedy="Remove it, or use packing: documents",
        )
    if recipe.layout.cp_split == "work" and data.train.get_sample(0).document_ids is None:
        raise RecipeError(
            "zigzag already gives every rank the same work on rows of one document",
            field="layout.cp_split",
            got="work",
            allowed="zigzag",
            remedy="Remove it, or use data.packing: documents",
        )


def _describe_precision(recipe: Recipe) -> str:
    """Return the precision's kind; for quantised products, with what decides their numbers."""
    section = recipe.precision.low_precision
    if section is None:
        return recipe.precision.kind
    parts = [section.recipe, *section.targets, *(f"not {pattern}" for pattern in section.exclude)]
    if section.fast_products != select_fast_products(section.recipe):
        parts.append(f"fast accumulation of {' and '.join(section.fast_products) or 'nothing'}")
    return f"{section.kind} ({', '.join([*parts, section.compute])})"


def _check_preference(recipe: Recipe) -> None:
    """Check that a reference without adapters has adapters to switch off."""
    if recipe.preference is None:
        return
    if recipe.preference.reference == "adapter_off" and recipe.adapters is None:
        raise RecipeError(
            "there are no adapters to switch off",
            field="preference.reference",
            got="adapter_off",
            allowed="frozen",
            remedy="Train adapters (adapters: ...), or use a frozen copy as the reference",
        )


def _list_trained(shape: ModelShape, frozen_names: frozenset[str]) -> dict[str, ParameterSpec]:
    """List the trained parameters by name."""
    return {
        spec.name: spec
        for spec in shape.list_parameters()
        if spec.name not in frozen_names
        and (shape.adapters is None or spec.adapter_part is not None)
    }


def _check_optimizer(
    recipe: Recipe, plan: Plan, shape: ModelShape, frozen_names: frozenset[str]
) -> None:
    """Check that the optimizer's package, matrices and whole blocks are available."""
    trained = _list_trained(shape, frozen_names)
    if recipe.optimizer.name == "adamw_8bit":
        from shardwright.optim import check_block_boundaries, require_torchao

        require_torchao()
        layouts = {
            name: layout for name, layout in plan.placement.parameters.items() if name in trained
        }
        check_block_boundaries(layouts, plan.layout, recipe.optimizer.block_size)
    if recipe.optimizer.name == "muon" and not any(
        s.layer is not None and len(s.shape) > 1 for s in trained.values()
    ):
        raise RecipeError(
            "no matrix of a block is trained, and Muon updates only those",
            field="optimizer.name",
            got="muon",
            remedy="Use adamw, which updates every kind of parameter",
        )


def _describe_adapters(recipe: Recipe, shape: ModelShape) -> dict[str, Any]:
    """Describe the trained adapters and their base; empty for a model without adapters."""
    if shape.adapters is None:
        return {}
    adapters = asdict(shape.adapters) | {"modules": sorted(shape.adapters.modules)}
    base = "random"  # determined by the seed, which is recorded separately
    if recipe.model.is_pretrained:
        assert recipe.model.path is not None
        base = WeightsFolder(recipe.model.path).fingerprint()
    return {"adapters": adapters, "base": base}


def _describe_shape(shape: ModelShape) -> dict[str, Any]:
    """Describe the shape as JSON, equal for config.json files with the same meaning."""
    if isinstance(shape, HFShape):
        return shape.describe_identity()
    described = {
        field.name: getattr(shape, field.name)
        for field in fields(shape)
        if field.name not in ("config", "names", "adapters")
    }
    nested = {
        name: [asdict(item) for item in value]
        for name, value in described.items()
        if isinstance(value, tuple)
    }
    return (
        described
        | nested
        | {
            name: asdict(value)
            for name, value in described.items()
            if isinstance(value, ExpertShape | LatentShape)
        }
    )
