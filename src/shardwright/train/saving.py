"""What a checkpoint of a run holds, when training waits for it, and how a run goes on from one."""

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
from shardwright.checkpoint.load import WholeCheckpoint, load_checkpoint, newest_checkpoint, open_checkpoint, read_run_values
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
    "global_batch_size": "the data cursor counts batches: samples would be seen twice or never",
    "optimizer.name": "its moments are another rule's",
    "freeze": "its moments are those of other parameters",
    "adapters": "its tensors have other shapes or meanings",
    "base": "adapters are the difference to the weights that they were trained beside",
}
"""What no resumed run may change, whatever it is allowed, and why."""


@dataclass(frozen=True)
class ResumeFrom:
    """A whole checkpoint of the same run, its values, and the drift that was allowed by name."""

    checkpoint: WholeCheckpoint
    values: RunValues
    allowed: tuple[Difference, ...] = ()


def find_start(checked: Checked, folder: RunFolder, allow_drift: Sequence[str] = ()) -> ResumeFrom | None:
    """Where a resumed run goes on; None where it ended before its first checkpoint. Every rank calls this, before any writes.

    Args:
        allow_drift: fields that may have changed, as a refusal names them; `optimizer` means all under it.

    Raises:
        CheckpointError: the checkpoints are damaged, or the recipe has changed in a way that would make it another run.
    """
    found = newest_checkpoint(folder.checkpoints)
    if found is None:
        if folder.has_checkpoints:
            raise CheckpointError("no whole checkpoint to resume from", field="run.dir", got=str(folder.checkpoints))
        return None
    values = read_run_values(found)
    allowed, refused = split_allowed(differences(values.run.as_saved(), checked.drift_fields), allow_drift, FIXED_FIELDS)
    if refused:
        more = f"; {len(refused) - _SHOWN_DIFFERENCES} more" if len(refused) > _SHOWN_DIFFERENCES else ""
        raise CheckpointError(
            f"the recipe is no longer that of the run: {'; '.join(refused[:_SHOWN_DIFFERENCES])}{more}",
            field="--resume",
            remedy="Undo the change, start a new run (--run-dir), or go on all the same (--allow-drift FIELD)",
        )
    return ResumeFrom(found, values, tuple(allowed))


def changes_since(start: ResumeFrom, checked: Checked) -> list[Difference]:
    """What has changed in the recipe that a resumed run may change: to be told, not refused."""
    return differences(start.values.recipe, _changeable(checked))


