"""The plan: one frozen value that describes how a run is distributed over devices.

Rehearsal, verifier and trainer all read the same `Plan`. What follows from layout and model
(stages, context-parallel method, shards, precision, lengths of rows) is computed and checked by
the functions that build it, and by no other. No torch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from shardwright.architecture import HFShape, ModelShape
from shardwright.config.recipe import Recipe, RecomputeKind, RecomputeMode
from shardwright.config.training import PrecisionSection, TrainingSection, should_cast_once
from shardwright.errors import DataError, LayoutError, RecipeError
from shardwright.layout.degrees import Layout, resolve_layout
from shardwright.layout.saved_results import RecomputeChoice
from shardwright.placement import (
    Placement,
    check_low_precision,
    compute_token_multiple,
    place_model,
)
from shardwright.placement.compilation import (
    SEPARATE_FUNCTIONS,
    CompileChoice,
    PointwiseChoice,
    choose_blocks,
    choose_pointwise,
)
from shardwright.placement.row_assignment import WorkBalance, waits_after_each_micro_batch
from shardwright.schedule import PIPELINE_SCHEDULES, load_schedule, load_schedule_file


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes in sequences and tokens, after resolution of the ones left out.

    global_batch_size = micro_batch_size x data_ranks x gradient_accumulation_steps, in
    sequences.
    """

    sequence_length: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    data_ranks: int
    row_multiple: int | None = None
    """Rows are padded to the longest of their micro-batch, rounded up to a multiple of this
    many tokens, at most to sequence_length; None pads every row to sequence_length."""
    balance: WorkBalance | None = None
    """Rows are assigned by their work; None assigns them by length, or in their order."""

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch_size * self.data_ranks * self.gradient_accumulation_steps

    @property
    def global_batch_tokens(self) -> int:
        """Tokens per optimizer step; an upper bound if rows end before sequence_length."""
        return self.global_batch_size * self.sequence_length


@dataclass(frozen=True)
class PrecisionChoice:
    """Result of `precision: auto` for a run; the reason is one clause for a person to read."""

    kind: Literal["fp32", "bf16"]
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} (auto: {self.reason})"


