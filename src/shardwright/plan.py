"""The narrow waist: one frozen value that says how a run is cut over devices.

Planner, rehearsal, verifier and trainer all read the same `Plan`; `resolve` is pure and needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardwright.config.schema import Recipe, RecomputeKind
from shardwright.config.training import PrecisionSection, TrainingSection
from shardwright.errors import DataError, LayoutError, RecipeError
from shardwright.layout.degrees import Layout, resolve_layout
from shardwright.schedule import load_schedule


@dataclass(frozen=True)
class BatchPlan:
    """global_batch_size = micro_batch_size x data_ranks x gradient_accumulation_steps, in sequences."""

    sequence_length: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    data_ranks: int
    row_multiple: int | None = None
    """Rows are filled up to the longest of their micro-batch, rounded up to a multiple of so many tokens, and to sequence_length
    at most; None fills every row to sequence_length."""

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step."""
        return self.micro_batch_size * self.data_ranks * self.gradient_accumulation_steps

    @property
    def global_batch_tokens(self) -> int:
        """Tokens per optimizer step; where rows end with the longest of their micro-batch, at most."""
        return self.global_batch_size * self.sequence_length


@dataclass(frozen=True)
class PrecisionChoice:
    """What `precision: auto` means for a run, and why; the reason is one clause for a person to read."""

    kind: Literal["fp32", "bf16"]
    reason: str

    def __str__(self) -> str:
        return f"{self.kind} (auto: {self.reason})"


@dataclass(frozen=True)
class Plan:
    """How a training run is cut over devices. Its precision is never `auto`."""

    layout: Layout
    batch: BatchPlan
    precision: PrecisionSection
    recompute: RecomputeKind = "none"
    precision_reason: str | None = None
    """Why `precision: auto` came to this kind; None where the recipe names the kind."""

    def __post_init__(self) -> None:
        assert self.precision.kind != "auto", "resolve chooses the precision of a plan"

    def as_dict(self) -> dict[str, Any]:
        """JSON for the run folder."""
        return {
            "layout": asdict(self.layout) | {"world_size": self.layout.world_size},
            "batch": asdict(self.batch) | {"global_batch_size": self.batch.global_batch_size},
            "precision": self.precision.model_dump(mode="json"),
            "recompute": self.recompute,
            **({} if self.precision_reason is None else {"precision_reason": self.precision_reason}),
        }


def resolve(recipe: Recipe, world_size: int, auto_precision: PrecisionChoice | None = None) -> Plan:
    """The plan of a recipe on `world_size` ranks.

    Args:
        auto_precision: what `precision: auto` means on the devices that the plan is for. A recipe that names its precision
            needs none.

    Raises:
        LayoutError, RecipeError: degrees or batch sizes that contradict each other, with the arithmetic shown.
        ScheduleError: a pipeline schedule that does not take the step's micro-batches.
    """
    layout, batch = resolve_degrees(recipe, world_size)
    chosen = auto_precision if recipe.precision.kind == "auto" else None
    return Plan(
        layout=layout,
        batch=batch,
        precision=settle_precision(recipe, chosen).precision,
        recompute=recipe.recompute,
        precision_reason=None if chosen is None else chosen.reason,
    )


def resolve_degrees(recipe: Recipe, world_size: int) -> tuple[Layout, BatchPlan]:
    """Layout and batch of a recipe on `world_size` ranks: all of the plan that does not depend on the devices.

    Raises:
        LayoutError, RecipeError, ScheduleError: as `resolve`.
    """
    layout = resolve_layout(recipe.layout, world_size)
    batch = resolve_batch(recipe.training, layout.data_ranks)
    if layout.pp > 1:
        _check_schedule(layout, batch, compiles=recipe.model.compile)
    return layout, batch


def settle_precision(recipe: Recipe, choice: PrecisionChoice | None) -> Recipe:
    """The recipe with the chosen kind in place of `precision: auto`; a recipe that names its precision as it is."""
    if recipe.precision.kind != "auto" or choice is None:
        return recipe
    return recipe.model_copy(update={"precision": recipe.precision.model_copy(update={"kind": choice.kind})})


