"""Work that the host of a trainer has launched ahead of the device."""

from __future__ import annotations

from math import inf


def count_unfinished_passes(num_passes: float | None, *, is_accumulated: bool) -> float:
    """Count the forward passes that the host has launched and the device has not finished.

    A single micro-batch has one pass, before which the device has no work. In a pipeline the
    device, which waits for the next rank with each message, has finished two of the passes.

    Args:
        num_passes: passes in flight through the rank's layers, None without a pipeline.

    >>> [count_unfinished_passes(n, is_accumulated=True) for n in (None, 1.0, 4.0)]
    [inf, 0.0, 2.0]
    """
    if not is_accumulated:
        return 1.0
    return inf if num_passes is None else max(0.0, num_passes - 2.0)
