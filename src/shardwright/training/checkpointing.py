"""Checkpoints of a run: contents, saving during training, resuming and rolling back."""

from __future__ import annotations

import logging
import math
import time
from functools import cached_property
from typing import Any

from shardwright.checkpoint.background_save import BackgroundSaver
from shardwright.checkpoint.commit import RetentionPolicy
from shardwright.checkpoint.drift import is_below
from shardwright.checkpoint.fence import SUPERSEDED_MESSAGE, FencedDisk
from shardwright.checkpoint.local_tensors import ParameterShard
from shardwright.checkpoint.object_store import get_disk
from shardwright.checkpoint.rank_verification import is_any_rank_non_finite
from shardwright.checkpoint.run_values import RunValues
from shardwright.checkpoint.tensor_loading import VerifiedCheckpoint, load_checkpoint
from shardwright.checkpoint.tensor_saving import SavedCheckpoint
from shardwright.errors import NonFiniteCheckpoint, SaveFailed
from shardwright.optim.sharded_optimizer import Moment
from shardwright.optim.state import (
    collect_hyperparameters,
    collect_optimizer_moments,
    collect_optimizer_values,
    load_optimizer_values,
)
from shardwright.parallel.mesh import check_nccl_groups, get_host_group
from shardwright.peer_copies.copier import PeerCopier
from shardwright.peer_copies.memory import get_process_memory
from shardwright.peer_copies.recovery import load_copies
from shardwright.training.rank_context import RankContext
from shardwright.training.resume_point import (
    CopiesInMemory,
    ResumePoint,
    collect_changeable_settings,
    find_rollback_point,
)
from shardwright.training.training_state import TrainingState

logger = logging.getLogger(__name__)


