"""What a checkpoint of a run holds, and how a run goes on from one."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwright.checkpoint.drift import Difference, differences
from shardwright.checkpoint.load import WholeCheckpoint, load_checkpoint, newest_checkpoint, read_values
from shardwright.checkpoint.pieces import Part
from shardwright.checkpoint.save import save_checkpoint
from shardwright.errors import CheckpointError
from shardwright.optim.state import load_optimizer_values, optimizer_tensors, optimizer_values
from shardwright.telemetry.speaker import Speaker
from shardwright.train.folder import RunFolder
from shardwright.train.preflight import Checked
from shardwright.train.setup import TrainState


@dataclass(frozen=True)
class ResumeFrom:
    """A whole checkpoint of the same run, and its values."""

    checkpoint: WholeCheckpoint
    values: dict[str, Any]


def find_start(checked: Checked, folder: RunFolder) -> ResumeFrom | None:
    """Where a resumed run goes on; None where it ended before its first checkpoint. Every rank calls this, before any writes.

    Raises:
        CheckpointError: the checkpoints are damaged, or the recipe has changed in a way that would make it another run.
    """
    found = newest_checkpoint(folder.checkpoints)
    if found is None:
        if folder.has_checkpoints:
            raise CheckpointError("no whole checkpoint to resume from", field="run.dir", got=str(folder.checkpoints))
        return None
    values = read_values(found)
    drift = differences(values["run"], checked.drift_fields)
    if drift:
        raise CheckpointError(
            f"the recipe is no longer that of the run: {'; '.join(map(str, drift))}",
            field="--resume",
            remedy="Undo the change, or start a new run (--run-dir)",
        )
    return ResumeFrom(found, values)


def changes_since(start: ResumeFrom, checked: Checked) -> list[Difference]:
    """What has changed in the recipe that a resumed run may change: to be told, not refused."""
    return differences(start.values["recipe"], _changeable(checked))


def _changeable(checked: Checked) -> dict[str, Any]:
    """Sections that steer the run from here on, without making what it has learned another run's."""
    recipe = checked.recipe
    return {
        "training": recipe.training.model_dump(mode="json"),
        "precision": recipe.precision.model_dump(mode="json"),
        "recompute": recipe.recompute,
    }


@dataclass
class Saver:
    """Saves and restores the state of one run; every rank calls the same at the same step.

    Randomness needs no state of its own: initial weights, sample order and dropout are functions of seed, step and token.
    """

    checked: Checked
    state: TrainState
    speaker: Speaker
    folder: RunFolder

    def tensors(self) -> dict[str, Part]:
        """Every tensor of the state by name, as this rank holds it: weights `model.*`, moments `optimizer.*`."""
        model = self.state.model
        named = dict(model.named_parameters())
        held: dict[str, tuple[str, Tensor]] = {f"model.{name}": (name, parameter.detach()) for name, parameter in named.items()}
        for key, moment in optimizer_tensors(self.state.optimizer, named.items()).items():
            held[key] = (key.removeprefix("optimizer.").rpartition(".")[0], moment)
        return {key: Part(tensor, model.layouts[name].shape, model.held(name)) for key, (name, tensor) in held.items()}

    def values(self) -> dict[str, Any]:
        """Everything else of the state, as JSON."""
        state = self.state
        return {
            "step": state.step,
            "samples_seen": state.step * self.checked.plan.batch.global_batch_size,
            "skipped_in_a_row": state.skipped_in_a_row,
            "best_loss": state.best_loss if math.isfinite(state.best_loss) else None,
            "loss_scaler": None if state.scaler is None else state.scaler.state_dict(),
            "optimizer": optimizer_values(state.optimizer),
            "layout": str(self.checked.plan.layout),
            "evaluation_due": state.evaluation_due,
            "run": self.checked.drift_fields,
            "recipe": _changeable(self.checked),
        }

    def save(self, *, best: bool) -> None:
        """Write a checkpoint of this step.

        Raises:
            SaveFailed: on every rank; the older checkpoints are whole. A run that cannot save (a full disk) is not worth its hours:
                it ends, and goes on from the last checkpoint when there is room.
        """
        began = time.perf_counter()
        section = self.checked.recipe.checkpoint
        saved = save_checkpoint(
            self.folder.checkpoints,
            self.state.step,
            self.tensors(),
            self.values(),
            keep_last=section.keep_last,
            best=best and section.keep_best,
        )
        seconds = time.perf_counter() - began
        self.speaker.write("checkpoint", step=self.state.step, path=str(saved.path), size_bytes=saved.num_bytes, seconds=seconds)

    def restore(self, start: ResumeFrom) -> None:
        """Go on from a checkpoint that `find_start` found to fit."""
        found, values = start.checkpoint, start.values
        load_checkpoint(found, self.tensors())
        state = self.state
        state.step = int(values["step"])
        state.skipped_in_a_row = int(values["skipped_in_a_row"])
        state.evaluation_due = bool(values["evaluation_due"])
        state.best_loss = math.inf if values["best_loss"] is None else float(values["best_loss"])
        load_optimizer_values(state.optimizer, values["optimizer"])
        if state.scaler is not None:
            state.scaler.load_state_dict(values["loss_scaler"])
        self.speaker.write("resumed", step=state.step, path=str(found.path))