def _changeable(checked: Checked) -> dict[str, Any]:
    """What steers the run from here on, without making what it has learned another run's."""
    recipe = checked.recipe
    return {
        "training": recipe.training.model_dump(mode="json", exclude=set(FIXED_TRAINING)),
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
    speaks: bool = True
    drift: list[dict[str, Any]] = field(default_factory=list)
    """What was allowed to change, at which step; carried on from checkpoint to checkpoint."""
    fence: Fence | None = None
    """This generation's claim, on the rank that changes names; a save after another's claim ends the run."""

    def __post_init__(self) -> None:
        disk = None if self.fence is None else FencedDisk(disk_of(self.folder.checkpoints), self.fence)
        self._background = BackgroundSaver(timeout_seconds=self.checked.recipe.checkpoint.timeout_seconds, disk=disk)
        self._begin_seconds = self._stall_seconds = 0.0
        # Nothing but the update changes what is saved: whoever makes one waits for the copy of a save that is under way.
        self.state.optimizer.register_step_pre_hook(lambda *_: self._await_copy())

    def tensors(self) -> dict[str, Part]:
        """Every tensor of the state by name, as this rank holds it: weights `model.*`, moments `optimizer.*`.

        Of a model with adapters these alone: the base stays where it was read, and `run.base` says what it was.
        """
        model = self.state.model
        adapted = self.checked.shape.adapters is not None
        named = dict(model.named_parameters())
        held = {
            f"model.{name}": Moment(parameter.detach(), name)
            for name, parameter in named.items()
            if not adapted or name in model.trainable
        }
        held |= optimizer_moments(self.state.optimizer, named.items())
        return {
            key: Part(
                part.tensor,
                model.layouts[part.parameter].shape if part.shape is None else part.shape,
                model.held(part.parameter) if part.boxes is None else part.boxes,
            )
            for key, part in held.items()
        }

    def values(self) -> dict[str, Any]:
        """Everything else of the state, as JSON."""
        state = self.state
        return {
            "step": state.step,
            "samples_seen": (state.step + state.steps_left_out) * self.checked.plan.batch.global_batch_size,
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
        """Save this step: in the background, unless the recipe says otherwise or it is the `last` save of this process.

        Where the save before is still being written, it is waited for. A save that fails is told and harms nothing: the older
        checkpoints are whole, and training goes on.

        Raises:
            SaveFailed: the last save failed, on every rank: what was trained since the checkpoint before ends with this process. Or
                another generation has taken over, whose run this is from then on.
        """
        began = time.perf_counter()
        section, step = self.checked.recipe.checkpoint, self.state.step
        waits = self._background.is_saving
        self._settle()
        if waits:
            logger.info("step %d waited %.3g s for the save before it", step, time.perf_counter() - began)
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
        self._begin_seconds = self._stall_seconds = time.perf_counter() - began
        if saved is not None:
            self._tell(saved, self._stall_seconds)

    def _await_copy(self) -> None:
        """Wait until the save that was begun has its copy of the state."""
        began = time.perf_counter()
        self._background.await_copy()
        self._stall_seconds += time.perf_counter() - began

    def poll(self) -> None:
        """Tell of a save that has ended meanwhile; called once a step."""
        if not self._background.is_saving:
            self._settle()

    def close(self, *, broken: bool = False) -> None:
        """Wait for the save that is going on; not where the run is `broken`, and a peer that the save needs may be gone."""
        if broken:
            self._background.abandon()
        else:
            self._settle()
            self._background.close()

    def _settle(self) -> None:
        """Wait for the save that is going on and tell what came of it."""
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
        if self.speaks:  # it is the same on every rank
            self.speaker.write("warning", message=message)

    def restore(self, start: ResumeFrom) -> None:
        """Go on from a checkpoint that `find_start` found to fit."""
        found, values = start.checkpoint, start.values
        load_checkpoint(found, self.tensors())
        state = self.state
        state.step = values.step
        state.skipped_in_a_row = values.skipped_in_a_row
        state.steps_left_out = values.steps_left_out
        state.evaluation_due = values.evaluation_due
        state.best_loss = math.inf if values.best_loss is None else values.best_loss
        load_optimizer_values(state.optimizer, values.optimizer.model_dump(), trainable=state.model.trainable)
        if state.scaler is not None and values.loss_scaler is not None:
            state.scaler.load_state_dict(values.loss_scaler.model_dump())
        before = [drift.model_dump() for drift in values.drift]
        self.drift = [*before, *({"step": state.step, **told.as_json()} for told in start.allowed)]
        self.speaker.write("resumed", step=state.step, path=str(found.path))
        if found.refused:
            lost = "; ".join(map(str, found.refused))
            self._warn(f"fell back from {found.refused[0].path.name} to {found.path.name}: {lost}")
        if start.allowed:
            self._warn(f"allowed to differ from the run that saved: {'; '.join(map(str, start.allowed))}")

    def go_back(self, reason: str, *, at_least_steps_before: int) -> bool:
        """Restore the newest whole checkpoint so many steps back, and pass over the data read since; False without one."""
        self._settle()
        state, batch_size = self.state, self.checked.plan.batch.global_batch_size
        found = newest_before(self.folder.checkpoints, state.step - at_least_steps_before)
        if found is None:
            return False
        from_step, read_until = state.step, state.step + state.steps_left_out
        self.restore(ResumeFrom(found, read_run_values(found)))
        first = state.step + state.steps_left_out
        state.steps_left_out = read_until - state.step
        self.speaker.write(
            "rolled_back",
            step=state.step,
            reason=reason,
            from_step=from_step,
            path=str(found.path),
            first_sample=first * batch_size,
            num_samples=(read_until - first) * batch_size,
        )
        return True


def newest_before(root: Place, step: int) -> WholeCheckpoint | None:
    """The newest whole checkpoint of at most `step`; every rank calls this and gets the same."""
    ranks = Ranks()
    folders = step_folders(root) if ranks.is_first else []
    for name in ranks.from_first([folder.path.name for folder in reversed(folders) if folder.step <= step]):
        try:
            return open_checkpoint(root / name)
        except CheckpointError as error:  # the same on every rank
            logger.warning("%s", error)
    return None
