"""When a loss spikes, or gradients stay non-finite: go back to an earlier checkpoint and leave out the data in between.

Source: Chowdhery et al. 2022, PaLM, section 5.1: restarting from a checkpoint before a spike and passing over the batches around it
mitigates it, while the same batches from another state do no harm. A checkpoint holds how many steps of data were left out, so
what follows is a function of the recipe, the checkpoint and that number, as everything else is.
"""

from __future__ import annotations

from collections import deque
from math import isfinite
from statistics import median

from shardwright.config.upkeep import RollbackSection


class SpikeWatch:
    """Watches the losses; every rank sees the same ones and comes to the same answer."""

    def __init__(self, section: RollbackSection | None) -> None:
        self.section = section
        self.rollbacks = 0
        """Made by this process."""
        self._losses: deque[float] = deque(maxlen=1 if section is None else section.window_steps)

    def observe(self, loss: float, *, skipped: bool) -> str | None:
        """Why this step is a spike, or None. A skipped step is none by itself, and counts for nothing."""
        if self.section is None or skipped:
            return None
        usual = median(self._losses) if len(self._losses) == self._losses.maxlen else None
        if usual is not None and (not isfinite(loss) or loss > usual + self.section.spike_nats):
            return f"the loss is {loss:.4g}, {loss - usual:.3g} above the median of the {len(self._losses)} steps before"
        self._losses.append(loss)
        return None

    @property
    def may_go_back(self) -> bool:
        """Whether the recipe still allows a rollback."""
        return self.section is not None and self.rollbacks < self.section.max_rollbacks

    def went_back(self) -> None:
        """The losses seen so far are another course's."""
        self.rollbacks += 1
        self._losses.clear()
