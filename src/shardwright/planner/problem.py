"""Planning problem of a recipe: the settings that it fixes, and those that are searched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import get_args

from shardwright.architecture import ModelShape, read_config
from shardwright.architecture.adapter_targets import add_adapters
from shardwright.architecture.frozen_names import match_frozen
from shardwright.config.recipe import Recipe, RecomputeMode
from shardwright.errors import ArchitectureError, InputError, LayoutError, RecipeError
from shardwright.hardware import Accelerator
from shardwright.layout import Layout, resolve_layout
from shardwright.placement import check_low_precision, place_model
from shardwright.planner.candidate import (
    OPTIMIZER_OFFLOADS,
    Candidate,
    LowRankAdapter,
    Precision,
    ReferenceKind,
)
from shardwright.planner.engine_model import choose_optimizer_kind
from shardwright.planner.low_precision import build_scaled_shares, read_low_precision_section
from shardwright.planner.model_costs import ModelFacts, get_model_facts
from shardwright.planner.search.space import PlanningProblem
from shardwright.planner.update_place import choose_update_place, find_backward_obstacle
from shardwright.plans import (
    BatchPlan,
    Plan,
    PrecisionChoice,
    check_bf16_weights,
    resolve_batch,
)

_MAX_LAYERS = 2048
"""Assigning layers to pipeline stages takes time quadratic in their number: about a minute for
this many."""
_MAX_SEQUENCES = 2**30
"""Maximum sequences of a global batch. Finding divisors of larger numbers takes long."""


def read_planning_shape(recipe: Recipe) -> ModelShape:
    """Read the shape of a recipe's model from its config alone: no weights, tokenizer or data.

    Raises:
        ArchitectureError: the config is unsupported, or lacks a size that is needed.
    """
    config = recipe.model.config if recipe.model.config is not None else recipe.model.path
    assert config is not None  # the schema requires one of them
    if (
        isinstance(config, dict)
        and "vocab_size" not in config
        and recipe.tokenizer.vocab_size is not None
    ):
        config = {**config, "vocab_size": recipe.tokenizer.vocab_size}
    if isinstance(config, dict) and "vocab_size" not in config:
        raise ArchitectureError(
            "vocab_size is needed to count parameters and logits",
            field="model.config.vocab_size",
            remedy="Set it, e.g. --set model.config.vocab_size=32000; planning does not read the "
            "tokenizer, whose number `shardwright data` prints",
        )
    shape = read_config(config)
    if shape.num_layers > _MAX_LAYERS:
        raise ArchitectureError(
            "too many layers to plan",
            field="model.config",
            got=f"{shape.num_layers:,} layers",
            allowed=f"at most {_MAX_LAYERS:,}",
        )
    total = recipe.training.global_batch_size
    if total is not None and total > _MAX_SEQUENCES:
        raise RecipeError(
            "too many sequences to plan",
            field="training.global_batch_size",
            got=total,
            allowed=f"at most {_MAX_SEQUENCES:,}",
        )
    shape.check_sequence_length(recipe.training.sequence_length)
    return shape


def set_vocabulary(recipe: Recipe, shape: ModelShape) -> Recipe:
    """Return the recipe with the size of the vocabulary in its inline config.

    A run takes it from the tokenizer, which planning does not read.
    """
    config = recipe.model.config
    if config is None or "vocab_size" in config:
        return recipe
    sized = recipe.model.model_copy(update={"config": config | {"vocab_size": shape.vocab_size}})
    return recipe.model_copy(update={"model": sized})


def get_recipe_facts(recipe: Recipe, shape: ModelShape) -> ModelFacts:
    """Return the cached facts of a recipe's model, and of what the recipe freezes.

    Raises:
        RecipeError: a pattern of `model.freeze` matches no parameter, or they match all.
    """
    return get_model_facts(shape, frozen_names=match_frozen(recipe.model.freeze, shape))


def build_template(
    recipe: Recipe,
    *,
    precision: Precision | None = None,
    adapter: LowRankAdapter | None = None,
) -> Candidate:
    """Build a candidate with all settings of the recipe that are not searched, and a one-device
    layout.

    `precision` overrides the recipe's; `auto` must be resolved before. `auto` of `model.compile`
    and `model.fused_pointwise` compiles nothing (`resolve_compilation_on`).
    """
    section = recipe.layout
    training = recipe.training
    kind = precision or recipe.precision.kind
    assert kind != "auto", "call resolve_precision first"
    if recipe.precision.master_weights == "bf16":
        check_bf16_weights(kind, read_planning_shape(recipe))
    low_precision = read_low_precision_section(recipe, kind)
    adapter = adapter or build_adapter(recipe)
    moved = recipe.moved_offload
    return Candidate(
        layout=Layout(
            wrap_blocks=section.wrap_blocks,
            prefetch_depth=section.prefetch_depth,
            max_gathers_in_flight=section.max_gathers_in_flight,
            bucket_size_bytes=section.bucket_size_bytes,
        ),
        sequence_length=training.sequence_length,
        precision=kind,
        scaled_shares=None
        if low_precision is None
        else build_scaled_shares(read_planning_shape(recipe), low_precision),
        optimizer=choose_optimizer_kind(recipe.optimizer),
        scale_block_size=recipe.optimizer.block_size,
        offload=OPTIMIZER_OFFLOADS[moved.optimizer],
        is_updated_on_host=choose_update_place(recipe).place == "host",
        parameter_offload=moved.parameters,
        keeps_zeros=recipe.model.keep_zeros,
        needs_gradient_norm=find_backward_obstacle(recipe, precision=kind) is not None,
        activation_offload=moved.activations,
        offload_buffer_bytes=moved.buffer_bytes
        if recipe.run.device == "cpu" or moved.optimizer == "host"
        else moved.bucket_bytes,
        ahead_bytes=moved.ahead_bytes,
        is_read_ahead_auto=moved.read_ahead_bytes == "auto",
        resident_state_bytes=2 * moved.buffer_bytes,
        adapter=adapter,
        should_reduce_in_bf16=recipe.precision.reduce_dtype == "bf16",
        has_bf16_masters=recipe.precision.master_weights == "bf16",
        working_weights=recipe.precision.working_weights,
        compile=recipe.model.compile is True,
        has_fused_functions=recipe.model.fused_pointwise == "compiled",
        compile_functions=recipe.model.compile_functions,
        flash_attention=recipe.model.attention != "explicit",
        attention=recipe.model.attention,
        has_masked_kernels=recipe.run.device != "cpu",
        document_tokens=training.sequence_length if recipe.data.packing == "documents" else None,
        loss_chunk_tokens=recipe.model.smallest_loss_chunk,
        has_liger_loss=recipe.model.loss_kernel == "liger",
        is_loss_chunk_auto=recipe.model.has_auto_loss_chunk,
        reference=_choose_reference(recipe, adapter),
    )


def choose_precision_on(accelerator: Accelerator) -> PrecisionChoice:
    """Resolve `precision: auto` for a device of the catalogue.

    >>> from shardwright.hardware.catalog_loading import find_accelerator
    >>> str(choose_precision_on(find_accelerator("T4")))
    'fp32 (auto: T4-16GB has no bf16 units)'
    """
    if accelerator.has_bf16_units:
        return PrecisionChoice("bf16", f"{accelerator.name} multiplies bf16 natively")
    return PrecisionChoice("fp32", f"{accelerator.name} has no bf16 units")


_TRITON_VENDORS = ("NVIDIA", "AMD")
_BEFORE_TRITON = ("Pascal",)
"""Generations below compute capability 7.0 (`numerics.compilation`)."""


def resolve_compilation_on(recipe: Recipe, accelerator: Accelerator) -> Recipe:
    """Resolve `auto` of `model.compile` and `model.fused_pointwise` as a run on this device does if
    Triton is installed there."""
    is_compiling = (
        accelerator.kind == "gpu"
        and accelerator.vendor in _TRITON_VENDORS
        and accelerator.generation not in _BEFORE_TRITON
    )
    model = recipe.model
    has_compiled_blocks = is_compiling if model.compile == "auto" else model.compile
    fused = model.fused_pointwise
    if fused == "auto":
        fused = "compiled" if is_compiling and not has_compiled_blocks else "none"
    resolved = model.model_copy(update={"compile": has_compiled_blocks, "fused_pointwise": fused})
    return recipe.model_copy(update={"model": resolved})


def _choose_reference(recipe: Recipe, adapter: LowRankAdapter | None) -> ReferenceKind:
    """Return the reference of the recipe's preference training.

    Default: the model with adapters disabled, or a frozen copy without adapters.
    """
    if recipe.preference is None:
        return "none"
    return recipe.preference.reference or ("frozen" if adapter is None else "adapter_off")


def build_adapter(recipe: Recipe) -> LowRankAdapter | None:
    """Return the recipe's adapters; None without adapters."""
    if recipe.adapters is None:
        return None
    return describe_adapters(add_adapters(read_planning_shape(recipe), recipe.adapters))