class RunCheckpointer:
    """Saving and restoring of a run's state. Collective: all ranks make the same calls.

    Random state is not saved: initial weights, sample order and dropout are functions of seed,
    step and token.
    """

    def __init__(
        self, context: RankContext, state: TrainingState, copier: PeerCopier | None = None
    ) -> None:
        self.context = context
        self.state = state
        self.copier = copier
        """Sends the state to another rank's memory after every step; None if that is off."""
        self.drift: list[dict[str, Any]] = []
        """Changes allowed so far, with their steps; copied to each checkpoint."""
        fence = context.fence
        disk = None if fence is None else FencedDisk(get_disk(context.folder.checkpoints), fence)
        self._background = BackgroundSaver(
            timeout_seconds=context.recipe.checkpoint.timeout_seconds, disk=disk
        )
        self._blocking_seconds = 0.0
        self._stall_seconds = 0.0
        # Only the update changes the saved state, so it waits for the copy of a running save.
        self.state.optimizer.register_step_pre_hook(lambda *_: self._await_copy())

    def collect_tensors(self) -> dict[str, ParameterShard]:
        """Collect this rank's part of every tensor: weights `model.*`, states `optimizer.*`.

        Under adapters the base is left out; `run.base` in the values identifies it. The update has
        ended before what follows on the current stream.
        """
        self.state.wait_for_update()
        model = self.state.model
        adapted = self.context.validated_run.shape.adapters is not None
        named = dict(model.named_parameters())
        offload = model.trained_offload
        moments = {
            f"model.{name}": Moment(parameter.detach(), name)
            if offload is None or name not in offload.names
            else Moment(offload.view_weight(name), name, is_offloaded=True)
            for name, parameter in named.items()
            if not adapted or name in model.trainable
        }
        moments |= collect_optimizer_moments(self.state.optimizer, named.items())
        return {
            key: ParameterShard(
                part.tensor,
                model.layouts[part.parameter].shape if part.shape is None else part.shape,
                model.local_boxes(part.parameter) if part.boxes is None else part.boxes,
                is_offloaded=part.is_offloaded,
            )
            for key, part in moments.items()
        }

    def collect_values(self) -> dict[str, Any]:
        """Collect the state that is not tensors, as JSON."""
        state = self.state
        return self._fixed_values | {
            "step": state.step,
            "samples_seen": (state.step + state.skipped_data_steps)
            * self.context.plan.batch.global_batch_size,
            "steps_left_out": state.skipped_data_steps,
            "skipped_in_a_row": state.num_consecutive_skips,
            "best_loss": state.best_loss if math.isfinite(state.best_loss) else None,
            "loss_scaler": None if state.scaler is None else state.scaler.state_dict(),
            "layout": str(self.context.plan.layout),
            "evaluation_due": state.is_evaluation_due,
            "drift": self.drift,
        }

    @cached_property
    def _fixed_values(self) -> dict[str, Any]:
        """Values that are the same after every step."""
        return {
            "run": self.context.validated_run.drift_fields,
            "recipe": collect_changeable_settings(self.context.validated_run),
        }

    def begin_peer_copy(self) -> None:
        """Start to send the state to another rank's memory, if the recipe says so.

        The copy ends during the next step, whose update waits until the state is in host memory.

        Raises:
            RunFailed: The copy of the step before failed. RuntimeError: A peer was lost.
            RankFailed: An operation of this step has failed (`check_nccl_groups`).
        """
        if self.copier is None:
            return
        check_nccl_groups()
        self.copier.memory.finished_step = self.state.step
        if self.state.step == 0:  # a restart at step 0 needs no copy
            return
        optimizer = self.state.optimizer
        tensors = self.collect_tensors()
        # Now, because the next update changes the learning rate while the thread may still read.
        hyperparameters = collect_hyperparameters(optimizer)
        self.copier.begin(
            self.state.step,
            tensors,
            self.collect_values(),
            lambda: {
                "optimizer": collect_optimizer_values(optimizer)
                | {"hyperparameters": hyperparameters}
            },
        )

    def discard_peer_copies(self) -> None:
        """Forget the copies in memory, because their state must not be continued. Collective."""
        if self.copier is None:
            return
        try:
            self.copier.wait()
        finally:
            self.copier.memory.discard()

    def save(self, *, is_best: bool, is_last: bool = False, should_wait: bool = False) -> bool:
        """Save this step; in the background unless the recipe disables it or it is the `is_last`.

        Waits for a save that is still running. A failed save is only reported: older
        checkpoints are intact, and training continues.

        Args:
            is_best: True if the validation loss is the lowest so far.
            is_last: True if the run ends after this step.
            should_wait: Wait until the checkpoint is complete.

        Returns:
            True if the checkpoint is complete or being written. The same on all ranks.

        Raises:
            SaveFailed: On every rank, if the last save failed, as the steps since the previous
                checkpoint would be lost. Or another launch has claimed the run.
            RankFailed: An operation of this step has failed (`check_nccl_groups`).
        """
        check_nccl_groups()
        start_seconds = time.perf_counter()
        section = self.context.recipe.checkpoint
        step = self.state.step
        waits = self._background.is_saving
        self._finish_pending_save()
        if waits:
            logger.info(
                "step %d waited %.3g s for the previous save",
                step,
                time.perf_counter() - start_seconds,
            )
        in_background = section.asynchronous and not (is_last or should_wait)
        tensors = self.collect_tensors()
        # A skipped step saves the state before it again, and that may be the cause.
        num_last = section.keep_last + self.state.num_consecutive_skips
        if section.keep_last == 1 and is_any_rank_non_finite(get_host_group(), tensors):
            num_last += 1  # the checkpoint before it may be the last one that is finite
        try:
            saved = (self._background.save if in_background else self._background.save_and_wait)(
                self.context.folder.checkpoints,
                step,
                tensors,
                self.collect_values(),
                merged_values={"optimizer": collect_optimizer_values(self.state.optimizer)},
                retention=RetentionPolicy(num_last, section.keep_every),
                is_best=is_best and section.keep_best,
            )
        except SaveFailed as error:
            if SUPERSEDED_MESSAGE in str(error):
                raise
            if is_last:
                raise SaveFailed(
                    f"{error}. Remove the cause; --resume then repeats the steps since the newest "
                    "checkpoint"
                ) from error
            self.context.log_warning(str(error))
            return False
        self._blocking_seconds = self._stall_seconds = time.perf_counter() - start_seconds
        if saved is not None:
            self._log_checkpoint(saved, self._stall_seconds)
        return True

    def _await_copy(self) -> None:
        """Wait until the running save and the running copy have read the state."""
        start_seconds = time.perf_counter()
        self._background.wait_for_copy()
        if self.copier is not None:
            self.copier.wait_for_copy()
        self._stall_seconds += time.perf_counter() - start_seconds

    def poll(self) -> None:
        """Log a completed background save, if any; called once per step."""
        if not self._background.is_saving:
            self._finish_pending_save()

    def close(self, *, is_broken: bool = False) -> None:
        """Wait for a running save; not if the run is `is_broken`, as a peer may be gone."""
        if is_broken:
            self._background.abandon()
            if self.copier is not None:
                self.copier.abandon()
        else:
            if self.copier is not None:
                self.copier.close()
            self._finish_pending_save()
            self._background.close()

    def _finish_pending_save(self) -> None:
        """Wait for a running save and log its result."""
        try:
            saved = self._background.wait()
        except SaveFailed as error:
            if SUPERSEDED_MESSAGE in str(error):
                raise
            self.context.log_warning(str(error))
        else:
            if saved is not None:
                self._log_checkpoint(saved, self._blocking_seconds + saved.seconds)

    def _log_checkpoint(self, saved: SavedCheckpoint, seconds: float) -> None:
        self.context.event_logger.log(
            "checkpoint",
            step=saved.step,
            path=str(saved.path),
            size_bytes=saved.num_bytes,
            seconds=seconds,
            stall_seconds=self._stall_seconds,
        )

    def restore(
        self, start: ResumePoint | CopiesInMemory, finished_step: int | None = None
    ) -> None:
        """Restore the state from a checkpoint that `find_resume_point` accepted, or from copies.

        Args:
            start: State to restore.
            finished_step: Newest step that the run had finished, if that is known.
        """
        state = self.state
        start_seconds = time.perf_counter()
        state.model.invalidate_weights()
        if isinstance(start, CopiesInMemory):
            load_copies(
                get_host_group(), get_process_memory(), start.copy_id, self.collect_tensors()
            )
            self._restore_values(start.values)
            if self.copier is None:
                # One rank is left, which renews no copies: old ones must not be continued.
                get_process_memory().discard()
        else:
            # A rollback may read a checkpoint from before a change.
            changed = [each.field for each in start.allowed] + [
                each["field"] for each in self.drift
            ]
            load_checkpoint(
                start.checkpoint,
                self.collect_tensors(),
                group=get_host_group(),
                allow_non_finite=self.context.recipe.checkpoint.allow_non_finite,
                converts_dtypes=any(is_below(field, "precision") for field in changed),
            )
            self._restore_values(start.values)
            self.drift += [
                {"step": state.step, **difference.as_json()} for difference in start.allowed
            ]
        self.context.event_logger.log(
            "resumed",
            step=state.step,
            path=None if isinstance(start, CopiesInMemory) else str(start.checkpoint.path),
            source="memory" if isinstance(start, CopiesInMemory) else "checkpoint",
            steps_lost=None if finished_step is None else max(0, finished_step - state.step),
        )
        self._log_resharding(start, time.perf_counter() - start_seconds)
        if isinstance(start, CopiesInMemory):
            return
        checkpoint = start.checkpoint
        if checkpoint.refused:
            reasons = "; ".join(map(str, checkpoint.refused))
            newest = checkpoint.refused[0].path.name
            self.context.log_warning(
                f"fell back from {newest} to {checkpoint.path.name}: {reasons}"
            )
        if start.allowed:
            self.context.log_warning(
                f"allowed differences from the run that saved: {'; '.join(map(str, start.allowed))}"
            )

    def _log_resharding(self, start: ResumePoint | CopiesInMemory, seconds: float) -> None:
        """Log that the state was of another layout, if it was."""
        context = self.context
        layout = str(context.plan.layout)
        if start.values.layout == layout:
            return
        restart = context.restart
        context.event_logger.log(
            "resharded",
            step=self.state.step,
            from_layout=start.values.layout,
            to_layout=layout,
            world_size=context.rank_environment.world_size,
            former_world_size=None if restart is None else restart.former_world_size,
            source="memory" if isinstance(start, CopiesInMemory) else "checkpoint",
            seconds=seconds,
        )

    def _restore_values(self, values: RunValues) -> None:
        """Restore the state that is not tensors."""
        state = self.state
        state.step = values.step
        state.num_consecutive_skips = values.skipped_in_a_row
        state.skipped_data_steps = values.steps_left_out
        state.is_evaluation_due = values.evaluation_due
        state.best_loss = math.inf if values.best_loss is None else values.best_loss
        load_optimizer_values(
            state.optimizer, values.optimizer.model_dump(), trainable=state.model.trainable
        )
        if state.scaler is not None and values.loss_scaler is not None:
            state.scaler.load_state_dict(values.loss_scaler.model_dump())
        self.drift = [drift.model_dump() for drift in values.drift]

    def roll_back(self, reason: str, *, min_steps_back: int) -> bool:
        """Roll back to the newest complete and finite checkpoint at least so many steps back.

        Data read since then is skipped. Returns False if there is no such checkpoint.

        Raises:
            NonFiniteCheckpoint: All such checkpoints contain NaN or infinity.
        """
        self._finish_pending_save()
        self.discard_peer_copies()
        state = self.state
        batch_size = self.context.plan.batch.global_batch_size
        from_step = state.step
        read_until = state.step + state.skipped_data_steps
        checkpoint = self._restore_newest(from_step - min_steps_back)
        if checkpoint is None:
            return False
        first = state.step + state.skipped_data_steps
        state.skipped_data_steps = read_until - state.step
        self.context.event_logger.log(
            "rolled_back",
            step=state.step,
            reason=reason,
            from_step=from_step,
            path=str(checkpoint.path),
            first_sample=first * batch_size,
            num_samples=(read_until - first) * batch_size,
        )
        return True

    def _restore_newest(self, max_step: int) -> VerifiedCheckpoint | None:
        """Restore the newest finite checkpoint of at most `max_step`; None without checkpoints."""
        failure = None
        while start := find_rollback_point(self.context.folder, max_step):
            try:
                self.restore(start)
            except NonFiniteCheckpoint as error:
                self.context.log_warning(f"{error.field}: {error.problem}")
                failure = error
                max_step = start.checkpoint.step - 1
            else:
                return start.checkpoint
        if failure is not None:  # its tensors have been loaded
            raise failure
        return None