@dataclass(frozen=True)
class Plan:
    """Distribution of a training run over devices, from `build_plan` or `complete_plan`."""

    placement: Placement
    batch: BatchPlan
    precision: PrecisionSection
    """Resolved precision: never `auto`."""
    recompute: RecomputeMode | Literal["auto"] = "none"
    """`mixed`: each layer as in `recompute_choice`. `auto`: not resolved yet."""
    precision_reason: str | None = None
    """Reason why `precision: auto` chose this kind; None if the recipe names the kind."""
    is_compiled: bool = False
    """True if every block is compiled with torch.compile."""
    compile_reason: str | None = None
    """Reason of `model.compile: auto`; None if the recipe chooses, or if nothing is to train."""
    recompute_choice: RecomputeChoice | None = None
    """Results that each layer keeps, if the plan chose them; None if the recipe names a kind."""
    pointwise: PointwiseChoice = SEPARATE_FUNCTIONS
    """Functions that norms, gates and rotations call."""
    async_tensor_parallel_reason: str | None = None
    """Reason of `layout.async_tensor_parallel: auto`; None if the recipe names the overlap."""
    expert_dispatch_reason: str | None = None
    """Reason of `layout.expert_dispatch: auto`; None if the recipe names the order."""
    offloads_trained_weights: bool = False
    """True if the blocks' matrices are trained and leave the device between their uses."""

    @property
    def shape(self) -> ModelShape:
        """Shape of the whole model."""
        return self.placement.shape

    @property
    def layout(self) -> Layout:
        """Degrees and options of all parallelisms."""
        return self.placement.layout

    @property
    def has_fused_losses(self) -> bool:
        """True if losses and gradients of a chunk of logits are one compiled function."""
        return self.is_compiled or self.pointwise.kind != "none"

    @property
    def has_working_weights(self) -> bool:
        """True if trained matrices are cast to the compute precision once per step."""
        return (
            (not self.layout.is_sharded or self.offloads_trained_weights)
            and self.precision.kind not in ("fp32", "fp64")
            and self.precision.master_weights != "bf16"
            and not isinstance(self.shape, HFShape)
            and should_cast_once(
                self.precision.working_weights,
                has_recompute=self.recompute != "none",
                gradient_accumulation_steps=self.batch.gradient_accumulation_steps,
                has_adapters=self.shape.adapters is not None,
                is_offloaded=self.offloads_trained_weights,
            )
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values for the run folder."""
        stages = self.placement.stages
        context = self.placement.context
        choice = self.recompute_choice
        reasons = {f.name: getattr(self, f.name) for f in fields(self) if "_reason" in f.name}
        return {
            "layout": asdict(self.layout) | {"world_size": self.layout.world_size},
            **({} if stages is None else {"stages": [asdict(stage) for stage in stages]}),
            **({} if context is None else {"context_method": asdict(context)}),
            "batch": asdict(self.batch) | {"global_batch_size": self.batch.global_batch_size},
            "precision": self.precision.model_dump(mode="json"),
            "recompute": self.recompute,
            **({} if choice is None else {"recompute_choice": choice.as_dict()}),
            "compile": self.is_compiled,
            "fused_pointwise": asdict(self.pointwise),
            **{name: reason for name, reason in reasons.items() if reason is not None},
        }


def build_plan(
    shape: ModelShape,
    layout: Layout,
    batch: BatchPlan,
    precision: PrecisionSection,
    recompute: RecomputeKind = "none",
    *,
    offloads_trained_weights: bool = False,
) -> Plan:
    """Build the plan of a model from resolved parts.

    Raises:
        LayoutError, ScheduleError: the layout does not support the model.
        RecipeError: 8-bit products would not be those of one process.
    """
    placement = place_model(shape, layout, batch.sequence_length)
    plan = Plan(
        placement, batch, precision, recompute, offloads_trained_weights=offloads_trained_weights
    )
    _check_precision(plan)
    return plan


def resolve_plan(
    recipe: Recipe,
    shape: ModelShape,
    world_size: int,
    auto_precision: PrecisionChoice | None = None,
    auto_compilation: CompileChoice | None = None,
) -> Plan:
    """Resolve a recipe on `world_size` ranks into a plan.

    Args:
        shape: the recipe's model.
        auto_precision: choice for `precision: auto`; not needed if the recipe names its precision.
        auto_compilation: the same for what `auto` compiles; None compiles nothing.

    Raises:
        LayoutError, RecipeError: degrees or batch sizes contradict each other or do not divide
            the model; shows the arithmetic.
        ScheduleError: the pipeline schedule does not support the number of micro-batches.
    """
    layout, batch = resolve_degrees(recipe, world_size)
    placement = place_model(shape, layout, batch.sequence_length)
    return complete_plan(recipe, placement, batch, auto_precision, auto_compilation)


def complete_plan(
    recipe: Recipe,
    placement: Placement,
    batch: BatchPlan,
    auto_precision: PrecisionChoice | None,
    auto_compilation: CompileChoice | None = None,
) -> Plan:
    """Complete a placed model to a plan: precision, recompute and compilation of the recipe.

    Without `auto_compilation`, `model.compile: auto` and `model.fused_pointwise: auto` compile
    nothing.

    Raises:
        LayoutError, RecipeError: 8-bit products would not be those of one process.
    """
    choice = auto_precision if recipe.precision.kind == "auto" else None
    compilation = None
    if recipe.model.compile == "auto" and auto_compilation is not None:
        compilation = choose_blocks(auto_compilation, placement.shape)
    plan = Plan(
        placement,
        batch,
        resolve_precision(recipe, choice).precision,
        recipe.recompute_kind or "auto",
        None if choice is None else choice.reason,
        recipe.model.compile is True if compilation is None else compilation.is_compiled,
        None if compilation is None else compilation.reason,
        offloads_trained_weights=recipe.has_offloaded_trained_weights,
    )
    pointwise = choose_pointwise(
        recipe.model.fused_pointwise,
        plan.shape,
        has_compiled_blocks=plan.is_compiled,
        auto_compilation=auto_compilation,
    )
    plan = replace(plan, pointwise=pointwise)
    _check_precision(plan)
    return plan


def _check_precision(plan: Plan) -> None:
    """Check that 8-bit products are those of one process, and that no precision is `auto`."""
    assert plan.precision.kind != "auto", "`resolve_plan` resolves `auto`"
    if plan.precision.low_precision is not None:
        check_low_precision(
            plan.placement, plan.precision.low_precision, plan.batch.sequence_length
        )
    if plan.precision.working_weights is True:
        _check_working_weights(plan)
    if plan.precision.master_weights == "bf16":
        check_bf16_weights(plan.precision.kind, plan.shape, plan.precision_reason)


def check_bf16_weights(kind: str, shape: ModelShape, kind_reason: str | None = None) -> None:
    """Check that products multiply bf16 (`kind`, with the reason of `auto`), in our own modules.

    Raises:
        RecipeError: the run could not have master weights of bf16.
    """
    if kind != "bf16":
        reason = f"products would be in {kind}{'' if kind_reason is None else f' ({kind_reason})'}"
        remedy = "Set precision.kind: bf16, or remove the key"
    elif isinstance(shape, HFShape):
        reason = f"transformers' {shape.class_name} has numbers that must stay in fp32"
        remedy = "Remove the key"
    else:
        return
    raise RecipeError(
        reason, field="precision.master_weights", got="bf16", allowed="fp32", remedy=remedy
    )


def _check_working_weights(plan: Plan) -> None:
    """Check that weights are cast, and by our own modules.

    Raises:
        RecipeError: `precision.working_weights: true` would have no effect.
    """
    if plan.layout.is_sharded and not plan.offloads_trained_weights:
        reason = f"zero_stage {plan.layout.zero_stage} gathers the weights in the compute precision"
    elif isinstance(plan.shape, HFShape):
        reason = f"transformers' {plan.shape.class_name} reads its own weights"
    else:
        return
    raise RecipeError(
        f"{reason}: a copy of the weights would never be read",
        field="precision.working_weights",
        got=True,
        allowed="auto, false",
        remedy="Remove the key",
    )


def pad_to_longest_row(plan: Plan, minimum: int = 1) -> Plan:
    """Return the plan with rows padded to the longest of their micro-batch.

    Their lengths are multiples of `minimum` tokens, and divide evenly under the layout.
    """
    tokens = compute_token_multiple(plan.placement, plan.precision.low_precision)
    multiple = compute_row_multiple(plan.layout, math.lcm(minimum, tokens))
    return replace(plan, batch=replace(plan.batch, row_multiple=multiple))


def build_work_balance(
    shape: ModelShape, layout: Layout, sequence_length: int, *, is_padded: bool
) -> WorkBalance:
    """Build the rule that assigns rows by their FLOPs.

    Args:
        is_padded: rows are one document each and end with the longest of their micro-batch.
    """
    # FLOPs per token grow linearly with the mean number of visible keys, (length + 1) / 2.
    length = max(2, sequence_length)
    shortest = shape.count_flops_per_token(1)
    slope = (shape.count_flops_per_token(length) - shortest) / ((length - 1) / 2)
    waits = waits_after_each_micro_batch(layout)
    return WorkBalance(slope / (shortest - slope), is_padded, waits, is_pipeline=layout.pp > 1)


def balance_work(plan: Plan, *, has_documents: bool) -> Plan:
    """Return the plan with rows assigned by their work (`placement.row_assignment`).

    Args:
        has_documents: rows have several documents.
    """
    balance = build_work_balance(
        plan.placement.shape,
        plan.layout,
        plan.batch.sequence_length,
        is_padded=not has_documents and plan.batch.row_multiple is not None,
    )
    return replace(plan, batch=replace(plan.batch, balance=balance))


def resolve_degrees(recipe: Recipe, world_size: int) -> tuple[Layout, BatchPlan]:
    """Resolve layout and batch of a recipe: what depends on neither the model nor the devices.

    Raises:
        LayoutError, RecipeError, ScheduleError: as `resolve_plan`.
    """
    layout = resolve_layout(recipe.layout, world_size)
    batch = resolve_batch(recipe.training, layout.data_ranks)
    if layout.pp > 1:
        load_schedule(
            layout.schedule, layout.pp, batch.gradient_accumulation_steps, layout.virtual_stages
        )  # checks that it supports the step's micro-batches
    elif layout.schedule not in PIPELINE_SCHEDULES:
        load_schedule_file(layout.schedule)  # unused, but a wrong name is an error anyway
    return layout, batch


def resolve_precision(recipe: Recipe, choice: PrecisionChoice | None) -> Recipe:
    """Replace `precision: auto` by the chosen kind; a recipe that names its kind is unchanged."""
    if recipe.precision.kind != "auto" or choice is None:
        return recipe
    return recipe.model_copy(
        update={"precision": recipe.precision.model_copy(update={"kind": choice.kind})}
    )


def compute_row_multiple(layout: Layout, minimum: int = 1) -> int:
    """Return a multiple of `minimum` tokens by which rows divide evenly under a layout."""
    return math.lcm(minimum, 2 * layout.cp * layout.tp)


def resolve_batch(training: TrainingSection, data_ranks: int) -> BatchPlan:
    """Derive the missing one of micro batch, accumulation and global batch from the other two.

    If only one is given, accumulation is 1.

    >>> resolve_batch(TrainingSection(sequence_length=8, max_steps=1, learning_rate=1,
    ...                               global_batch_size=12, micro_batch_size=2),
    ...               data_ranks=2).gradient_accumulation_steps
    3
    """
    micro = training.micro_batch_size
    accumulation = training.gradient_accumulation_steps
    total = training.global_batch_size
    if micro is None and total is None:
        raise RecipeError(
            "the number of sequences per step is not set",
            field="training.micro_batch_size",
            remedy="Set micro_batch_size or global_batch_size "
            "(any two of micro, accumulation and global give the third)",
        )
    if total is None:
        assert micro is not None
        accumulation = accumulation or 1
    elif micro is None:
        accumulation = accumulation or 1
        micro = _divide(
            total,
            data_ranks * accumulation,
            f"{data_ranks} data ranks x accumulation {accumulation}",
            "micro_batch_size",
        )
    elif accumulation is None:
        accumulation = _divide(
            total,
            micro * data_ranks,
            f"micro {micro} x {data_ranks} data ranks",
            "gradient_accumulation_steps",
        )
    product = micro * data_ranks * accumulation
    if total is not None and product != total:
        raise RecipeError(
            f"micro {micro} x {data_ranks} data ranks x accumulation {accumulation} = {product}, "
            f"not {total}",
            field="training.global_batch_size",
            got=total,
            allowed=str(product),
            remedy="Omit one of the three; it is computed from the other two",
        )
    return BatchPlan(training.sequence_length, micro, accumulation, data_ranks)


def count_steps(training: TrainingSection, num_samples: int, global_batch_size: int) -> int:
    """Count a run's optimizer steps: the smaller of `max_steps` and the steps of `num_epochs`.

    Raises:
        DataError: the epochs do not fill one global batch.
    """
    limits = [] if training.max_steps is None else [training.max_steps]
    if training.num_epochs is not None:
        steps = math.floor(training.num_epochs * num_samples / global_batch_size)
        if steps < 1:
            raise DataError(
                f"{training.num_epochs:g} epochs of {num_samples} samples do not fill "
                f"one global batch of {global_batch_size}",
                field="training.num_epochs",
                remedy="Train for more epochs, lower global_batch_size, or add data",
            )
        limits.append(steps)
    return min(limits)


def _divide(total: int, divisor: int, divisor_text: str, result_name: str) -> int:
    """Divide `total`, or raise a LayoutError that shows the arithmetic."""
    if total % divisor:
        nearby = max(divisor, total // divisor * divisor)
        raise LayoutError(
            f"global batch {total} is not a multiple of {divisor_text} = {divisor}, "
            f"so {result_name} is not a whole number",
            field="training.global_batch_size",
            got=total,
            allowed=f"{nearby} or {nearby + divisor}, for instance",
        )
    return total // divisor
