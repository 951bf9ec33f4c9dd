"""Which part of a decoder a pipeline stage holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Blocks `first_layer` to `last_layer` (not included), with the embedding before or the final norm and head after them.

    `index` counts stages in the order in which tokens pass them; `rank` is the position on axis pp that holds it.
    """

    index: int
    rank: int
    first_layer: int
    last_layer: int
    embedding: bool
    head: bool

    @property
    def layers(self) -> range:
        """Numbers of its blocks in the whole model."""
        return range(self.first_layer, self.last_layer)