def row_multiple(layout: Layout, at_least: int = 1) -> int:
    """A multiple of `at_least` tokens such that rows come out even under every cut of a row that the layout makes.

    Zigzag takes 2 x cp chunks, sequence parallelism tp equal shares of a context rank's tokens.

    >>> row_multiple(Layout(tp=2, cp=3), 8)
    24
    """
    return math.lcm(at_least, 2 * layout.cp * layout.tp)


def _check_schedule(layout: Layout, batch: BatchPlan, *, compiles: bool) -> None:
    """Refuse a schedule that does not take the step's micro-batches, or that compiled blocks cannot run."""
    schedule = load_schedule(layout.schedule, layout.pp, batch.gradient_accumulation_steps, layout.virtual_stages)
    if compiles and schedule.splits_backward:
        raise LayoutError(
            "a compiled block makes all of its gradients at once, and this schedule puts some off",
            field="layout.schedule",
            got=layout.schedule,
            allowed="one without I and W: gpipe, 1f1b, interleaved_1f1b",
            remedy="Take one of these, or model.compile: false",
        )


def resolve_batch(training: TrainingSection, data_ranks: int) -> BatchPlan:
    """Any two of micro batch, accumulation and global batch give the third; one alone takes accumulation 1.

    >>> resolve_batch(TrainingSection(sequence_length=8, max_steps=1, learning_rate=1, global_batch_size=12,
    ...                               micro_batch_size=2), data_ranks=2).gradient_accumulation_steps
    3
    """
    micro, accumulation, total = training.micro_batch_size, training.gradient_accumulation_steps, training.global_batch_size
    if micro is None and total is None:
        raise RecipeError(
            "say how many sequences a step holds",
            field="training.micro_batch_size",
            remedy="Give micro_batch_size or global_batch_size (any two of micro, accumulation and global give the third)",
        )
    if total is None:
        assert micro is not None
        accumulation = accumulation or 1
    elif micro is None:
        accumulation = accumulation or 1
        micro = _divide(
            total, data_ranks * accumulation, f"{data_ranks} data ranks x accumulation {accumulation}", "micro_batch_size"
        )
    elif accumulation is None:
        accumulation = _divide(total, micro * data_ranks, f"micro {micro} x {data_ranks} data ranks", "gradient_accumulation_steps")
    product = micro * data_ranks * accumulation
    if total is not None and product != total:
        raise RecipeError(
            f"micro {micro} x {data_ranks} data ranks x accumulation {accumulation} = {product}, not {total}",
            field="training.global_batch_size",
            got=total,
            allowed=str(product),
            remedy="Leave one of the three out: it follows from the other two",
        )
    return BatchPlan(training.sequence_length, micro, accumulation, data_ranks)


def count_steps(training: TrainingSection, num_samples: int, global_batch_size: int) -> int:
    """Optimizer steps of the run: the smaller of `max_steps` and what `num_epochs` make, at least one."""
    limits = [] if training.max_steps is None else [training.max_steps]
    if training.num_epochs is not None:
        steps = math.floor(training.num_epochs * num_samples / global_batch_size)
        if steps < 1:
            raise DataError(
                f"{training.num_epochs:g} epochs of {num_samples} samples do not fill one global batch of {global_batch_size}",
                field="training.num_epochs",
                remedy="Train for more epochs, lower global_batch_size, or add data",
            )
        limits.append(steps)
    return min(limits)


def _divide(total: int, by: int, shown: str, wanted: str) -> int:
    if total % by:
        nearby = max(by, total // by * by)
        raise LayoutError(
            f"global batch {total} is not a multiple of {shown} = {by}, so {wanted} is not a whole number",
            field="training.global_batch_size",
            got=total,
            allowed=f"{nearby} or {nearby + by}, for instance",
        )
    return total // by
