"""Rollback to an earlier checkpoint after a loss spike or too many non-finite gradients.

Source: Chowdhery et al. 2022, PaLM, section 5.1: restarting from a checkpoint before a spike
and skipping the batches around it mitigates the spike, while the same batches do no harm from
another state. A checkpoint has the number of skipped data steps, so the run after it remains a
function of the recipe, the checkpoint and that number.
"""

from __future__ import annotations

from collections import deque
from math import isfinite
from statistics import median

from shardwright.config.run import RollbackSection
from shardwright.errors import NonFiniteError
from shardwright.training.checkpointing import RunCheckpointer
from shardwright.training.rank_context import RankContext
from shardwright.training.step import StepUpdate
from shardwright.training.training_state import TrainingState


class RollbackPolicy:
    """Decisions about rollbacks; identical on all ranks, which see the same losses and norms."""

    def __init__(
        self, context: RankContext, state: TrainingState, checkpointer: RunCheckpointer
    ) -> None:
        self.context = context
        self.state = state
        self.checkpointer = checkpointer
        self.spike_detector = LossSpikeDetector(context.recipe.elastic.rollback)

    def roll_back_if_needed(self, loss: float, update: StepUpdate) -> bool:
        """Roll back if the step requires it and a checkpoint exists; return True if done.

        Raises:
            NonFiniteError: Too many steps were skipped, and no rollback is left or configured.
        """
        detector = self.spike_detector
        reason = self._count_skips(update) or detector.observe(loss, skipped=update.is_skipped)
        if reason is None:
            return False
        section = self.context.recipe.elastic.rollback
        step = self.state.step
        assert section is not None
        self.context.watchdog.begin_phase("save", step)
        if not detector.has_rollbacks_left:
            obstacle = f"no rollbacks are left (max_rollbacks is {section.max_rollbacks})"
        elif self.checkpointer.roll_back(reason, min_steps_back=section.at_least_steps_before):
            detector.record_rollback()
            return True
        else:
            obstacle = "there is no earlier checkpoint"
        self.context.log_warning(f"{reason}; {obstacle}, so training continues", step=step)
        return False

    def _count_skips(self, update: StepUpdate) -> str | None:
        """Count consecutive skipped steps.

        Returns the reason to roll back, if there were too many and a rollback is possible.

        Raises:
            NonFiniteError: There were too many, and no rollback is left or configured.
        """
        state = self.state
        limit = self.context.recipe.training.max_skipped_steps
        if not update.is_skipped:
            state.num_consecutive_skips = 0
            return None
        state.num_consecutive_skips += 1
        self.context.event_logger.log(
            "skipped_step",
            step=state.step,
            reason=f"gradient norm is {update.gradient_norm:g}",
            in_a_row=state.num_consecutive_skips,
            loss_scale=None if state.scaler is None else state.scaler.scale,
        )
        if state.num_consecutive_skips <= limit:
            return None
        problem = (
            f"{state.num_consecutive_skips} consecutive steps up to step {state.step} "
            "had a non-finite gradient"
        )
        if self.spike_detector.has_rollbacks_left:
            return problem
        raise NonFiniteError(
            f"{problem} (training.max_skipped_steps is {limit}); "
            "lower training.learning_rate or return to an earlier checkpoint"
        )


class LossSpikeDetector:
    """Detector of loss spikes. All ranks see the same losses and decide identically."""

    def __init__(self, section: RollbackSection | None) -> None:
        self.section = section
        self.num_rollbacks = 0
        """Number of rollbacks in this process."""
        self._losses: deque[float] = deque(maxlen=1 if section is None else section.window_steps)

    def observe(self, loss: float, *, skipped: bool) -> str | None:
        """Return the reason if this step is a spike, else None; skipped steps are ignored."""
        if self.section is None or skipped:
            return None
        usual = median(self._losses) if len(self._losses) == self._losses.maxlen else None
        if usual is not None and (not isfinite(loss) or loss > usual + self.section.spike_nats):
            return (
                f"the loss is {loss:.4g}, {loss - usual:.3g} above "
                f"the median of the {len(self._losses)} previous steps"
            )
        self._losses.append(loss)
        return None

    @property
    def has_rollbacks_left(self) -> bool:
        """True if the recipe allows another rollback."""
        return self.section is not None and self.num_rollbacks < self.section.max_rollbacks

    def record_rollback(self) -> None:
        """Count a rollback and forget the losses before it."""
        self.num_rollbacks += 1
        self._losses.clear()
