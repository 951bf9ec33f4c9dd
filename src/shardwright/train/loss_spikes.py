"""Detection of loss spikes, after which a run rolls back and skips the data in between.

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