def describe_adapters(shape: ModelShape) -> LowRankAdapter | None:
    """Return the rank of a model's adapters, and the roles of matrices with an adapter in any
    layer. None without adapters."""
    if shape.adapters is None:
        return None
    roles = {
        spec.adapted_matrix.role
        for spec in shape.list_parameters()
        if spec.adapted_matrix is not None
    }
    return LowRankAdapter(
        shape.adapters.rank,
        tuple(sorted(roles)),
        quantised=shape.adapters.quantize is not None,
        has_magnitudes=shape.adapters.kind == "dora",
        has_dropout=shape.adapters.dropout > 0.0,
    )


def build_problem(recipe: Recipe, template: Candidate, num_gpus: int) -> PlanningProblem:
    """Build the planning problem of a recipe on `num_gpus` devices: degrees, recomputation, and
    the split of the batch are open.

    The recipe's global batch is fixed. Without one, its micro-batch and accumulation are fixed
    on every rank.

    Raises:
        RecipeError: the recipe sets neither a global batch nor a micro-batch.
    """
    training = recipe.training
    is_allowed = build_check(recipe, template)
    if training.global_batch_size is not None:
        return PlanningProblem(
            template, num_gpus, training.global_batch_size, is_allowed=is_allowed
        )
    if training.micro_batch_size is None:
        raise RecipeError(
            "the batch size is not set",
            field="training.global_batch_size",
            remedy="Set global_batch_size, or micro_batch_size (per rank)",
        )
    accumulation = training.gradient_accumulation_steps or 1
    return PlanningProblem(
        template,
        num_gpus,
        None,
        (training.micro_batch_size,),
        (accumulation,),
        is_allowed=is_allowed,
    )


