"""Policy after each step: roll back, evaluate, check replicas, save, stop."""

from __future__ import annotations

from collections import Counter

import torch

from shardwright.checkpoint.rank_group import RankGroup
from shardwright.errors import GenerationEnded, Preempted, RankFailed
from shardwright.launch.stop_signals import describe_cause
from shardwright.parallel.gradient_reduction import narrow_to_box
from shardwright.parallel.mesh import get_host_group
from shardwright.parallel.parallel_model import ParallelModel
from shardwright.training.checkpointing import RunCheckpointer
from shardwright.training.evaluation import evaluate
from shardwright.training.metrics.rank_metrics import RankMetrics
from shardwright.training.rank_context import RankContext
from shardwright.training.rollback import RollbackPolicy
from shardwright.training.step import StepUpdate
from shardwright.training.training_state import TrainingState


class StepPolicy:
    """Everything that happens between two steps; the same on all ranks."""

    def __init__(
        self,
        context: RankContext,
        state: TrainingState,
        checkpointer: RunCheckpointer,
        rank_metrics: RankMetrics,
    ) -> None:
        self.context = context
        self.state = state
        self.checkpointer = checkpointer
        self.rank_metrics = rank_metrics
        self.rollback = RollbackPolicy(context, state, checkpointer)
        self.has_validation = context.validated_run.data.validation is not None
        restart = context.restart
        self._leave_after_steps = None if restart is None else restart.leave_after_steps
        self._leave_step: int | None = None

    def begin(self) -> None:
        """Note the step from which this generation starts."""
        if self._leave_after_steps is not None:
            self._leave_step = self.state.step + self._leave_after_steps

    def apply(self, loss: float, update: StepUpdate, *, should_stop: bool) -> float | None:
        """Act on the step that has just ended; collective.

        Args:
            loss: Training loss of the step.
            update: Result of the step's update.
            should_stop: True if a stop is requested on any rank.

        Returns:
            The validation loss if this step was evaluated, else `loss`; None after a rollback.

        Raises:
            Preempted: A stop was requested; the state is saved, except in a trial.
            GenerationEnded: A launch of more ranks follows; the state is in memory or saved.
            SaveFailed: The last checkpoint could not be written.
            NonFiniteError: Too many consecutive steps had a non-finite gradient.
            RankFailed: A rank's weights differ from those of its replicas.
        """
        if self.rollback.roll_back_if_needed(loss, update):
            return None
        recipe = self.context.recipe
        step = self.state.step
        is_last = step == self.context.validated_run.total_steps
        if self.context.is_trial:
            if should_stop and not is_last:
                self._stop()
            return loss
        is_best = False
        self.state.is_evaluation_due = self.has_validation and (
            is_last or _is_due(step, recipe.evaluation.every_steps)
        )
        if self.state.is_evaluation_due and (is_last or not should_stop):
            evaluated = evaluate(self.context, self.state, is_last=is_last)
            if evaluated is None:
                should_stop = True
            else:
                loss = evaluated.loss
                is_best = evaluated.is_best
        leaves = self._is_leave_step(step) and not should_stop
        # Without copies in memory the next launch reads this step's checkpoint.
        needs_checkpoint = leaves and self.checkpointer.copier is None
        should_save = (
            is_last
            or should_stop
            or needs_checkpoint
            or (is_best and recipe.checkpoint.keep_best)
            or _is_due(step, recipe.checkpoint.every_steps)
        )
        self._check_replicas(should_save or leaves)
        if should_save:
            self.context.watchdog.begin_phase("save", step)
            with self.rank_metrics.measure_checkpoint():
                has_saved = self.checkpointer.save(
                    is_best=is_best, is_last=is_last or should_stop, should_wait=needs_checkpoint
                )
            if needs_checkpoint and not has_saved:
                self.begin()  # as many steps until the next try
                return loss
        if should_stop and not is_last:
            self._stop()
        if leaves:
            self._leave()
        return loss

    def _is_leave_step(self, step: int) -> bool:
        """Return True if the ranks leave after this step, because more ranks follow."""
        return (
            self._leave_step is not None
            and self._leave_step <= step < self.context.validated_run.total_steps
        )

    def _leave(self) -> None:
        """Begin the copy of this step, if the ranks keep copies, and raise `GenerationEnded`."""
        step = self.state.step
        self.context.watchdog.begin_phase("save", step)
        self.checkpointer.begin_peer_copy()
        raise GenerationEnded(step)

    def may_act(self, step: int, update: StepUpdate) -> bool:
        """Return True if `apply` may do more after this step than note that it succeeded."""
        return update.is_skipped or self.may_read_weights(step)

    def may_read_weights(self, step: int) -> bool:
        """Return True if `apply` may read the weights after this step without a stop request."""
        recipe = self.context.recipe
        return (
            recipe.elastic.rollback is not None
            or step == self.context.validated_run.total_steps
            or (self.has_validation and _is_due(step, recipe.evaluation.every_steps))
            or _is_due(step, recipe.checkpoint.every_steps)
            or _is_due(step, recipe.run.replica_check_every_steps)
            or self._is_leave_step(step)
        )

    def make_up_evaluation(self) -> float | None:
        """Run the evaluation that a stop prevented before a resume; return its loss, if any."""
        if not (self.state.is_evaluation_due and self.has_validation):
            return None
        evaluated = evaluate(self.context, self.state, is_last=False)
        if evaluated is None:
            return None
        if evaluated.is_best and self.context.recipe.checkpoint.keep_best:
            self.checkpointer.save(is_best=True)
        return evaluated.loss

    def _check_replicas(self, is_save_step: bool) -> None:
        """Compare replicated weights if a check is due, and before they are saved.

        Raises:
            RankFailed: A rank's weights differ from those of its replicas.
        """
        every_steps = self.context.recipe.run.replica_check_every_steps
        step = self.state.step
        if every_steps is None or not (is_save_step or _is_due(step, every_steps)):
            return
        if difference := find_differing_replicas(self.state.model):
            self.checkpointer.discard_peer_copies()
            raise RankFailed(
                f"step {step}: {difference}. "
                "This step was not saved; the previous checkpoint is intact"
            )

    def _stop(self) -> None:
        """Raise `Preempted` with the cause; if ranks differ, that of the lowest rank with one."""
        context = self.context
        step = self.state.step
        causes = context.rank_sync.gather([context.stop_request.cause])
        reason = next(describe_cause(int(cause)) for (cause,) in causes if cause)
        context.event_logger.log("preempted", step=step, reason=reason)
        total_steps = context.validated_run.total_steps
        raise Preempted(
            f"{reason}: the trial stopped at step {step} of {total_steps}"
            if context.is_trial
            else f"{reason}: saved at step {step} of {total_steps}; --resume continues"
        )


