"""Learning from pairs of responses of which one is preferred."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardwright.config.section import Section


class PreferenceSection(Section):
    """Preference tuning: what is learned is which of two responses is preferred, not their tokens. The sources then hold `chosen`
    and `rejected` responses, a pair a row, and `training.global_batch_size` counts pairs."""

    kind: Literal["dpo"] = "dpo"
    """`dpo`: direct preference optimisation (Rafailov et al. 2023)."""
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How hard the model is held to the reference: the larger, the closer it stays."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs taken to be the wrong way round (conservative DPO)."""
    reference: Literal["frozen", "adapter_off"] | None = None
    """What the model is held to: the weights it began with, `frozen` beside it in the same layout, or the model with its adapters
    switched off, which costs no memory. Default: `adapter_off` with `adapters`, else `frozen`."""
