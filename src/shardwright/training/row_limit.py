"""Steps that are repeated because of the limit of padded exchanges, and the limit itself."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.parallel.experts.padded_exchange import PaddedExchange

REPEATED_STEPS = 3
"""Repeated steps after which the limit is raised."""


@dataclass
class RowLimit:
    """Limit of padded exchanges, which is raised if it often makes steps repeat.

    Repeated steps, and so the limits, are the same on all ranks.
    """

    exchange: PaddedExchange
    _num_repeated: int = 0

    def count_repeated_step(self, rows_beyond_limit: int) -> str:
        """Count a repeated step, and raise the limit if there are enough; return a message."""
        message = (
            f"the step was repeated with exact exchanges: {rows_beyond_limit:,} rows of experts "
            f"exceeded {self.exchange.limit:g} times the even share of a pair of ranks "
            "(layout.expert_row_limit)"
        )
        self._num_repeated += 1
        if self._num_repeated == REPEATED_STEPS:
            self._num_repeated = 0
            if self.exchange.raise_limit():
                message += f"; from now on the limit is {self.exchange.limit:g} times that share"
        return message
