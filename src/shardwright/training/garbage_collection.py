"""Python's garbage collection at steps of our choosing.

Python starts a collection whenever enough objects have been allocated. A rank that stops for one
while it launches kernels delays all others, and each rank stops at other times. So collection is
off during training, and all ranks collect together after every `EVERY_STEPS`-th step.

Source: Jiang et al. 2024, MegaScale (arXiv 2402.15627), which finds these delays; torchtitan
collects at chosen steps too.
"""

from __future__ import annotations

import gc

EVERY_STEPS = 50
"""Steps between two collections. Tensors of a step are freed without one, as nothing in a step
refers to itself."""

_are_imports_excluded = False
"""True once `freeze_imports` has been called. To count the excluded objects takes as long as a run
of a small model takes to start."""


class GarbageCollection:
    """Context in which Python collects garbage only in `collect_if_due`.

    What exists when it is entered is excluded from collections until it is left, so that each of
    them takes milliseconds: model and modules have hundreds of thousands of objects.

    A process that may train several generations has excluded its imports before the first one
    (`freeze_imports`). There the model stays collectable, so that a failed generation can be freed
    without a pass over all imports.
    """

    def __init__(self) -> None:
        self._was_enabled = False
        self._has_frozen = False

    def __enter__(self) -> GarbageCollection:
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()
        self._has_frozen = not _are_imports_excluded
        if self._has_frozen:
            gc.freeze()
        return self

    def collect_if_due(self, step: int) -> None:
        """Collect if `step` (from 1, the same on all ranks) is a multiple of `EVERY_STEPS`."""
        if step % EVERY_STEPS == 0:
            gc.collect()

    def __exit__(self, *_: object) -> None:
        if self._has_frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()


def freeze_imports() -> None:
    """Exclude all objects of this process from collections permanently, before it has a model."""
    global _are_imports_excluded
    gc.collect()
    gc.freeze()
    _are_imports_excluded = True
