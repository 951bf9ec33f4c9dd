"""The recipe as frozen pydantic models.

Every key here does something; keys are the field's standard words. Defaults are what a careful person would pick for a
first run. Batch arithmetic, divisibility and anything that needs the number of ranks is `plan.resolve`'s business.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from shardwright.config.adapters import AdapterSection
from shardwright.config.data import DataSection
from shardwright.config.layout import Cluster, Layout, LayoutSection
from shardwright.config.model import ModelSection, MoeSection, TokenizerSection
from shardwright.config.preference import PreferenceSection
from shardwright.config.section import NonNegative, Section
from shardwright.config.training import EvaluationSection, OptimizerSection, Precision, PrecisionSection, TrainingSection
from shardwright.config.upkeep import CheckpointSection, ElasticSection, RunSection, WatchdogSection

RecomputeKind = Literal["none", "selective", "full"]


class Recipe(Section):
    """One training run, whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)] = "run"
    """Names the run folder."""
    seed: NonNegative = 0
    """Initial weights, sample order and dropout are functions of it."""
    model: ModelSection
    tokenizer: TokenizerSection = TokenizerSection()
    data: DataSection
    training: TrainingSection
    optimizer: OptimizerSection = OptimizerSection()
    precision: Precision = PrecisionSection()
    recompute: RecomputeKind = "none"
    """`selective` recomputes all but matrix products and attention in the backward pass; `full` whole blocks."""
    layout: Layout = LayoutSection()
    cluster: Cluster = None
    """What `layout: auto` plans for; default the devices of this machine."""
    moe: MoeSection = MoeSection()
    adapters: AdapterSection | None = None
    """Low-rank adapters to train in place of the model's own weights."""
    preference: PreferenceSection | None = None
    """Learn from pairs of responses, chosen and rejected, in place of tokens."""
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    elastic: ElasticSection = ElasticSection()
    watchdog: WatchdogSection = WatchdogSection()
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _tokens_are_learned(self) -> Recipe:
        for key in ("label_smoothing", "neftune_noise_alpha"):
            if self.preference is not None and getattr(self.training, key):
                raise ValueError(f"`training.{key}` is for learning tokens; it does nothing with `preference`")
        return self

    @model_validator(mode="after")
    def _adapters_train_alone(self) -> Recipe:
        if self.adapters is not None and self.model.freeze:
            raise ValueError("`adapters` freeze all of the model's own weights: leave `model.freeze` out")
        return self