def _is_due(step: int, every_steps: int | None) -> bool:
    return every_steps is not None and step % every_steps == 0


def find_differing_replicas(model: ParallelModel) -> str | None:
    """Describe how ranks differ that hold the same part of a parameter; None if all agree.

    Collective. Compares an XOR over the bits of each part (`torch.hash_tensor`), which finds
    any single differing value. Replicas are identical to the bit, because each adds the same
    sums to the same weights. Parts on one rank only (ZeRO, tensor parallelism) have no replica.
    Offloaded frozen weights are not compared: they are not in memory, and nothing writes them.
    """
    places = []
    hashes = []
    with torch.no_grad():
        for name, _ in model.named_parameters():
            local = model.read_parameter(name)
            if local is None:
                continue
            for box in model.local_boxes(name):
                part = narrow_to_box(local, box.local_bounds)
                if part.numel():
                    places.append(f"{name} {[list(bounds) for bounds in box.global_bounds]}")
                    hashes.append(torch.hash_tensor(part).view(torch.int64))
    local_hashes = dict(zip(places, torch.stack(hashes).tolist() if hashes else [], strict=True))
    hashes_by_place: dict[str, dict[int, int]] = {}
    for rank, parts in enumerate(RankGroup(get_host_group()).all_gather(local_hashes)):
        for place, value in parts.items():
            hashes_by_place.setdefault(place, {})[rank] = value
    wrong = {
        place: values for place, values in hashes_by_place.items() if len(set(values.values())) > 1
    }
    if not wrong:
        return None
    place, values = next(iter(wrong.items()))
    return (
        f"{len(wrong)} of {len(hashes_by_place)} parts of the weights differ between ranks "
        f"that should have identical copies: {place}, {_describe_outlier(values)}"
    )


def _describe_outlier(values: dict[int, int]) -> str:
    """Name the ranks that differ from the majority, if there is one."""
    (common, count), *others = Counter(values.values()).most_common()
    if others and others[0][1] == count:
        return f"ranks {', '.join(map(str, values))} disagree, without a majority"
    return f"on rank {', '.join(str(rank) for rank, value in values.items() if value != common)}"