def build_check(recipe: Recipe, template: Candidate) -> Callable[[Candidate], bool] | None:
    """Return a function that is True for layouts with the scales of one process, and with
    blocks whose saved tensors and weights can leave. None if all layouts are allowed."""
    keeps_scales = _build_scale_check(recipe, template)
    if template.activation_offload == template.parameter_offload == "none":
        return keeps_scales
    return lambda candidate: (
        candidate.is_runnable and (keeps_scales is None or keeps_scales(candidate))
    )


def restrict_to_runnable(problem: PlanningProblem, shape: ModelShape) -> PlanningProblem:
    """Return the problem without the candidates that `train` cannot run."""
    is_allowed = problem.is_allowed

    def can_run(candidate: Candidate) -> bool:
        try:
            place_model(shape, candidate.layout, candidate.sequence_length)
        except InputError:
            return False
        return candidate.is_runnable and (is_allowed is None or is_allowed(candidate))

    return replace(problem, is_allowed=can_run)


def _build_scale_check(recipe: Recipe, template: Candidate) -> Callable[[Candidate], bool] | None:
    """Return a function that is True for layouts with the scales of one process."""
    section = read_low_precision_section(recipe, template.precision)
    if section is None:
        return None
    shape = read_planning_shape(recipe)

    @cache
    def keeps_scales(layout: Layout) -> bool:
        length = template.sequence_length
        try:
            placement = place_model(shape, layout, length)
            check_low_precision(placement, section, length)
        except InputError:
            return False
        return True

    return lambda candidate: keeps_scales(candidate.layout)


def build_recipe_candidate(recipe: Recipe, template: Candidate, num_gpus: int) -> Candidate | None:
    """Return the recipe's own layout on `num_gpus` devices, without recomputation if the plan
    chooses it. None if it is `auto` or does not match their number."""
    return _build_recipe_candidate(recipe, template, num_gpus)[0]


def explain_missing_candidate(recipe: Recipe, template: Candidate, num_gpus: int) -> str | None:
    """Return the reason why the recipe's layout cannot run on `num_gpus` devices. None if it
    can, or is `auto`."""
    return None if recipe.layout.auto else _build_recipe_candidate(recipe, template, num_gpus)[1]


def _build_recipe_candidate(
    recipe: Recipe, template: Candidate, num_gpus: int
) -> tuple[Candidate | None, str | None]:
    try:
        layout = resolve_layout(recipe.layout, num_gpus)
        batch = resolve_batch(recipe.training, layout.data_ranks)
    except (LayoutError, RecipeError) as error:
        return None, error.problem
    return _complete_template(template, layout, batch, recipe.recompute_kind or "none"), None


def build_plan_candidate(recipe: Recipe, plan: Plan) -> Candidate:
    """Describe the plan that runs as a candidate, without recomputation if it is not resolved."""
    recompute = "none" if plan.recompute == "auto" else plan.recompute
    template = replace(
        build_template(set_vocabulary(recipe, plan.shape)),
        compile=plan.is_compiled,
        has_fused_functions=plan.pointwise.kind == "compiled",
    )
    candidate = _complete_template(template, plan.layout, plan.batch, recompute)
    if plan.recompute != "mixed" or plan.recompute_choice is None:
        return candidate
    return replace(candidate, saved_results=plan.recompute_choice.layers)


def _complete_template(
    template: Candidate, layout: Layout, batch: BatchPlan, recompute: RecomputeMode
) -> Candidate:
    return replace(
        template,
        layout=layout,
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
        recompute=recompute,
    )


def build_low_rank_adapter(rank: int | None, *, is_quantised: bool) -> LowRankAdapter | None:
    """Return the adapters to plan for; None without a rank.

    Raises:
        InputError: quantised without adapters, or a rank below 1.
    """
    if rank is not None:
        if rank < 1:
            raise InputError(
                "too small",
                field="lora_rank",
                got=rank,
                allowed="at least 1, or none for training without adapters",
            )
        return LowRankAdapter(rank, quantised=is_quantised)
    if is_quantised:
        raise InputError(
            "only the frozen weights under adapters can be quantised",
            field="quantised",
            remedy="Add --lora RANK (in Python: lora_rank)",
        )
    return None


def parse_precision(name: str | None) -> Precision | None:
    """Return the precision of a name; None for None.

    Raises:
        InputError: unknown name.
    """
    known: tuple[Precision, ...] = get_args(Precision)
    for precision in known:
        if name == precision:
            return precision
    if name is None:
        return None
    raise InputError("not a precision", field="precision", got=name, allowed=", ".join(known))
