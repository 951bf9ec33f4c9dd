"""Optimizer steps of shardwright on one device, set up as a run sets them up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.case import Case, read_model_config
from benchmarks.contenders.with_shardwright import (
    build_recipe,
    build_validated_run,
    draw_weights_on,
)
from benchmarks.gpu_model import make_batch
from shardwright.config.low_precision import FP8Section, LowPrecisionRecipe, NVFP4Section
from shardwright.config.offload import OffloadSection
from shardwright.config.training import PrecisionSection
from shardwright.launch.rank_environment import RankEnvironment
from shardwright.training.checks.run_checks import ValidatedRun
from shardwright.training.memory_settings import agree_on_memory_settings
from shardwright.training.rank_sync import RankSync
from shardwright.training.setup import build_state
from shardwright.training.step import StepLoss, StepUpdate, accumulate_gradients, update_parameters
from shardwright.training.training_state import TrainingState


def choose_precision(recipe: LowPrecisionRecipe | None) -> PrecisionSection:
    """Return bf16, with quantised products of a recipe if one is given."""
    if recipe is None:
        return PrecisionSection(kind="bf16")
    return PrecisionSection.of_low_precision(
        NVFP4Section(experimental=True) if recipe == "nvfp4" else FP8Section(recipe=recipe)
    )


@dataclass(frozen=True)
class BuiltStep:
    """Functions that run a step's passes and its update, and what they train."""

    validated_run: ValidatedRun
    state: TrainingState
    run_passes: Callable[[], StepLoss]
    run_update: Callable[[], StepUpdate]

    def run(self) -> None:
        """Run a whole step."""
        self.run_passes()
        self.run_update()


def build_training_state(
    case: Case,
    device: torch.device,
    *,
    precision: PrecisionSection | None = None,
    offload: OffloadSection | None = None,
    num_micro_batches: int = 1,
) -> tuple[ValidatedRun, TrainingState]:
    """Build model and optimizer of a case, with the settings that a run chooses by free memory.

    Returns:
        The run with these settings, and its state.

    Args:
        precision: Replaces that of the case.
        offload: Likewise.
    """
    recipe = build_recipe(case)
    changes = {"gradient_accumulation_steps": num_micro_batches}
    update: dict[str, Any] = {"training": recipe.training.model_copy(update=changes)}
    if precision is not None:
        update |= {"precision": precision}
    if offload is not None:
        update |= {"offload": offload}
    validated_run = agree_on_memory_settings(
        build_validated_run(recipe.model_copy(update=update), 1, device),
        RankSync(RankEnvironment(), device),
        device,
    )
    with draw_weights_on(device):
        return validated_run, build_state(validated_run, device)


def build_step(
    case: Case,
    device: torch.device,
    *,
    precision: PrecisionSection | None = None,
    offload: OffloadSection | None = None,
    num_micro_batches: int = 1,
) -> BuiltStep:
    """Build steps on the same random tokens; arguments as in `build_training_state`.

    The update of an offloaded optimizer may run during the next forward pass, as in a run.
    """
    validated_run, state = build_training_state(
        case,
        device,
        precision=precision,
        offload=offload,
        num_micro_batches=num_micro_batches,
    )
    generator = torch.Generator().manual_seed(0)
    shape = (case.micro_batch_size, case.sequence_length)
    vocab_size = read_model_config(case)["vocab_size"]
    batches = [
        make_batch(torch.randint(0, vocab_size, shape, generator=generator))
        for _ in range(num_micro_batches)
    ]
    update = partial(
        update_parameters,
        state.model,
        state.optimizer,
        learning_rate=1e-5,
        max_grad_norm=1.0,
        overlaps_forward=True,
    )
    return BuiltStep(
        validated_run,
        state,
        partial(accumulate_gradients, state.model, batches, seed=0, step=0),
        update,
    )
