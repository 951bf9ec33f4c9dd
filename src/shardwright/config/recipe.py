"""The recipe as frozen pydantic models.

Keys are the standard terms of the field; defaults suit a first run. Checks that need the number
of ranks, such as batch arithmetic and divisibility, are in `plan.resolve`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from shardwright.config.adapter_section import AdapterSection
from shardwright.config.data import DataSection
from shardwright.config.layout import ClusterSetting, LayoutSection, LayoutSetting
from shardwright.config.model import ModelSection, MoeSection, TokenizerSection
from shardwright.config.offload import OffloadSection
from shardwright.config.preference import PreferenceSection
from shardwright.config.recipe_section import NonNegative, PositiveGib, RecipeSection
from shardwright.config.run import CheckpointSection, ElasticSection, RunSection, WatchdogSection
from shardwright.config.training import (
    EvaluationSection,
    OptimizerSection,
    PrecisionSection,
    PrecisionSetting,
    TrainingSection,
)

RecomputeKind = Literal["none", "selective", "full"]

RecomputeMode = Literal["none", "selective", "full", "mixed"]
"""Recomputation of a plan: one kind for all layers, or results that are chosen for each layer."""


class RecomputeSection(RecipeSection):
    """Recomputation that the plan chooses for each layer."""

    budget_gib: PositiveGib | None = None
    """Memory of a device, in GiB, that a step may need as predicted; default all that the device
    has."""


def _parse_recompute_setting(value: Any) -> Any:
    if value == "auto":
        return RecomputeSection()
    if isinstance(value, dict | RecomputeSection) or value in get_args(RecomputeKind):
        return value
    raise ValueError("must be none, selective, full, auto or {budget_gib: N}")


def _get_recompute_tag(value: Any) -> str:
    return "kind" if isinstance(value, str) else RecomputeSection.__name__


RecomputeSetting = Annotated[
    Annotated[RecomputeKind, Tag("kind")]
    | Annotated[RecomputeSection, Tag(RecomputeSection.__name__)],
    Discriminator(_get_recompute_tag),
    BeforeValidator(_parse_recompute_setting),
]
"""A kind, `auto`, or a mapping with `budget_gib`."""


class Recipe(RecipeSection):
    """One complete training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)] = "run"
    """Name of the run and of its folder."""
    seed: NonNegative = 0
    """Seed of the initial weights, the sample order and dropout."""
    model: ModelSection
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection
    training: TrainingSection
    optimizer: OptimizerSection = OptimizerSection()
    precision: PrecisionSetting = PrecisionSection()
    recompute: RecomputeSetting = "none"
    """`selective` recomputes everything except matrix products, attention and tensor-parallel
    collectives in the backward pass; `full` recomputes whole blocks. `{budget_gib: N}` keeps,
    within that memory per device, the results that take longest to recompute per byte; `auto` does
    so within the device's memory. docs/planning.md explains the choice."""
    layout: LayoutSetting = LayoutSection()
    offload: OffloadSection = OffloadSection()
    """Optimizer states in host memory or on disk."""
    cluster: ClusterSetting = None
    """Cluster that `layout: auto` plans for; default the devices of this machine."""
    moe: MoeSection = MoeSection()
    adapters: AdapterSection | None = None
    """Low-rank adapters to train instead of the model's own weights."""
    preference: PreferenceSection | None = None
    """Train on pairs of chosen and rejected responses instead of tokens."""
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    elastic: ElasticSection = ElasticSection()
    watchdog: WatchdogSection = WatchdogSection()
    run: RunSection = RunSection()

    @property
    def has_offloaded_trained_weights(self) -> bool:
        """True if the matrices of blocks are trained and leave the device between their uses."""
        return self.adapters is None and self.moved_offload.parameters != "none"

    @property
    def recompute_kind(self) -> RecomputeKind | None:
        """Kind of recomputation of all layers; None if the plan chooses for each layer."""
        return None if isinstance(self.recompute, RecomputeSection) else self.recompute

    @property
    def moved_offload(self) -> OffloadSection:
        """Offloading that moves bytes in a run: on a CPU nothing moves to the host."""
        return self.offload.without_host() if self.run.device == "cpu" else self.offload

    @model_validator(mode="after")
    def _check_token_options(self) -> Recipe:
        for key in ("label_smoothing", "neftune_noise_alpha"):
            if self.preference is not None and getattr(self.training, key):
                raise ValueError(
                    f"`training.{key}` applies to tokens; it has no effect with `preference`"
                )
        return self

    @model_validator(mode="after")
    def _check_master_weights(self) -> Recipe:
        if self.precision.master_weights == "fp32":
            return self
        if self.optimizer.name in ("muon", "adafactor"):
            raise ValueError(
                f"`precision.master_weights: bf16` does not support `optimizer.name: "
                f"{self.optimizer.name}`; use adamw, adamw_8bit or sgd, or remove `master_weights`"
            )
        if self.has_offloaded_trained_weights:
            raise ValueError(
                "`precision.master_weights: bf16` does not support trained weights that are "
                f"offloaded (`offload.parameters: {self.offload.parameters}`); offload only the "
                "moments (`offload.optimizer`), or remove `master_weights`"
            )
        return self

    @model_validator(mode="after")
    def _check_adapters(self) -> Recipe:
        if self.adapters is not None and self.model.freeze:
            raise ValueError(
                "`adapters` already freezes all of the model's weights: remove `model.freeze`"
            )
        return self
