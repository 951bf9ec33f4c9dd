"""Checkpoints of a run: contents, saving during training, resuming and rolling back."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.checkpoint.background import BackgroundSaver
from shardwright.checkpoint.commit import Keep, step_folders
from shardwright.checkpoint.drift import Difference, differences, split_allowed
from shardwright.checkpoint.exchange import Ranks
from shardwright.checkpoint.fence import SHUT_OUT, Fence, FencedDisk
from shardwright.checkpoint.load import (
    WholeCheckpoint,
    load_checkpoint,
    newest_checkpoint,
    open_checkpoint,
    read_run_values,
)
from shardwright.checkpoint.pieces import Part
from shardwright.checkpoint.place import Place
from shardwright.checkpoint.remote import disk_of
from shardwright.checkpoint.save import SavedCheckpoint
from shardwright.checkpoint.values import RunValues
from shardwright.errors import CheckpointError, SaveFailed
from shardwright.optim.cut import Moment
from shardwright.optim.state import load_optimizer_values, optimizer_moments, optimizer_values
from shardwright.telemetry.speaker import Speaker
from shardwright.train.folder import RunFolder
from shardwright.train.preflight import FIXED_TRAINING, Checked
from shardwright.train.setup import TrainState

logger = logging.getLogger(__name__)

_SHOWN_DIFFERENCES = 20

FIXED_FIELDS = {
    "model": "its tensors have other shapes or meanings",
    "global_batch_size": "the data cursor counts batches: samples would be repeated or left out",
    "optimizer.name": "its states belong to another update rule",
    "freeze": "its optimizer states belong to other parameters",
    "adapters": "its tensors have other shapes or meanings",
    "base": "adapters fit only the base weights that they were trained with",
}
"""Fields that `--allow-drift` cannot allow to change in a resumed run, and the reasons."""


@dataclass(frozen=True)
class ResumeFrom:
    """Complete checkpoint of the same run, its values, and the drift allowed by field name."""

    checkpoint: WholeCheckpoint
    values: RunValues
    allowed: tuple[Difference, ...] = ()


def find_start(
    checked: Checked, folder: RunFolder, allow_drift: Sequence[str] = ()
) -> ResumeFrom | None:
    """Find the checkpoint to resume from; None if the run ended before its first one.

    Collective, called before any rank writes.

    Args:
        allow_drift: Fields that may have changed, named as in the error; `optimizer` includes
            all fields below it.

    Raises:
        CheckpointError: The checkpoints are damaged, or the recipe has changed too much.
    """
    found = newest_checkpoint(folder.checkpoints)
    if found is None:
        if folder.has_checkpoints:
            raise CheckpointError(
                "no complete checkpoint to resume from",
                field="run.dir",
                got=str(folder.checkpoints),
            )
        return None
    values = read_run_values(found)
    allowed, refused = split_allowed(
        differences(values.run.as_saved(), checked.drift_fields), allow_drift, FIXED_FIELDS
    )
    if refused:
        more = (
            f"; {len(refused) - _SHOWN_DIFFERENCES} more"
            if len(refused) > _SHOWN_DIFFERENCES
            else ""
        )
        raise CheckpointError(
            f"the recipe differs from the run's: {'; '.join(refused[:_SHOWN_DIFFERENCES])}{more}",
            field="--resume",
            remedy="Undo the change, start a new run (--run-dir), "
            "or resume anyway (--allow-drift FIELD)",
        )
    return ResumeFrom(found, values, tuple(allowed))


def changes_since(start: ResumeFrom, checked: Checked) -> list[Difference]:
    """List the changes of the recipe that a resumed run may make; they are only reported."""
    return differences(start.values.recipe, _changeable(checked))


def _changeable(checked: Checked) -> dict[str, Any]:
    """Collect the settings that a resumed run may change."""
    recipe = checked.recipe
    return {
        "training": recipe.training.model_dump(mode="json", exclude=set(FIXED_TRAINING)),
        "precision": recipe.precision.model_dump(mode="json"),
        "recompute": recipe.recompute,
    }


@dataclass
class Saver:
    """Saving and restoring of a run's state. Collective: all ranks make the same calls.

    Random state is not saved: initial weights, sample order and dropout are functions of seed,
    step and token.
    """

    checked: Checked
    state: TrainState
    speaker: Speaker
    folder: RunFolder
    speaks: bool = True
    drift: list[dict[str, Any]] = field(default_factory=list)
    """Changes allowed so far, with their steps; copied to each checkpoint."""
    fence: Fence | None = None
    """Claim of the checkpoint folder, on rank 0; a save after a newer claim fails."""

    def __post_init__(self) -> None:
        disk = (
            None if self.fence is None else FencedDisk(disk_of(self.folder.checkpoints), self.fence)
        )
        self._background = BackgroundSaver(
            timeout_seconds=self.checked.recipe.checkpoint.timeout_seconds, disk=disk
        )
        self._begin_seconds = self._stall_seconds = 0.0
        # Only the update changes the saved state, so it waits for the copy of a running save.
        self.state.optimizer.register_step_pre_hook(lambda *_: self._await_copy())

    def tensors(self) -> dict[str, Part]:
        """Collect this rank's part of every tensor: weights `model.*`, states `optimizer.*`.

        Under adapters the base is left out; `run.base` in the values identifies it.
        """
        model = self.state.model
        adapted = self.checked.shape.adapters is not None
        named = dict(model.named_parameters())
        moments = {
            f"model.{name}": Moment(parameter.detach(), name)
            for name, parameter in named.items()
            if not adapted or name in model.trainable
        }
        moments |= optimizer_moments(self.state.optimizer, named.items())
        return {
            key: Part(
                part.tensor,
                model.layouts[part.parameter].shape if part.shape is None else part.shape,
                model.held(part.parameter) if part.boxes is None else part.boxes,
            )
            for key, part in moments.items()
        }

    def values(self) -> dict[str, Any]:
        """Collect the state that is not tensors, as JSON."""
        state = self.state
        return {
            "step": state.step,
            "samples_seen": (state.step + state.steps_left_out)
            * self.checked.plan.batch.global_batch_size,
            "steps_left_out": state.steps_left_out,
            "skipped_in_a_row": state.skipped_in_a_row,
            "best_loss": state.best_loss if math.isfinite(state.best_loss) else None,
            "loss_scaler": None if state.scaler is None else state.scaler.state_dict(),
            "layout": str(self.checked.plan.layout),
            "evaluation_due": state.evaluation_due,
            "run": self.checked.drift_fields,
            "recipe": _changeable(self.checked),
            "drift": self.drift,
        }

    def save(self, *, best: bool, last: bool = False) -> None:
        """Save this step; in the background unless the recipe disables it or it is the `last`.

        Waits for a save that is still running. A failed save is only reported: older
        checkpoints are intact, and training continues.

        Raises:
            SaveFailed: On every rank, if the last save failed, as the steps since the previous
                checkpoint would be lost. Or another launch has claimed the run.
        """
        start_seconds = time.perf_counter()
        section = self.checked.recipe.checkpoint
        step = self.state.step
        waits = self._background.is_saving
        self._settle()
        if waits:
            logger.info(
                "step %d waited %.3g s for the previous save",
                step,
                time.perf_counter() - start_seconds,
            )
        in_background = section.asynchronous and not last
        try:
            saved = (self._background.save if in_background else self._background.save_now)(
                self.folder.checkpoints,
                step,
                self.tensors(),
                self.values(),
                merged={"optimizer": optimizer_values(self.state.optimizer)},
                keep=Keep(section.keep_last, section.keep_every),
                best=best and section.keep_best,
            )
        except SaveFailed as error:
            if last or SHUT_OUT in str(error):
                raise
            self._warn(str(error))
            return
        self._begin_seconds = self._stall_seconds = time.perf_counter() - start_seconds
        if saved is not None:
            self._tell(saved, self._stall_seconds)

    def _await_copy(self) -> None:
        """Wait until the running save has copied the state."""
        start_seconds = time.perf_counter()
        self._background.await_copy()
        self._stall_seconds += time.perf_counter() - start_seconds

    def poll(self) -> None:
        """Log a save that has completed; called once per step."""
        if not self._background.is_saving:
            self._settle()

    def close(self, *, broken: bool = False) -> None:
        """Wait for a running save; not if the run is `broken`, as a peer may be gone."""
        if broken:
            self._background.abandon()
        else:
            self._settle()
            self._background.close()

    def _settle(self) -> None:
        """Wait for a running save and log its result."""
        try:
            saved = self._background.wait()
        except SaveFailed as error:
            if SHUT_OUT in str(error):
                raise
            self._warn(str(error))
        else:
            if saved is not None:
                self._tell(saved, self._begin_seconds + saved.seconds)

    def _tell(self, saved: SavedCheckpoint, seconds: float) -> None:
        self.speaker.write(
            "checkpoint",
            step=saved.step,
            path=str(saved.path),
            size_bytes=saved.num_bytes,
            seconds=seconds,
            stall_seconds=self._stall_seconds,
        )

    def _warn(self, message: str) -> None:
        if self.speaks:  # the message is the same on every rank
            self.speaker.write("warning", message=message)

    def restore(self, start: ResumeFrom) -> None:
        """Restore the state from a checkpoint that `find_start` accepted."""
        checkpoint = start.checkpoint
        values = start.values
        load_checkpoint(checkpoint, self.tensors())
        state = self.state
        state.step = values.step
        state.skipped_in_a_row = values.skipped_in_a_row
        state.steps_left_out = values.steps_left_out
        state.evaluation_due = values.evaluation_due
        state.best_loss = math.inf if values.best_loss is None else values.best_loss
        load_optimizer_values(
            state.optimizer, values.optimizer.model_dump(), trainable=state.model.trainable
        )
        if state.scaler is not None and values.loss_scaler is not None:
            state.scaler.load_state_dict(values.loss_scaler.model_dump())
        before = [drift.model_dump() for drift in values.drift]
        self.drift = [
            *before,
            *({"step": state.step, **difference.as_json()} for difference in start.allowed),
        ]
        self.speaker.write("resumed", step=state.step, path=str(checkpoint.path))
        if checkpoint.refused:
            reasons = "; ".join(map(str, checkpoint.refused))
            newest = checkpoint.refused[0].path.name
            self._warn(f"fell back from {newest} to {checkpoint.path.name}: {reasons}")
        if start.allowed:
            self._warn(
                f"allowed differences from the run that saved: {'; '.join(map(str, start.allowed))}"
            )

    def go_back(self, reason: str, *, at_least_steps_before: int) -> bool:
        """Roll back to the newest complete checkpoint at least so many steps back.

        Data read since then is skipped. Returns False if there is no such checkpoint.
        """
        self._settle()
        state = self.state
        batch_size = self.checked.plan.batch.global_batch_size
        checkpoint = newest_before(self.folder.checkpoints, state.step - at_least_steps_before)
        if checkpoint is None:
            return False
        from_step = state.step
        read_until = state.step + state.steps_left_out
        self.restore(ResumeFrom(checkpoint, read_run_values(checkpoint)))
        first = state.step + state.steps_left_out
        state.steps_left_out = read_until - state.step
        self.speaker.write(
            "rolled_back",
            step=state.step,
            reason=reason,
            from_step=from_step,
            path=str(checkpoint.path),
            first_sample=first * batch_size,
            num_samples=(read_until - first) * batch_size,
        )
        return True


def newest_before(root: Place, step: int) -> WholeCheckpoint | None:
    """Find the newest complete checkpoint of at most `step`. Collective; same on all ranks."""
    ranks = Ranks()
    folders = step_folders(root) if ranks.is_first else []
    for name in ranks.from_first(
        [folder.path.name for folder in reversed(folders) if folder.step <= step]
    ):
        try:
            return open_checkpoint(root / name)
        except CheckpointError as error:  # same on every rank
            logger.warning("%s", error)
    return None
